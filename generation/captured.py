"""Capture a decoding step as a CUDA graph: choose and read a token of each row with a single launch."""

from __future__ import annotations

import torch

from common.graphs import Capture
from common.machine import exact_device
from generation.sampling import Penalties, Sampling, choose
from model import KVCache, TransformerLanguageModel


class StaticCache(KVCache):
    """A cache with fixed shapes and addresses, which takes one token per row at a time. Attention reads the whole
    capacity, and a mask hides entries that are not written yet."""

    def __init__(self, model: TransformerLanguageModel, rows: int, capacity: int):
        super().__init__(model.config, rows, model.device, model.token_embedding.weight.dtype, capacity)
        self.rows, self.slots = (torch.arange(count, device=model.device) for count in (rows, capacity))

    def place(self, T: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the positions of each row's next token, (B, 1), and the mask to add to attention's scores, (B, 1, 1,
        S)."""
        assert T == 1
        hidden = self.slots > self.ends[:, None]  # (B, S)
        # Every layer would convert a boolean mask to this.
        zeros = torch.zeros(hidden.shape, dtype=self.entries.dtype, device=hidden.device)
        mask = zeros.masked_fill(hidden, -torch.inf)
        return self.ends[:, None], mask[:, None, None]

    def write(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """Store keys and values, (B, 1, 2, K, D), and return all, (2, B, K, S, D)."""
        entries = self.entries[layer]
        entries[:, self.rows, :, self.ends] = kv.squeeze(1).to(entries.dtype)
        return entries.to(kv.dtype)

    def advance(self, T: int) -> None:
        self.lengths = [length + T for length in self.lengths]
        self.ends += T

    def truncate(self, lengths: list[int]) -> None:
        self.lengths = list(lengths)
        self.ends.copy_(torch.tensor(lengths))


class CapturedDecoder:
    """A captured step that chooses the next token of each row and reads it. Each replay overwrites `tokens`, (B,), and
    the `logits` they were chosen from, (B, V)."""

    def __init__(self, model: TransformerLanguageModel, rows: int, capacity: int, sampling: Sampling, graphs: Capture):
        device, size = exact_device(model.device), model.config.vocab_size
        self.key: object = None  # texts with the same one can use this decoder
        self.model, self.sampling, self.cache = model, sampling, StaticCache(model, rows, capacity)
        self.penalties = Penalties(sampling, [[]] * rows, torch.zeros(size, device=device))
        self.uniforms = torch.zeros(rows, sampling.max_new_tokens, dtype=torch.float64, device=device)
        self.following, self.logits = torch.zeros(2, rows, size, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.tokens = torch.zeros(rows, dtype=torch.long, device=device)
        graphs.warm_up(self.step)
        self.replay_step, _ = graphs.capture(self.step)

    def fill(self, cache: KVCache, following: torch.Tensor, penalties: Penalties, uniforms: torch.Tensor) -> None:
        """Begin texts. following: logits of each row's next token, (B, V); uniforms: random numbers, (B,
        max_new_tokens)."""
        held = max(cache.lengths)
        self.cache.entries[..., :held, :] = cache.entries[..., :held, :]
        self.cache.truncate(cache.lengths)
        self.penalties.held.copy_(penalties.held)
        self.penalties.bias.copy_(penalties.bias)
        self.following.copy_(following)
        self.uniforms.copy_(uniforms)
        self.at.zero_()

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
