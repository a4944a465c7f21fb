"""Write GGUF files for llama.cpp, Ollama and programs built on them.

llama.cpp's own converter is not used: it refuses every vocabulary that is not on its list, because it recognises a
pre-tokenizer by the ids of one fixed text, and it assumes that ff_dim is 4 * embed_dim. llama.cpp's architecture "gpt2"
is GPT-2's form with the tanh approximation of GELU; "llama", "qwen2" and "qwen3" are the classes of hf_llama.py. Our
other forms have none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from common.errors import ConfigError, require_packages
from common.files import atomic_write
from exchange.hf_common import ConversionError
from exchange.hf_model import CONVERSIONS, choose_hf_model_type
from model import TransformerLanguageModel, scale_frequencies
from model_config import ModelConfig
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_bpe import NFC, BPETokenizer, replace_surrogates, shorten_stage

if TYPE_CHECKING:
    import gguf

# What can be expressed


def require_gguf(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raise ConfigError, naming the option, if llama.cpp cannot run this model or tokenizer, or if gguf is missing."""
    if problem := find_gguf_obstacle(config, tokenizer):
        raise ConfigError(f"llama.cpp cannot run this model, so it cannot be exported as GGUF: {problem}.")
    require_packages("gguf")


def find_gguf_obstacle(config: ModelConfig, tokenizer: Tokenizer) -> str:
    """Return why no llama.cpp architecture fits this model, or ""."""
    try:
        kind = choose_hf_model_type(config)
    except ConversionError as wrong:
        return str(wrong)
    if kind != "llama" and config.rope_scaling:
        return f"its {kind} architecture has no rope_scaling"
    if tokenizer.vocab_size > config.vocab_size:
        return f"the tokenizer has {tokenizer.vocab_size:,} ids and the model a vocab_size of {config.vocab_size:,}"
    if isinstance(tokenizer, BPETokenizer) and (problem := find_bpe_obstacle(tokenizer)):
        return f"its tokenizer {problem}"
    return ""


def find_bpe_obstacle(tokenizer: BPETokenizer) -> str:
    """Return what llama.cpp would do differently with this byte-level BPE, or "".

    Pre-tokenizers are built into llama.cpp, each under a name. It does not normalize to NFC, which is accepted here:
    most text is NFC already.
    """
    content = json.loads(tokenizer.to_json())
    model, added = content["model"], content.get("added_tokens") or []
    if not tokenizer.splitting:
        return f"has a pre-tokenizer that is not known here: {shorten_stage(content.get('pre_tokenizer'))}"
    if content.get("normalizer") not in (None, NFC):
        return f"has a normalizer that llama.cpp lacks: {shorten_stage(content['normalizer'])}"
    for token in added:
        if any(token.get(key) for key in ("lstrip", "rstrip", "single_word")) and not token.get("special"):
            return f"strips spaces or matches whole words with the added token {token['content']!r:.60}"
    # llama.cpp ignores merges (a word that is a token is taken whole) exactly for Llama 3's pre-tokenizer.
    if bool(model.get("ignore_merges")) != (tokenizer.splitting == "llama-bpe"):
        reachable = {token["content"] for token in added} | {"".join(pair) for pair in _read_merges(content)}
        if unreachable := [token for token in model["vocab"] if len(token) > 1 and token not in reachable]:
            return f"has tokens that no merge creates, such as {unreachable[0]!r:.60}"
    return ""


def is_special_name(name: str) -> bool:
    """Return whether llama.cpp treats an added token as special by its name alone, like Qwen's <|fim_prefix|>."""
    return name.startswith("<|") and name.endswith("|>")


def _read_merges(content: dict[str, Any]) -> list[list[str]]:
    """Return the merges of a `tokenizers` file; older files store each pair as one string."""
    return [pair.split(" ") if isinstance(pair, str) else pair for pair in content["model"]["merges"]]


# Writing


def write_gguf(
    path: str | Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    name: str,
    gguf_type: str = "f32",
    chat_template: str | None = None,
) -> None:
    """Write the model, in fp32 and on the CPU, and its tokenizer to `path`, whole or not at all.

    `gguf_type`: "f16", "f32" or "q8_0"; `chat_template` is in Jinja. Raises what `require_gguf` raises, before anything
    is written.
    """
    require_gguf(model.config, tokenizer)
    import gguf

    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the GGUF file to write.")
    tensors = dict(to_gguf_tensors(model))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values()), "weights were rounded on the way here"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        writer = gguf.GGUFWriter(file.name, choose_hf_model_type(model.config))  # writes to the temporary file's name
        try:
            _add_shape(writer, model.config, name)
            writer.add_file_type(_file_type(gguf_type))
            if gguf_type == "q8_0":
                writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
            if isinstance(tokenizer, CharacterTokenizer):
                _add_characters(writer, tokenizer, model.config.vocab_size)
            else:
                _add_bpe(writer, tokenizer, model.config.vocab_size)
            if chat_template is not None:
                writer.add_chat_template(chat_template)
            for tensor_name, tensor in tensors.items():
                stored = _choose_storage(tensor_name, tensor, gguf_type)
                writer.add_tensor(tensor_name, gguf.quants.quantize(tensor.numpy(), stored), raw_dtype=stored)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()


