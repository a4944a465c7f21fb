"""Capture a decoding step as a CUDA graph: choose and read a token of each row with a single launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from common.graphs import Capture
from generation.sampling import Penalties, Sampling, choose
from model import KVCache, TransformerLanguageModel

CAPACITY_MULTIPLE = 64  # the attention kernels work on blocks


class StaticCache(KVCache):
    """A cache with fixed shapes and addresses, which takes one token per row at a time. Attention reads the whole
    capacity, and a mask hides entries that are not written yet."""

    def __init__(self, cache: KVCache):
        """Copy the texts of a cache."""
        pad = -cache.keys.size(3) % CAPACITY_MULTIPLE
        self.keys, self.values = (torch.nn.functional.pad(part, (0, 0, 0, pad)) for part in (cache.keys, cache.values))
        self.lengths = list(cache.lengths)
        self.ends = torch.tensor(self.lengths, device=self.keys.device)  # (B,)
        self.rows = torch.arange(len(self.lengths), device=self.keys.device)
        self.slots = torch.arange(self.keys.size(3), device=self.keys.device)

    def place(self, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of each row's next token, (B, 1), and the mask to add to attention's scores, (B, 1, 1,
        S)."""
        assert T == 1
        hidden = self.slots > self.ends[:, None]  # (B, S)
        # Every layer would convert a boolean mask to this.
        mask = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device).masked_fill(hidden, -torch.inf)
        return self.ends[:, None], mask[:, None, None]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v, each (B, K, 1, D), and return all keys and values, (B, K, S, D)."""
        keys, values = self.keys[layer], self.values[layer]
        keys[self.rows, :, self.ends] = k.squeeze(2).to(keys.dtype)
        values[self.rows, :, self.ends] = v.squeeze(2).to(values.dtype)
        return keys.to(k.dtype), values.to(v.dtype)

    def advance(self, T: int) -> None:
        self.lengths = [length + T for length in self.lengths]
        self.ends += T

    def truncate(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        self.ends.copy_(torch.tensor(lengths))


class CapturedDecoder:
    """A captured step that chooses the next token of each row and reads it. Each replay overwrites `tokens`, (B,), and
    the `logits` they were chosen from, (B, V)."""

    def __init__(
        self,
        model: TransformerLanguageModel,
        cache: KVCache,
        following: torch.Tensor,
        penalties: Penalties,
        uniforms: torch.Tensor,
        sampling: Sampling,
        graphs: Capture,
    ):
        """following: logits of each row's next token, (B, V); uniforms: random numbers, (B, max_new_tokens)."""
        self.model, self.cache, self.penalties, self.sampling = model, StaticCache(cache), penalties, sampling
        self.uniforms, self.following = uniforms, following.clone()
        self.at = torch.zeros(1, dtype=torch.long, device=following.device)
        self.tokens = torch.zeros(len(following), dtype=torch.long, device=following.device)
        self.logits = following.float()
        with self.unchanged():
            graphs.warm_up(self.step)
        with self.unchanged():
            self.replay_step, _ = graphs.capture(self.step)

    @contextlib.contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore what a step inside changes."""
        cache, penalties = self.cache, self.penalties
        changed = (self.following, cache.ends, self.at, penalties.held)
        before, lengths = [tensor.clone() for tensor in changed], cache.lengths
        try:
            yield
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            cache.lengths = lengths

    @property
    def has_room(self) -> bool:
        return max(self.cache.lengths) < self.model.config.max_seq_len

    def step(self) -> None:
        self.choose()
        self.read()

    def choose(self) -> None:
        """Choose the next token of each row."""
        self.logits.copy_(self.following)
        uniforms = self.uniforms.index_select(1, self.at).squeeze(1)
        self.tokens.copy_(choose(self.penalties.apply(self.logits), uniforms, self.sampling))
        self.penalties.count(self.tokens)
        self.at += 1

    def read(self) -> None:
        """Read the chosen tokens. Requires `has_room`."""
        self.following.copy_(self.model.next_logits(self.cache, self.tokens))

    def replay(self) -> None:
        """Replay `step`."""
        self.replay_step()
        self.cache.lengths = [length + 1 for length in self.cache.lengths]
