"""Train a GPT-2 class language model on a token file.

    python train_colab_mmap.py --input my_text.txt --minutes 60   # chooses a model for the text and the machine
    python train_colab_mmap.py --config quickstart.json      # a model that answers questions, in minutes on a CPU
    python train_colab_mmap.py --config gpt2_small.json      # 134M parameters on datasets_cache/, on a GPU
    python train_colab_mmap.py --config gpt2_small.json --dry_run

Every key of the config is a flag. Running the same command again continues the run.

Read on in `training/fit.py`: `fit` makes and resumes the run, `take_steps` is the loop.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from common.errors import CheckpointError
from common.script import end, process_age, writing_script
from tokenization.corpus import require_existing
from training.config import BUILTIN_CONVERSATIONS, parse_config

# A waiting thread spins this often before it sleeps. With libgomp's default of 300,000, a step takes up to five times
# as long beside another busy program; with fewer, a quiet machine is slower (docs/benchmarks/what_was_tried.md).
SPIN_COUNT = "30000"


@writing_script(CheckpointError)
def main(argv: Sequence[str] | None = None) -> int:
    started = time.perf_counter()
    if argv is None:
        started -= process_age()
    config = parse_config(argv)
    print(f"Run        {config.run_dir}{f' on {config.input}' if config.input else ''}", flush=True)
    require_existing([text for text in (config.input, config.companion) if text and text != BUILTIN_CONVERSATIONS])
    if "OMP_WAIT_POLICY" not in os.environ:  # torch reads both when it is imported
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    # Importing torch takes seconds, and --help should not wait for it.
    from training import companion, dial, inspections
    from training.fit import fit

    if config.needs_dial and not config.companion:
        config = dial.choose(argv, config, started)
    code = 0
    for run, begins in companion.plan_runs(config, started) if config.companion else [(config, started)]:
        if run.dry_run or run.profile:
            code = inspections.inspect(run, begins)
        else:
            code = fit(run, begins, ends_process=argv is None and run.companion == config.companion)
        if code:
            break
    return code


if __name__ == "__main__":
    end(main)
