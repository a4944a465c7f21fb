"""One model under two sets of names: ours, and those of Hugging Face `transformers`. Dicts in, dicts out: no files.

GPT-2's form is `GPT2LMHeadModel` there, the modern one `Qwen3ForCausalLM`; Llama and Qwen2 are there for other people's
models.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from common.tensors import meta_model
from exchange import hf_llama
from exchange.hf_common import ConversionError, Entry, Table, Tensors, to_ours, to_theirs
from exchange.hf_gpt2 import GPT2_BUFFERS, config_of_gpt2, gpt2_config, gpt2_obstacles, gpt2_table
from exchange.hf_llama import config_of_llama, folded, llama_config, llama_obstacles, llama_table
from model import list_first, require_shapes
from model_config import ModelConfig


class Form(NamedTuple):
    """How one of their classes is written and read."""

    model_class: str
    obstacles: Callable[[ModelConfig], list[str]]  # options of a model that the class cannot have
    config: Callable[[ModelConfig], dict[str, Any]]
    config_of: Callable[[dict[str, Any], bool], ModelConfig]  # of their config, and whether the head is tied
    entries: Callable[[ModelConfig], Table]  # all but the head's
    prefix: str = "model."  # of all tensors but the head's; files of the bare model lack it
    embedding: str = "model.embed_tokens.weight"
    blocks: str = "model.layers."
    is_tied: bool = False  # where a config does not say
    fold: Callable[[ModelConfig, Tensors], Tensors] = lambda config, state: state  # what goes into another tensor

    def table(self, config: ModelConfig) -> Table:
        return [*self.entries(config), *([] if config.tie_embeddings else [Entry("head.weight", ("lm_head.weight",))])]

    def tensors(self, config: ModelConfig, state: Tensors) -> Tensors:
        """Their tensors of a model of ours."""
        return to_theirs(self.table(config), config, self.fold(config, state))

    def shapes(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Of their tensors."""
        with torch.device("meta"):
            state = meta_model(config).state_dict()
            return {name: tuple(tensor.shape) for name, tensor in self.tensors(config, state).items()}


def llama_form(kind: str) -> Form:
    config_of = functools.partial(config_of_llama, kind)
    return Form(hf_llama.CLASSES[kind], llama_obstacles, llama_config, config_of, llama_table, fold=folded)


FORMS = {
    "gpt2": Form(
        "GPT2LMHeadModel", gpt2_obstacles, gpt2_config, config_of_gpt2, gpt2_table,
        "transformer.", "transformer.wte.weight", "transformer.h.", is_tied=True,
    ),
    **{kind: llama_form(kind) for kind in hf_llama.CLASSES},
}  # fmt: skip


def to_hf(config: ModelConfig, state: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Our model -> the content of a config.json, and the tensors of a model.safetensors. A tied head is left out.

    Raises ConversionError naming every option that no class there supports.
    """
    form = FORMS[hf_kind(config)]
    return form.config(config), form.tensors(config, state)


def from_hf(hf_config: dict[str, Any], tensors: Tensors) -> tuple[ModelConfig, Tensors]:
    """The reverse of `to_hf`. Weights of half precision become fp32; a tied head is left out.

    Raises ConversionError naming the architecture, the options or the tensors that do not fit.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in FORMS:
        named = f"{kind!r:.100}" if kind is not None else "missing"
        raise ConversionError(f"model_type is {named}; what can be imported is {', '.join(FORMS)}")
    form = FORMS[kind]
    tensors = their_names(kind, tensors)
    tied = is_tied(hf_config, tensors, form.embedding, form.is_tied)
    try:
        config = form.config_of(hf_config, tied)
    except (ValueError, TypeError) as problem:
        raise ConversionError(str(problem)) from None
    if tied:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    layers = len({name.removeprefix(form.blocks).split(".")[0] for name in tensors if name.startswith(form.blocks)})
    if layers < config.num_layers:  # check first: the config may claim any number
        raise ConversionError(f"the config has {config.num_layers:,} layers, and {form.blocks}{layers}.* is missing")
    try:
        require_shapes(tensors, form.shapes(config), "the weights do not fit the config")
    except ValueError as problem:
        raise ConversionError(str(problem)) from None
    return config, to_ours(form.table(config), config, {name: tensor.float() for name, tensor in tensors.items()})


def with_rows(config: ModelConfig, state: Tensors, vocab_size: int, twin: int) -> tuple[ModelConfig, Tensors]:
    """Our model with a larger vocabulary: each id that it lacks gets the rows of the id `twin`."""
    added = vocab_size - config.vocab_size
    rows = {
        name: torch.cat([state[name], state[name][twin].expand(added, -1)])  # (vocab_size, C)
        for name in ("token_embedding.weight", "head.weight")
    }
    return dataclasses.replace(config, vocab_size=vocab_size), state | rows


def hf_kind(config: ModelConfig) -> str:
    """The `model_type` for a model of ours. Raises ConversionError naming every option that it does not support."""
    kind = "gpt2" if config.position == "learned" else hf_llama.kind_of(config)
    if wrong := FORMS[kind].obstacles(config):
        raise ConversionError(
            f"with position {config.position!r} and activation {config.activation!r} the class is "
            f"{FORMS[kind].model_class}, which cannot have {list_first(wrong)}"
        )
    return kind


def their_names(kind: str, tensors: Tensors) -> Tensors:
    """Tensors under the names of the class with a head: files of the bare model, like those of openai-community, lack
    the prefix. Buffers that are no weights are dropped."""
    prefix, buffers = FORMS[kind].prefix, (*GPT2_BUFFERS, ".rotary_emb.inv_freq")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(buffers)}
    if any(name.startswith(prefix) for name in kept):
        return kept
    return {name if name.startswith("lm_head.") else prefix + name: tensor for name, tensor in kept.items()}


def is_tied(hf_config: dict[str, Any], tensors: Tensors, embedding: str, default: bool) -> bool:
    """As transformers reads it: if the config ties a head that the file stores with other numbers, the file wins."""
    tied = hf_config.get("tie_word_embeddings", default)
    if type(tied) is not bool:
        raise ConversionError(f"tie_word_embeddings is {tied!r:.100}; true or false is needed")
    head, embedded = tensors.get("lm_head.weight"), tensors.get(embedding)
    return tied and (head is None or embedded is None or torch.equal(head, embedded))
