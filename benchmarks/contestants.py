"""The contestants of `peers.py`, ready to train, and the measurement of one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.measure import flag_words
from benchmarks.workload import Training, time_steps
from common.machine import has_fast_bf16, pick_device
from model import TransformerLanguageModel
from model_config import ModelConfig
from training.machine.hardware import Hardware

CONTESTANTS = {
    "ours": "the trainer's own step with its automatic choices",
    "plain PyTorch": "our model in a plain loop: fp32, eager, AdamW without fusing, rows stacked one by one",
    "transformers": "GPT2LMHeadModel with `labels=` and the Trainer's defaults: fp32, eager, fused AdamW. It shifts "
    "the labels itself, so it learns from one token less in each row. Untied head, exact GELU, no dropout, like ours",
    "nanoGPT": "its GPT and its configure_optimizers, as its train.py uses them: on a CPU fp32, eager, AdamW without "
    "fusing; on CUDA compiled, bf16 (fp16 where it is missing), TF32, fused AdamW. Its head is always tied, so it "
    "updates fewer parameters",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape of model and batch. Ours chooses its settings for a run of `max_steps`."""

    num_layers: int
    embed_dim: int
    num_heads: int
    max_seq_len: int
    vocab_size: int
    batch_size: int
    max_steps: int

    def flags(self, folder: str) -> list[str]:
        """The trainer's flags for this case on a token folder."""
        values = {"data_dir": folder, **dataclasses.asdict(self)}
        del values["vocab_size"]  # the trainer takes it from the tokens
        return flag_words(values)

    def __str__(self) -> str:
        return f"{self.num_layers} x {self.embed_dim}, context {self.max_seq_len}, batch {self.batch_size}"


def cases(is_cuda: bool) -> dict[str, Case]:
    return {
        "shakespeare_char": Case(4, 128, 4, 64, 65, 12, max_steps=2_000),
        "4x256": Case(4, 256, 4, 256, 65, 32, max_steps=5_000),
        "gpt2_small": Case(12, 768, 12, 512, 32_000, 64 if is_cuda else 4, max_steps=20_000),
        "toy": Case(1, 32, 2, 16, 65, 4, max_steps=100),
    }


class Contestant(NamedTuple):
    """A model ready to train: `step()` is one update."""

    step: Callable[[], object]
    parameters: int


def random_batches(case: Case, folder: str, device: torch.device) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Draws inputs and targets, each (B, T) int64, as most code does: random places of a memory map, row by row."""
    tokens = np.memmap(Path(folder) / "tokens.bin", "<u2", mode="r")
    T = case.max_seq_len

    def rows(starts: Sequence[int]) -> torch.Tensor:
        batch = torch.stack([torch.from_numpy(tokens[start : start + T].astype(np.int64)) for start in starts])
        return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - T, (case.batch_size,)).tolist()
        return rows(starts), rows([start + 1 for start in starts])

    return draw


def model_config(case: Case) -> ModelConfig:
    return ModelConfig(case.vocab_size, case.embed_dim, case.num_heads, case.num_layers, max_seq_len=case.max_seq_len)


def plain_pytorch(case: Case, folder: str, device: torch.device) -> Contestant:
    model = TransformerLanguageModel(model_config(case)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=False)
    draw = random_batches(case, folder, device)

    def step() -> None:
        inputs, targets = draw()
        optimizer.zero_grad(set_to_none=True)
        model(inputs, targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Contestant(step, model.num_parameters())


def transformers_gpt2(case: Case, folder: str, device: torch.device) -> Contestant:
    from transformers import GPT2LMHeadModel, TrainingArguments

    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    as_ours = {"activation_function": "gelu", "tie_word_embeddings": False, **dropout}
    # Any: the declared type of `to` allows no device.
    model: Any = GPT2LMHeadModel(gpt2_config(model_config(case), use_cache=False, eos_token_id=0, **as_ours))
    model.to(device).train()
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TrainingArguments)}
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=5e-5, weight_decay=0.0, fused=str(defaults["optim"]).endswith("fused")
    )
    draw = random_batches(case, folder, device)

    def step() -> None:
        inputs, _ = draw()
        model(input_ids=inputs, labels=inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), defaults["max_grad_norm"])
        optimizer.step()
        model.zero_grad()

    return Contestant(step, sum(p.numel() for p in model.parameters()))


def nanogpt(case: Case, folder: str, device: torch.device, checkout: str) -> Contestant:
    model = nanogpt_model(checkout, model_config(case)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    precision, step_model = torch.float32, model
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        # Not is_bf16_supported, which counts emulation.
        precision = torch.bfloat16 if has_fast_bf16(device) else torch.float16
        autocast = lambda: torch.amp.autocast("cuda", precision)  # noqa: E731
        step_model = torch.compile(model)
    scaler = torch.amp.GradScaler(device.type, enabled=precision == torch.float16)
    draw = random_batches(case, folder, device)
    batch = draw()

    def step() -> None:
        nonlocal batch
        with autocast():
            _, loss = step_model(*batch)
        batch = draw()  # while the GPU computes
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    return Contestant(step, parameters)


def measure(
    name: str, case: Case, folder: str, device: str, checkout: str | None, seconds: float, started: float
) -> dict[str, Any]:
    """Train one contestant in this process, which started at `started`."""
    torch.manual_seed(0)
    about: dict[str, Any] = {}
    if name == "ours":
        training = Training.open([*case.flags(folder), "--device", device])
        hardware, compiled = training.hardware, training.step_model is not training.model
        contestant = Contestant(training.step, training.model.num_parameters())
        about = {"precision": hardware.precision, "compiled": compiled}
    else:
        target = pick_device(device)
        builders: dict[str, Callable[[Case, str, torch.device], Contestant]] = {
            "plain PyTorch": plain_pytorch,
            "transformers": transformers_gpt2,
            "nanoGPT": functools.partial(nanogpt, checkout=checkout or ""),
        }
        contestant = builders[name](case, folder, target)
        # Not detect_hardware, which changes the process's settings, as for ours.
        hardware = Hardware(target, "", "fp32", "", False, "", peak_flops=None, memory_bytes=None)
    contestant.step()
    hardware.synchronize()
    startup = time.perf_counter() - started
    step_seconds, steps = time_steps(contestant.step, hardware.synchronize, seconds)
    peak = hardware.peak_memory()
    return about | {
        "parameters": contestant.parameters,
        "tokens_per_second": case.batch_size * case.max_seq_len / step_seconds,
        "ms_per_step": 1000 * step_seconds,
        "steps": steps,
        "startup_seconds": startup,
        "peak_memory_gb": peak and peak / 1e9,
    }


def gpt2_config(config: ModelConfig, **more: Any) -> Any:
    """A `transformers.GPT2Config` of the same shape."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=config.vocab_size,
        n_positions=config.max_seq_len,
        n_embd=config.embed_dim,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        bos_token_id=0,
        **more,
    )


def nanogpt_model(checkout: str | Path, config: ModelConfig) -> Any:
    """A GPT of the same shape from a checkout of nanoGPT."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(checkout) / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    shape = module.GPTConfig(
        block_size=config.max_seq_len,
        vocab_size=config.vocab_size,
        n_layer=config.num_layers,
        n_head=config.num_heads,
        n_embd=config.embed_dim,
        dropout=0.0,
        bias=config.bias,
    )
    return module.GPT(shape)
