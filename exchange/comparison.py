"""Whether two models are the same: how far apart their logits are, and whether rounding explains it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from common.errors import CheckpointError
from exchange.hf_tokenizer import probe_text
from model import TransformerLanguageModel
from tokenizer import Tokenizer

LARGEST_DIFFERENCE = 1e-4  # of logits, in fp32
LARGEST_SHARE_IN_DOUBLE = 1e-10  # of the largest logit, in fp64, where rounding is this small
LARGEST_SHARE_MODERN = 1e-5  # measured at 12 layers x 768: 2e-6; with the rotation the wrong way round, over 0.1
LONGEST_PROBE = 1024  # tokens


@torch.inference_mode()
def least_likely(model: TransformerLanguageModel, tokenizer: Tokenizer) -> int:
    """The id whose highest probability over all positions of the probe text is the lowest."""
    probabilities = model(probe_tokens(model, tokenizer)).softmax(-1)  # (1, T, V)
    return int(probabilities[0, :, : tokenizer.vocab_size].amax(0).argmin())


def probe_tokens(model: TransformerLanguageModel, tokenizer: Tokenizer) -> torch.Tensor:
    """(1, T) ids of the probe text, up to the context length."""
    ids = tokenizer.encode(probe_text(tokenizer))
    return torch.from_numpy(np.resize(ids, (1, min(model.config.max_seq_len, LONGEST_PROBE))).astype(np.int64))


class Difference(NamedTuple):
    """The largest difference of two models' logits. Where fp32 alone could not tell rounding from a fault, also in
    fp64, beside the largest logit."""

    in_single: float
    in_double: float | None = None
    largest_logit: float = 0.0

    def __str__(self) -> str:
        rounding = f" (rounding: they reach {self.largest_logit:.3g}, and in fp64 differ by {self.in_double or 0:.2g})"
        return f"{self.in_single:.2g} at most" + (rounding if self.in_double is not None else "")


def largest_difference(
    model: TransformerLanguageModel, theirs: Any, tokenizer: Tokenizer, whose: str = "transformers"
) -> Difference:
    """The largest difference of the logits on the probe text, in fp32, up to the context length. `theirs` is a model
    of the library `whose`, or another one of ours.

    Raises CheckpointError if it is larger than LARGEST_DIFFERENCE and rounding does not explain it. The activations of
    a large GPT-2 reach thousands, so two orders of summation differ by more than that in fp32, but not in fp64. The
    modern form computes norms and angles in fp32 whatever its weights are: there, the share of the largest logit
    decides.
    """
    tokens = probe_tokens(model, tokenizer)
    in_single, _ = difference_of_logits(model, theirs, tokens)
    if in_single <= LARGEST_DIFFERENCE:
        return Difference(in_single)
    in_double, largest = difference_of_logits(model.double(), theirs.double(), tokens)
    model.float()
    share = LARGEST_SHARE_MODERN if model.config.position == "rope" else LARGEST_SHARE_IN_DOUBLE
    if not in_double <= share * largest:  # which NaN is not
        raise CheckpointError(
            f"{whose} computes other logits from these weights: they differ by {in_single:.3g} (in fp64 by "
            f"{in_double:.3g}). Rounding does that to a wide model with untrained weights; of any other model, please "
            "report it."
        )
    return Difference(in_single, in_double, largest)


@torch.inference_mode()
def difference_of_logits(model: TransformerLanguageModel, theirs: Any, tokens: torch.Tensor) -> tuple[float, float]:
    """The largest difference, and the largest logit. Ids that only `theirs` has are not compared."""
    logits, answer = model(tokens), theirs(tokens)
    other = answer if isinstance(answer, torch.Tensor) else answer.logits
    return (logits - other[..., : logits.shape[-1]]).abs().max().item(), logits.abs().max().item()
