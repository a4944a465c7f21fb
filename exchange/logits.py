"""Check that two models compute the same logits, up to rounding."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import CheckpointError
from exchange.hf_tokenizer import probe_text
from model import TransformerLanguageModel
from tokenizer import Tokenizer

MAX_DIFFERENCE = 1e-4  # between logits in fp32
# In fp64, the difference is compared with the largest logit.
MAX_SHARE_FP64 = 1e-10
MAX_SHARE_MODERN = 1e-5  # measured at 12 layers x 768: 2e-6; with RoPE rotated the wrong way, over 0.1
MAX_PROBE_TOKENS = 1024


@torch.inference_mode()
def find_least_likely_id(model: TransformerLanguageModel, tokenizer: Tokenizer) -> int:
    """Return the id with the lowest peak probability on the probe text."""
    probabilities = model(_encode_probe(model, tokenizer)).softmax(-1)  # (1, T, V)
    return int(probabilities[0, :, : tokenizer.vocab_size].amax(0).argmin())


def _encode_probe(model: TransformerLanguageModel, tokenizer: Tokenizer) -> torch.Tensor:
    """Return the ids of the probe text, (1, T), repeated or cut to the context length."""
    ids = tokenizer.encode(probe_text(tokenizer))
    return torch.from_numpy(np.resize(ids, (1, min(model.config.max_seq_len, MAX_PROBE_TOKENS))).astype(np.int64))


class LogitDifference(NamedTuple):
    """The largest difference between two models' logits in fp32. `fp64` is set if fp32 alone could not tell rounding
    from a fault."""

    fp32: float
    fp64: float | None = None
    largest_logit: float = 0.0

    def __str__(self) -> str:
        rounding = (
            f" (rounding: logits reach {self.largest_logit:.3g}, and in fp64 they differ by {self.fp64 or 0:.2g})"
        )
        return f"{self.fp32:.2g} at most" + (rounding if self.fp64 is not None else "")


def require_same_logits(model: TransformerLanguageModel, hf_model: Any, tokenizer: Tokenizer) -> LogitDifference:
    """Compare the logits of our model and one of transformers on the probe text. Return the largest difference.

    Raises CheckpointError if the difference exceeds
    MAX_DIFFERENCE and rounding does not explain it. The activations of a large GPT-2 reach thousands, so summing in
    another order differs by more than that in fp32, but not in fp64. The modern form computes norms and angles in fp32
    even if its weights are fp64, so it gets a wider limit.
    """
    tokens = _encode_probe(model, tokenizer)
    fp32, _ = _measure_difference(model, hf_model, tokens)
    if fp32 <= MAX_DIFFERENCE:
        return LogitDifference(fp32)
    fp64, largest = _measure_difference(model.double(), hf_model.double(), tokens)
    model.float()
    share = MAX_SHARE_MODERN if model.config.position == "rope" else MAX_SHARE_FP64
    if not fp64 <= share * largest:  # `not <=` also catches NaN
        raise CheckpointError(
            f"transformers computes other logits: they differ by {fp32:.3g} (in fp64 by {fp64:.3g}). An "
            "untrained wide model can round this badly; for any other model, please report it."
        )
    return LogitDifference(fp32, fp64, largest)


@torch.inference_mode()
def _measure_difference(model: TransformerLanguageModel, hf_model: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the largest difference and the largest logit. Ids that only `hf_model` has are not compared."""
    logits, other_logits = model(tokens), hf_model(tokens).logits
    return (logits - other_logits[..., : logits.shape[-1]]).abs().max().item(), logits.abs().max().item()
