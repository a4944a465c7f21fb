"""LoRA adapters in the form of Hugging Face `peft`, proven on the exported base.

Between their names and ours lie twists, as between those of the models: NanoChat has q, k and v apart, each with an A
of its own, and the rows of q and k in another order. That GPT-2's layers are transposed is told by `fan_in_fan_out`;
its adapters are not. Those of an embedding are transposed. Shapes in comments: C = embed_dim, V = vocab_size, r = rank.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import ADAPTERS, Checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import json_bytes
from common.lora import EMBEDDING, LoRA, find_base
from common.tensors import read_safetensors, safetensors_pieces, write_verified
from exchange.hf_card import adapter_card
from exchange.hf_folder import (
    Difference,
    largest_difference,
    load_in_fp32,
    load_theirs,
    new_folder,
    require_peft,
    require_same_tokens,
)
from exchange.hf_form import GPT2_BLOCK, NANOCHAT_BLOCK, Tensors, hf_kind, swap_halves
from exchange.hf_tokenizer import hf_special_tokens, hf_tokenizer_config, hf_tokenizer_json
from model import ModelConfig, TransformerLanguageModel


def export_adapters(checkpoint: Checkpoint, lora: LoRA, out: Path, base: Path | None) -> Difference:
    """Write the adapters of a checkpoint as the folder `out`, for the base that was exported as the folder `base`.
    Returns the largest difference of the logits.

    Raises ConfigError without `base`, for one that is another model, and if peft is missing or something lies at
    `out`; CheckpointError if peft reads other adapters than it should.
    """
    require_peft()
    own = find_base(lora, checkpoint.path)
    remedy = f"python tools/export_hf.py {own} FOLDER writes it"
    if base is None:
        raise ConfigError(
            f"{checkpoint.path} holds adapters: say with --base FOLDER where their base is exported ({remedy})."
        )
    model, tokenizer = load_in_fp32(checkpoint)
    if not (base / "config.json").is_file():
        raise ConfigError(f"--base {base} is no folder with an exported model; {remedy}.")
    try:
        theirs = load_theirs(base)
    except Exception as problem:  # its config is checked by several libraries, with errors of their own
        raise ConfigError(
            f"--base {base} cannot be opened by transformers ({str(problem).strip():.500}); {remedy}."
        ) from None
    model_of_base = TransformerLanguageModel(model.config).eval()
    Checkpoint(own).load_weights(model_of_base)
    try:
        largest_difference(model_of_base, theirs, tokenizer)
    except (CheckpointError, RuntimeError, IndexError):  # of other weights, another shape, another vocabulary
        raise ConfigError(f"--base {base} is another model than the base of the adapters, {own}; {remedy}.") from None
    theirs.float()
    adapters = read_safetensors(checkpoint.path / ADAPTERS)
    tensors, modules = to_peft(model.config, adapters, lora, theirs.config.vocab_size)
    template = checkpoint.chat_template()
    contents = {
        "adapter_config.json": json_bytes(peft_config(model.config, lora, modules, base)),
        "tokenizer.json": hf_tokenizer_json(tokenizer),
        "tokenizer_config.json": json_bytes(hf_tokenizer_config(tokenizer, model.config.max_seq_len, template)),
        "README.md": adapter_card(checkpoint, lora, model.config, tokenizer, out.name, base.name).encode(),
    }
    if template:
        contents["chat_template.jinja"] = template.jinja(hf_special_tokens(tokenizer)).encode()
    with new_folder(out) as folder:
        pieces = safetensors_pieces(tensors, metadata={"format": "pt"})
        write_verified(folder / "adapter_model.safetensors", pieces)
        for name, content in contents.items():
            write_verified(folder / name, content)
        require_same_tokens(folder, tokenizer, template)
        return largest_difference(model, adapted_by_peft(theirs, folder), tokenizer, "peft")


def peft_config(config: ModelConfig, lora: LoRA, modules: list[str], base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.as_posix(),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": modules,
        "fan_in_fan_out": hf_kind(config) == "gpt2",
        "inference_mode": True,
    }


def to_peft(config: ModelConfig, adapters: Tensors, lora: LoRA, vocab_size: int) -> tuple[Tensors, list[str]]:
    """Our adapters -> the tensors of an adapter_model.safetensors, and the modules that they are for. Nothing is added
    to ids up to `vocab_size` that the exported base has beside ours."""
    is_gpt2 = hf_kind(config) == "gpt2"
    blocks = "transformer.h" if is_gpt2 else "model.layers"
    tensors: Tensors = {}
    modules: list[str] = []
    for module in lora.end_modules:
        holder = EMBEDDING if config.tie_embeddings else module
        a, b = (adapters[f"{holder}.lora_{kind}"].float() for kind in "AB")  # (r, C), (V, r)
        b = torch.cat([b, torch.zeros(vocab_size - len(b), lora.rank)])
        if module == EMBEDDING:
            path = "transformer.wte" if is_gpt2 else "model.embed_tokens"
            prefix = f"base_model.model.{path}.lora_embedding"
            tensors |= {f"{prefix}_A": b.T.contiguous(), f"{prefix}_B": a.T.contiguous()}
        else:
            path = "lm_head"
            tensors |= {f"base_model.model.{path}.lora_{kind}.weight": t.clone() for kind, t in (("A", a), ("B", b))}
        modules.append(path)
    for module in lora.block_modules:
        names = their_modules(module, is_gpt2)
        modules += names
        for layer in range(config.num_layers):
            a, b = (adapters[f"blocks.{layer}.{module}.lora_{kind}"].float() for kind in "AB")  # (r, in), (out, r)
            parts = [part.contiguous() for part in b.chunk(len(names))]  # of qkv each (C, r)
            if len(names) == 3:
                parts[:2] = [swap_halves(part, config.num_heads) for part in parts[:2]]
            for name, part in zip(names, parts, strict=True):
                prefix = f"base_model.model.{blocks}.{layer}.{name}"
                tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": part}
    return tensors, modules


def their_modules(module: str, is_gpt2: bool) -> list[str]:
    """What a module of our blocks is called there. With the name of its parent: a bare c_proj would be two."""
    if is_gpt2:
        return [GPT2_BLOCK[module]]
    return [f"self_attn.{part}_proj" for part in "qkv"] if module == "attention.qkv" else [NANOCHAT_BLOCK[module]]


def adapted_by_peft(theirs: Any, folder: Path) -> Any:
    """The exported base with the adapters of a folder, as peft reads them. Raises CheckpointError if it does not."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # of what peft calls in transformers
            return PeftModel.from_pretrained(theirs, folder).eval()
    except (ValueError, RuntimeError, KeyError) as problem:
        raise CheckpointError(f"peft cannot open the adapters: {str(problem).strip():.500}") from None
