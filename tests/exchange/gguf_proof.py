"""Proof that llama.cpp runs a GGUF file as our model: the same token ids, the same next tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

from common.errors import CheckpointError
from exchange.gguf_file import is_special_name
from exchange.hf_tokenizer import probe_text
from model import TransformerBlock, TransformerLanguageModel
from tests.exchange.llama_server import TOP, LlamaServer
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_bpe import BPETokenizer

# Largest difference of log-probabilities between llama.cpp and a model with its GELU. That GELU's rounding depends on
# the last bit of its input: with random weights, 2 layers of 64 were 3e-4 apart, 12 of 768 up to 4e-3. A wrong file
# differs more.
TOLERANCE = 1e-2
# Largest change of the perplexity by rounding weights to f16 or q8_0, whose log-probabilities cannot be equal.
PERPLEXITY_TOLERANCE = 0.01
LONGEST_SCORED = 256  # tokens of each text whose probabilities are compared: llama.cpp is asked for one at a time
TABLE_ENDS = 10.0  # beyond it, llama.cpp computes GELU without its fp16 table


# The model as llama.cpp computes it


def with_tanh(model: TransformerLanguageModel) -> TransformerLanguageModel:
    """The same weights with the tanh approximation of GELU (Hendrycks & Gimpel 2016, section 2)."""
    with torch.device("meta"):
        twin = TransformerLanguageModel(dataclasses.replace(model.config, activation="gelu_tanh"))
    twin.load_state_dict(model.state_dict(), assign=True)
    return twin.eval()


def with_table(model: TransformerLanguageModel) -> TransformerLanguageModel:
    """`with_tanh`, rounded as llama.cpp does it on a CPU: it looks GELU up in a table of fp16 values."""
    if model.config.is_gated:
        return model
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
    """The largest difference of a logit, at any position of the texts, that the tanh approximation of GELU makes; 0.0
    for a model that has it."""
    if model.config.activation != "gelu":
        return 0.0
    twin = with_tanh(model)
    batches = [torch.tensor(ids)[None] for _, ids in cut_texts(model, tokenizer, texts)]
    return max((float((model(ids) - twin(ids)).abs().max()) for ids in batches), default=0.0)


def cut_texts(
    model: TransformerLanguageModel, tokenizer: Tokenizer, texts: Sequence[str]
) -> Iterator[tuple[str, list[int]]]:
    """Texts with their ids, cut to leave room for one token more; for a character tokenizer, without the characters
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
    """How far llama.cpp is from the model: the largest differences of the log-probabilities of the TOP likeliest."""

    texts: int  # with equal ids
    compared: int  # positions in them
    difference: float  # to the model
    rounding_aside: float  # to the model with llama.cpp's GELU (`with_table`)

    def __str__(self) -> str:
        aside = f" ({self.rounding_aside:.1e} from this model with llama.cpp's GELU: tanh's, in fp16)"
        aside = aside if self.difference > self.rounding_aside else ""
        return (
            f"llama.cpp gives the same token ids on {self.texts} texts; its log-probabilities of the {TOP} likeliest "
            f"next tokens differ by at most {self.difference:.1e}{aside}"
        )


@dataclass(frozen=True)
class RoundedAgreement:
    """How far llama.cpp, with rounded weights, is from the model."""

    texts: int  # with equal ids
    compared: int  # tokens in them
    change: float  # of the perplexity, as a share of the model's

    def __str__(self) -> str:
        return (
            f"llama.cpp gives the same token ids on {self.texts} texts; its perplexity on {self.compared} tokens of "
            f"them differs by {self.change:+.3%}"
        )


