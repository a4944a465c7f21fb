"""A model as one HTML file that computes and talks in a browser, offline: `tools/export_page.py`.

page.html is the frame, page.css and page.js what the visitor sees. A worker writes (page_writer.js), with the model
(page_model.js) and page_tokenizer.js. The demo's own files draw the texts and their tokens
(serving/demo_*).
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
from common.checkpoint import open_checkpoint, stored_weights
from common.errors import ConfigError
from common.files import atomic_write
from common.tensors import Uninitialized, meta_model
from exchange.folders import load_in_fp32
from exchange.hf_card import example_prompt, known_state
from exchange.page_weights import pack, packed_size
from model import KVCache, TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from tokenizer_base import replace_surrogates
from tokenizer_bpe import find_tiktoken_obstacle

HERE = Path(__file__).resolve().parent
DEMO = HERE.parent / "serving"
LARGEST_PAGE = 200_000_000  # bytes
LARGEST_MEMORY = 2_000_000_000  # bytes; browsers allow a page 4 GB at most, and phones less
TEXTS, LONGEST_TEXT = 8, 64  # of the proof


class Proof(NamedTuple):
    """What rounding changes, over texts that the model itself wrote."""

    agreement: float  # share of the places at which the likeliest token stays the same
    cost: float  # bits a token by which these texts become less likely
    places: int

    def __str__(self) -> str:
        return (
            f"the likeliest token stays the same at {self.agreement:.1%} of {self.places} places of its own text, and "
            f"that text costs {self.cost:+.4f} bits a token"
        )


def export_page(path: str | Path, out: Path, kind: str) -> tuple[int, Proof]:
    """Write the model of a checkpoint or run folder as the page `out`, with weights of `kind` ("int8" or "f16").
    Returns the size in bytes and how far rounding moves the model. Adapters are merged.

    Raises ConfigError, before anything is written, if `out` exists, the page would be too large, or a browser could
    not run the model; CheckpointError or DataError for a checkpoint that cannot be read.
    """
    if out.exists():
        raise ConfigError(f"{out} is already there. Name a file that is not.")
    checkpoint = open_checkpoint(path)
    template = checkpoint.chat_template()
    config = checkpoint.trusted_config()
    require_page(config, load_tokenizer(checkpoint.tokenizer_path()), template, kind)
    model, tokenizer = load_in_fp32(checkpoint)
    described = describe(model, tokenizer, template, kind, out.stem)
    saved = known_state(checkpoint)
    described |= {
        "trained_on": saved.data.get("train_tokens") if saved else None,
        "example": example_prompt(checkpoint, tokenizer),
    }
    packed = {name: pack(name, weights, kind) for name, weights in stored_weights(model).items()}
    page = fill_in(described, b"".join(each.data for each in packed.values()))
    with Uninitialized():
        rounded = TransformerLanguageModel(config).eval()
    rounded.load_weights({name: each.weights for name, each in packed.items()})
    proof = prove(model, rounded, tokenizer)
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(out) as file:
        file.write(page)
    return len(page), proof


def require_page(config: ModelConfig, tokenizer: Tokenizer, template: Template | None, kind: str) -> None:
    """Raises ConfigError for a model or a tokenizer that the page cannot run, and for a page that is too large."""
    if not isinstance(tokenizer, CharacterTokenizer):
        problem = find_tiktoken_obstacle(json.loads(tokenizer.to_json())) or tokenizer.encoder_note
        if not problem and (tokenizer.splitting not in ("gpt-2", "qwen35") or tokenizer.found_in_text):
            problem = f"it reads text in another way ({tokenizer.splitting})"
        if not problem and tokenizer.bos_id is not None:
            problem = f"it puts {tokenizer.decode([tokenizer.bos_id])} before each text"
        if problem:
            raise ConfigError(f"The page has only the kinds of BPE that are learned here. In this one, {problem}.")
    if isinstance(template, ChatML):
        raise ConfigError("The page does not know ChatML, this model's chat template; tools/export_hf.py exports it.")
    if template:
        require_end_of_text_id(tokenizer)
    weights = stored_weights(meta_model(config))
    size = sum(packed_size(tensor.shape, kind) for tensor in weights.values()) * 4 // 3
    if size > LARGEST_PAGE:
        smaller = "; --type int8 makes about half of it" if kind == "f16" else ""
        raise ConfigError(
            f"The page would have {size / 1e6:,.0f} MB; more than {LARGEST_PAGE / 1e6:,.0f} MB takes too long to open"
            f"{smaller}. Export a smaller model, or use tools/export_hf.py."
        )
    cache = 8 * config.num_layers * config.num_kv_heads * config.max_seq_len * config.head_dim
    memory = sum(tensor.numel() for tensor in weights.values()) * (4 if kind == "f16" else 1) + cache
    if memory > LARGEST_MEMORY:
        raise ConfigError(
            f"In a browser the model would take {memory / 1e9:.1f} GB of memory, {cache / 1e9:.1f} GB of it for its "
            f"context of {config.max_seq_len:,} tokens; {LARGEST_MEMORY / 1e9:g} GB at most are allowed."
        )


def describe(
    model: TransformerLanguageModel, tokenizer: Tokenizer, template: Template | None, kind: str, name: str
) -> dict[str, Any]:
    """What page_model.js needs beside the weights. A vector has 0 rows."""
    shapes = {name: list(weights.shape) for name, weights in stored_weights(model).items()}
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
    """All characters; or all tokens in GPT-2's letters for bytes, of which none is a space, "" for a special token, and
    how text is cut into words."""
    if isinstance(tokenizer, CharacterTokenizer):
        return {"characters": "".join(map(chr, tokenizer.codes))}
    tokens = [""] * tokenizer.vocab_size
    for token, i in json.loads(tokenizer.to_json())["model"]["vocab"].items():
        if token not in tokenizer.special_ids:
            tokens[i] = token
    return {
        "tokens": " ".join(tokens),
        "splitting": tokenizer.splitting,
        "nfc": tokenizer.normalizer is not None,  # `obstacle_to_tiktoken` refuses any other
    }


def fill_in(described: dict[str, Any], weights: bytes) -> bytes:
    """The page. Its code is allowed by hash: whatever text is in it, no other code runs."""

    def read(*paths: Path) -> str:
        return "\n".join(path.read_text(encoding="utf-8") for path in paths)

    show_tokens = f"function showTokens(element, props, watch) {{\n{read(DEMO / 'demo_tokens.js')}\n}}\n"
    script, style = show_tokens + read(HERE / "page.js"), read(DEMO / "demo_page.css", HERE / "page.css")
    parts = {
        "script": script,
        "script_hash": sha256(script),
        "style": style,
        "style_hash": sha256(style),
        "tokens": read(DEMO / "demo_tokens.html"),
        "worker": read(*(HERE / f"page_{name}.js" for name in ("tokenizer", "model", "writer"))),
        # In HTML, only a < can end the content of a script element.
        "model": json.dumps(described, ensure_ascii=False).replace("<", "\\u003c"),
        "weights": base64.b64encode(weights + bytes(-len(weights) % 3)).decode(),
    }
    # In one pass: a name may hold the name of another part.
    template = read(HERE / "page.html")
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template).encode()


def sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@torch.inference_mode()
def prove(model: TransformerLanguageModel, rounded: TransformerLanguageModel, tokenizer: Tokenizer) -> Proof:
    """Compare the rounded model with the model on texts that the model writes: it may know no other text."""
    config = model.config
    length = min(LONGEST_TEXT, config.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(config, TEXTS, model.device, torch.float32, length)
    rows = [torch.full((TEXTS,), tokenizer.end_of_text_id or 0)]
    for _ in range(length):
        shares = model.next_logits(cache, rows[-1]).softmax(-1)  # (TEXTS, V)
        rows.append(shares.multinomial(1, generator=generator).squeeze(1))
    texts = torch.stack(rows, dim=1)  # (TEXTS, length + 1)
    before, after = (each(texts[:, :-1]) for each in (model, rounded))  # (TEXTS, length, V)
    targets = texts[:, 1:].flatten()
    losses = [torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets).item() for logits in (before, after)]
    agreement = (before.argmax(-1) == after.argmax(-1)).float().mean().item()
    return Proof(agreement, (losses[1] - losses[0]) / math.log(2), targets.numel())
