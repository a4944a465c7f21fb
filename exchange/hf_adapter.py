"""Export LoRA adapters for Hugging Face `peft`, and check them on the exported base.

Three differences: in Qwen3 and Llama, q, k and v, and gate and up, are separate modules, each with its own A. GPT-2's
layers are transposed (`fan_in_fan_out`), its adapters are not. An embedding's adapters are transposed.
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
from exchange.comparison import LogitDifference, require_same_logits
from exchange.folders import load_in_fp32
from exchange.hf_card import build_model_card
from exchange.hf_common import Tensors, expand_layers
from exchange.hf_folder import load_hf_model, new_hf_folder
from exchange.hf_model import CONVERSIONS, choose_hf_model_type
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenizer import Tokenizer


def export_adapters(checkpoint: Checkpoint, lora: LoRA, out: Path, base: Path | None) -> LogitDifference:
    """Write the adapters of a checkpoint to the folder `out`; `base` is the folder of their exported base.

    Returns the logits' largest difference. Raises ConfigError if `base` is missing or another model, peft is missing,
    or `out` exists; CheckpointError if peft computes other logits from the files.
    """
    require_packages("peft")
    own = find_base(lora, checkpoint.path)
    remedy = f"python tools/export_hf.py {own} FOLDER exports it"
    if base is None:
        raise ConfigError(
            f"{checkpoint.path} has adapters, which need their exported base: name its folder with --base ({remedy})."
        )
    config = checkpoint.model_config()
    if lora.end_modules and config.embed_norm and config.is_gated:
        raise CheckpointError(
            f"{checkpoint.path} adapts the embeddings of a model with embed_norm. An export folds that norm into the "
            f"embedding table, so these adapters cannot be exported. Merge them with python tools/merge_lora.py "
            f"{checkpoint.path} OUT, then export OUT."
        )
    model, tokenizer = load_in_fp32(checkpoint)
    theirs = load_exported_base(own, base, remedy, model, tokenizer)
    adapters = read_safetensors(checkpoint.path / ADAPTERS)
    tensors, modules = to_peft(model.config, adapters, lora, theirs.config.vocab_size)
    described = {
        "adapter_config.json": json_bytes(peft_config(model.config, lora, modules, base)),
        "README.md": build_model_card(checkpoint, model, tokenizer, out.name, lora, base.name).encode(),
    }
    weights = "adapter_model.safetensors", tensors
    context, template = model.config.max_seq_len, checkpoint.chat_template()
    with new_hf_folder(out, weights, described, tokenizer, context, template) as folder:
        return require_same_logits(model, load_with_peft(theirs, folder), tokenizer, "peft")


def load_exported_base(
    own: Path, base: Path, remedy: str, adapted: TransformerLanguageModel, tokenizer: Tokenizer
) -> Any:
    """Load the exported base in fp32 with transformers and check that it is `own`, the base of `adapted`.

    Raises ConfigError, ending with `remedy`, if it is not.
    """
    if not (base / "config.json").is_file():
        raise ConfigError(f"--base {base} is not an exported model; {remedy}.")
    try:
        theirs = load_hf_model(base)
    except Exception as problem:  # several libraries check the config, each with its own errors
        raise ConfigError(
            f"--base {base} cannot be opened by transformers ({str(problem).strip():.500}); {remedy}."
        ) from None
    model_of_base = TransformerLanguageModel(adapted.config).eval()
    Checkpoint(own).load_weights(model_of_base)
    try:
        require_same_logits(model_of_base, theirs, tokenizer)
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
        "fan_in_fan_out": choose_hf_model_type(config) == "gpt2",
        "inference_mode": True,
    }


def to_peft(config: ModelConfig, adapters: Tensors, lora: LoRA, vocab_size: int) -> tuple[Tensors, list[str]]:
    """Convert our adapters to the tensors of adapter_model.safetensors. Returns them and the adapted modules' names.

    Ids that only the exported base has, up to `vocab_size`, get zeros.
    """
    conversion = CONVERSIONS[choose_hf_model_type(config)]
    entries = {entry.ours: entry for entry in expand_layers(conversion.table(config), config)}
    tensors: Tensors = {}
    modules: dict[str, None] = {}  # an ordered set
    for module in lora.end_modules:
        holder = EMBEDDING if config.tie_embeddings else module
        a, b = (adapters[f"{holder}.lora_{kind}"].float() for kind in "AB")  # (r, C), (V, r)
        b = torch.cat([b, torch.zeros(vocab_size - len(b), lora.rank)])
        if module == EMBEDDING:
            path = conversion.embedding.removesuffix(".weight")
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
            # The name includes its parent: a bare c_proj would match two modules.
            modules[path.removeprefix(f"{conversion.blocks}{layer}.")] = None
    return tensors, list(modules)


def load_with_peft(base: Any, folder: Path) -> Any:
    """Load the adapters of a folder onto the exported base with peft. Raises CheckpointError if peft fails."""
    from peft import PeftModel

    try:
        with warnings.catch_warnings(
            action="ignore", category=FutureWarning
        ):  # peft uses deprecated names of transformers
            return PeftModel.from_pretrained(base, folder).eval()
    except (ValueError, RuntimeError, KeyError) as problem:
        raise CheckpointError(f"peft cannot open the adapters: {str(problem).strip():.500}") from None
