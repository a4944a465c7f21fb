"""Values of a configuration that contradict each other."""

from __future__ import annotations

from typing import Any


def contradictions(values: dict[str, Any], sources: dict[str, str], processes: int = 1) -> list[str]:
    """Problems with values that contradict each other, or the number of processes. `sources`: where each came from."""
    problems = []
    given = {key for key in values if sources[key] != "default"}
    three = ("bin_file", "tokenizer_file", "metadata_file")
    named = [key for key in three if values[key]]
    if named and len(named) < 3:
        missing = " and ".join(f"--{key}" for key in three if key not in named)
        problems.append(f"--{named[0]} needs {missing} beside it (or use --data_dir FOLDER for all three)")
    if named and values["data_dir"]:
        problems.append("--data_dir and --bin_file both name the tokens; give one of them")
    if named and values["input"]:
        problems.append("--input and --bin_file both name the data; give one of them")
    if not values["input"]:
        problems += [
            f"{key} is for --input; token files have their own" for key in ("tokenizer", "vocab_size") if key in given
        ]
    for is_on, key_of, flag, keys in (
        (values["optimizer"] == "muon", "optimizer", "--optimizer muon", ("muon_learning_rate",)),
        (values["lora_rank"], "lora_rank", "--lora_rank N", ("lora_alpha", "lora_targets")),
    ):
        problems += [
            f"{key} ({sources[key]}) is for {flag}"
            for key in keys
            if not is_on and key in given and not (sources[key_of] == "flag" and sources[key] != "flag")  # flags win
        ]
    if values["lora_rank"] and values["optimizer"] == "muon":
        problems.append("lora_rank trains adapters, only with AdamW; add --optimizer adamw")
    if values["lora_rank"] and not (values["init_from"] or values["resume_from"]):
        problems.append("lora_rank trains adapters of a trained model; name it with --init_from CHECKPOINT")
    if values["use_lr_scheduler"] == "constant" and sources["cooldown"] == "flag":
        problems.append("cooldown is for --use_lr_scheduler cosine or linear")
    if values["minutes"] and values["use_lr_scheduler"] == "constant":
        problems.append(
            "minutes lets the learning rate fall in time, and use_lr_scheduler constant has no fall; add "
            "--use_lr_scheduler linear, or stop by --max_hours"
        )
    if values["minutes"] and values["cooldown"] == 1 and "cooldown" in given:
        problems.append(
            "cooldown 1 falls from the first step on, and with minutes the last step is not known then; give a "
            "--cooldown below 1"
        )
    if values["tokenizer"] == "char" and "vocab_size" in given:
        problems.append("vocab_size has no effect with tokenizer char; leave it out")
    if values["min_lr"] > values["learning_rate"] and values["use_lr_scheduler"] != "constant":
        problems.append(
            f"min_lr {values['min_lr']:g} ({sources['min_lr']}) is above learning_rate {values['learning_rate']:g} "
            f"({sources['learning_rate']})"
        )
    problems += [
        f"{key} {values[key]!r} is not UTF-8, and safetensors cannot open files there; choose another folder"
        for key in ("output_dir", "checkpoint_dir")
        if any("\ud800" <= character <= "\udfff" for character in values[key] or "")
    ]
    rows = values["batch_size"] * values["gradient_accumulation_steps"]
    if (values["micro_batch_size"] or 1) > rows:
        problems.append(f"micro_batch_size {values['micro_batch_size']} is above the {rows} sequences of a step")
    if processes > rows:
        problems.append(
            f"torchrun started {processes} processes for the {rows} sequences of a step (batch_size * "
            f"gradient_accumulation_steps): --nproc_per_node={rows} at most, or a larger --batch_size"
        )
    if values["profile"] and processes > 1:
        problems.append(
            f"--profile is for one process, and torchrun started {processes}: python train_colab_mmap.py ... --profile"
        )
    if values["device"] in ("cuda", "mps") and not values["use_gpu"]:
        problems.append(f"--device {values['device']} and --use_gpu false contradict each other")
    if values["dry_run"] and values["profile"]:
        problems.append("--dry_run and --profile each replace the training; give one of them")
    if values["resume_from"] and values["resume"] == "never":
        problems.append("--resume_from and --resume never contradict each other")
    if values["resume_from"] and values["init_from"]:
        problems.append("--resume_from continues a run, --init_from starts a new one; give one of them")
    if values["stop_after_worse"] and not values["eval_interval"]:
        problems.append("--stop_after_worse needs evaluations; give --eval_interval more than 0")
    return problems
