"""A decoder-only Transformer language model (Radford et al. 2019, "GPT-2") for every size and variant.

Together with model_config.py, this file is the whole model: the layers and the key/value cache.

Shapes in comments: B sequences in a batch, T tokens in a sequence, C = embed_dim, H = num_heads, K = num_kv_heads,
D = head_dim, F = ff_dim, V = vocab_size, S = tokens held in a key/value cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from model_config import ModelConfig

VOCAB_MULTIPLE = 128
# A CPU's flash attention takes 3 times as long to go backward over 64 tokens in bf16 as in fp32, and as long over 256
# (docs/benchmarks/what_was_tried.md).
CPU_FP32_ATTENTION = 128  # tokens
IGNORE_INDEX = -100  # targets with this value do not count in the loss


class KVCache:
    """Keys and values of the tokens read so far, so that a new token costs one position, not T.

    Rows may hold texts of different lengths; `lengths[row]` is the position of the row's next token. Entries beyond it
    are left over from padding: attention does not see them, and new tokens overwrite them. `capacity`: tokens per row,
    max_seq_len by default.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        device: torch.device,
        dtype: torch.dtype,
        capacity: int | None = None,
    ):
        shape = (2, batch_size, config.num_kv_heads, capacity or config.max_seq_len, config.head_dim)
        # Keys and values in one tensor, so that one operation stores both: (layers, 2, B, K, capacity, D).
        self.entries = torch.zeros(config.num_layers, *shape, device=device, dtype=dtype)
        self.lengths = [0] * batch_size
        self.ends = torch.zeros(batch_size, dtype=torch.long, device=device)  # `lengths` on the device
        self.positions = self.ends  # positions of the tokens being read

    @property
    def uniform(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    def place(self, T: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the positions of the next T tokens of each row, where `write` will store them, and their attention
        mask.

        Positions: (T,) if all rows are equally long, else (B, T). Mask: broadcastable to (B, H, T, S), or None if the
        causal order is enough.
        """
        device, held = self.entries.device, max(self.lengths)
        if self.uniform:
            positions = torch.arange(held, held + T, device=device)
        else:
            positions = self.ends[:, None] + torch.arange(T, device=device)
        self.positions = positions
        if not held or (T == 1 and self.uniform):  # is_causal is enough, or there is nothing to hide
            return positions, None
        seen = torch.arange(held + T, device=device) <= positions[..., None]  # (T, S) or (B, T, S)
        return positions, seen if seen.dim() == 2 else seen[:, None]  # broadcast over heads

    def write(self, layer: int, kv: torch.Tensor) -> torch.Tensor:
        """Store keys and values, (B, T, 2, K, D), and return all up to the longest row, (2, B, K, S, D)."""
        entries, positions = self.entries[layer], self.positions
        end = max(self.lengths) + kv.size(1)
        if positions.dim() == 1:
            entries[..., self.lengths[0] : end, :] = kv.permute(2, 0, 3, 1, 4)
        else:
            rows = torch.arange(kv.size(0), device=kv.device)[:, None]
            entries[:, rows, :, positions] = kv.to(entries.dtype)  # the indexed dimensions, (B, T), come first
        return entries[..., :end, :].to(kv.dtype)

    def advance(self, T: int) -> None:
        self.lengths = [length + T for length in self.lengths]
        self.ends = self.ends + T

    def truncate(self, lengths: list[int]) -> None:
        """Set each row's length, which drops the entries beyond it, such as padding of a batch of prompts."""
        self.lengths = list(lengths)
        self.ends = torch.tensor(lengths, device=self.entries.device)


def place_texts(starts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions and mask for rows of several texts. starts (B, T): the column in which each token's text starts.

    Positions, (B, T), are counted from there. The mask, (B, 1, T, T), lets each token see the tokens before it in its
    own text.
    """
    columns = torch.arange(starts.size(1), device=starts.device)
    seen = (columns <= columns[:, None]) & (starts[:, None, :] == starts[:, :, None])  # (B, T, T)
    return columns - starts, seen[:, None]


def rotations(
    positions: torch.Tensor, head_dim: int, base: float = 10_000.0, scaling: tuple[float, ...] = ()
) -> torch.Tensor:
    """Return the cosines and sines for `rotate`, concatenated: positions (T,) -> (T, D)."""
    half = head_dim // 2
    frequencies = base ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    if scaling:
        frequencies = scale_frequencies(frequencies, *scaling)
    angles = positions[:, None].float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (Su et al. 2021, eq. 34) in the half-split layout: pairs are (x[i], x[i + D/2]).

    x: (B, T, heads, D); cos, sin: (T, 1, D/2) or (B, T, 1, D/2), the same for all heads.
    """
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x1 * sin + x2 * cos), dim=-1)


def scale_frequencies(frequencies: torch.Tensor, factor: float, low: float, high: float, length: float) -> torch.Tensor:
    """Return Llama 3's frequencies for contexts longer than the `length` of pretraining. Frequencies that turn fewer
    than `low` times within it are divided by `factor`, those that turn more than `high` times stay; in between,
    interpolate linearly."""
    turns = length * frequencies / (2 * math.pi)
    stays = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (stays + (1 - stays) / factor)


def rms_norm(x: torch.Tensor, eps: float = 1e-6, gain: torch.Tensor | None = None) -> torch.Tensor:
    """Divide x by the root mean square of its last dimension (Zhang & Sennrich 2019), and multiply by the gain.
    Computes in fp32, because autocast treats rms_norm differently in different versions of PyTorch."""
    kind = x.device.type
    if kind != "meta" and not torch.is_autocast_enabled(kind):  # F.rms_norm computes in fp32 itself
        return F.rms_norm(x, x.shape[-1:], gain, eps)
    return F.rms_norm(x.float(), x.shape[-1:], None if gain is None else gain.float(), eps).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, config: ModelConfig):
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(width)) if config.norm_gain else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.eps, self.weight)


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "layernorm":
        return nn.LayerNorm(config.embed_dim, config.norm_eps, bias=config.bias)
    return RMSNorm(config.embed_dim, config)


