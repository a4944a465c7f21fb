"""One model under two sets of names: ours, and those of Hugging Face `transformers`. Dicts in, dicts out: no files.

GPT-2's form is `GPT2LMHeadModel` there, the modern one `NanoChatForCausalLM`. Three things differ: GPT-2's linear
layers are stored transposed, biases that we leave out are zeros there, and NanoChat rotates the other way.

Shapes in comments: C = embed_dim, F = ff_dim, H = heads, D = C / H, V = vocab_size, T = max_seq_len.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from model import ROPE_BASE, ModelConfig, listed

Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]

CLASSES = {"gpt2": "GPT2LMHeadModel", "nanochat": "NanoChatForCausalLM"}
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu2": "relu2"}  # ours -> theirs
OUR_ACTIVATIONS = {theirs: ours for ours, theirs in ACTIVATIONS.items()} | {"gelu_pytorch_tanh": "gelu_tanh"}
# What each class always is, without an option. NanoChat's norm of the embedding and of q and k is always there.
NEEDED: dict[str, dict[str, Any]] = {
    "gpt2": {"norm": "layernorm", "qk_norm": False, "embed_norm": False, "logit_softcap": 0.0},
    "nanochat": {"norm": "rmsnorm", "qk_norm": True, "embed_norm": True, "bias": False},
}
LAYER_NORM_EPSILON, RMS_NORM_EPSILON = 1e-5, 1e-6
DEFAULT_SOFTCAP = 15.0  # NanoChat's, where its config.json has no such key

GPT2_ENDS = {"token_embedding": "wte", "positional_embedding": "wpe", "ln_f": "ln_f"}
GPT2_BLOCK = {
    "norm1": "ln_1",
    "attention.qkv": "attn.c_attn",
    "attention.out_proj": "attn.c_proj",
    "norm2": "ln_2",
    "feed_forward.fc1": "mlp.c_fc",
    "feed_forward.fc2": "mlp.c_proj",
}
KINDS = ("weight", "bias")
GPT2_BUFFERS = (".attn.bias", ".attn.masked_bias")  # the causal mask, in files of older versions
NANOCHAT_BLOCK = {
    "attention.out_proj": "self_attn.o_proj",
    "feed_forward.fc1": "mlp.fc1",
    "feed_forward.fc2": "mlp.fc2",
}


class ConversionError(ValueError):
    """A model that the other side cannot express, or tensors that do not belong to the model."""


def to_hf(config: ModelConfig, state: Tensors) -> tuple[dict[str, Any], Tensors]:
    """Our model -> the content of a config.json, and the tensors of a model.safetensors. A tied head is left out.

    Raises ConversionError naming every option that no class there supports.
    """
    kind = hf_kind(config)
    if kind == "gpt2":
        return gpt2_config(config), gpt2_tensors(config, state)
    return nanochat_config(config), nanochat_tensors(config, state)


def from_hf(hf_config: dict[str, Any], tensors: Tensors) -> tuple[ModelConfig, Tensors]:
    """The reverse of `to_hf`. Weights of half precision become fp32; a tied head is left out.

    Raises ConversionError naming the architecture, the options or the tensors that do not fit.
    """
    kind = hf_config.get("model_type")
    if not isinstance(kind, str) or kind not in CLASSES:
        named = f"{kind!r:.100}" if kind is not None else "missing"
        raise ConversionError(f"model_type is {named}; what can be imported is gpt2 and nanochat")
    tensors = their_names(kind, tensors)
    embedding = "transformer.wte.weight" if kind == "gpt2" else "model.embed_tokens.weight"
    tied = is_tied(hf_config, tensors, embedding, default=kind == "gpt2")
    try:
        config = config_of_gpt2(hf_config, tied) if kind == "gpt2" else config_of_nanochat(hf_config, tied)
    except (ValueError, TypeError) as problem:
        raise ConversionError(str(problem)) from None
    if tied:
        tensors = {name: tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    blocks = "transformer.h." if kind == "gpt2" else "model.layers."
    layers = len({name.removeprefix(blocks).split(".")[0] for name in tensors if name.startswith(blocks)})
    if layers < config.num_layers:  # check first: the config may claim any number
        raise ConversionError(f"the config has {config.num_layers:,} layers, and {blocks}{layers}.* is missing")
    require_shapes(tensors, gpt2_shapes(config) if kind == "gpt2" else nanochat_shapes(config))
    tensors = {name: tensor.float() for name, tensor in tensors.items()}
    return config, state_of_gpt2(config, tensors) if kind == "gpt2" else state_of_nanochat(config, tensors)


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
    kind = "gpt2" if config.position == "learned" else "nanochat"
    wrong = [
        f"{key} {getattr(config, key)!r} (it needs {needed!r})"
        for key, needed in NEEDED[kind].items()
        if getattr(config, key) != needed
    ]
    if wrong:
        raise ConversionError(
            f"with position {config.position!r} the class is {CLASSES[kind]}, which cannot have {listed(wrong)}"
        )
    return kind


def their_names(kind: str, tensors: Tensors) -> Tensors:
    """Tensors under the names of the class with a head: files of the bare model, like those of openai-community, lack
    the prefix. Buffers that are no weights are dropped."""
    prefix = "transformer." if kind == "gpt2" else "model."
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(GPT2_BUFFERS)}
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


def require_shapes(tensors: Tensors, shapes: Shapes) -> None:
    """Raises ConversionError listing tensors that are missing, unknown, of another shape, or whole numbers."""
    problems = [f"{name} is missing" for name in shapes if name not in tensors]
    problems += [f"{name} is unknown" for name in tensors if name not in shapes]
    problems += [
        f"{name} is {tuple(tensors[name].shape)}, not {shape}"
        for name, shape in shapes.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    problems += [f"{name} is {tensor.dtype}" for name, tensor in tensors.items() if not tensor.is_floating_point()]
    if problems:
        raise ConversionError("the weights do not fit the config: " + listed(problems))


def require_options(hf_config: dict[str, Any], needed: dict[str, Any]) -> None:
    """Raises ConversionError for keys of a foreign config with a value that our model cannot express. An absent key has
    the needed value, which is the default there."""
    wrong = [
        f"{key} is {hf_config[key]!r:.100} (only {value!r} can be expressed)"
        for key, value in needed.items()
        if hf_config.get(key, value) != value
    ]
    if wrong:
        raise ConversionError(listed(wrong))


def our_activation(name: Any) -> str:
    if not isinstance(name, str) or name not in OUR_ACTIVATIONS:
        raise ConversionError(f"the activation is {name!r:.100}; what can be expressed is {', '.join(OUR_ACTIVATIONS)}")
    return OUR_ACTIVATIONS[name]


# GPT-2


def gpt2_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [CLASSES["gpt2"]],
        "model_type": "gpt2",
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_ctx": config.max_seq_len,  # of older versions; some converters still ask for it
        "n_embd": config.embed_dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ff_dim,
        "activation_function": ACTIVATIONS[config.activation],
        "layer_norm_epsilon": LAYER_NORM_EPSILON,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout),
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def config_of_gpt2(hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    require_options(
        hf_config,
        {
            "layer_norm_epsilon": LAYER_NORM_EPSILON,
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
        },
    )
    return ModelConfig(  # absent keys as GPT2Config has them
        vocab_size=hf_config.get("vocab_size", 50257),
        embed_dim=hf_config.get("n_embd", 768),
        num_heads=hf_config.get("n_head", 12),
        num_layers=hf_config.get("n_layer", 12),
        ff_dim=hf_config.get("n_inner"),  # type: ignore[arg-type]  # None is 4 * n_embd here and there
        max_seq_len=hf_config.get("n_positions", 1024),
        dropout=hf_config.get("resid_pdrop", 0.1),
        tie_embeddings=tied,
        activation=our_activation(hf_config.get("activation_function", "gelu_new")),
    )


def gpt2_modules(config: ModelConfig) -> dict[str, str]:
    """Our module -> theirs, the head aside."""
    modules = {ours: f"transformer.{theirs}" for ours, theirs in GPT2_ENDS.items()}
    for layer in range(config.num_layers):
        modules |= {f"blocks.{layer}.{ours}": f"transformer.h.{layer}.{name}" for ours, name in GPT2_BLOCK.items()}
    return modules


def gpt2_shapes(config: ModelConfig) -> Shapes:
    C, F = config.embed_dim, config.ff_dim
    weights = {
        "wte": (config.vocab_size, C), "wpe": (config.max_seq_len, C), "ln_f": (C,), "ln_1": (C,), "ln_2": (C,),
        "attn.c_attn": (C, 3 * C), "attn.c_proj": (C, C), "mlp.c_fc": (C, F), "mlp.c_proj": (F, C),
    }  # fmt: skip
    shapes: Shapes = {}
    for module in gpt2_modules(config).values():
        shape = next(shape for name, shape in weights.items() if module.endswith(f".{name}"))
        shapes[f"{module}.weight"] = shape
        if not module.endswith(("wte", "wpe")):
            shapes[f"{module}.bias"] = shape[-1:]
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def is_conv1d(name: str) -> bool:
    """OpenAI wrote its linear layers as convolutions of width 1, whose weight is (in, out); ours is (out, in)."""
    return ".c_" in name and name.endswith(".weight")


def gpt2_tensors(config: ModelConfig, state: Tensors) -> Tensors:
    tensors: Tensors = {}
    names = {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in gpt2_modules(config).items() for kind in KINDS}
    names["head.weight"] = "lm_head.weight"
    theirs_to_ours = {theirs: ours for ours, theirs in names.items()}
    for name, shape in gpt2_shapes(config).items():
        tensor = state.get(theirs_to_ours[name])
        if tensor is None:  # biases cannot be turned off there; adding zeros changes no bit
            assert name.endswith(".bias") and not config.bias, name
            tensor = torch.zeros(shape)
        tensors[name] = tensor.T.contiguous() if is_conv1d(name) else tensor
    return tensors


def state_of_gpt2(config: ModelConfig, tensors: Tensors) -> Tensors:
    state: Tensors = {}
    for ours, theirs in gpt2_modules(config).items():
        for kind in KINDS:
            if (tensor := tensors.get(f"{theirs}.{kind}")) is not None:
                state[f"{ours}.{kind}"] = tensor.T.contiguous() if is_conv1d(f"{theirs}.{kind}") else tensor
    return with_head(config, state, tensors)


def with_head(config: ModelConfig, state: Tensors, tensors: Tensors) -> Tensors:
    return state if config.tie_embeddings else state | {"head.weight": tensors["lm_head.weight"]}


# The modern form


def nanochat_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": [CLASSES["nanochat"]],
        "model_type": "nanochat",
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.ff_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "max_position_embeddings": config.max_seq_len,
        "hidden_act": ACTIVATIONS[config.activation],
        "attention_dropout": config.dropout,
        "attention_bias": False,
        "rms_norm_eps": RMS_NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_BASE},
        "final_logit_softcapping": config.logit_softcap or None,  # absent, it would be 15
        "initializer_range": 0.02,
        "tie_word_embeddings": config.tie_embeddings,
        "dtype": "float32",
    }


def config_of_nanochat(hf_config: dict[str, Any], tied: bool) -> ModelConfig:
    heads = hf_config.get("num_attention_heads", 6)
    rope = hf_config.get("rope_parameters") or {"rope_theta": hf_config.get("rope_theta", ROPE_BASE)}
    if not isinstance(rope, dict):
        raise ConversionError(f"rope_parameters is {rope!r:.100}; an object {{...}} is needed")
    require_options({"rope_type": "default", **rope}, {"rope_type": "default", "rope_theta": ROPE_BASE})
    needed = {"rope_scaling": None, "rms_norm_eps": RMS_NORM_EPSILON, "attention_bias": False}
    require_options({key: value for key, value in hf_config.items() if value is not None}, needed)
    if hf_config.get("num_key_value_heads") not in (None, heads):
        raise ConversionError(
            f"num_key_value_heads is {hf_config['num_key_value_heads']!r:.100} beside {heads!r:.100} heads; here every "
            "head has keys and values of its own"
        )
    config = ModelConfig(  # absent keys as NanoChatConfig has them
        vocab_size=hf_config.get("vocab_size", 50304),
        embed_dim=hf_config.get("hidden_size", 768),
        num_heads=heads,
        num_layers=hf_config.get("num_hidden_layers", 12),
        ff_dim=hf_config.get("intermediate_size", 8192),
        max_seq_len=hf_config.get("max_position_embeddings", 2048),
        dropout=hf_config.get("attention_dropout", 0.0),
        bias=False,
        tie_embeddings=tied,
        activation=our_activation(hf_config.get("hidden_act", "relu2")),
        norm="rmsnorm",
        position="rope",
        qk_norm=True,
        embed_norm=True,
        logit_softcap=hf_config.get("final_logit_softcapping", DEFAULT_SOFTCAP) or 0.0,
    )
    if hf_config.get("head_dim") not in (None, config.head_dim):
        raise ConversionError(f"head_dim is {hf_config['head_dim']!r:.100}; only hidden_size / heads can be expressed")
    return config


def nanochat_shapes(config: ModelConfig) -> Shapes:
    C, F = config.embed_dim, config.ff_dim
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, C)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        shapes |= {f"{prefix}.self_attn.{kind}_proj.weight": (C, C) for kind in "qkvo"}
        shapes |= {f"{prefix}.mlp.fc1.weight": (F, C), f"{prefix}.mlp.fc2.weight": (C, F)}
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, C)
    return shapes


def swap_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of q's or k's projection, (C, C) or (C, rank), with the two halves of every head swapped.

    RoPE rotates the pairs (x[i], x[i + D/2]). NanoChat rotates them by the negative angle; with the members of each
    pair swapped, that is our rotation. The swap is the same in q and k, so their products do not change, and a norm
    over the head ignores the order. The function is its own inverse.
    """
    return weight.view(heads, 2, -1, weight.size(1)).flip(1).reshape(weight.shape)  # (H, 2, D/2, C)


