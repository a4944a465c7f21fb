"""Before the first step: estimates of memory, the micro-batch that fits, and dry runs that write nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import train_colab_mmap
from common.checkpoint import find_newest_run, open_checkpoint
from common.errors import MemoryExhausted
from model import CPU_FP32_ATTENTION, TransformerLanguageModel
from model_config import ModelConfig
from tests.forked import Forked
from tests.helpers import CPU, estimated, full_disk, rows_of, wait_until, with_large_weights
from tokenizer import CharacterTokenizer
from training.config import Config
from training.hardware import Hardware
from training.memory import MEMORY_SHARE, PROCESS_BYTES, bytes_per_token, count_held_bytes, fit_micro_batch

CONFIG = Config(embed_dim=64, num_heads=2, num_layers=2, max_seq_len=32, batch_size=32)


def with_memory(memory_bytes: int | None, precision: str = "fp32") -> Hardware:
    return dataclasses.replace(CPU, precision=precision, memory_bytes=memory_bytes)


def config_of(**values: Any) -> Config:
    config = dataclasses.replace(CONFIG, **values)
    return dataclasses.replace(config, sources=dict.fromkeys(config.values(), "default"))


def estimate(vocab_size: int = 1000, precision: str = "fp32", **values: Any) -> int:
    config = config_of(**values)
    with torch.device("meta"):
        model = TransformerLanguageModel(config.shape(vocab_size))
    return estimated(config, model, with_memory(None, precision))


# The estimate


def test_the_estimate_grows_with_all_that_takes_memory() -> None:
    base = estimate()
    for more in (
        {"batch_size": 64},
        {"vocab_size": 2000},
        {"max_seq_len": 64},
        {"num_layers": 4},
        {"embed_dim": 128},
        {"ff_dim": 1024},
    ):
        assert estimate(**more) > base, more


def test_what_dropout_keeps_is_counted() -> None:
    """Measure the tensors that are kept for the backward pass."""
    config, kept = config_of(max_seq_len=256, batch_size=2, dropout=0.1), []
    models = [TransformerLanguageModel(ModelConfig(40, 64, 2, 2, max_seq_len=256, dropout=p)) for p in (0.0, 0.1)]
    for model in models:
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.zeros(2, 256, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(tokens, tokens)
        kept.append(sum(storages.values()))
        loss.backward()
    without, with_dropout = (estimated(config, model, with_memory(None)) for model in models)
    assert with_dropout - without == pytest.approx(kept[1] - kept[0], rel=0.25)


def kept_of_a_token(config: Config, layers: int, precision: str) -> float:
    """Bytes that a forward pass keeps for its backward pass, weights aside."""
    model = TransformerLanguageModel(dataclasses.replace(config.shape(40), num_layers=layers))
    model.activation_checkpointing = config.activation_checkpointing
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    storages: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(rows_of(config), config.max_seq_len, dtype=torch.long)
    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        model(tokens, tokens)
    casts = {tuple(parameter.shape[::-1]) for parameter in model.parameters()}  # of weights, to bf16
    of_activations = [
        tensor.untyped_storage().nbytes()
        for place, tensor in storages.items()
        if place not in weights and tuple(tensor.shape) not in casts and tuple(tensor.shape[::-1]) not in casts
    ]
    return sum(of_activations) / tokens.numel()


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        ("fp32", {}),
        ("fp32", {"ff_dim": 96}),
        ("fp32", {"activation_checkpointing": True}),
        ("fp32", {"position": "rope"}),
        ("fp32", {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "bias": False, "activation": "swiglu"}),
        ("bf16", {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "bias": False, "activation": "swiglu"}),
        ("bf16", {"activation_checkpointing": True}),
    ],
)
def test_what_a_layer_keeps_is_what_is_counted(precision: str, changes: dict) -> None:
    config = config_of(embed_dim=256, max_seq_len=CPU_FP32_ATTENTION + 1, batch_size=2, **changes)
    kept = (kept_of_a_token(config, 6, precision) - kept_of_a_token(config, 2, precision)) / 4
    with torch.device("meta"):
        models = [TransformerLanguageModel(dataclasses.replace(config.shape(40), num_layers=n)) for n in (6, 2)]
    counted = [bytes_per_token(config, model, with_memory(None, precision)) for model in models]
    assert (counted[0] - counted[1]) / 4 == pytest.approx(kept, rel=0.06)


def test_compiled_code_and_checkpointed_activations_take_less() -> None:
    compiled = dataclasses.replace(with_memory(None, "bf16"), compiles=True)
    config = config_of(batch_size=64, max_seq_len=512)
    with torch.device("meta"):
        model = TransformerLanguageModel(config.shape(32_000))
    eager = estimated(config, model, with_memory(None, "bf16"))
    assert estimated(config, model, compiled) < eager
    checkpointed = dataclasses.replace(config, activation_checkpointing=True)
    assert estimated(checkpointed, model, compiled) < estimated(config, model, compiled)


@pytest.mark.parametrize(
    ("layers", "width", "context", "rows", "precision", "gb"),
    [
        (12, 768, 512, 64, "bf16", 12.103),
        (24, 1024, 1024, 8, "bf16", 7.684),
        (12, 768, 512, 16, "fp16", 3.506),
    ],
)
def test_what_compiled_code_keeps_is_what_is_counted(
    layers: int, width: int, context: int, rows: int, precision: str, gb: float
) -> None:
    """Compare with the GB that PyTorch (2.11; 2.13 for 8 x 512 tokens) hands from the forward to the backward pass when
    it partitions for a GPU, including weights in half precision (docs/benchmarks/gpu_forecast.md)."""
    shape = {"num_layers": layers, "embed_dim": width, "max_seq_len": context, "batch_size": rows}
    config = config_of(**shape)
    with torch.device("meta"):
        model = TransformerLanguageModel(config.shape(32_000))
    hardware = dataclasses.replace(with_memory(None, precision), device=torch.device("cuda"), compiles=True)
    counted = bytes_per_token(config, model, hardware) * rows * context + 2 * model.num_parameters()
    assert counted == pytest.approx(gb * 1e9, rel=0.02)


def test_tokens_in_the_same_memory_are_counted() -> None:
    def held(is_cuda: bool, place: str) -> int:
        tokens = SimpleNamespace(nbytes=1000, device=torch.device("cuda" if place == "gpu" else "cpu"))
        companion = SimpleNamespace(tokens=tokens, placement=place)
        data = SimpleNamespace(tokens=tokens, placement=place, companion=companion)
        return count_held_bytes(
            data, dataclasses.replace(with_memory(None), device=torch.device("cuda" if is_cuda else "cpu"))
        )

    assert (held(True, "gpu"), held(True, "ram"), held(True, "mmap")) == (2000, 0, 0)
    assert (held(False, "ram"), held(False, "mmap")) == (PROCESS_BYTES + 2000, PROCESS_BYTES)


# The micro-batch that fits


@pytest.mark.parametrize("rows_that_fit", [16, 4, 1])
def test_the_micro_batch_is_halved_until_it_fits(rows_that_fit: int, capsys: pytest.CaptureFixture) -> None:
    config = config_of()
    model = TransformerLanguageModel(config.shape(1000))
    needed, too_much = (
        estimated(dataclasses.replace(config, micro_batch_size=rows), model, with_memory(None))
        for rows in (rows_that_fit, 2 * rows_that_fit)
    )
    fitted = fit_micro_batch(config, model, with_memory(int((needed + too_much) / 2 / MEMORY_SHARE)))
    assert fitted == rows_that_fit
    printed = capsys.readouterr().out
    assert f"micro_batch_size {rows_that_fit}" in printed and "32 sequences" in printed


def test_a_step_that_fits_is_left_as_it_is(capsys: pytest.CaptureFixture) -> None:
    config = config_of()
    model = TransformerLanguageModel(config.shape(1000))
    assert fit_micro_batch(config, model, with_memory(10**12)) == 32
    assert fit_micro_batch(config, model, with_memory(None)) == 32  # a machine that does not tell
    assert not capsys.readouterr().out


def test_a_model_that_cannot_fit_ends_with_exit_code_5() -> None:
    config = config_of()
    model = TransformerLanguageModel(config.shape(1000))
    with pytest.raises(MemoryExhausted) as caught:
        fit_micro_batch(config, model, with_memory(10**6))
    assert caught.value.exit_code == 5
    assert all(said in str(caught.value) for said in ("one sequence", "--max_seq_len", "--micro_batch_size 1"))


# The dry run


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    np.random.default_rng(0).integers(0, 30, 4000).astype("<u2").tofile(folder / "tokens.bin")
    CharacterTokenizer([chr(97 + i) for i in range(30)]).save(folder / "tokenizer.json")
    metadata = {"vocab_size": 30, "dtype": "uint16", "total_tokens": 4000, "train_split_index": 3600}
    files = {"bin_file": "tokens.bin", "tokenizer_file": "tokenizer.json", "tokenizer_type": "character"}
    (folder / "tokens_metadata.json").write_text(json.dumps({**metadata, **files}))
    return folder


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(folder.rglob("*"))}


SHAPE = ("--embed_dim", "16", "--num_heads", "2", "--num_layers", "1", "--max_seq_len", "8", "--device", "cpu")


def test_a_dry_run_tells_all_and_writes_nothing(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    before = listing(tmp_path)
    argv = ["--data_dir", str(tokens), *SHAPE, "--batch_size", "6", "--epochs", "3", "--units_per_hour", "12"]
    assert train_colab_mmap.main([*argv, "--gradient_accumulation_steps", "2", "--dry_run"]) == 0
    assert listing(tmp_path) == before
    printed = capsys.readouterr().out
    config = Config(embed_dim=16, num_heads=2, num_layers=1, max_seq_len=8)
    parameters = TransformerLanguageModel(config.shape(30)).num_parameters()
    windows = int(re.search(r"([\d,]+) windows", printed)[1].replace(",", ""))
    steps = -(-3 * windows // 12)
    assert f"{parameters:,} parameters" in printed
    assert f"Steps      {steps:,} of 96 tokens" in printed
    for line in (
        r"^Data .*4,000 tokens",
        r"^Splits .*3,600 training tokens.* 400 validation",
        r"^Memory .*about [\d.]+ [kM]B of [\d.]+ GB .*plus [\d.]+ [kM]B of RAM",
        r"^Disk .*about [1-9][\d.]* kB of [\d.]+ [GM]B free in ",
        r"^First loss 3\.\d\d; an untrained model has ln\(30\) = 3\.40",
        r"^Saving .*[\d.]+ s per checkpoint.* verified",
        r"^Evaluating .*windows",
        r"^Speed .*s a step.* tokens/s",
        rf"^Time .*{steps:,} steps",
        r"^Cost .*at 12 an hour",
        r"no run was written",
    ):
        assert re.search(line, printed, re.MULTILINE), line


def test_a_dry_run_forecasts_what_is_left(train: Callable, tmp_path: Path) -> None:
    dry = ("--dry_run",)
    assert train(tmp_path / "run", max_steps=4).code == 0
    more = train(tmp_path / "run", extra=dry, max_steps=10)
    assert more.code == 0 and "Steps      6 left of " in more.out and " for 6 steps with" in more.out
    for max_steps in (4, 2):  # as many as were taken, and fewer
        done = train(tmp_path / "run", extra=dry, max_steps=max_steps)
        assert done.code == 0 and "This run is finished at step 4" in done.out and "Time " not in done.out


def test_a_dry_run_leaves_a_run_that_is_there_alone(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    (run / "checkpoints" / "step_00000001").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    before = listing(tmp_path)
    argv = ["--data_dir", str(tokens), *SHAPE, "--output_dir", str(run), "--resume", "never", "--dry_run"]
    assert train_colab_mmap.main(argv) == 0
    assert listing(tmp_path) == before


def test_a_dry_run_of_a_model_that_does_not_fit_ends_with_exit_code_5(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("common.machine.memory_info", lambda name: 10**5)
    before = listing(tmp_path)
    assert train_colab_mmap.main(["--data_dir", str(tokens), *SHAPE, "--dry_run", "--placement", "ram"]) == 5
    assert capsys.readouterr().err.startswith("error: ")
    assert listing(tmp_path) == before


def test_a_dry_run_tries_the_mirror_and_leaves_nothing_there(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drive").mkdir()
    before = listing(tmp_path)
    argv = ["--data_dir", str(tokens), *SHAPE, "--dry_run", "--checkpoint_dir", str(tmp_path / "drive" / "copies")]
    assert train_colab_mmap.main(argv) == 0
    assert re.search(
        r"^Mirror .*can be written and read; about [1-9][\d.]* kB of", capsys.readouterr().out, re.MULTILINE
    )
    assert {path: entry for path, entry in listing(tmp_path).items() if "drive" not in path} == {
        path: entry for path, entry in before.items() if "drive" not in path
    }
    assert list((tmp_path / "drive").iterdir()) == []

    with full_disk("drive"):
        assert train_colab_mmap.main(argv) == 4
    assert "could not be written and read back (No space left" in capsys.readouterr().err
    assert list((tmp_path / "drive").iterdir()) == []


def test_a_first_loss_that_no_untrained_model_has_is_reported(
    tmp_path: Path, tokens: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    initialize = TransformerLanguageModel.__init__

    def spoiled(model: TransformerLanguageModel, config: ModelConfig) -> None:
        initialize(model, config)
        with_large_weights(model)

    monkeypatch.setattr(TransformerLanguageModel, "__init__", spoiled)
    assert train_colab_mmap.main(["--data_dir", str(tokens), *SHAPE, "--dry_run"]) == 0
    assert "Warning: these should be close" in capsys.readouterr().out


def test_a_dry_run_times_no_compiling_as_an_evaluation(train: Callable, tmp_path: Path) -> None:
    """Two graphs, of training and of evaluation, are compiled before anything is timed."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = train(tmp_path / "run", extra=("--dry_run",), compile="on", eval_interval=3)
    assert result.code == 0 and "Compiled in" in result.out
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_dry_run_that_is_ended_leaves_nothing(tmp_path: Path, train_flags: Callable) -> None:
    process = Forked([*train_flags(tmp_path / "runs" / "run", max_steps=100), "--dry_run"], cwd=tmp_path)
    wait_until(lambda: bool(list(tmp_path.glob(".dry_run-*"))))
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate()
    assert process.returncode == 130 and "Interrupted" in err
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_dry_run_leaves_is_no_run_and_goes_with_the_next_one(copy_of: Path, train: Callable) -> None:
    runs, left = copy_of.parent, copy_of.with_name(".dry_run-run")
    shutil.copytree(copy_of, left)
    assert find_newest_run(runs) == copy_of and open_checkpoint(runs).path.is_relative_to(copy_of)
    assert train(copy_of).code == 0 and not left.exists()


def test_a_dry_run_without_time_for_a_step_is_refused(train: Callable, tmp_path: Path) -> None:
    result = train(tmp_path / "run", extra=("--dry_run",), max_hours=1e-9)
    assert result.code == 2 and "No step can be taken: --max_hours" in result.err
