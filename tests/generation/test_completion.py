"""From prompts to text: the cache against a loop without one, seeds, stop strings, whole characters."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from generation import completion, stream
from generation.completion import Completion, encode_prompt, generate
from generation.sampling import Sampling
from generation.stream import forbid_unused_ids
from model import KVCache, TransformerLanguageModel
from model_config import ModelConfig
from tests.generation.helpers import (
    CHARACTERS,
    CONTEXT,
    FAR,
    GREEDY,
    SAMPLED,
    changed,
    either_way,
    next_token,
    random_model,
    texts,
)
from tokenizer import CharacterTokenizer
from tokenizer_bpe import BPETokenizer, TokenizerError


class ScriptedModel(TransformerLanguageModel):
    """Continues any prompt of `prompt_length` tokens with the tokens of `script`, whatever it reads."""

    def __init__(self, vocab_size: int, script: Sequence[int], prompt_length: int):
        super().__init__(ModelConfig(vocab_size, embed_dim=4, num_heads=1, num_layers=1, max_seq_len=128))
        self.script, self.prompt_length = list(script), prompt_length

    def hidden(
        self, tokens: torch.Tensor, cache: KVCache | None = None, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(B, T, 1): the place in the script of what follows each token."""
        first = cache.lengths[0] + 1 - self.prompt_length
        super().hidden(tokens, cache)
        return (first + torch.arange(tokens.size(1))).expand(tokens.shape)[..., None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        for place, token in enumerate(self.script):
            logits[..., token] = torch.where(hidden[..., 0] == place, 50.0, logits[..., token])
        return logits


def naive_tokens(model: TransformerLanguageModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """Generate like `generate` for one prompt, but without a cache: read the whole window again for each token.

    When the window is full, its second half is kept and grows again.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    uniforms = torch.rand(sampling.max_new_tokens, generator=generator, dtype=torch.float64).tolist()
    context, window, new = model.config.max_seq_len, prompt[-model.config.max_seq_len :], []
    for uniform in uniforms:
        with torch.no_grad():
            logits = model(torch.tensor([window]))[0, -1].float()
        token = int(logits.argmax()) if sampling.temperature == 0 else next_token(logits, uniform, sampling)
        new.append(token)
        keep = context if len(window) < context else max(1, context // 2)
        window = [*window, token][-keep:]
    return new


# The cache, the batch, and the end of the context


@either_way
@pytest.mark.parametrize("prompt", ["a", "badge", "h"])
def test_below_the_context_length_the_text_is_that_of_a_loop_without_cache(model, characters, sampling, prompt):
    expected = characters.decode(naive_tokens(model, characters.encode(prompt).tolist(), sampling))
    assert len(set(expected)) > 1
    assert texts(generate(model, characters, [prompt], sampling)) == [expected]


@either_way
@pytest.mark.parametrize("prompt", ["a", "badgecab", "abcdefgh" * 2, "abcdefgh" * 5])
def test_past_the_context_it_continues_from_the_second_half(model, characters, sampling, prompt):
    sampling = changed(sampling, **FAR)
    completion = generate(model, characters, [prompt], sampling)[0]
    assert completion.tokens == len(completion.text) == 3 * CONTEXT
    assert completion.text == characters.decode(naive_tokens(model, characters.encode(prompt).tolist(), sampling))


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_keep_going(characters, context):
    model = random_model(len(CHARACTERS), max_seq_len=context)
    assert len(generate(model, characters, ["abc"], GREEDY)[0].text) == 10


@either_way
@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("length", [10, 3 * CONTEXT], ids=["within the context", "past the context"])
def test_a_batch_gives_each_prompt_the_text_it_gets_alone(characters, sampling, position, length):
    model = random_model(len(CHARACTERS), position=position)
    prompts = ["a", "badge", "", "abcdef", "hh"]
    together = generate(model, characters, prompts, changed(sampling, max_new_tokens=length))
    for i, prompt in enumerate(prompts):
        alone = generate(model, characters, [prompt], changed(sampling, max_new_tokens=length, seed=sampling.seed + i))
        assert together[i] == alone[0], f"{prompt!r} alone and with others"


def test_more_prompts_than_fit_at_once(model, characters, monkeypatch):
    prompts = [CHARACTERS[i % 8] * (1 + i % 3) for i in range(11)]
    expected = generate(model, characters, prompts, SAMPLED)
    monkeypatch.setattr(completion, "ROWS_AT_ONCE", 4)
    assert generate(model, characters, prompts, SAMPLED) == expected


def test_the_model_is_left_in_the_mode_it_was_in(model, characters):
    """Without dropout's noise while generating, and training again after, an error included."""
    noisy = random_model(len(CHARACTERS), dropout=0.5)
    noisy.load_weights(model.state_dict())
    noisy.train()
    assert texts(generate(noisy, characters, ["abc"], GREEDY)) == texts(generate(model, characters, ["abc"], GREEDY))
    assert noisy.training
    with pytest.raises(TokenizerError, match="'z'"):
        generate(noisy, characters, ["abc", "xyz"], GREEDY)
    assert noisy.training


# Seeds and prompts


def test_a_seed_gives_the_same_text_and_another_seed_another(model, characters):
    first, again, other = (
        generate(model, characters, ["ab"], changed(SAMPLED, max_new_tokens=30, seed=seed))[0].text
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_generation_neither_reads_nor_moves_the_global_random_state(model, characters):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = generate(model, characters, ["ab"], SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert generate(model, characters, ["ab"], SAMPLED) == expected


def test_an_empty_prompt_starts_a_document(bpe):
    """An empty prompt becomes the end-of-text token, which separates documents, if there is one."""
    model = random_model(bpe.vocab_size)
    text = generate(model, bpe, [""], changed(GREEDY, max_new_tokens=1))[0]
    with torch.no_grad():
        logits = model(torch.tensor([[bpe.end_of_text_id]]))[0, -1]
    logits[bpe.unused_ids] = -torch.inf
    best = int(logits.argmax())
    assert text.text == ("" if best == bpe.end_of_text_id else bpe.decode([best]))
    characters = CharacterTokenizer.train(CHARACTERS)
    assert len(generate(random_model(8), characters, [""], GREEDY)[0].text) == 10


# The choice of a token


def test_temperature_zero_top_k_one_and_a_tiny_top_p_are_greedy(model, characters):
    expected = generate(model, characters, ["abc"], changed(GREEDY, **FAR))[0].text
    for setting in ({"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1e-6}):
        sampling = Sampling(seed=3, **FAR, **{"top_p": 1.0, **setting})
        assert generate(model, characters, ["abc"], sampling)[0].text == expected, setting


def favour(model: TransformerLanguageModel, ids: Sequence[int]) -> TransformerLanguageModel:
    """Make `ids` by far the likeliest tokens, whatever was read."""
    with torch.no_grad():
        model.ln_f.weight.zero_()
        model.ln_f.bias.fill_(1.0)
        model.head.weight[list(ids)] = 10.0
    return model


@either_way
def test_special_tokens_but_end_of_text_are_never_sampled(bpe, sampling):
    unused = {1, 2}  # <|pad|> and <|unk|>
    model = favour(random_model(bpe.vocab_size), unused)
    rows = [encode_prompt(bpe, prompt) for prompt in ("the", "cat and")]
    steps = list(stream.stream(model, rows, sampling, forbid_unused_ids(model, bpe)))
    assert len(steps) == 10 and not unused & {token for tokens, _ in steps for token in tokens}


@either_way
def test_ids_of_the_model_beyond_the_tokenizers_are_never_sampled(characters, sampling):
    """A vocabulary padded to a rounder number, for speed, has ids without text."""
    padded = random_model(len(CHARACTERS) + 5)
    favour(padded, range(len(CHARACTERS), len(CHARACTERS) + 5))
    assert len(generate(padded, characters, ["abc"], sampling)[0].text) == 10


# Text as it comes: stop strings, end of text, whole characters


def streamed(model, bpe: BPETokenizer, sampling: Sampling, prompt: str = "the") -> tuple[Completion, list[str]]:
    """A completion, and the pieces as which its text came."""
    made = Completion(bpe, sampling.stop)
    steps = stream.stream(model, [encode_prompt(bpe, prompt)], sampling, forbid_unused_ids(model, bpe))
    return made, list(made.pieces(steps))


def scripted(bpe: BPETokenizer, text_or_ids: str | list[int], prompt: str = "the") -> ScriptedModel:
    script = bpe.encode(text_or_ids).tolist() if isinstance(text_or_ids, str) else text_or_ids
    return ScriptedModel(bpe.vocab_size, script, len(bpe.encode(prompt)))


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (("dog",), " cat and the "),
        ((" the d",), " cat and"),
        (("hat", "and the"), " cat "),
        (("d",), " cat an"),
        (("absent",), " cat and the dog and the hat"),
    ],
)
def test_a_stop_string_ends_the_text_wherever_the_tokens_are_cut(bpe, stop, expected):
    whole = " cat and the dog and the hat"
    made, pieces = streamed(
        scripted(bpe, whole), bpe, Sampling(max_new_tokens=len(bpe.encode(whole)), temperature=0, stop=stop)
    )
    assert made.text == "".join(pieces) == expected
    stopped_after = next((n for n in range(len(whole) + 1) if any(w in whole[:n] for w in stop)), len(whole))
    needed = next(n for n in range(99) if len(bpe.decode(bpe.encode(whole)[:n])) >= stopped_after)
    assert made.tokens == needed  # not one more than it takes to know


def test_characters_of_several_tokens_are_shown_whole(bpe):
    whole = " naïve 😀👩‍👧 日本 end"
    script = bpe.encode(whole).tolist()
    assert len(bpe.encode("😀")) == 4
    made, pieces = streamed(scripted(bpe, whole), bpe, Sampling(max_new_tokens=len(script), temperature=0))
    assert made.text == "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 5  # shown as it came


def test_end_of_text_ends_the_text_and_is_not_in_it(bpe):
    script = [*bpe.encode(" cat").tolist(), bpe.end_of_text_id, *bpe.encode(" dog").tolist()]
    completion = generate(scripted(bpe, script), bpe, ["the"], Sampling(max_new_tokens=20, temperature=0))[0]
    assert completion.text == " cat"
    assert completion.tokens == len(bpe.encode(" cat")) + 1


def test_text_held_back_for_a_stop_string_is_shown_at_the_end_of_the_document(bpe):
    script = [*bpe.encode(" cat do").tolist(), bpe.end_of_text_id]
    made, pieces = streamed(scripted(bpe, script), bpe, Sampling(max_new_tokens=20, temperature=0, stop=("dog",)))
    assert made.text == "".join(pieces) == " cat do"


def test_a_text_that_has_ended_stays_as_it_is_while_others_continue(characters):
    """Rows of one batch stop at different times, and each has its own text."""
    model = random_model(len(CHARACTERS))
    prompts = ["a", "cab", "hh", "fed"]
    sampling = Sampling(max_new_tokens=12, temperature=1.5, top_p=1.0, seed=4, stop=("a",))
    free = texts(generate(model, characters, prompts, changed(sampling, stop=())))
    stopped = generate(model, characters, prompts, sampling)
    expected = [text.split("a")[0] for text in free]
    assert len({len(text) for text in expected}) > 1
    assert texts(stopped) == expected
