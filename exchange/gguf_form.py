"""A model in the GGUF form, which llama.cpp, Ollama and what is built on them run; and proof that they run this model.

Written without llama.cpp's own converter: it knows a pre-tokenizer by the ids it gives to a certain text, so that it
refuses every vocabulary that is not on its list, and it takes the feed-forward network to be four times as wide as the
model. llama.cpp's architecture "gpt2" is GPT-2's form with the tanh approximation of GELU; it has none for the others.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from common.chat import ChatTemplate
from common.errors import CheckpointError, ConfigError
from common.files import atomic_write
from exchange.llama_server import TOP, LlamaServer
from model import ModelConfig, TransformerBlock, TransformerLanguageModel
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_base import END_OF_TEXT, valid_unicode
from tokenizer_bpe import PROBE, BPETokenizer, obstacle_to_tiktoken

if TYPE_CHECKING:
    import gguf

PRECISIONS = ("fp32", "fp16")
LAYER_NORM_EPS = 1e-5  # PyTorch's default, which the model has
LARGEST_FP16 = 65504.0
# Of a layer: GGUF's name, ours.
PARTS = (
    ("attn_norm", "norm1"),
    ("attn_qkv", "attention.qkv"),
    ("attn_output", "attention.out_proj"),
    ("ffn_norm", "norm2"),
    ("ffn_up", "feed_forward.fc1"),
    ("ffn_down", "feed_forward.fc2"),
)
# Between log-probabilities of llama.cpp and of a model with its GELU, whose rounding turns on the last bit of what
# enters it: with random weights, 2 layers of 64 were 3e-4 apart, 12 of 768 up to 4e-3. Matrices in fp16 make it round
# more. A wrong file is further off than either.
TOLERANCES = {"fp32": 1e-2, "fp16": 1e-1}
TABLE_ENDS = 10.0  # beyond it, llama.cpp does not round what it takes GELU of
INSTALL = "pip install -r requirements-extras.txt"


# What can be expressed


def require_gguf(config: ModelConfig, tokenizer: Tokenizer, precision: str = "fp32") -> None:
    """Raises ConfigError, naming the option, for a model, a tokenizer or a precision that GGUF or llama.cpp cannot
    express, and if the package that writes the form is missing."""
    if precision not in PRECISIONS:
        raise ConfigError(f"precision is {precision!r}; GGUF files are written in {' or '.join(PRECISIONS)}.")
    if problem := obstacle_to_gguf(config, tokenizer):
        raise ConfigError(f"llama.cpp cannot run this model, so there is no GGUF file of it: {problem}.")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"Writing a GGUF file needs the package gguf: {INSTALL}")


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
        return f"it runs the form of GPT-2 alone (configs/gpt2_small.json), which has {', '.join(others)}"
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
    precision: str = "fp32",
    chat_template: str | None = None,
) -> None:
    """Write the model, in fp32 and on the CPU, and its tokenizer to `path`, whole or not at all.

    `precision` is that of the matrices; "fp16" halves the file. `chat_template` is in Jinja. Raises what `require_gguf`
    raises, and ConfigError for weights beyond the range of fp16, before anything is written.
    """
    require_gguf(model.config, tokenizer, precision)
    import gguf

    path = Path(path)
    if path.is_dir():
        raise ConfigError(f"{path} is a folder; name the GGUF file that is to be written.")
    tensors = dict(named_tensors(model))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values()), "weights were rounded on the way here"
    if precision == "fp16":
        tensors = {name: rounded(name, tensor) for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        writer = gguf.GGUFWriter(file.name, "gpt2")  # it opens the file once more; that handle is for what comes after
        try:
            add_shape(writer, model.config, name, precision)
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
    """Under GGUF's names, in the orientation of nn.Linear. llama.cpp asks for every bias: zeros where there is none."""
    weights = model.state_dict()

    def pair(theirs: str, ours: str) -> Iterator[tuple[str, torch.Tensor]]:
        weight = weights[f"{ours}.weight"]
        yield f"{theirs}.weight", weight
        yield f"{theirs}.bias", weights.get(f"{ours}.bias", torch.zeros(weight.size(0)))

    yield "token_embd.weight", weights["token_embedding.weight"]
    yield "position_embd.weight", weights["positional_embedding.weight"]
    if not model.config.tie_embeddings:  # where it is missing, llama.cpp takes the token embedding
        yield "output.weight", weights["head.weight"]
    yield from pair("output_norm", "ln_f")
    for layer in range(model.config.num_layers):
        for theirs, ours in PARTS:
            yield from pair(f"blk.{layer}.{theirs}", f"blocks.{layer}.{ours}")


def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """To fp16 if it is one of the matrices that tokens are multiplied with. What is added stays in fp32, as in files of
    llama.cpp's own: adding it takes no time."""
    if tensor.dim() < 2 or name == "position_embd.weight":
        return tensor
    if tensor.abs().max() > LARGEST_FP16:
        raise ConfigError(f"{name} has weights beyond {LARGEST_FP16:,.0f}, the range of fp16; write the file in fp32.")
    return tensor.half()


