"""What `peers.py` measures: our trainer aside, other ways to train the same model, each as its own code does it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

CONTESTANTS = {
    "ours": "the trainer's own step with its automatic choices",
    "plain PyTorch": "our model in a plain loop: fp32, eager, AdamW that is not fused, rows stacked one by one",
    "transformers": "GPT2LMHeadModel with `labels=` and the Trainer's defaults: fp32, eager, fused AdamW. It shifts "
    "the labels itself, and so learns from one token less in each row. Head untied, exact GELU, no dropout, as ours",
    "nanoGPT": "its GPT and its configure_optimizers, as its train.py uses them: on a CPU fp32, eager, AdamW that is "
    "not fused; on CUDA compiled, bf16 (fp16 where there is none), TF32, fused AdamW. Its head is always tied: it has "
    "that many parameters less to update",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A shape of model and batch. `max_steps` is the length of run for which ours makes its choices."""

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
        del values["vocab_size"]  # that of the tokens
        return [word for key, value in values.items() for word in (f"--{key}", str(value))]

    def __str__(self) -> str:
        return f"{self.num_layers} x {self.embed_dim}, context {self.max_seq_len}, batch {self.batch_size}"


class Contestant(NamedTuple):
    """A model ready to train: `step()` is one update."""

    step: Callable[[], object]
    parameters: int


def random_batches(case: Case, folder: str, device: torch.device) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Draws inputs and targets, each (B, T) int64, the usual way: random places of a memory map, one row at a time."""
    import numpy as np
    import torch

    tokens = np.memmap(Path(folder) / "tokens.bin", "<u2", mode="r")
    T = case.max_seq_len

    def rows(starts: Sequence[int]) -> torch.Tensor:
        batch = torch.stack([torch.from_numpy(tokens[start : start + T].astype(np.int64)) for start in starts])
        return batch.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else batch

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(tokens) - T, (case.batch_size,)).tolist()
        return rows(starts), rows([start + 1 for start in starts])

    return draw


def plain_pytorch(case: Case, folder: str, device: torch.device) -> Contestant:
    import torch

    from model import ModelConfig, TransformerLanguageModel

    shape = {key: value for key, value in dataclasses.asdict(case).items() if key not in ("batch_size", "max_steps")}
    model = TransformerLanguageModel(ModelConfig(**shape)).to(device)
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
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    config = GPT2Config(
        vocab_size=case.vocab_size,
        n_positions=case.max_seq_len,
        n_embd=case.embed_dim,
        n_layer=case.num_layers,
        n_head=case.num_heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: Any = GPT2LMHeadModel(config)  # typed too narrowly: `to` takes a device
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
    import torch

    from benchmarks.measure import load_nanogpt

    module = load_nanogpt(checkout)
    config = module.GPTConfig(
        block_size=case.max_seq_len,
        vocab_size=case.vocab_size,
        n_layer=case.num_layers,
        n_head=case.num_heads,
        n_embd=case.embed_dim,
        dropout=0.0,
        bias=True,
    )
    model = module.GPT(config).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), device.type)
    precision, step_model = torch.float32, model
    autocast: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        precision = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
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
