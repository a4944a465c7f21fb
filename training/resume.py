"""How a session begins: continue the run that its folder holds, or start a new one; and what may not have changed."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from common.checkpoint import BEST, Checkpoint, describe_damage, problems_of, step_folders, step_of
from common.errors import CheckpointError
from common.files import sha256_file
from common.lora import LoRA, find_base, lora_of
from common.script import world
from model_config import ModelConfig
from tokenization.token_folder import find_tokens
from training.config import scope_of
from training.growth import changes
from training.mirror import read_best_state
from training.parallel import any_process, broadcast_tensors, on_rank_0
from training.previous import quarantine, set_aside, weights_hash
from training.run import Run
from training.saver import write_config
from training.state import TrainState

TOKENS = "tokens_sha256 of the data"  # as `identity` calls it


def start_or_resume(run: Run) -> None:
    """Continue the run of `run.previous` if there is one, else start it.

    Raises CheckpointError if what is there belongs to another model or other data.
    """
    run.state, scaler = on_rank_0(lambda: (open_run(run), run.scaler.state_dict()))
    run.saved_step = run.state.step
    run.skips[0] = run.state.skipped_updates
    if world().size > 1:
        run.scaler.load_state_dict(scaler)
        share_rank_0(run)


def open_run(run: Run) -> TrainState:
    """Continue the run that the folders hold, or set it aside and start a new one. Returns where the run stands."""
    previous = run.previous
    is_own = previous.saved is not None and previous.is_own
    run_id = previous.saved.state.run_id if previous.saved is not None and is_own else new_run_id(run)
    run.state = replace(run.state, run_id=run_id)
    state = restore(run) if previous.checkpoint is not None else new_state(run)
    if run.config.resume == "never":  # last: the new weights may come from the old run

        def prepare(moves: dict[Path, Path], new: Path) -> None:
            for folder, aside in moves.items():
                weights, was = run.previous.init, folder.resolve()
                if weights is not None and weights.path.resolve().is_relative_to(was):
                    moved = aside / weights.path.resolve().relative_to(was)
                    run.config = replace(run.config, init_from=str(moved))
            write_config(run, new)

        set_aside(run.dir, run.mirror.dir if run.mirror is not None else None, prepare)
    run.dir.mkdir(parents=True, exist_ok=True)
    return state


def new_run_id(run: Run) -> str:
    """Make the id of a new run: the same on machines that begin the same run at once; another one to start over."""
    config = run.config
    if config.resume == "never":
        return uuid.uuid4().hex
    settings = {key: value for key, value in config.values().items() if scope_of(key) in ("run", "fixed")}
    what = [os.path.normpath(config.run_dir), settings, run.data.fingerprint]
    return hashlib.sha256(json.dumps(what, default=str).encode()).hexdigest()[:32]


def new_state(run: Run) -> TrainState:
    """Make the state of a run that starts now, and load trained weights if `init_from` names some."""
    state, init = run.state, run.previous.init
    if init is not None:
        require_tokenizer(init, run)
        if lora_of(run.model) is None:  # else the model has them as its base
            init.load_weights(run.model)
        print(f"Starting from the weights of {init.path}.")
        state = replace(state, initialized_from=weights_hash(init))
    if run.mirror is not None:
        print(
            f"Copies     go to {run.mirror.dir}. There are none of this run yet: if there should be, stop and mount "
            f"the disk they are on."
        )
    return state


def require_tokenizer(checkpoint: Checkpoint, run: Run) -> None:
    """Raise CheckpointError if the data was tokenized with another tokenizer than the checkpoint's."""
    tokenizer_path = checkpoint.tokenizer_path()
    if sha256_file(tokenizer_path) != run.data.metadata.tokenizer_sha256:
        raise CheckpointError(
            f"The data was not tokenized with the tokenizer of {checkpoint.path}. Tokenize it with: python "
            f"tokenize_local_bpe.py --input my_text.txt --tokenizer_file {tokenizer_path}"
        )


def restore(run: Run) -> TrainState:
    """Load everything that a checkpoint holds, and print what changed since."""
    previous, requested = run.previous, run.config.resume_from
    checkpoint, saved = previous.checkpoint, previous.saved
    assert checkpoint is not None and saved is not None
    require_the_same(run)
    for folder in step_folders(run.dir / "checkpoints") if previous.is_own else []:
        if step_of(folder) >= step_of(checkpoint.path) and folder.resolve() != checkpoint.path.resolve():
            quarantine(folder)  # damaged: else the run would continue from it
    checkpoint.load_weights(run.model)
    checkpoint.load_optimizer(run.optimizer)
    if saved.scaler and run.scaler.is_enabled():
        run.scaler.load_state_dict(saved.scaler)
    best = best_state(run) or TrainState()
    run.state = replace(
        saved.state,
        run_id=run.state.run_id,
        resumed_from=os.path.normpath(requested) if requested else saved.state.resumed_from,
        best_val_loss=best.best_val_loss,
        best_step=best.step,
        best_windows=best.best_windows,
    )
    print(f"Continuing from {checkpoint.path}: step {run.state.step:,}, epoch {run.epoch:.2f}.")
    print_changes(saved.config, run)
    return run.state