def add_shape(writer: gguf.GGUFWriter, config: ModelConfig, name: str, precision: str) -> None:
    import gguf

    writer.add_name(valid_unicode(name))
    writer.add_context_length(config.max_seq_len)
    writer.add_embedding_length(config.embed_dim)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.ff_dim)
    writer.add_head_count(config.num_heads)
    writer.add_layer_norm_eps(LAYER_NORM_EPS)
    file_type = gguf.LlamaFileType.ALL_F32 if precision == "fp32" else gguf.LlamaFileType.MOSTLY_F16
    writer.add_file_type(file_type)


def add_bpe(writer: gguf.GGUFWriter, tokenizer: BPETokenizer, vocab_size: int) -> None:
    """Byte-level BPE in GPT-2's letters for bytes. Ids that no token has get a name no text comes to (of a space, for
    which those letters have another sign), and are never sampled."""
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
    # llama.cpp takes id 11 for the beginning and the end of a text where nothing else is said.
    end = tokenizer.end_of_text_id
    if end is None:
        end = next(iter(tokenizer.unused_ids), vocab_size - 1)
    writer.add_bos_token_id(end)
    writer.add_eos_token_id(end)
    for token, add in (("<|pad|>", writer.add_pad_token_id), ("<|unk|>", writer.add_unk_token_id)):
        if token in tokenizer.special_ids:
            add(tokenizer.special_ids[token])


def add_characters(writer: gguf.GGUFWriter, tokenizer: CharacterTokenizer, vocab_size: int) -> None:
    """A character vocabulary is RWKV's kind of tokenizer, which takes the longest token that the text goes on with:
    here each is the bytes of one character. It is the kind that needs no special token; with "gpt2" one of the
    characters would end the text. llama.cpp answers text with other characters by an error."""
    from gguf import TokenType

    # 0xff stands in no UTF-8 text: ids beyond the tokenizer's are never read, and each needs a name of its own.
    contents = [chr(code).encode() for code in tokenizer.codes]
    contents += [b"\xff%d" % i for i in range(len(contents), vocab_size)]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list(["".join(f"\\x{byte:02x}" for byte in content) for content in contents])
    unused = vocab_size - tokenizer.vocab_size
    writer.add_token_types([TokenType.NORMAL] * tokenizer.vocab_size + [TokenType.UNUSED] * unused)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


# The model as llama.cpp computes it


def with_tanh(model: TransformerLanguageModel) -> TransformerLanguageModel:
    """The same weights with the tanh approximation of GELU (Hendrycks & Gimpel 2016, section 2)."""
    with torch.device("meta"):
        twin = TransformerLanguageModel(dataclasses.replace(model.config, activation="gelu_tanh"))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval()


def with_table(model: TransformerLanguageModel) -> TransformerLanguageModel:
    """`with_tanh`, rounded as on llama.cpp's CPU, which looks GELU up in a table: fp16 to fp16."""
    twin = with_tanh(model)
    for block in twin.blocks:
        assert isinstance(block, TransformerBlock)
        block.feed_forward.fc1.register_forward_hook(lambda module, inputs, output: through_fp16(output))
        block.feed_forward.fc2.register_forward_pre_hook(lambda module, inputs: through_fp16(inputs[0]))
    return twin


def through_fp16(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x.abs() < TABLE_ENDS, x.half().float(), x)


@torch.inference_mode()
def tanh_difference(model: TransformerLanguageModel, tokenizer: Tokenizer, texts: Sequence[str]) -> float:
    """The largest difference between a logit of the model and that of the model with tanh's GELU, at any position of
    the texts; 0.0 for a model that has tanh's."""
    if model.config.activation == "gelu_tanh":
        return 0.0
    twin = with_tanh(model)
    batches = [torch.tensor(ids)[None] for _, ids in cut_texts(model, tokenizer, texts)]
    return max((float((model(ids) - twin(ids)).abs().max()) for ids in batches), default=0.0)


def cut_texts(
    model: TransformerLanguageModel, tokenizer: Tokenizer, texts: Sequence[str]
) -> Iterator[tuple[str, list[int]]]:
    """Texts with their ids, as many as leave room for one token more; for a character tokenizer without the characters
    that it lacks."""
    for text in texts:
        if isinstance(tokenizer, CharacterTokenizer):
            text = tokenizer.decode(tokenizer.encode(text, unknown="drop"))
        ids = tokenizer.encode(text)[: model.config.max_seq_len - 1].tolist()
        if ids:
            yield text, ids


# Proof


@dataclass(frozen=True)
class Agreement:
    """How far llama.cpp is from the model: the largest difference between log-probabilities of the TOP likeliest."""

    texts: int  # whose ids are equal
    compared: int  # places in them
    difference: float  # from the model
    rounding_aside: float  # from the model with llama.cpp's GELU (`with_table`)

    def __str__(self) -> str:
        return (
            f"llama.cpp gives the same token ids on {self.texts} texts; its log-probabilities of the {TOP} likeliest "
            f"next tokens differ by at most {self.difference:.1e} ({self.rounding_aside:.1e} from this model with "
            "llama.cpp's GELU: tanh's, in fp16)"
        )