def nanochat_tensors(config: ModelConfig, state: Tensors) -> Tensors:
    tensors = {"model.embed_tokens.weight": state["token_embedding.weight"]}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = (part.contiguous() for part in state[f"{ours}.attention.qkv.weight"].split(config.embed_dim))
        tensors[f"{theirs}.self_attn.q_proj.weight"] = swap_halves(q, config.num_heads)
        tensors[f"{theirs}.self_attn.k_proj.weight"] = swap_halves(k, config.num_heads)
        tensors[f"{theirs}.self_attn.v_proj.weight"] = v
        tensors |= {f"{theirs}.{n}.weight": state[f"{ours}.{o}.weight"] for o, n in NANOCHAT_BLOCK.items()}
    return tensors if config.tie_embeddings else tensors | {"lm_head.weight": state["head.weight"]}


def state_of_nanochat(config: ModelConfig, tensors: Tensors) -> Tensors:
    state = {"token_embedding.weight": tensors["model.embed_tokens.weight"]}
    for layer in range(config.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        q, k, v = (tensors[f"{theirs}.self_attn.{kind}_proj.weight"] for kind in "qkv")
        qkv = [swap_halves(q, config.num_heads), swap_halves(k, config.num_heads), v]
        state[f"{ours}.attention.qkv.weight"] = torch.cat(qkv)  # (3C, C)
        state |= {f"{ours}.{o}.weight": tensors[f"{theirs}.{n}.weight"] for o, n in NANOCHAT_BLOCK.items()}
    return with_head(config, state, tensors)
