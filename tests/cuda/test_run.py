"""What only a GPU can show: the same training as on the CPU, without waits, recompilation or unforeseen memory.

Skipped where PyTorch sees no CUDA GPU.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.workload import Training, write_random_tokens
from common.checkpoint import open_checkpoint
from generation.decoding import generate
from generation.sampling import Sampling
from model import TransformerLanguageModel
from training.evaluate import validation_loss
from training.memory import estimate_memory

pytestmark = pytest.mark.cuda

SHAPE = ["--num_layers", "2", "--embed_dim", "64", "--num_heads", "2", "--max_seq_len", "32", "--batch_size", "8"]
ON_GPU = ["--device", "cuda", "--max_steps", "100", "--learning_rate", "0.003"]


@pytest.fixture(autouse=True)
def fresh_device() -> Iterator[None]:
    """No compiled code, memory or matmul precision of another test."""
    precision = torch.get_float32_matmul_precision()
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_tokens(tmp_path_factory.mktemp("tokens") / "small", 20_000, 300)


def opened(tokens: Path, *flags: str) -> Training:
    return Training.open([*SHAPE, *ON_GPU, "--data_dir", str(tokens), *flags])


def losses_of(run_dir: Path) -> list[float]:
    return [json.loads(line)["train_loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_fp32_training_has_the_losses_of_the_cpu(tmp_path: Path, train: Callable) -> None:
    """Dropout is off, for the two devices draw other numbers; precision fp32 means no TF32 either."""
    for device in ("cpu", "cuda"):
        result = train(tmp_path / device, device=device, precision="fp32", compile="off", dropout=0.0)
        assert result.code == 0, result.err
    ours, reference = losses_of(tmp_path / "cuda"), losses_of(tmp_path / "cpu")
    assert ours == pytest.approx(reference, rel=1e-3)
    assert ours[0] == pytest.approx(reference[0], rel=1e-5)


def test_a_compiled_model_has_the_losses_of_the_eager_one(tmp_path: Path, train: Callable) -> None:
    for choice in ("on", "off"):
        result = train(tmp_path / choice, device="cuda", precision="fp32", compile=choice, dropout=0.0)
        assert result.code == 0, result.err
        assert "torch.compile failed" not in result.out
    assert losses_of(tmp_path / "on") == pytest.approx(losses_of(tmp_path / "off"), rel=1e-3)


def test_the_automatic_precision_trains_in_half_with_weights_in_full(tmp_path: Path, train: Callable) -> None:
    """bf16, or fp16 with a gradient scaler before capability 8.0: close to fp32, and it learns."""
    for precision in ("auto", "fp32"):
        result = train(tmp_path / precision, device="cuda", precision=precision, compile="off", max_steps=60, dropout=0)
        assert result.code == 0, result.err
    half, full = losses_of(tmp_path / "auto"), losses_of(tmp_path / "fp32")
    assert half[-1] < 0.8 * half[0]
    assert half[-1] == pytest.approx(full[-1], rel=0.1)
    kept = open_checkpoint(tmp_path / "auto")
    model = TransformerLanguageModel(kept.model_config())
    kept.load_weights(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_logits_are_bf16_and_gradients_fp32(tokens: Path) -> None:
    training = opened(tokens, "--compile", "off")
    if training.hardware.precision != "bf16":
        pytest.skip("a GPU without bf16")
    inputs, targets = training.data.batch(0, 4)
    with training.hardware.autocast():
        assert training.model(inputs).dtype == torch.bfloat16
        loss = training.model(inputs, targets)
    loss.backward()
    assert loss.dtype == torch.float32
    assert {parameter.grad.dtype for parameter in training.model.parameters()} == {torch.float32}


@pytest.mark.parametrize("choices", [{"precision": "fp32", "compile": "off"}, {}], ids=["fp32", "automatic"])
def test_a_resumed_run_has_the_losses_of_an_uninterrupted_one(tmp_path: Path, train: Callable, choices: dict) -> None:
    """Dropout included: what it draws belongs to the seed and the step. Atomic additions differ in their order."""
    flags = {"device": "cuda", "use_lr_scheduler": "constant", **choices}
    assert train(tmp_path / "straight", max_steps=24, **flags).code == 0
    assert train(tmp_path / "resumed", max_steps=12, **flags).code == 0
    result = train(tmp_path / "resumed", max_steps=24, **flags)
    assert result.code == 0, result.err
    straight, resumed = losses_of(tmp_path / "straight"), losses_of(tmp_path / "resumed")
    assert len(straight) == len(resumed) == 24
    assert resumed == pytest.approx(straight, rel=1e-3 if choices else 1e-2)


def test_placements_give_the_same_batches(tokens: Path) -> None:
    placed = {place: opened(tokens, "--placement", place, "--compile", "off").data for place in ("gpu", "ram", "mmap")}
    assert placed["gpu"].tokens.is_cuda and not placed["ram"].tokens.is_cuda
    windows = placed["gpu"].windows
    for seen in (0, 8, windows - 3, windows + 5):  # across the end of an epoch too
        expected = placed["mmap"].batch(seen, 8)
        for place in ("gpu", "ram"):
            batch = placed[place].batch(seen, 8)
            assert all(tensor.is_cuda for tensor in batch)
            assert all(torch.equal(a, b) for a, b in zip(batch, expected, strict=True)), place


@contextlib.contextmanager
def waiting_forbidden() -> Iterator[None]:
    """Raise where the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_wait_would_be_noticed() -> None:
    with pytest.raises(RuntimeError), waiting_forbidden():
        torch.ones(1, device="cuda").item()