def verify_gguf(
    path: str | Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str] = (),
    precision: str = "fp32",
) -> Agreement | None:
    """Load the file with llama.cpp and compare ids and next tokens with those of the model, in fp32 and on the CPU, on
    `texts` and on text of many kinds. None where xllamacpp, which brings llama.cpp, is not installed.

    Raises CheckpointError if llama.cpp cannot load the file or says something else.
    """
    if importlib.util.find_spec("xllamacpp") is None:
        return None
    probe = PROBE if isinstance(tokenizer, BPETokenizer) else "".join(map(chr, tokenizer.codes))
    pairs = list(cut_texts(model, tokenizer, (probe, *texts)))
    twin, server = with_table(model), LlamaServer(path, model.config)
    harmless = harmless_id(tokenizer)
    difference, rounding_aside, compared = 0.0, 0.0, 0
    for text, ids in pairs:
        require_same_ids(path, tokenizer, text, server.tokenize(text))
        for length in sorted({1, len(ids) // 2 or 1, len(ids)}):
            top = server.next_tokens(ids[:length], harmless)
            difference = max(difference, distance(top, model, ids[:length]))
            rounding_aside = max(rounding_aside, distance(top, twin, ids[:length]))
            compared += 1
    if not rounding_aside <= TOLERANCES[precision]:
        raise CheckpointError(
            f"{path} is not this model: llama.cpp's log-probabilities differ by {rounding_aside:.1e}, and rounding "
            f"explains {TOLERANCES[precision]:.0e}. Do not use it."
        )
    return Agreement(len(pairs), compared, difference, rounding_aside)


def require_same_ids(path: str | Path, tokenizer: Tokenizer, text: str, theirs: list[int]) -> None:
    ours = tokenizer.encode(text).tolist()
    if theirs == ours:
        return
    same = next((i for i, (a, b) in enumerate(zip(theirs, ours, strict=False)) if a != b), min(len(theirs), len(ours)))
    raise CheckpointError(
        f"{path} has another tokenizer: llama.cpp gives other ids from token {same} on, after "
        f"{tokenizer.decode(ours[:same])[-40:]!r}. Do not use it."
    )


def harmless_id(tokenizer: Tokenizer) -> int:
    """A token of whole characters that ends nothing."""
    special = tokenizer.special_ids.values() if isinstance(tokenizer, BPETokenizer) else ()
    for i in range(tokenizer.vocab_size):
        if i not in special and (text := tokenizer.decode([i])) and "\ufffd" not in text:
            return i
    raise AssertionError("a vocabulary without a single character")


@torch.inference_mode()
def distance(top: dict[int, float], model: TransformerLanguageModel, prompt: list[int]) -> float:
    """The largest difference between the log-probabilities in `top`, by id, and the model's of what follows."""
    ours = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)  # (V,)
    return max(abs(logprob - float(ours[i])) for i, logprob in top.items())


# What to type


def llama_command(
    path: str | Path, config: ModelConfig, prompt: str = "Once upon a time", template: ChatTemplate | None = None
) -> str:
    """llama.cpp's command for text that goes on from a prompt, or with a `template` for a chat."""
    tokens = min(200, config.max_seq_len // 2)
    if template:
        return f"llama-cli -m {shlex.quote(str(path))} --jinja -n {tokens}"
    return f"llama-completion -m {shlex.quote(str(path))} -no-cnv -n {tokens} -p {shlex.quote(prompt)}"


def modelfile(path: str | Path, config: ModelConfig, template: ChatTemplate | None = None) -> str:
    """What Ollama is told of the file, in a Modelfile beside it. Its default context is longer than most of ours."""
    form = '"{{ .Prompt }}"'
    if template:
        form = (
            f'"""{END_OF_TEXT}{{{{ range .Messages }}}}'
            f'{{{{ if eq .Role "assistant" }}}}{template.assistant} {{{{ .Content }}}}{END_OF_TEXT}'
            f'{{{{ else if eq .Role "system" }}}}{template.system} {{{{ .Content }}}}\n'
            f'{{{{ else }}}}{template.user} {{{{ .Content }}}}\n{{{{ end }}}}{{{{ end }}}}{template.assistant}"""'
        )
    return f"FROM ./{Path(path).name}\nPARAMETER num_ctx {config.max_seq_len}\nTEMPLATE {form}\n"


def ollama_commands(path: str | Path) -> str:
    """To be typed in the folder of the file and the Modelfile."""
    name = re.sub(r"[^a-z0-9._-]+", "-", Path(path).stem.lower()).strip("-._") or "model"
    return f'ollama create {name} -f Modelfile\nollama run {name} "Once upon a time"'