def _file_type(gguf_type: str) -> int:
    """Return llama.cpp's number for the file's main weight type."""
    from gguf import LlamaFileType

    return {"f32": LlamaFileType.ALL_F32, "f16": LlamaFileType.MOSTLY_F16, "q8_0": LlamaFileType.MOSTLY_Q8_0}[gguf_type]


def _choose_storage(name: str, tensor: torch.Tensor, gguf_type: str) -> gguf.GGMLQuantizationType:
    """Return the type in which a tensor is stored, as llama.cpp's converter does.

    Gains, biases and positions stay in fp32. Rows that are not whole q8_0 blocks are stored as f16.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if tensor.dim() < 2 or name == "position_embd.weight":
        return GGMLQuantizationType.F32
    storage = GGMLQuantizationType[gguf_type.upper()]
    block, _ = GGML_QUANT_SIZES[storage]
    return GGMLQuantizationType.F16 if tensor.size(-1) % block else storage


def to_gguf_tensors(model: TransformerLanguageModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under GGUF's names, oriented as in nn.Linear.

    llama.cpp's "llama" applies RoPE to neighbouring pairs, transformers to the halves of a head: `_interleave_halves`.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    config = model.config
    kind = choose_hf_model_type(config)
    names = get_tensor_name_map(MODEL_ARCH[kind.upper()], config.num_layers)
    for theirs, tensor in CONVERSIONS[kind].tensors(config, model.state_dict()).items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert name is not None, theirs
        if kind == "gpt2" and name.startswith("blk.") and tensor.dim() == 2:  # GPT-2's Conv1D stores (in, out)
            tensor = tensor.T
        elif kind == "llama" and ".attn_q." in name:
            tensor = _interleave_halves(tensor, config.num_heads)
        elif kind == "llama" and ".attn_k." in name:
            tensor = _interleave_halves(tensor, config.num_kv_heads)
        yield name, tensor.contiguous()
    if config.rope_scaling:
        half = config.head_dim // 2
        frequencies = config.rope_base ** (-torch.arange(half) / half)
        # llama.cpp divides the frequencies by this
        yield (
            "rope_freqs.weight",
            frequencies / scale_frequencies(frequencies, *config.rope_scaling),
        )


def _interleave_halves(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the halves of each head in the rows of a q or k projection, (heads * D, C) or (heads * D,)."""
    return rows.view(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)  # (heads, D/2, 2, C)


def _add_shape(writer: gguf.GGUFWriter, config: ModelConfig, name: str) -> None:
    writer.add_name(replace_surrogates(name))
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ff_dim)
    writer.add_head_count(config.num_heads)
    if choose_hf_model_type(config) == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(config.num_kv_heads)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_freq_base(config.rope_base)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_vocab_size(config.vocab_size)


def _add_bpe(writer: gguf.GGUFWriter, tokenizer: BPETokenizer, vocab_size: int) -> None:
    """Add a byte-level BPE vocabulary, spelled in GPT-2's byte-to-unicode mapping.

    Ids without a token get a name with a space, which no text can produce in that spelling, and are never sampled.
    USER_DEFINED makes llama.cpp find added tokens in text, as `encode` does; but see `is_special_name`.
    """
    from gguf import TokenType

    content = json.loads(tokenizer.to_json())
    tokens = [f"[unused {i}]" for i in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    for token, i in content["model"]["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for token in content.get("added_tokens") or []:
        i, is_control = token["id"], token["special"] or is_special_name(token["content"])
        tokens[i], types[i] = token["content"], TokenType.CONTROL if is_control else TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in _read_merges(content)])
    writer.add_add_bos_token(tokenizer.bos_id is not None)
    # Without these, llama.cpp uses id 11 as the beginning and the end of a text.
    other = next(iter(tokenizer.unused_ids), vocab_size - 1)
    writer.add_bos_token_id(other if tokenizer.start_id is None else tokenizer.start_id)
    writer.add_eos_token_id(other if tokenizer.end_of_text_id is None else tokenizer.end_of_text_id)
    for token, add in (("<|pad|>", writer.add_pad_token_id), ("<|unk|>", writer.add_unk_token_id)):
        if token in tokenizer.special_ids:
            add(tokenizer.special_ids[token])


def _add_characters(writer: gguf.GGUFWriter, tokenizer: CharacterTokenizer, vocab_size: int) -> None:
    """Add a character vocabulary as an RWKV tokenizer, which always takes the longest matching token.

    Each token is the UTF-8 bytes of one character. Unlike "gpt2", RWKV needs no special token, so no character ends
    the text. llama.cpp refuses characters that are not in the vocabulary.
    """
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
