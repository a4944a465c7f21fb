"""LoRA adapters as a folder of Hugging Face `peft`, checked on the exported base.

What differs: Qwen3 and Llama have q, k and v, and gate and up, as separate modules, each with its own A. GPT-2's layers
are transposed, which `fan_in_fan_out` says, but its adapters are not. An embedding's adapters are transposed.
Shapes in comments: C = embed_dim, V = vocab_size, r = rank.
"""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import torch

from common.checkpoint import ADAPTERS, Checkpoint
from common.errors import CheckpointError, ConfigError, require_packages
from common.files import json_bytes
from common.lora import EMBEDDING, LoRA, find_base
from common.tensors import read_safetensors
from exchange.comparison import Difference, largest_difference
from exchange.folders import load_in_fp32
from exchange.hf_card import model_card
from exchange.hf_common import Tensors, expanded
from exchange.hf_folder import load_theirs, written_folder
from exchange.hf_model import FORMS, hf_kind
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer


def export_adapters(checkpoint: Checkpoint, lora: LoRA, out: Path, base: Path | None) -> Difference:
    """Write the adapters of a checkpoint as the folder `out`, for the base that was exported as the folder `base`.
    Returns the largest difference of the logits.

    Raises ConfigError if `base` is missing or another model, if peft is missing, or if something is at `out`;
    CheckpointError if peft reads other adapters from the files.
    """
    require_packages("peft")
    own = find_base(lora, checkpoint.path)
    remedy = f"python tools/export_hf.py {own} FOLDER writes it"
    if base is None:
        raise ConfigError(
            f"{checkpoint.path} holds adapters: say with --base FOLDER where their base is exported ({remedy})."
        )
    config = checkpoint.model_config()
    if lora.end_modules and config.embed_norm and config.is_gated:
        raise CheckpointError(
            f"{checkpoint.path} adapts the embeddings of a model with embed_norm, which an exported base has in its "
            f"table: these adapters cannot be exported. python tools/merge_lora.py {checkpoint.path} OUT merges them; "
            f"export OUT."
        )
    model, tokenizer = load_in_fp32(checkpoint)
    theirs = exported_base(own, base, remedy, model, tokenizer)
    adapters = read_safetensors(checkpoint.path / ADAPTERS)
    tensors, modules = to_peft(model.config, adapters, lora, theirs.config.vocab_size)
    described = {
        "adapter_config.json": json_bytes(peft_config(model.config, lora, modules, base)),
        "README.md": model_card(checkpoint, model, tokenizer, out.name, lora, base.name).encode(),
    }
    weights = "adapter_model.safetensors", tensors
    context, template = model.config.max_seq_len, checkpoint.chat_template()
    with written_folder(out, weights, described, tokenizer, context, template) as folder:
        return largest_difference(model, adapted_by_peft(theirs, folder), tokenizer, "peft")


def exported_base(own: Path, base: Path, remedy: str, adapted: TransformerLanguageModel, tokenizer: Tokenizer) -> Any:
    """The exported base in the folder `base` as transformers reads it, in fp32. Raises ConfigError, which says the
    `remedy`, if it is not the base `own` of the `adapted` model."""
    if not (base / "config.json").is_file():
        raise ConfigError(f"--base {base} is not a folder with an exported model; {remedy}.")
    try:
        theirs = load_theirs(base)
    except Exception as problem:  # several libraries check its config, each with its own errors
        raise ConfigError(
            f"--base {base} cannot be opened by transformers ({str(problem).strip():.500}); {remedy}."
        ) from None
    model_of_base = TransformerLanguageModel(adapted.config).eval()
    Checkpoint(own).load_weights(model_of_base)
    try:
        largest_difference(model_of_base, theirs, tokenizer)
    except (CheckpointError, RuntimeError, IndexError):  # other weights, another shape, another vocabulary
        raise ConfigError(f"--base {base} is not the base of the adapters, {own}; {remedy}.") from None
    return theirs.float()


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
    """Our adapters -> the tensors of an adapter_model.safetensors, and the names of the modules they adapt. The ids
    that only the exported base has, up to `vocab_size`, get zeros."""
    form = FORMS[hf_kind(config)]
    entries = {entry.ours: entry for entry in expanded(form.table(config), config)}
    tensors: Tensors = {}
    modules: dict[str, None] = {}  # in order, each once
    for module in lora.end_modules:
        holder = EMBEDDING if config.tie_embeddings else module
        a, b = (adapters[f"{holder}.lora_{kind}"].float() for kind in "AB")  # (r, C), (V, r)
        b = torch.cat([b, torch.zeros(vocab_size - len(b), lora.rank)])
        if module == EMBEDDING:
            path = form.embedding.removesuffix(".weight")
            prefix = f"base_model.model.{path}.lora_embedding"
            tensors |= {f"{prefix}_A": b.T.contiguous(), f"{prefix}_B": a.T.contiguous()}
        else:
            path = "lm_head"
            tensors |= {f"base_model.model.{path}.lora_{kind}.weight": t.clone() for kind, t in (("A", a), ("B", b))}
        modules[path] = None
    for module, layer in itertools.product(lora.block_modules, range(config.num_layers)):
        path = f"blocks.{layer}.{module}"
        a, b = (adapters[f"{path}.lora_{kind}"].float() for kind in "AB")  # (r, in), (out, r)
        entry = entries[f"{path}.weight"]._replace(transposed=False)
        for name, part in zip(entry.theirs, entry.split(b), strict=True):
            path = name.removesuffix(".weight")
            tensors |= {
                f"base_model.model.{path}.lora_A.weight": a.clone(),
                f"base_model.model.{path}.lora_B.weight": part,
            }
            # With its parent: a bare c_proj would match two.
            modules[path.removeprefix(f"{form.blocks}{layer}.")] = None
    return tensors, list(modules)


def adapted_by_peft(theirs: Any, folder: Path) -> Any:
    """The exported base with the adapters of a folder, as peft reads them. Raises CheckpointError if peft fails."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # peft calls old names in transformers
            return PeftModel.from_pretrained(theirs, folder).eval()
    except (ValueError, RuntimeError, KeyError) as problem:
        raise CheckpointError(f"peft cannot open the adapters: {str(problem).strip():.500}") from None