def best_state(run: Run) -> TrainState | None:
    """Read the state saved with best/, whose loss later weights have to beat; None if best/ is missing or damaged."""
    best = run.dir / BEST
    if best.exists() and (problems := problems_of(best)):
        print(f"Warning: {describe_damage(best, problems)} The next evaluation replaces it.", file=sys.stderr)
        return None
    return read_best_state(best)


def share_rank_0(run: Run) -> None:
    """Give all processes what rank 0 has loaded. Raises CheckpointError if this run was begun on another machine than
    that of rank 0."""
    broadcast_tensors(list(run.model.state_dict().values()))
    broadcast_tensors(list(run.optimizer.tensors().values()))
    own = step_folders(run.dir / "checkpoints") if run.config.resume == "auto" else []
    (is_elsewhere,) = any_process(bool(own) and run.state.step == 0)
    if is_elsewhere:
        raise CheckpointError(
            f"There are checkpoints in {run.dir} on one of the machines, and none on that of process 0, which "
            f"reads and writes them. Give torchrun --node_rank=0 on the machine that has them, or --resume never "
            f"to start over."
        )


# What may not change


def require_the_same(run: Run) -> None:
    """Raise CheckpointError listing what changed since and may not: architecture, adapters, optimizer, tokenizer and
    data; and if the base of the adapters is gone."""
    config, checkpoint, saved = run.config, run.previous.checkpoint, run.previous.saved
    assert checkpoint is not None and saved is not None
    lora = checkpoint.lora()
    if lora is not None:
        find_base(lora, checkpoint.path)
    then = identity(checkpoint.model_config(), lora, saved.config.get("optimizer"), saved.data)
    now = identity(run.shape, lora_of(run.model), config.optimizer, run.data.fingerprint)
    clashes = [
        f"{key}: {then.get(key)!r} in the checkpoint, {now.get(key)!r} now"
        for key in dict.fromkeys([*then, *now])
        if then.get(key) != now.get(key)
    ]
    if clashes and then.get(TOKENS) != now.get(TOKENS) and (change := text_change(run, saved.data)):
        clashes.append(change)
    if clashes:
        head = f"{checkpoint.path} cannot be continued: model, adapters, optimizer, tokenizer and data may not change."
        raise CheckpointError(
            "\n  ".join([head, *clashes])
            + f"\nGive the old values, or another --output_dir, or --resume never ({config.run_dir} is kept aside)."
        )


def text_change(run: Run, then: dict[str, Any]) -> str:
    """Say what has changed in the text of `--input` since, and what to type; "" if its tokens of then are not found."""
    config, tokens = run.config, find_tokens(str(then.get("tokens_sha256")))
    if not config.input or tokens is None:
        return ""
    length = f"--minutes {config.minutes:g}" if config.minutes else f"--epochs {config.epochs}"
    return (
        f"files: {changes(tokens, run.data.metadata)}\n"
        f"The old tokens are kept: to go on with them, --data_dir {tokens.path.parent} --output_dir {config.run_dir} "
        f"instead of --input.\nTo train these weights on the new text: --input {shlex.quote(config.input)} {length} "
        f"--init_from {config.run_dir} --output_dir {config.run_dir}_2."
    )


def identity(shape: ModelConfig, lora: LoRA | None, optimizer: Any, data: dict[str, Any]) -> dict[str, Any]:
    """Return what a run keeps, by name. The base of adapters may move."""
    values = {key: value for key, value in shape.to_dict().items() if key != "dropout"}
    values |= {f"lora_{key}": getattr(lora, key, 0) for key in ("rank", "alpha", "targets", "base_sha256")}
    values["optimizer"] = optimizer
    return values | {f"{key} of the data": str(value)[:16] for key, value in data.items()}


def print_changes(saved: dict[str, Any], run: Run) -> None:
    """Print the keys of the configuration that changed since the last session."""
    now, sources = run.resolved(), run.config.sources
    for key, value in saved.items():
        if key in now and scope_of(key) == "run" and now[key] != value:
            print(f"  changed: {key} {value} -> {now[key]} ({sources.get(key, '')})")
