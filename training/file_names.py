"""What lies in a run folder, by name."""

CONFIG = "config.json"
METRICS = "metrics.jsonl"
SAMPLES = "samples.jsonl"
SAMPLES_TABLE = "samples.md"  # drawn from SAMPLES, for people
CURVE = "loss_curve.png"
SUMMARY = "summary.md"
MARKER = "run.json"  # in a mirror: which run these are the copies of; in a run folder: where its copies went
STAGING = ".session-"  # in a mirror: the folder of a session, for what has no name yet
