"""The contestants of `generation.py`: each generates tokens and records when each one was ready."""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contestants import gpt2_config, nanogpt_model
from benchmarks.measure import BATCH_HELD, OURS, generation_case
from common.checkpoint import open_checkpoint
from common.errors import ConfigError
from common.machine import cpu_bf16_flag, pick_device
from generate import load_model
from generation.decoding import continuations
from generation.sampling import Sampling
from model import TransformerLanguageModel
from model_config import ModelConfig

# prompts (B, held), new tokens, sampled or greedy -> when each new token was ready, in seconds
Generator = Callable[[torch.Tensor, int, bool], list[float]]

HUGGING_FACE, NANOGPT = "Hugging Face", "nanoGPT"
NANOGPT_TOKENS = 3  # each takes as long as reading the prompt


def model_config(checkpoint: str | None, shape: dict[str, Any]) -> ModelConfig:
    """The config of a checkpoint or run folder; without one, of a model of this shape."""
    return open_checkpoint(checkpoint).model_config() if checkpoint else ModelConfig(**shape)


def contestants(nanogpt: str | None) -> list[str]:
    """On a CPU all in fp32, and again in bf16 if the CPU has units for it; on a GPU in bf16."""
    precisions = ["bf16"] if torch.cuda.is_available() else ["fp32", "bf16"] if cpu_bf16_flag() else ["fp32"]
    names = [f"{who}, {precision}" for precision in precisions for who in (OURS, HUGGING_FACE)]
    return names + ([f"{NANOGPT}, {precisions[0]}"] if nanogpt else [])


def measure(name: str, flags: Namespace, config: ModelConfig) -> dict[str, float]:
    """Milliseconds from one token (of each row) to the next, by case."""
    who, _, precision = name.partition(", ")
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    device = pick_device("auto")
    torch.manual_seed(0)
    if who not in (OURS, HUGGING_FACE, NANOGPT):
        raise ConfigError(f"There is no contestant {name}.")
    if who == NANOGPT:
        run, tokens = nanogpt(config, flags.nanogpt, device, dtype), NANOGPT_TOKENS
        cases = [(held, 1, False) for held in flags.held]
    else:
        run = (ours if who == OURS else hugging_face)(config, flags.checkpoint, device, dtype)
        tokens = flags.new_tokens
        cases = [(held, 1, False) for held in flags.held] + [(BATCH_HELD, batch, True) for batch in flags.batches]
    results = {}
    with torch.inference_mode():
        run(torch.zeros((1, BATCH_HELD), dtype=torch.long), 2, False)  # one-time work does not count
        for held, batch, sampled in cases:
            prompts = torch.randint(config.vocab_size, (batch, held))
            times = run(prompts, tokens, sampled)
            gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
            results[generation_case(held, batch, sampled)] = 1000 * statistics.median(gaps)
    return results


def ours(config: ModelConfig, checkpoint: str | None, device: torch.device, dtype: torch.dtype) -> Generator:
    model: TransformerLanguageModel = load_model(checkpoint)[0] if checkpoint else TransformerLanguageModel(config)
    if not checkpoint:
        with torch.no_grad():
            model.head.weight.mul_(8)  # as far apart as a trained model's logits, so that top_p cuts off most tokens
    model.to(device, dtype).eval()

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        sampling = Sampling(new_tokens, temperature=0.8 if sampled else 0.0, top_p=0.9)
        uniforms = torch.rand(len(prompts), new_tokens, dtype=torch.float64).to(device)
        return [time.perf_counter() for _ in continuations(model, prompts.tolist(), [], uniforms, sampling)]

    return run


def hugging_face(config: ModelConfig, checkpoint: str | None, device: torch.device, dtype: torch.dtype) -> Generator:
    from transformers import GPT2LMHeadModel

    # Any: the declared types allow neither this `to` nor the streamer below.
    model: Any = GPT2LMHeadModel(gpt2_config(config, eos_token_id=None))  # nothing ends a text early
    with torch.no_grad():
        model.lm_head.weight.mul_(8)
    model.to(device, dtype).eval()

    class Stamps(list[float]):
        """A streamer: `generate` passes it the prompt, then each token, on the host."""

        def put(self, tokens: torch.Tensor) -> None:
            self.append(time.perf_counter())

        def end(self) -> None:
            pass

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        how: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 0} if sampled else {}
        stamps, prompts = Stamps(), prompts.to(device)
        how |= {"attention_mask": torch.ones_like(prompts), "pad_token_id": 0, "streamer": stamps}
        model.generate(prompts, max_new_tokens=new_tokens, do_sample=sampled, **how)
        return stamps[1:]

    return run


def nanogpt(config: ModelConfig, checkout: str, device: torch.device, dtype: torch.dtype) -> Generator:
    with contextlib.redirect_stdout(sys.stderr):
        model = nanogpt_model(checkout, config).to(device, dtype).eval()

    def run(prompts: torch.Tensor, new_tokens: int, sampled: bool) -> list[float]:
        times, tokens = [], prompts.to(device)
        for _ in range(new_tokens):
            tokens = model.generate(tokens, 1)
            tokens.tolist()
            times.append(time.perf_counter())
        return times

    return run