def residual_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype of the residual stream: bf16 if autocast computes in bf16. Every layer reads and writes the
    stream, so fewer bytes save time on a GPU; for the gain and the effect on the loss see
    docs/benchmarks/gpu_forecast.md. The range of fp16 is too narrow for a sum over all layers."""
    kind = x.device.type
    is_bf16 = kind != "meta" and torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.bfloat16
    return torch.bfloat16 if is_bf16 else x.dtype


class Linear(nn.Linear):
    """nn.Linear with a matrix-vector product for a single bf16 vector on a CPU.

    Generation reads every weight for each token, so memory limits its speed. The matrix-matrix product in bf16
    rearranges the weight for the CPU's matrix unit at each call. Measured for all weights of GPT-2 small: 15 ms per
    token, 10 ms with the matrix-vector product, 16 to 17 ms in fp32.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (
            self.weight.dtype == torch.float16
        ):  # and the residual stream in fp32: see `convert` in generation/loading.py
            x = x.half()
        if x.dtype != torch.bfloat16 or x.numel() != self.in_features or x.device.type != "cpu":
            return super().forward(x)
        vector = x.reshape(-1)
        y = self.weight.mv(vector) if self.bias is None else self.bias.addmv(self.weight, vector)
        return y.view(*x.shape[:-1], -1)


class Head(Linear):
    """The last layer, which computes the logits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Tensor cores are slow at odd sizes, so pad the weight. For the few rows of a generated token, copying the
        # weight would cost more.
        rows, padding = x.shape[:-1].numel(), -self.out_features % VOCAB_MULTIPLE
        if not (x.is_cuda and padding and rows >= VOCAB_MULTIPLE):
            return super().forward(x)
        x = x.half() if self.weight.dtype == torch.float16 else x
        return F.linear(x, F.pad(self.weight, (0, 0, 0, padding)))[..., : self.out_features]


def lacks_flash(device: torch.device) -> bool:
    """Return whether a GPU has no flash kernel for attention, as those before Ampere."""
    is_gpu = device.type == "cuda" and torch.cuda.is_available()
    return is_gpu and torch.cuda.get_device_properties(device).major < 8


def attend_in_fp32(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    """`F.scaled_dot_product_attention`, computed in fp32 even inside autocast."""
    with torch.autocast("cpu", enabled=False):
        return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), **options).to(q.dtype)


def attend_one_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Compute attention of one token: q (B, H, 1, D), k and v (B, K, S, D), mask (B, 1, 1, S), added to the scores ->
    (B, H, 1, D).

    PyTorch's kernel with a mask goes through S block by block: 50 us at S = 1024 on an H200, where this takes 14.
    """
    B, K, _, D = k.shape
    q = q.reshape(B, K, -1, D)  # heads that share keys become rows of one product: (B, K, H / K, D)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):  # scores in fp32, as in the fused kernels
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT, out_dtype=torch.float32).view(B, K, -1, k.size(2))
    else:
        scores = q @ k.mT  # (B, K, H / K, S)
    scores = torch.add(mask, scores, alpha=D**-0.5)
    return (scores.softmax(dim=-1).to(v.dtype) @ v).reshape(B, -1, 1, D)


