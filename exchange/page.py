"""Export a model as one HTML file that generates text in a browser, offline: `tools/export_page.py`.

page.html, page.css and page.js are the page. A worker generates (page_writer.js, page_model.js, page_tokenizer.js).
Texts and tokens are drawn by the demo's own files (serving/demo_*).
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch

from common.chat import ChatML, Template, require_end_of_text_id
from common.checkpoint import open_checkpoint, select_stored_weights
from common.errors import ConfigError
from common.files import atomic_write
from common.tensors import Uninitialized, meta_model
from exchange.folders import load_in_fp32
from exchange.hf_card import example_prompt, try_read_state
from exchange.page_weights import pack, packed_size
from model import KVCache, TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from tokenizer_base import replace_surrogates
from tokenizer_bpe import find_tiktoken_obstacle

PAGE_FOLDER = Path(__file__).resolve().parent
DEMO_FOLDER = PAGE_FOLDER.parent / "serving"
MAX_PAGE_BYTES = 200_000_000
MAX_MEMORY_BYTES = 2_000_000_000  # browsers allow a page at most 4 GB, phones less
PROOF_TEXTS, PROOF_TOKENS = 8, 64  # texts, and tokens per text, on which rounding is measured


class RoundingCost(NamedTuple):
    """How rounding the weights changes the model, measured on texts that it wrote."""

    agreement: float  # share of positions where the most likely token is the same
    extra_bits: float  # increase of the loss, in bits per token
    positions: int

    def __str__(self) -> str:
        return (
            f"the most likely token is the same at {self.agreement:.1%} of {self.positions} positions, and the loss "
            f"changes by {self.extra_bits:+.4f} bits per token"
        )


def export_page(path: str | Path, out: Path, kind: str) -> tuple[int, RoundingCost]:
    """Write the model of a checkpoint or run folder, with adapters merged, as the page `out`.

    `kind`: "int8" or "f16". Returns the size in bytes and the effect of rounding. Raises ConfigError, before anything
    is written, if `out` exists, the page would be too large or a browser could not run the model; CheckpointError or
    DataError if the checkpoint cannot be read.
    """
    if out.exists():
        raise ConfigError(f"{out} already exists. Name a new file.")
    checkpoint = open_checkpoint(path)
    template = checkpoint.chat_template()
    config = checkpoint.trusted_config()
    require_page_export(config, load_tokenizer(checkpoint.tokenizer_path()), template, kind)
    model, tokenizer = load_in_fp32(checkpoint)
    description = describe_model(model, tokenizer, template, kind, out.stem)
    saved = try_read_state(checkpoint)
    description |= {
        "trained_on": saved.data.get("train_tokens") if saved else None,
        "example": example_prompt(checkpoint, tokenizer),
    }
    packed = {name: pack(name, weights, kind) for name, weights in select_stored_weights(model).items()}
    page = render_page(description, b"".join(each.data for each in packed.values()))
    with Uninitialized():
        rounded = TransformerLanguageModel(config).eval()
    rounded.load_weights({name: each.weights for name, each in packed.items()})
    proof = measure_rounding(model, rounded, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as file:
        file.write(page)
    return len(page), proof


def require_page_export(config: ModelConfig, tokenizer: Tokenizer, template: Template | None, kind: str) -> None:
    """Raise ConfigError if the page cannot run the model or its tokenizer, or would be too large."""
    if not isinstance(tokenizer, CharacterTokenizer):
        problem = find_tiktoken_obstacle(json.loads(tokenizer.to_json())) or tokenizer.encoder_note
        if not problem and (tokenizer.splitting not in ("gpt-2", "qwen35") or tokenizer.found_in_text):
            problem = f"its pre-tokenizer is another one ({tokenizer.splitting})"
        if not problem and tokenizer.bos_id is not None:
            problem = f"it adds {tokenizer.decode([tokenizer.bos_id])} before each text"
        if problem:
            raise ConfigError(f"Only tokenizers trained by this project can be exported to a page: {problem}.")
    if isinstance(template, ChatML):
        raise ConfigError("The page does not support ChatML, this model's chat template. Use tools/export_hf.py.")
    if template:
        require_end_of_text_id(tokenizer)
    weights = select_stored_weights(meta_model(config))
    size = sum(packed_size(tensor.shape, kind) for tensor in weights.values()) * 4 // 3
    if size > MAX_PAGE_BYTES:
        smaller = "--type int8 takes about half of that. Or export" if kind == "f16" else "Export"
        raise ConfigError(
            f"The page would have {size / 1e6:,.0f} MB; above {MAX_PAGE_BYTES / 1e6:,.0f} MB it takes too long to "
            f"open. {smaller} a smaller model, or use tools/export_hf.py."
        )
    cache = 8 * config.num_layers * config.num_kv_heads * config.max_seq_len * config.head_dim
    memory = sum(tensor.numel() for tensor in weights.values()) * (4 if kind == "f16" else 1) + cache
    if memory > MAX_MEMORY_BYTES:
        raise ConfigError(
            f"The model would take {memory / 1e9:.1f} GB of memory in a browser ({cache / 1e9:.1f} GB for its context "
            f"of {config.max_seq_len:,} tokens); the limit is {MAX_MEMORY_BYTES / 1e9:g} GB. Use tools/export_hf.py."
        )


def describe_model(
    model: TransformerLanguageModel, tokenizer: Tokenizer, template: Template | None, kind: str, name: str
) -> dict[str, Any]:
    """Return what page_model.js needs in addition to the weights. Vectors are listed with 0 rows."""
    shapes = {name: list(weights.shape) for name, weights in select_stored_weights(model).items()}
    unused = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, model.config.vocab_size)]
    return {
        "name": replace_surrogates(name),
        "type": kind,
        "parameters": model.num_parameters(),
        "config": model.config.to_dict(),
        "tensors": [[name, *([0] * (2 - len(shape))), *shape] for name, shape in shapes.items()],
        "tokenizer": {
            **describe_tokenizer(tokenizer),
            "end": tokenizer.end_of_text_id,
            "ends": sorted(tokenizer.end_ids),
            "unused": unused,
        },
        "chat": template.to_dict() if template else None,
    }


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, str | bool]:
    """Return all characters, or all BPE tokens and the pre-tokenizer.

    Tokens are in GPT-2's letters for bytes, joined by spaces, which those letters do not contain; special tokens are
    "".
    """
    if isinstance(tokenizer, CharacterTokenizer):
        return {"characters": "".join(map(chr, tokenizer.codes))}
    tokens = [""] * tokenizer.vocab_size
    for token, i in json.loads(tokenizer.to_json())["model"]["vocab"].items():
        if token not in tokenizer.special_ids:
            tokens[i] = token
    return {
        "tokens": " ".join(tokens),
        "splitting": tokenizer.splitting,
        "nfc": tokenizer.normalizer is not None,  # `find_tiktoken_obstacle` refuses any other normalizer
    }


def render_page(description: dict[str, Any], weights: bytes) -> bytes:
    """Return the page. Its code is allowed by hash, so no other code runs, whatever text the page contains."""

    def read(*paths: Path) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)

    show_tokens = f"function showTokens(element, props, watch) {{\n{read(DEMO_FOLDER / 'demo_tokens.js')}\n}}\n"
    script = show_tokens + read(PAGE_FOLDER / "page.js")
    style = read(DEMO_FOLDER / "demo_page.css", PAGE_FOLDER / "page.css")
    parts = {
        "script": script,
        "script_hash": csp_hash(script),
        "style": style,
        "style_hash": csp_hash(style),
        "tokens": read(DEMO_FOLDER / "demo_tokens.html"),
        "worker": read(*(PAGE_FOLDER / f"page_{name}.js" for name in ("tokenizer", "model", "writer"))),
        # Only a < can end the content of a script element.
        "model": json.dumps(description, ensure_ascii=False).replace("<", "\\u003c"),
        "weights": base64.b64encode(weights + bytes(-len(weights) % 3)).decode(),
    }
    # One pass, because a part may contain the name of another.
    template = read(PAGE_FOLDER / "page.html")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template).encode()


def csp_hash(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@torch.inference_mode()
def measure_rounding(
    model: TransformerLanguageModel, rounded: TransformerLanguageModel, tokenizer: Tokenizer
) -> RoundingCost:
    """Measure what rounding changes, on texts that the model writes: no other text is sure to suit it."""
    config = model.config
    length = min(PROOF_TOKENS, config.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(config, PROOF_TEXTS, model.device, torch.float32, length)
    rows = [torch.full((PROOF_TEXTS,), tokenizer.end_of_text_id or 0)]
    for _ in range(length):
        shares = model.next_logits(cache, rows[-1]).softmax(-1)  # (PROOF_TEXTS, V)
        rows.append(shares.multinomial(1, generator=generator).squeeze(1))
    texts = torch.stack(rows, dim=1)  # (PROOF_TEXTS, length + 1)
    before, after = (each(texts[:, :-1]) for each in (model, rounded))  # (PROOF_TEXTS, length, V)
    targets = texts[:, 1:].flatten()
    losses = [torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item() for logits in (before, after)]
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean().item()
    return RoundingCost(agreement, (losses[1] - losses[0]) / math.log(2), targets.numel())
