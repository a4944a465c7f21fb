"""Whole runs on a GPU: the losses of the CPU, of the uncompiled model, of the run that was not interrupted."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import train_colab_mmap
from common.checkpoint import open_checkpoint
from model import TransformerLanguageModel
from tests.cuda.helpers import DEVICE, losses_of
from tests.helpers import generated_text, run_script
from training.records import read_metrics

pytestmark = pytest.mark.cuda


def test_fp32_training_has_the_losses_of_the_cpu(tmp_path: Path, train: Callable) -> None:
    """Dropout is off, for the two devices draw other numbers; precision fp32 means no TF32 either."""
    for device in ("cpu", DEVICE):
        result = train(tmp_path / device, device=device, precision="fp32", compile="off", dropout=0.0)
        assert result.code == 0, result.err
    ours, reference = losses_of(tmp_path / DEVICE), losses_of(tmp_path / "cpu")
    assert ours == pytest.approx(reference, rel=1e-3)
    assert ours[0] == pytest.approx(reference[0], rel=1e-5)


def test_the_dial_trains_a_text_in_its_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It times models, compiles the one that it takes, and the training finds its code compiled."""
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(generated_text(3_000_000))
    began = time.perf_counter()
    result = run_script(train_colab_mmap.main, "--input", "book.txt", "--minutes", "1")
    assert result.code == 0, result.err
    assert time.perf_counter() - began < 1.05 * 60
    assert "Choice " in result.out and "out of memory" not in (result.out + result.err).lower()


# Newton-Schulz works in bf16, where the last bit of a gradient may make a difference.
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [((), 1e-3), (("--optimizer", "muon"), 1e-2), (("--config", "gpt2_small_modern.json"), 1e-2)],
    ids=["gpt-2", "muon", "modern"],
)
def test_a_compiled_model_has_the_losses_of_the_eager_one(
    tmp_path: Path, train: Callable, flags: tuple[str, ...], tolerance: float
) -> None:
    for choice in ("on", "off"):
        result = train(tmp_path / choice, flags, device=DEVICE, precision="fp32", compile=choice, dropout=0.0)
        assert result.code == 0, result.err
        assert ("Compiled in" in result.out) == (choice == "on"), result.out
    compiled, eager = losses_of(tmp_path / "on"), losses_of(tmp_path / "off")
    assert compiled == pytest.approx(eager, rel=tolerance)
    assert compiled[0] == pytest.approx(eager[0], rel=1e-5) and compiled[-1] < 0.9 * compiled[0]


