"""The files to mutate and their readers: tiny files of every kind, each with a function that uses its content."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from common.errors import DataError
from generate import generate_text, load_model
from tests.helpers import CPU, flags_of_a_tiny_run, generated_text, open_tokens, write_tokens
from tokenization.token_folder import require_same_files
from tokenizer import Tokenizer
from tokenizer_bpe import BPETokenizer
from train_colab_mmap import make_run
from training.clock import Clock
from training.config import Config, parse_config
from training.evaluate import bits_per_byte
from training.resume import start_or_resume
from training.run import Run
from training.saver import Saver
from training.state import Saved
from training.step import train_step
from training.stop import Stop

TEXT = "the cat sat on a mat.\n"


def tiny_config(token_folder: Path, run_dir: Path, **changes: object) -> Config:
    shape = {"embed_dim": 16, "max_seq_len": 8, "max_steps": 4, "batch_size": 2, "gradient_accumulation_steps": 1}
    return parse_config(flags_of_a_tiny_run(token_folder, run_dir, **shape, **changes))


def write_bpe_tokenizer(path: Path) -> None:
    BPETokenizer.train([generated_text(2_000)], vocab_size=280).save(path)


def use_tokenizer(tokenizer: Tokenizer) -> None:
    """Check the invariants of a tokenizer."""
    with contextlib.suppress(ValueError):  # the characters of TEXT may be gone
        ids = tokenizer.encode(TEXT)
        assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer.byte_lengths) == tokenizer.vocab_size
    for i in (0, tokenizer.vocab_size - 1):
        assert isinstance(tokenizer.decode([i]) + tokenizer.decoder().push([i]), str)
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.unused_ids)
    assert tokenizer.end_of_text_id is None or 0 <= tokenizer.end_of_text_id < tokenizer.vocab_size


def use_tokens(config: Config) -> None:
    data = open_tokens(config, CPU)
    windows = [*data.batch(0, 2), *data.batch(data.windows, 2), *data.validation_batch(0, 1, 1)]
    assert all(w.min() >= 0 and w.max() < data.vocab_size for w in windows)
    assert data.describe() and (bits_per_byte(2.0, data) or 1) > 0
    use_tokenizer(data.tokenizer)


def use_metadata(folder: Path, config: Config) -> None:
    use_tokens(config)
    with contextlib.suppress(DataError):  # it tells of no files
        require_same_files(folder, ["no files"], [], "character")


def use_model(folder: Path) -> None:
    model, tokenizer = load_model(folder, "cpu")
    assert generate_text(model, tokenizer, "the", max_new_tokens=3).startswith("the")


class Training:
    """A tiny training in this process, of which each run can continue from a checkpoint that is not to be trusted."""

    def __init__(self, folder: Path, **changes: object):
        self.token_folder = write_tokens(folder / "data", generated_text(2_000))
        self.config = tiny_config(self.token_folder, folder / "run", **changes)
        self.data = open_tokens(self.config, CPU)
        run = self.start_or_resume()
        with Stop() as stop, Saver(run, Clock(run, 0.0), stop) as saver:
            for _ in range(2):
                self.take_step(run)
            saver.save_unsaved_step()
        self.checkpoint = folder / "run" / "checkpoints" / "step_00000002"

    def start_or_resume(self) -> Run:
        with contextlib.redirect_stdout(io.StringIO()):
            run, previous = make_run(self.config)
            start_or_resume(run, previous)
        return run

    def take_step(self, run: Run) -> None:
        train_step(run)
        run.advance()

    def resume(self) -> None:
        """As the trainer does: restore, take a step, and write down the state that another restore would read."""
        run = self.start_or_resume()
        state = run.state
        assert run.checkpoint_step == state.step >= 0 and run.epoch >= 0
        assert state.evaluated_step <= state.step
        if not run.took_last_step:
            self.take_step(run)
        saved = Saved(state, run.scaler.state_dict(), self.data.fingerprint, self.config.values())
        json.dumps(saved.to_json(), allow_nan=False)


@contextlib.contextmanager
def limited_memory(spare: int) -> Iterator[None]:
    """Inside, the process cannot take more than `spare` bytes beside those it has, where the system can see to it."""
    if not sys.platform.startswith("linux"):
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    has = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (has + spare, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def seal(folder: Path) -> None:
    """Make the manifest agree with the files that are there, as someone who tampers with them would."""
    entries = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in folder.iterdir()
        if path.name != "manifest.json"
    }
    (folder / "manifest.json").write_text(json.dumps({"format_version": 1, "files": entries}))


def blogs_form(checkpoint: Path, folder: Path) -> Path:
    """A checkpoint as the blog's scripts leave it: weights by torch.save, no manifest."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(checkpoint / name, folder)
    model, _ = load_model(checkpoint, "cpu")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder
