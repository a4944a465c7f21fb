"""Convert configs and tensors between our model and Hugging Face transformers. Dicts in, dicts out: no files.

The GPT-2 form becomes `GPT2LMHeadModel`, the modern form `Qwen3ForCausalLM`; Llama and Qwen2 are for imported models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from common.tensors import meta_model
from exchange import hf_llama
from exchange.hf_common import ConversionError, Table, TensorEntry, Tensors, from_hf_tensors, to_hf_tensors
from exchange.hf_gpt2 import GPT2_BUFFERS, from_gpt2_config, gpt2_table, list_gpt2_obstacles, to_gpt2_config
from exchange.hf_llama import fold_embed_norm, from_llama_config, list_llama_obstacles, llama_table, to_llama_config
from model import list_first, require_shapes
from model_config import ModelConfig


class Conversion(NamedTuple):
    """How to convert to and from one class of transformers."""

    model_class: str
    list_obstacles: Callable[[ModelConfig], list[str]]  # options that the class lacks
    to_config: Callable[[ModelConfig], dict[str, Any]]
    from_config: Callable[[dict[str, Any], bool], ModelConfig]  # (config.json, is the head tied) -> our config
    body_table: Callable[[ModelConfig], Table]  # everything except the head
    prefix: str = "model."  # every name except the head's starts with this; files of the bare model lack it
    embedding: str = "model.embed_tokens.weight"
    blocks: str = "model.layers."
    is_tied: bool = False  # the default if config.json does not say
    fold: Callable[[ModelConfig, Tensors], Tensors] = lambda config, state: state  # merge tensors before the export

    def table(self, config: ModelConfig) -> Table:
        head = [] if config.tie_embeddings else [TensorEntry("head.weight", ("lm_head.weight",))]
        return [*self.body_table(config), *head]

    def tensors(self, config: ModelConfig, state: Tensors) -> Tensors:
        """Convert our tensors to those of the class."""
        return to_hf_tensors(self.table(config), config, self.fold(config, state))

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor of the class."""
        with torch.device("meta"):
            state = meta_model(config).state_dict()
            return {name: tuple(tensor.shape) for name, tensor in self.tensors(config, state).items()}


def _llama_conversion(kind: str) -> Conversion:
    name, from_config = hf_llama.MODEL_CLASSES[kind], functools.partial(from_llama_config, kind)
    return Conversion(name, list_llama_obstacles, to_llama_config, from_config, llama_table, fold=fold_embed_norm)


CONVERSIONS = {
    "gpt2": Conversion(
        "GPT2LMHeadModel", list_gpt2_obstacles, to_gpt2_config, from_gpt2_config, gpt2_table,
        "transformer.", "transformer.wte.weight", "transformer.h.", is_tied=True,
    ),
    **{kind: _llama_conversion(kind) for kind in hf_llama.MODEL_CLASSES},
}  # fmt: skip


def to_hf(config: ModelConfig, state: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Convert our model to the content of config.json and the tensors of model.safetensors, without a tied head.

    Raises ConversionError naming every option that no class supports.
    """
    conversion = CONVERSIONS[choose_hf_model_type(config)]
    return conversion.to_config(config), conversion.tensors(config, state)


def from_hf(hf_config: dict[str, Any], tensors: Tensors) -> tuple[ModelConfig, Tensors]:
    """Convert a Hugging Face model to ours, in fp32 and without a tied head: the reverse of `to_hf`.

    Raises ConversionError naming the architecture, the options or the tensors that do not fit.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in CONVERSIONS:
        description = f"{kind!r:.100}" if kind is not None else "missing"
        raise ConversionError(f"model_type is {description}; supported are {', '.join(CONVERSIONS)}")
    conversion = CONVERSIONS[kind]
    tensors = complete_names(kind, tensors)
    tied = is_tied(hf_config, tensors, conversion.embedding, conversion.is_tied)
    try:
        config = conversion.from_config(hf_config, tied)
    except (ValueError, TypeError) as problem:
        raise ConversionError(str(problem)) from None
    if tied:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    layers = len(
        {name.removeprefix(conversion.blocks).split(".")[0] for name in tensors if name.startswith(conversion.blocks)}
    )
    if layers < config.num_layers:  # checked first, as the config may claim any number
        raise ConversionError(
            f"the config has {config.num_layers:,} layers, and {conversion.blocks}{layers}.* is missing"
        )
    try:
        require_shapes(tensors, conversion.shapes(config), "the weights do not match the config")
    except ValueError as problem:
        raise ConversionError(str(problem)) from None
    return config, from_hf_tensors(
        conversion.table(config), config, {name: tensor.float() for name, tensor in tensors.items()}
    )


def extend_vocabulary(
    config: ModelConfig, state: Tensors, vocab_size: int, source_id: int
) -> tuple[ModelConfig, Tensors]:
    """Enlarge the vocabulary of our model: each added id gets the rows of the id `source_id`."""
    added = vocab_size - config.vocab_size
    rows = {
        name: torch.cat([state[name], state[name][source_id].expand(added, -1)])  # (vocab_size, C)
        for name in ("token_embedding.weight", "head.weight")
    }
    return dataclasses.replace(config, vocab_size=vocab_size), state | rows


def choose_hf_model_type(config: ModelConfig) -> str:
    """Return the `model_type` that fits our model. Raises ConversionError naming every option that it lacks."""
    kind = "gpt2" if config.position == "learned" else hf_llama.llama_model_type(config)
    if wrong := CONVERSIONS[kind].list_obstacles(config):
        raise ConversionError(
            f"position {config.position!r} and activation {config.activation!r} would be "
            f"{CONVERSIONS[kind].model_class}, which does not support {list_first(wrong)}"
        )
    return kind


def complete_names(kind: str, tensors: Tensors) -> Tensors:
    """Add the prefix that files of the bare model, like those of openai-community, lack, and drop buffers."""
    prefix, buffers = CONVERSIONS[kind].prefix, (*GPT2_BUFFERS, ".rotary_emb.inv_freq")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}
    if any(name.startswith(prefix) for name in kept):
        return kept
    return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in kept.items()}


def is_tied(hf_config: dict[str, Any], tensors: Tensors, embedding: str, default: bool) -> bool:
    """Return whether the head is tied. As in transformers, a head stored with other numbers wins over the config."""
    tied = hf_config.get("tie_word_embeddings", default)
    if type(tied) is not bool:
        raise ConversionError(f"tie_word_embeddings is {tied!r:.100}; true or false is needed")
    head, embedded = tensors.get("lm_head.weight"), tensors.get(embedding)
    return tied and (head is None or embedded is None or torch.equal(head, embedded))