def test_a_model_that_cannot_be_compiled_trains_uncompiled(
    tmp_path: Path, train: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(*batch: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no compiler found")

    flags = {"device": DEVICE, "precision": "fp32", "dropout": 0.0}
    assert train(tmp_path / "off", **flags, compile="off").code == 0
    monkeypatch.setattr(torch, "compile", lambda model, **options: compiled)
    result = train(tmp_path / "on", **flags, compile="on")
    assert result.code == 0, result.err
    assert result.out.count("torch.compile failed (no compiler found)") == 1
    assert losses_of(tmp_path / "on") == pytest.approx(losses_of(tmp_path / "off"), rel=1e-3)


def test_the_automatic_precision_trains_in_half_with_weights_in_full(tmp_path: Path, train: Callable) -> None:
    """bf16, or fp16 with a gradient scaler before capability 8.0: close to fp32, and it learns."""
    for precision in ("auto", "fp32"):
        result = train(tmp_path / precision, device=DEVICE, precision=precision, compile="off", max_steps=60, dropout=0)
        assert result.code == 0, result.err
    half, full = losses_of(tmp_path / "auto"), losses_of(tmp_path / "fp32")
    assert half[-1] < 0.8 * half[0]
    assert half[-1] == pytest.approx(full[-1], rel=0.1)
    kept = open_checkpoint(tmp_path / "auto")
    model = TransformerLanguageModel(kept.model_config())
    kept.load_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_in_fp16_continues_after_overflows_and_counts_them(
    tmp_path: Path, train: Callable, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Begun at a scale that is far too large; the one that was found is kept for the resumed run."""
    flags = {"device": DEVICE, "precision": "fp16", "compile": "off", "dropout": 0.0, "optimizer": optimizer}
    large = functools.partial(torch.amp.GradScaler, init_scale=2.0**30)
    with monkeypatch.context() as patch:
        patch.setattr(torch.amp, "GradScaler", large)
        result = train(tmp_path / "run", **flags, max_steps=60)
    assert result.code == 0, result.err
    assert "A few are normal in fp16" in result.out
    rows = read_metrics(tmp_path / "run")
    counts = [row.get("skipped_updates", 0) for row in rows]
    skipped = counts[-1]
    assert 0 < skipped < 25 and counts[:skipped] == list(range(1, skipped + 1)), counts
    assert rows[-1]["train_loss"] < 0.9 * rows[0]["train_loss"]
    state = json.loads((open_checkpoint(tmp_path / "run").path / "training_state.json").read_text())
    assert state["scaler"]["scale"] == 2.0 ** (30 - skipped)
    more = train(tmp_path / "run", **flags, max_steps=70)
    assert more.code == 0 and "Warning" not in more.out, more
    assert read_metrics(tmp_path / "run")[-1]["skipped_updates"] == skipped


@pytest.mark.parametrize("choices", [{"precision": "fp32", "compile": "off"}, {"compile": "on"}], ids=["fp32", "half"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, train: Callable, choices: dict) -> None:
    """Dropout included: what it draws belongs to the seed and the step. Atomic additions differ in their order."""
    flags = {"device": DEVICE, "use_lr_scheduler": "constant", **choices}
    assert train(tmp_path / "straight", max_steps=24, **flags).code == 0
    assert train(tmp_path / "resumed", max_steps=12, **flags).code == 0
    result = train(tmp_path / "resumed", max_steps=24, **flags)
    assert result.code == 0, result.err
    straight, resumed = losses_of(tmp_path / "straight"), losses_of(tmp_path / "resumed")
    assert len(straight) == len(resumed) == 24
    assert resumed == pytest.approx(straight, rel=1e-3 if "precision" in choices else 1e-2)


def test_a_compiled_run_answers_prompts_while_a_thread_reads_batches(tmp_path: Path, train: Callable) -> None:
    """Tokens in RAM are read and pinned by a thread meanwhile; training is as it is without prompts."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "one big red dog"}\n')
    flags = {"device": DEVICE, "compile": "on", "placement": "ram", "dropout": 0.0, "eval_interval": 4}
    result = train(tmp_path / "asked", **flags, eval_prompts=prompts)
    assert result.code == 0, result.err
    samples = (tmp_path / "asked" / "samples.md").read_text()
    assert "the cat" in samples and "one big red dog" in samples
    assert train(tmp_path / "not asked", **flags).code == 0
    assert losses_of(tmp_path / "asked") == pytest.approx(losses_of(tmp_path / "not asked"), rel=1e-2)


def test_a_dry_run_tells_all_and_writes_nothing(tmp_path: Path, train: Callable) -> None:
    result = train(tmp_path / "run", ("--dry_run",), device=DEVICE, compile="on")
    assert result.code == 0, result.err
    for line in (
        r"^Precision +(bf16|fp16): CUDA",
        r"^Compile +on: ",
        r"^Compiled in \d+ s",
        r"^Memory .* free now",
        r"^Speed .*s a step.* tokens/s",
        r"^Saving .* s per checkpoint.*verified",
        r"^Evaluating .*windows",
        r"^Time .* 24 steps",
        r"^Peak +[\d.]+ GB of GPU memory",
        r"^Dry run: no run was written",
    ):
        assert re.search(line, result.out, re.MULTILINE), (line, result.out)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("placement", ["gpu", "ram"])
def test_profiling_tells_where_the_time_goes_and_writes_nothing(
    tmp_path: Path, train: Callable, placement: str
) -> None:
    result = train(tmp_path / "run", ("--profile",), device=DEVICE, placement=placement, compile="on")
    assert result.code == 0, result.err
    assert re.search(r"^Profile    .* takes \d+% of a step", result.out, re.MULTILINE), result.out
    assert list(tmp_path.iterdir()) == []