@pytest.mark.parametrize("placement", ["gpu", "ram"])
@pytest.mark.parametrize("choice", ["on", "off"])
def test_a_step_that_does_not_report_waits_for_nothing(tokens: Path, placement: str, choice: str) -> None:
    training = opened(tokens, "--placement", placement, "--compile", choice, "--gradient_accumulation_steps", "2")
    if training.hardware.precision == "fp16":
        pytest.skip("fp16: its gradient scaler must read whether a gradient overflowed")
    for _ in range(3):
        training.step()
    with waiting_forbidden():
        for _ in range(3):
            training.step()
    assert torch.isfinite(training.loss)


def test_nothing_is_compiled_after_the_first_evaluation(tokens: Path) -> None:
    """One shape for training, one for evaluation: not for a last batch that is not full, nor for another epoch."""
    training = opened(tokens, "--compile", "on", "--gradient_accumulation_steps", "2", "--eval_batches", "0")
    data, config = training.data, training.config
    assert training.step_model is not training.model, "the model was not compiled"
    assert data.val_windows % config.rows_at_once, "the last batch should be a part of one"

    def evaluate() -> float:
        return validation_loss(training.model, training.step_model, data, config, training.hardware)

    training.step()
    evaluate()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(data.windows // config.sequences_per_step + 2):
            training.step()
        assert evaluate() > 0
        training.step()


def test_peak_memory_is_within_a_tenth_of_the_estimate(tmp_path: Path) -> None:
    tokens = write_random_tokens(tmp_path / "tokens", 200_000, 32_000)
    shape = [
        "--num_layers",
        "6",
        "--embed_dim",
        "512",
        "--num_heads",
        "8",
        "--max_seq_len",
        "512",
        "--batch_size",
        "16",
    ]
    before = torch.cuda.memory_allocated()
    training = Training.open([*shape, *ON_GPU, "--data_dir", str(tokens), "--placement", "ram"])
    training.step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    estimate = estimate_memory(training.config, training.model, training.hardware)
    assert training.config.rows_at_once == 16
    assert estimate == pytest.approx(peak, rel=0.1), f"estimated {estimate / 1e9:.2f} GB, measured {peak / 1e9:.2f} GB"


def test_memory_does_not_grow_from_step_to_step(tokens: Path) -> None:
    training = opened(tokens, "--compile", "off")
    for _ in range(3):
        training.step()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    for _ in range(10):
        training.step()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= held


def test_greedy_text_is_that_of_the_cpu(tmp_path: Path, train: Callable, token_folder: Path) -> None:
    """Of a model that has learned its text: in an untrained one the likeliest tokens are all but equal."""
    from tokenizer import load_tokenizer

    flags = {"precision": "fp32", "compile": "off", "dropout": 0.0, "eval_interval": 0, "checkpoint_steps": 0}
    result = train(tmp_path / "run", device="cuda", max_steps=300, **flags)
    assert result.code == 0, result.err
    checkpoint = open_checkpoint(tmp_path / "run")
    tokenizer = load_tokenizer(token_folder / "tokenizer.json")
    sampling = Sampling(max_new_tokens=40, temperature=0)  # beyond the context of 16
    texts = {}
    for device in ("cpu", "cuda"):
        model = TransformerLanguageModel(checkpoint.model_config())
        checkpoint.load_weights(model)
        completions = generate(model.to(device).eval(), tokenizer, ["the cat", "on a mat and saw", "d"], sampling)
        texts[device] = [completion.text for completion in completions]
    assert texts["cuda"] == texts["cpu"]


def test_the_sampled_draws_are_those_of_the_cpu(tokens: Path) -> None:
    """The same seed gives the same text wherever it runs; in fp64, so that no draw falls between two tokens."""
    training = opened(tokens, "--compile", "off")
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=3)
    texts = []
    for device in ("cuda", "cpu"):
        model = training.model.to(device, torch.float64).eval()
        texts.append([c.text for c in generate(model, training.data.tokenizer, ["\u0100\u0101"] * 2, sampling)])
    assert texts[0] == texts[1]
