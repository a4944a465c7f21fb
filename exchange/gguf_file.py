"""GGUF files, which llama.cpp, Ollama and programs built on them run: what they can express, and writing them.

llama.cpp's own converter is not used. It recognises a pre-tokenizer by the ids of one fixed text, so it refuses every
vocabulary that is not on its list, and it assumes a feed-forward network of four times the model's width. llama.cpp's
architecture "gpt2" is GPT-2's form with the tanh approximation of GELU; there is none for our other forms.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.errors import ConfigError
from common.files import atomic_write
from exchange.extras import require_package
from model import ModelConfig, TransformerLanguageModel
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_base import valid_unicode
from tokenizer_bpe import BPETokenizer, obstacle_to_tiktoken

if TYPE_CHECKING:
    import gguf

LAYER_NORM_EPS = 1e-5  # PyTorch's default, which the model uses
# Parts of a layer: (GGUF's name, our name).
PARTS = (
    ("attn_norm", "norm1"),
    ("attn_qkv", "attention.qkv"),
    ("attn_output", "attention.out_proj"),
    ("ffn_norm", "norm2"),
    ("ffn_up", "feed_forward.fc1"),
    ("ffn_down", "feed_forward.fc2"),
)


# What can be expressed


def require_gguf(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises ConfigError, naming the option, for a model or a tokenizer that GGUF or llama.cpp cannot express, and if
    the package gguf is missing."""
    if problem := obstacle_to_gguf(config, tokenizer):
        raise ConfigError(f"llama.cpp cannot run this model, so there is no GGUF file of it: {problem}.")
    require_package("gguf", "Writing a GGUF file")


def obstacle_to_gguf(config: ModelConfig, tokenizer: Tokenizer) -> str:
    """Why llama.cpp's "gpt2" cannot be this model; "" if it can."""
    expected = {
        "activation": ("gelu_tanh", "gelu"),
        "norm": ("layernorm",),
        "position": ("learned",),
        "qk_norm": (False,),
        "logit_softcap": (0,),
        "embed_norm": (False,),
    }
    others = [
        f"{name} {json.dumps(allowed[0])} (here {json.dumps(value)})"
        for name, allowed in expected.items()
        if (value := getattr(config, name)) not in allowed
    ]
    if others:
        return f"it runs only GPT-2's form (configs/gpt2_small.json), which has {', '.join(others)}"
    if tokenizer.vocab_size > config.vocab_size:
        return f"the tokenizer has {tokenizer.vocab_size:,} ids and the model a vocab_size of {config.vocab_size:,}"
    if isinstance(tokenizer, BPETokenizer) and (problem := obstacle_to_tiktoken(json.loads(tokenizer.to_json()))):
        return f"of its tokenizer, {problem}"
    return ""


# Writing


def write_gguf(
    path: str | Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    name: str,
    chat_template: str | None = None,
) -> None:
    """Write the model, in fp32 and on the CPU, and its tokenizer to `path`, whole or not at all.

    `chat_template` is in Jinja. Raises what `require_gguf` raises, before anything is written.
    """
    require_gguf(model.config, tokenizer)
    import gguf

    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the GGUF file to write.")
    tensors = dict(named_tensors(model))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values()), "weights were rounded on the way here"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        writer = gguf.GGUFWriter(file.name, "gpt2")  # opens the file by name; `file` makes it atomic
        try:
            add_shape(writer, model.config, name)
            if isinstance(tokenizer, CharacterTokenizer):
                add_characters(writer, tokenizer, model.config.vocab_size)
            else:
                add_bpe(writer, tokenizer, model.config.vocab_size)
            if chat_template is not None:
                writer.add_chat_template(chat_template)
            for tensor_name, tensor in tensors.items():
                writer.add_tensor(tensor_name, tensor.numpy())
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def named_tensors(model: TransformerLanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under GGUF's names, oriented as in nn.Linear. llama.cpp needs every bias: zeros where we have
    none."""
    weights = model.state_dict()

    def pair(theirs: str, ours: str) -> Iterator[tuple[str, torch.Tensor]]:
        weight = weights[f"{ours}.weight"]
        yield f"{theirs}.weight", weight
        yield f"{theirs}.bias", weights.get(f"{ours}.bias", torch.zeros(weight.size(0)))

    yield "token_embd.weight", weights["token_embedding.weight"]
    yield "position_embd.weight", weights["positional_embedding.weight"]
    if not model.config.tie_embeddings:  # without it, llama.cpp uses the token embedding
        yield "output.weight", weights["head.weight"]
    yield from pair("output_norm", "ln_f")
    for layer in range(model.config.num_layers):
        for theirs, ours in PARTS:
            yield from pair(f"blk.{layer}.{theirs}", f"blocks.{layer}.{ours}")


def add_shape(writer: gguf.GGUFWriter, config: ModelConfig, name: str) -> None:
    import gguf

    writer.add_name(valid_unicode(name))
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ff_dim)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_eps(LAYER_NORM_EPS)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)


def add_bpe(writer: gguf.GGUFWriter, tokenizer: BPETokenizer, vocab_size: int) -> None:
    """Byte-level BPE in GPT-2's letters for bytes. Ids without a token get a name that no text can produce (it has a
    space, which those letters write differently), and are never sampled."""
    from gguf import TokenType

    content = json.loads(tokenizer.to_json())
    tokens = [f"[unused {i}]" for i in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, i in content["model"]["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for token, i in tokenizer.special_ids.items():
        tokens[i], types[i] = token, TokenType.CONTROL
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_add_bos_token(False)
    # Without these, llama.cpp takes id 11 as the beginning and the end of a text.
    end = tokenizer.end_of_text_id
    if end is None:
        end = next(iter(tokenizer.unused_ids), vocab_size - 1)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    for token, add in (("<|pad|>", writer.add_pad_token_id), ("<|unk|>", writer.add_unk_token_id)):
        if token in tokenizer.special_ids:
            add(tokenizer.special_ids[token])


def add_characters(writer: gguf.GGUFWriter, tokenizer: CharacterTokenizer, vocab_size: int) -> None:
    """A character vocabulary as RWKV's kind of tokenizer, which takes the longest token that matches: here, the bytes
    of one character. This kind needs no special token; with "gpt2" one of the characters would end the text. llama.cpp
    refuses text with other characters."""
    from gguf import TokenType

    # No UTF-8 text contains 0xff. Ids beyond the tokenizer's are never read, but each needs its own name.
    contents = [chr(code).encode() for code in tokenizer.codes]
    contents += [b"\xff%d" % i for i in range(len(contents), vocab_size)]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["".join(f"\\x{byte:02x}" for byte in content) for content in contents])
    unused = vocab_size - tokenizer.vocab_size
    writer.add_token_types([TokenType.NORMAL] * tokenizer.vocab_size + [TokenType.UNUSED] * unused)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