def verify_gguf(
    path: str | Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str] = (),
    gguf_type: str = "f32",
) -> Agreement | RoundedAgreement:
    """Load the file with llama.cpp and compare token ids and next tokens with the model's, in fp32 and on the CPU, on
    `texts` and on text of many kinds.

    Raises CheckpointError if llama.cpp cannot load the file or answers differently.
    """
    texts = [probe_text(tokenizer), *texts]
    if isinstance(tokenizer, BPETokenizer):
        texts = [as_llama_cpp_reads(text, tokenizer) for text in texts]
    pairs = list(cut_texts(model, tokenizer, texts))
    server = LlamaServer(path, model.config)
    for text, _ in pairs:
        require_same_ids(path, tokenizer, text, server.tokenize(text))
    prompts = [ids for _, ids in pairs]
    compare = compare_next_tokens if gguf_type == "f32" else compare_perplexity
    return compare(path, model, tokenizer, prompts, server)


def compare_next_tokens(
    path: str | Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    server: LlamaServer,
) -> Agreement:
    """Raises CheckpointError if they differ by more than TOLERANCE."""
    twin, harmless = with_table(model), harmless_id(tokenizer)
    difference, rounding_aside, compared = 0.0, 0.0, 0
    for ids in prompts:
        for length in sorted({1, len(ids) // 2 or 1, len(ids)}):
            top = server.next_tokens(ids[:length], harmless)
            difference = max(difference, distance(top, model, ids[:length]))
            rounding_aside = max(rounding_aside, distance(top, twin, ids[:length]))
            compared += 1
    if not rounding_aside <= TOLERANCE:
        raise CheckpointError(
            f"{path} is not this model: llama.cpp's log-probabilities differ by {rounding_aside:.1e}, and rounding "
            f"explains only {TOLERANCE:.0e}. Do not use it."
        )
    return Agreement(len(prompts), compared, difference, rounding_aside)


@torch.inference_mode()
def compare_perplexity(
    path: str | Path,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[list[int]],
    server: LlamaServer,
) -> RoundedAgreement:
    """Raises CheckpointError if the perplexities differ by more than PERPLEXITY_TOLERANCE."""
    added = []  # to the loss of each token, in nats
    for ids in (prompt[:LONGEST_SCORED] for prompt in prompts):
        ours = model(torch.tensor([ids]))[0].log_softmax(-1)  # (T, V)
        for i in range(1, len(ids)):
            if is_harmless(tokenizer, ids[i]):
                added.append(float(ours[i - 1, ids[i]]) - server.log_probability(ids[:i], ids[i]))
    change = math.expm1(fmean(added)) if added else 0.0
    if not abs(change) <= PERPLEXITY_TOLERANCE:
        raise CheckpointError(
            f"{path} is not this model: llama.cpp's perplexity differs by {change:+.2%}, and rounding may explain "
            f"{PERPLEXITY_TOLERANCE:.0%}. Do not use it; --gguf_type f32 rounds nothing."
        )
    return RoundedAgreement(len(prompts), len(added), change)


def as_llama_cpp_reads(text: str, tokenizer: BPETokenizer) -> str:
    """The text without what llama.cpp is known to read otherwise: it brings no text into NFC, as Qwen's tokenizer does,
    and finds no added tokens that it takes as special."""
    for name in filter(is_special_name, tokenizer.found_in_text):
        text = text.replace(name, "")
    return tokenizer.decode(tokenizer.encode(text))


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
    """The first of `is_harmless`."""
    return next(i for i in range(tokenizer.vocab_size) if is_harmless(tokenizer, i))


def is_harmless(tokenizer: Tokenizer, token: int) -> bool:
    """Whether a token is of whole characters and does not end a text: llama.cpp reports its probability."""
    text = tokenizer.decode([token])
    return token not in tokenizer.special_ids.values() and bool(text) and "\ufffd" not in text


@torch.inference_mode()
def distance(top: dict[int, float], model: TransformerLanguageModel, prompt: list[int]) -> float:
    """The largest difference between the log-probabilities in `top`, by id, and the model's after the prompt."""
    ours = model(torch.tensor([prompt]))[0, -1].log_softmax(-1)  # (V,)
    return max(abs(logprob - float(ours[i])) for i, logprob in top.items())
