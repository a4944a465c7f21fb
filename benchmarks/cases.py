"""The contestants and shapes that `peers.py` and `generation.py` compare. Imports no torch."""

from __future__ import annotations

import dataclasses

from benchmarks.measure import flag_words

OURS = "ours"
BATCH_HELD = 16  # tokens of context when batches are timed: few, because the texts of a batch share only the weights
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


def generation_case(held: int, batch: int, sampled: bool) -> str:
    return f"{held} held, batch {batch}, {'sampled' if sampled else 'greedy'}"