class MultiHeadAttention(nn.Module):
    """Causal self-attention (Vaswani et al. 2017, eq. 1) with one fused projection for queries, keys and values. If
    there are fewer heads of keys and values, each serves a group of queries (Ainslie et al. 2023, "GQA")."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.qkv = Linear(config.embed_dim, sum(config.qkv_rows), bias=config.qkv_bias)
        self.out_proj = Linear(config.num_heads * config.head_dim, config.embed_dim, bias=config.bias)
        if config.qk_norm:  # Henry et al. 2020, with RMSNorm in place of the L2 norm
            self.q_norm, self.k_norm = RMSNorm(config.head_dim, config), RMSNorm(config.head_dim, config)

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        config = self.config
        B, T, _ = x.shape
        H, K = config.num_heads, config.num_kv_heads
        qkv = self.qkv(x).view(B, T, H + 2 * K, config.head_dim)
        qk, v = qkv.split((H + K, K), dim=2)
        if config.qk_norm and config.norm_gain:
            q, k = qk.split((H, K), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        elif config.qk_norm:
            qk = rms_norm(qk, config.norm_eps)
        if rotation is not None:
            cos, sin = rotation.to(qk.dtype).unsqueeze(-2).chunk(2, dim=-1)
            qk = rotate(qk, cos, sin)
        q, k = qk.split((H, K), dim=2)  # (B, T, H, D), (B, T, K, D)
        # Transpose last, as views: attention's output has the memory layout of q, and out_proj reads (B, T, H, D).
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))  # (B, H, T, D), twice (B, K, T, D)
        if x.device.type == "mps":  # attention is wrong on views there (pytorch issues 163597, 181133)
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if self.training and config.dropout:
            # Drop whole values: DropAttention's columns (Zehui et al. 2019, https://arxiv.org/abs/1907.11065). Dropping
            # single weights of the softmax is no better, and rules out the flash kernel on a CPU.
            v = v * F.dropout(v.new_ones(*v.shape[:-1], 1), config.dropout)
        if cache is not None:
            kv = qkv[:, :, H:] if rotation is None and not config.qk_norm else torch.cat((k, v), 1).transpose(1, 2)
            k, v = cache.write(layer, kv.reshape(B, T, 2, K, -1))
        if T == 1 and mask is not None and mask.is_floating_point():
            return self.out_proj(attend_one_token(q, k, v, mask).reshape(B, T, -1))
        groups = config.num_heads // config.num_kv_heads
        if groups > 1 and T == 1:  # heads of a group become rows of one query: (B, H, 1, D) -> (B, K, H / K, D)
            q = q.reshape(B, config.num_kv_heads, groups, config.head_dim)
        elif groups > 1 and (mask is not None or lacks_flash(x.device)):
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)  # (B, H, T, D)
        # is_causal instead of a mask lets PyTorch choose the flash kernel. A single new token sees the whole cache, so
        # it needs neither. With several new tokens after a cache is_causal would be wrong: it aligns to the cache's
        # start.
        is_short = self.training and q.device.type == "cpu" and q.dtype == torch.bfloat16 and T <= CPU_FP32_ATTENTION
        y = (attend_in_fp32 if is_short else F.scaled_dot_product_attention)(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=mask is None and T > 1,
            enable_gqa=q.size(1) != k.size(1),  # supported by the flash kernel only; others fall back to the slow one
        )
        y = y.reshape(B, config.num_heads, T, config.head_dim)
        return self.out_proj(y.transpose(1, 2).reshape(B, T, -1))


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Gate the second half by the first, (..., 2F) -> (..., F) (Shazeer 2020, "GLU variants improve Transformer")."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x),  # Hendrycks & Gimpel 2016
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # the approximation in section 2, used by GPT-2
    "swiglu": swiglu,
}


class FeedForward(nn.Module):
    """Position-wise feed-forward network."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.activation = config.activation
        self.fc1 = Linear(config.embed_dim, config.ff_dim * (2 if config.is_gated else 1), bias=config.bias)
        self.fc2 = Linear(config.ff_dim, config.embed_dim, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(ACTIVATIONS[self.activation](self.fc1(x)))


class TransformerBlock(nn.Module):
    """Pre-norm block: x + attention(norm1(x)), then x + feed_forward(norm2(x))."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.attention = MultiHeadAttention(config)
        self.feed_forward = FeedForward(config)
        self.norm1 = build_norm(config)
        self.norm2 = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: torch.Tensor,
        rotation: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x), rotation, mask, cache, layer))
        return x + self.dropout(self.feed_forward(self.norm2(x)))


class TransformerLanguageModel(nn.Module):
    """The language model: token ids in, next-token logits or the mean loss out."""

    rotary_table: torch.Tensor

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        if config.position == "learned":
            self.positional_embedding = nn.Embedding(config.max_seq_len, config.embed_dim)
        else:  # a table, because the compiler would recompute rotations for each element of each layer's q and k
            table = torch.empty(config.max_seq_len, config.head_dim)
            if table.device.type != "meta":  # computing there imports the compiler, a second
                positions = torch.arange(config.max_seq_len)
                table = rotations(positions, config.head_dim, config.rope_base, config.rope_scaling)
            self.register_buffer("rotary_table", table, persistent=False)
        if config.embed_norm:
            self.embed_norm = build_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_layers))
        self.ln_f = build_norm(config)
        self.head = Head(config.embed_dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.head.weight = self.token_embedding.weight
        self.activation_checkpointing = False  # set by the trainer; not part of the config
        self.kept_decoder: Any = None  # a CapturedDecoder of generation/captured.py
        if self.device.type != "meta":  # initialising takes time even there
            self.initialize()

    @torch.no_grad()
    def initialize(self) -> None:
        """Initialise as GPT-2 (Radford et al. 2019, section 2.3): normal(0, 0.02), zero biases. Projections that write
        to the residual stream are scaled by 1 / sqrt(2 * num_layers), because its variance grows with each.

        With `zero_init` these projections and the head start at zero, so every block starts as the identity, and all
        tokens are equally likely.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            for projection in (block.attention.out_proj, block.feed_forward.fc2):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * self.config.num_layers))
                if self.config.zero_init:
                    nn.init.zeros_(projection.weight)
        if self.config.zero_init:
            nn.init.zeros_(self.head.weight)

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    def num_parameters(self, trained_only: bool = False) -> int:
        """Return the number of parameters, with `trained_only` of those that are not frozen. A tied head counts
        once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not trained_only)

    def flops_per_token(self) -> int:
        """Return the FLOPs of the forward and backward pass per token (Chowdhery et al. 2022, "PaLM", appendix B): 6
        per parameter (4 if it is frozen and gets no gradient), and 12 * L * T * H * D for attention. Embedding lookups
        cost nothing."""
        c = self.config
        looked_up = [] if c.tie_embeddings else [*self.token_embedding.parameters()]
        if c.position == "learned":
            looked_up += self.positional_embedding.parameters()
        multiplied = [p for p in self.parameters() if not any(p is embedding for embedding in looked_up)]
        products = sum((6 if p.requires_grad else 4) * p.numel() for p in multiplied)
        return products + 12 * c.num_layers * c.max_seq_len * c.num_heads * c.head_dim

    def forward(
        self,
        tokens: torch.Tensor,
        targets: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return logits, tokens (B, T) -> (B, T, V), or with `targets` (B, T) the mean cross-entropy in nats, ().

        `starts`, `cache` and errors: see `residual`.
        """
        if targets is None:
            return self.logits(self.hidden(tokens, cache, starts))
        return self.loss(self.residual(tokens, cache, starts), targets)

    def hidden(
        self, tokens: torch.Tensor, cache: KVCache | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the input of the head, tokens (B, T) -> (B, T, C). Arguments and errors: see `residual`."""
        hidden: torch.Tensor = self.ln_f(self.residual(tokens, cache, starts))
        return hidden

    def residual(
        self, tokens: torch.Tensor, cache: KVCache | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the residual stream after the last block, tokens (B, T) -> (B, T, C).

        With a `cache`, `tokens` continue the texts in the cache and are added to it. `starts` (B, T) is for rows of
        several texts: the column in which each token's text starts, so that each text is computed as if it were alone.
        Use one or the other. Raises ValueError if the tokens do not fit in max_seq_len.
        """
        T = tokens.size(1)
        held = max(cache.lengths) if cache is not None else 0
        if held + T > self.config.max_seq_len:
            raise ValueError(f"{held + T} tokens do not fit in max_seq_len {self.config.max_seq_len}")

        if cache is None:
            x, rotation, mask = self.embed_texts(tokens, starts)
            for block in self.blocks:
                x = self.apply_block(block, x, rotation, mask)
            return x
        positions, mask = cache.place(T)
        x, rotation = self.embed(tokens, positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, mask, cache, layer)
        cache.advance(T)
        return x

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the input of the first block, tokens (B, T) -> (B, T, C), and the rotation for all blocks: (T, D) or
        (B, T, D), as `positions` is (T,) or (B, T)."""
        x = self.token_embedding(tokens)  # (B, T, C)
        x = x.float() if x.dtype == torch.float16 else x
        rotation = None
        if self.config.position == "learned":
            x = x + self.positional_embedding(positions)
        else:
            rotation = F.embedding(positions, self.rotary_table)
        if self.config.embed_norm:
            x = self.embed_norm(x)
        return self.dropout(x.to(residual_dtype(x))), rotation

    def embed_texts(
        self, tokens: torch.Tensor, starts: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Embed whole texts; `starts`: see `residual`. Return the arguments of a block: x, rotation, mask."""
        if starts is None:
            positions, mask = torch.arange(tokens.size(1), device=tokens.device), None
        else:
            positions, mask = place_texts(starts)
        return *self.embed(tokens, positions), mask

    def apply_block(
        self,
        block: Callable[..., torch.Tensor],
        x: torch.Tensor,
        rotation: torch.Tensor | None,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Apply a block without a cache. With activation checkpointing (Chen et al. 2016), keep only its input."""
        if self.activation_checkpointing and torch.is_grad_enabled():
            draws = self.config.dropout > 0
            x = checkpoint(block, x, rotation, mask, use_reentrant=False, preserve_rng_state=draws)
            return x
        return block(x, rotation, mask)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits, hidden (..., C) -> (..., V)."""
        logits: torch.Tensor = self.head(hidden)
        return logits

    def loss(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy, (), of the residual stream (B, T, C) for targets (B, T). Targets equal to
        IGNORE_INDEX do not count.

        Norm, head and loss are in one function, so that the compiler can fuse them and keep no fp32 logits.
        """
        logits = self.logits(self.ln_f(x)).flatten(0, 1)
        return F.cross_entropy(logits.float(), targets.flatten(), ignore_index=IGNORE_INDEX)

    def next_logits(self, cache: KVCache, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each row's next token, (B, V), after reading `tokens`, (B,), one per row of the
        cache."""
        return self(tokens[:, None], cache=cache)[:, -1]

    def load_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Load a state dict with the names of this class or of the blog's checkpoints. Raises ValueError if the weights
        do not fit (see `fit_weights`) or are not finite."""
        state = self.fit_weights(state)
        if self.config.tie_embeddings and not torch.equal(state["head.weight"], state["token_embedding.weight"]):
            raise ValueError("head.weight and token_embedding.weight differ, but tie_embeddings is set")
        # A sum is finite only if all weights are, and takes no memory.
        broken = [name for name, tensor in state.items() if not tensor.float().sum().isfinite()]
        if broken:
            raise ValueError(f"the weights are not finite: {list_first(broken)}")
        self.load_state_dict(state)

    def fit_weights(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the state dict with the names of this class. It may be on the meta device.

        Drops an `_orig_mod.` prefix (left by torch.compile) and a stored `causal_mask`. Raises ValueError listing
        weights that are missing, unknown, of another shape, or integers.
        """
        state = {name.removeprefix("_orig_mod."): tensor for name, tensor in state.items()}
        state = {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] != "causal_mask"}
        expected = self.state_dict()
        for name, twin in (("head.weight", "token_embedding.weight"), ("token_embedding.weight", "head.weight")):
            if name not in state and twin in state:  # the weights of a model that ties them
                state[name] = state[twin]
        require_shapes(
            state, {name: tensor.shape for name, tensor in expected.items()}, "the weights do not fit the model"
        )
        return state


def require_shapes(tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, Sequence[int]], what: str) -> None:
    """Raise ValueError with `what` and a list of tensors that are missing, unknown, of another shape, or integers."""
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in shapes]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {tuple(shape)}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != tuple(shape)
    ]
    problems += [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if problems:
        raise ValueError(f"{what}: {list_first(problems)}")


def list_first(problems: list[str]) -> str:
    more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
    return "; ".join(problems[:5]) + more
