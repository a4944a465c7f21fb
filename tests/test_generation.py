"""From logits to text: the cache against a loop without one, the choice of tokens, stop strings, whole characters."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common import machine
from generation import cuda_graph, decoding
from generation import sampling as sampling_module
from generation.cuda_graph import StaticKVCache
from generation.decoding import generate
from generation.sampling import Sampling, choose, penalize_repetition
from generation.text_stream import TextStream
from model import KVCache, ModelConfig, TransformerLanguageModel
from tokenizer import CharacterTokenizer, TokenizerError
from tokenizer_bpe import BPETokenizer

CONTEXT = 16
CHARACTERS = "abcdefgh"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def characters() -> CharacterTokenizer:
    return CharacterTokenizer.from_characters(CHARACTERS)


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    """Bytes and a few merges: a character outside ASCII takes several tokens."""
    return BPETokenizer.train(["the cat and the dog and the hat"] * 4, vocab_size=270)


def random_model(vocab_size: int, **changes) -> TransformerLanguageModel:
    """Large random weights, so that the text depends on all of the context; float64, so that a batch rounds as one
    row does."""
    torch.manual_seed(0)
    shape = {"embed_dim": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": CONTEXT}
    config = ModelConfig(vocab_size, **shape | changes)
    model = TransformerLanguageModel(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.4)
    return model


@pytest.fixture(scope="module")
def model() -> TransformerLanguageModel:
    return random_model(len(CHARACTERS))


class ScriptedModel(TransformerLanguageModel):
    """Continues any prompt of `prompt_length` tokens with the tokens of `script`, whatever it reads."""

    def __init__(self, vocab_size: int, script: Sequence[int], prompt_length: int):
        super().__init__(ModelConfig(vocab_size, embed_dim=4, num_heads=1, num_layers=1, max_seq_len=128))
        self.script, self.prompt_length = list(script), prompt_length

    def hidden(self, tokens: torch.Tensor, cache: KVCache | None = None) -> torch.Tensor:
        """(B, T, 1): the place in the script of what follows each token."""
        first = cache.lengths[0] + 1 - self.prompt_length
        super().hidden(tokens, cache)
        return (first + torch.arange(tokens.size(1))).expand(tokens.shape)[..., None].float()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.config.vocab_size)
        for place, token in enumerate(self.script):
            logits[..., token] = torch.where(hidden[..., 0] == place, 50.0, logits[..., token])
        return logits


def next_token(logits: torch.Tensor, uniform: float, sampling: Sampling) -> int:
    """`choose` for one row, token by token as the papers describe it."""
    weights = sorted(((value / sampling.temperature, -i) for i, value in enumerate(logits.tolist())), reverse=True)
    weights = weights[: sampling.top_k or None]
    largest = weights[0][0]
    probabilities = [(-i, math.exp(value - largest)) for value, i in weights]
    total = sum(p for _, p in probabilities)
    nucleus, mass = [], 0.0
    for token, p in probabilities:
        if mass >= sampling.top_p * total:
            break
        nucleus.append((token, p))
        mass += p
    target = uniform * mass
    for token, p in nucleus:
        target -= p
        if target < 0:
            return token
    return nucleus[-1][0]


def naive_tokens(model: TransformerLanguageModel, prompt: list[int], sampling: Sampling) -> list[int]:
    """What `generate` does for one prompt, without a cache: the whole window is read again for each token.

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


def texts(completions) -> list[str]:
    return [completion.text for completion in completions]


# The cache, the batch, and the end of the context

GREEDY = Sampling(max_new_tokens=10, temperature=0)
SAMPLED = Sampling(max_new_tokens=10, temperature=1.3, top_k=6, top_p=0.95, seed=11)
FAR = {"max_new_tokens": 3 * CONTEXT}
either_way = pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])


def changed(sampling: Sampling, **values) -> Sampling:
    return dataclasses.replace(sampling, **values)


@either_way
@pytest.mark.parametrize("prompt", ["a", "badge", "h"])
def test_below_the_context_length_the_text_is_that_of_a_loop_without_cache(model, characters, sampling, prompt):
    expected = characters.decode(naive_tokens(model, characters.encode(prompt).tolist(), sampling))
    assert len(set(expected)) > 1
    assert texts(generate(model, characters, [prompt], sampling)) == [expected]


@either_way
@pytest.mark.parametrize("prompt", ["a", "badgecab", "abcdefgh" * 2, "abcdefgh" * 5])
def test_past_the_context_it_keeps_going_on_the_second_half(model, characters, sampling, prompt):
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


def test_a_prompt_longer_than_the_context_does_not_disturb_the_others(model, characters):
    sampling = changed(SAMPLED, max_new_tokens=8)
    together = generate(model, characters, ["abcdefgh" * 4, "abba"], sampling)
    assert together[1] == generate(model, characters, ["abba"], changed(sampling, seed=sampling.seed + 1))[0]


def test_more_prompts_than_fit_at_once(model, characters, monkeypatch):
    prompts = [CHARACTERS[i % 8] * (1 + i % 3) for i in range(11)]
    expected = generate(model, characters, prompts, SAMPLED)
    monkeypatch.setattr(decoding, "ROWS_AT_ONCE", 4)
    shown = [""] * len(prompts)

    def show(i: int, piece: str) -> None:
        shown[i] += piece

    assert generate(model, characters, prompts, SAMPLED, on_text=show) == expected
    assert shown == texts(expected)
    assert [completion.seed for completion in expected] == [SAMPLED.seed + i for i in range(11)]


def test_no_prompts_give_no_completions(model, characters):
    assert generate(model, characters, [], SAMPLED) == []


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


# A step of fixed shapes, read one step late: what a GPU does, on the CPU


class Recorded:
    """Stands in for a CUDA graph: recording leaves no trace on the device, a replay none in Python."""

    def __init__(self, step, cache: StaticKVCache):
        self.step, self.cache = step, cache
        before = cache.next.clone()
        self.logits = step()
        cache.next.copy_(before)

    def replay(self) -> None:
        lengths = self.cache.lengths
        self.logits.copy_(self.step())
        self.cache.lengths = lengths


@contextlib.contextmanager
def as_on_a_gpu(recording: bool = True) -> Iterator[None]:
    caches = []

    def static_cache(cache: KVCache) -> StaticKVCache:
        caches.append(StaticKVCache(cache))
        return caches[-1]

    def record(step):
        if not recording:
            raise RuntimeError("operation not permitted when stream is capturing")
        recorded = Recorded(step, caches[-1])
        return recorded, recorded.logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "runs_ahead", lambda device: True)
        patch.setattr(decoding, "StaticKVCache", static_cache)
        patch.setattr(cuda_graph, "record", record)
        with contextlib.nullcontext() if recording else pytest.warns(UserWarning, match="no CUDA graph"):
            yield


@either_way
@pytest.mark.parametrize("changes", [{}, {"position": "rope"}], ids=["learned", "rope"])
@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("recording", [True, False], ids=["recorded", "not recorded"])
def test_a_gpus_way_gives_the_same_text(characters, sampling, changes, penalty, recording):
    """Rows of different lengths, to the end of the context and past it, more than once."""
    model = random_model(len(CHARACTERS), **changes)
    prompts = ["a", "badge", "abcdefgh" * 2, "hh"]
    sampling = changed(sampling, max_new_tokens=3 * CONTEXT, repetition_penalty=penalty)
    expected = generate(model, characters, prompts, sampling)
    with as_on_a_gpu(recording):
        assert generate(model, characters, prompts, sampling) == expected
    assert len(set(texts(expected))) == 4


def test_a_gpus_way_streams_and_stops_the_same(bpe):
    """Stop strings, the end of the text and pieces of characters: decided on the host, a step late."""
    model, prompts = random_model(bpe.vocab_size, max_seq_len=64), ["the", "cat and", "dog"]
    sampling = Sampling(max_new_tokens=120, temperature=1.0, top_p=1.0, stop=("a", "th"), seed=5)

    def streamed() -> tuple[list, list]:
        pieces = []
        return generate(model, bpe, prompts, sampling, on_text=lambda *piece: pieces.append(piece)), pieces

    expected = streamed()
    with as_on_a_gpu():
        assert streamed() == expected
    assert all(completion.tokens < 120 for completion in expected[0])


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_gpus_way_with_few_tokens(model, characters, count):
    sampling = changed(SAMPLED, max_new_tokens=count)
    expected = generate(model, characters, ["abc"], sampling)
    with as_on_a_gpu():
        assert generate(model, characters, ["abc"], sampling) == expected


@pytest.mark.parametrize("context", [1, 2, 3])
def test_a_gpus_way_in_the_smallest_contexts(characters, context):
    model = random_model(len(CHARACTERS), max_seq_len=context)
    expected = generate(model, characters, ["abc"], GREEDY)
    with as_on_a_gpu():
        assert generate(model, characters, ["abc"], GREEDY) == expected


def test_on_a_gpu_the_next_step_is_queued_before_a_token_is_read(model, characters):
    steps, steps_when_shown = [], []
    real = TransformerLanguageModel.next_logits
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerLanguageModel, "next_logits", lambda *given: steps.append(1) or real(*given))
        for ahead in (False, True):
            steps.clear()
            with as_on_a_gpu() if ahead else contextlib.nullcontext():
                show = lambda i, piece: steps_when_shown.append(len(steps))  # noqa: E731
                generate(model, characters, ["abc"], changed(GREEDY, max_new_tokens=2), on_text=show)
    assert steps_when_shown == [0, 1, 1, 1, 1, 1]  # each token, and what remains at the end


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@either_way
def test_a_gpu_gives_the_text_of_the_cpu(model, characters, sampling):
    prompts = ["a", "badge", "abcdefgh" * 2, "hh"]
    sampling = changed(sampling, max_new_tokens=3 * CONTEXT, repetition_penalty=1.5)
    on_gpu = random_model(len(CHARACTERS)).cuda()
    assert generate(on_gpu, characters, prompts, sampling) == generate(model, characters, prompts, sampling)


# Seeds and prompts


def test_a_seed_gives_the_same_text_and_another_seed_another(model, characters):
    first, again, other = (
        generate(model, characters, ["ab"], changed(SAMPLED, max_new_tokens=30, seed=seed))[0].text
        for seed in (1, 1, 2)
    )
    assert first == again != other


def test_the_samples_of_one_prompt_differ(model, characters):
    assert len(set(texts(generate(model, characters, ["ab"] * 4, changed(SAMPLED, max_new_tokens=30))))) == 4


def test_generation_neither_reads_nor_moves_the_global_random_state(model, characters):
    torch.manual_seed(1)
    before = torch.get_rng_state()
    expected = generate(model, characters, ["ab"], SAMPLED)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert generate(model, characters, ["ab"], SAMPLED) == expected


def test_fewer_tokens_are_the_beginning_of_more(model, characters):
    few, many = (generate(model, characters, ["ab"], changed(SAMPLED, max_new_tokens=n))[0].text for n in (5, 30))
    assert many.startswith(few) and len(few) == 5


def test_no_new_tokens(model, characters):
    pieces = []
    completion = generate(
        model, characters, ["ab"], changed(SAMPLED, max_new_tokens=0), on_text=lambda i, piece: pieces.append(piece)
    )[0]
    assert (completion.text, completion.tokens, "".join(pieces)) == ("", 0, "")


def test_an_empty_prompt_starts_a_document(bpe):
    """With the end-of-text token, which separates documents, in front; without one, the text starts all the same."""
    model = random_model(bpe.vocab_size)
    text = generate(model, bpe, [""], changed(GREEDY, max_new_tokens=1))[0]
    with torch.no_grad():
        logits = model(torch.tensor([[bpe.end_of_text_id]]))[0, -1]
    logits[bpe.unused_ids] = -torch.inf
    best = int(logits.argmax())
    assert text.text == ("" if best == bpe.end_of_text_id else bpe.decode([best]))
    characters = CharacterTokenizer.from_characters(CHARACTERS)
    assert len(generate(random_model(8), characters, [""], GREEDY)[0].text) == 10


# The choice of a token


def test_temperature_zero_top_k_one_and_a_tiny_top_p_are_greedy(model, characters):
    expected = generate(model, characters, ["abc"], changed(GREEDY, **FAR))[0].text
    for setting in ({"temperature": 1.0, "top_k": 1}, {"temperature": 1.0, "top_p": 1e-9}, {"temperature": 1e-6}):
        sampling = Sampling(seed=3, **FAR, **{"top_p": 1.0, **setting})
        assert generate(model, characters, ["abc"], sampling)[0].text == expected, setting


logit_rows = st.lists(
    st.floats(-20, 20, allow_nan=False) | st.sampled_from([0.0, 1.0, -math.inf]), min_size=2, max_size=12
).filter(lambda row: max(row) > -math.inf)
uniform = st.floats(0, 1, exclude_max=True) | st.just(1 - 2**-53)


@settings(max_examples=300, deadline=None)
@given(logit_rows, uniform, st.floats(0.05, 3), st.integers(0, 14), st.floats(0.01, 1))
def test_choose_never_leaves_what_top_k_and_top_p_allow(row, u, temperature, top_k, top_p):
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token = int(choose(torch.tensor([row], dtype=torch.float64), torch.tensor([u], dtype=torch.float64), sampling))
    assert row[token] > -math.inf
    likelier = [value for value in row if value > row[token]]
    assert not top_k or len(likelier) < top_k
    weights = [math.exp((value - max(row)) / temperature) for value in sorted(row, reverse=True)[: top_k or None]]
    assert sum(weights[: len(likelier)]) < top_p * sum(weights) + 1e-9  # what is likelier does not fill the nucleus


@settings(max_examples=100, deadline=None)
@given(st.lists(logit_rows.filter(lambda row: len(row) >= 4).map(lambda row: row[:4]), min_size=2, max_size=5))
def test_choose_treats_each_row_on_its_own(rows):
    rows = [row if max(row) > -math.inf else [0.0] * 4 for row in rows]
    logits = torch.tensor(rows, dtype=torch.float64)
    uniforms = torch.linspace(0, 0.999, len(rows), dtype=torch.float64)
    sampling = Sampling(temperature=0.7, top_k=3, top_p=0.9)
    together = choose(logits.clone(), uniforms, sampling).tolist()
    assert together == [int(choose(logits[i : i + 1], uniforms[i : i + 1], sampling)) for i in range(len(rows))]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(temperature=1.0, top_p=1.0), 6),
        (Sampling(temperature=0.5, top_p=1.0), 6),
        (Sampling(temperature=2.0, top_k=3, top_p=1.0), 3),
        (Sampling(temperature=1.0, top_p=0.75), 3),  # 0.40 + 0.30 falls short of 0.75
    ],
    ids=["plain", "cold", "top_k", "top_p"],
)
def test_choose_draws_from_the_softmax(sampling, kept):
    """Evenly spaced uniforms hit each token as often as its probability says, to within one."""
    probabilities = torch.tensor([0.03, 0.40, 0.10, 0.30, 0.15, 0.02], dtype=torch.float64)
    count = 2000
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens = choose(probabilities.log().expand(count, -1), uniforms, sampling)
    expected = probabilities ** (1 / sampling.temperature)
    expected[expected.argsort(descending=True)[kept:]] = 0
    expected /= expected.sum()
    assert (tokens.bincount(minlength=6) - count * expected).abs().max() <= 1


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.0, 4.0]),
    st.booleans(),
    st.lists(uniform, min_size=3, max_size=3),
    st.floats(0.3, 3),
    st.integers(0, 10),
    st.floats(0.05, 1) | st.just(1.0),
)
def test_looking_at_the_likeliest_tokens_first_changes_no_choice(seed, spread, ties, us, temperature, top_k, top_p):
    """Peaked rows and flat ones, with equal logits and forbidden tokens."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(seed)) * spread
    logits = logits.round() if ties else logits
    logits[:, ::7] = -torch.inf
    uniforms = torch.tensor(us, dtype=torch.float64)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    chosen = []
    for head in (6, 40):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sampling_module, "HEAD", head)
            chosen.append(choose(logits.clone(), uniforms, sampling).tolist())
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("top_k", [0, 3, 9])
@pytest.mark.parametrize("top_p", [0.3, 0.77, 1.0])
def test_choose_is_what_the_papers_describe(seed, top_k, top_p, monkeypatch):
    monkeypatch.setattr(sampling_module, "HEAD", 6)  # so that the nucleus ends within it here, beyond it there
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 40, generator=random) * torch.tensor([0.3, 1.0, 2.0, 4.0, 9.0])[:, None]
    uniforms = torch.rand(5, generator=random, dtype=torch.float64)
    sampling = Sampling(temperature=0.8, top_k=top_k, top_p=top_p)
    expected = [next_token(row, u, sampling) for row, u in zip(logits, uniforms.tolist(), strict=True)]
    assert choose(logits, uniforms, sampling).tolist() == expected


def test_only_a_row_that_needs_it_is_sorted_as_a_whole(monkeypatch):
    logits = torch.zeros(3, 2000)
    logits[[0, 2], 7] = 20.0
    sorted_rows = []
    real = sampling_module.choose_among
    monkeypatch.setattr(
        sampling_module,
        "choose_among",
        lambda count, logits, *given: sorted_rows.append((count, len(logits))) or real(count, logits, *given),
    )
    tokens = choose(logits, torch.tensor([0.5, 0.5, 0.5], dtype=torch.float64), Sampling(top_p=0.9))
    assert tokens.tolist() == [7, 900, 7]  # halfway through nine tenths of 2000 equal ones
    assert sorted_rows == [(sampling_module.HEAD, 3), (2000, 1)]


@pytest.mark.parametrize("temperature", [1e-320, 1e-300, 1e300])
def test_choose_bears_extreme_temperatures(temperature):
    """Neither overflow nor -inf divided by it may let a forbidden token through."""
    logits = torch.tensor([[3.0, -torch.inf, 9.0, -torch.inf]]).expand(20, -1)
    uniforms = torch.linspace(0, 0.999, 20, dtype=torch.float64)
    tokens = set(choose(logits.clone(), uniforms, Sampling(temperature=temperature, top_p=1.0)).tolist())
    assert tokens == ({2} if temperature < 1 else {0, 2})


def test_repetition_penalty_is_ctrls():
    """Scores of tokens already there are divided by the penalty where positive, multiplied where negative."""
    logits = torch.tensor([[2.0, -2.0, 3.0, -3.0], [2.0, -2.0, 3.0, -3.0]])
    seen = torch.tensor([[True, True, False, False], [False, False, False, True]])
    assert penalize_repetition(logits, seen, 4.0).tolist() == [
        [0.5, -8.0, 3.0, -3.0],
        [2.0, -2.0, 3.0, -12.0],
    ]


def test_repetition_penalty_counts_the_prompt_and_what_was_generated(characters):
    """With all scores negative and a high penalty, every other character comes before one comes back."""
    model = favour(random_model(len(CHARACTERS)), [])
    with torch.no_grad():
        model.head.weight.copy_(-torch.arange(1.0, 9.0)[:, None].expand(-1, 16))
    plain, penalized = (
        generate(model, characters, ["cab"], Sampling(max_new_tokens=5, temperature=0, repetition_penalty=penalty))
        for penalty in (1.0, 100.0)
    )
    assert (texts(plain), texts(penalized)) == (["aaaaa"], ["defgh"])


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
    seen = []
    real_choose = decoding.choose
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "choose", lambda *given: seen.append(real_choose(*given)) or seen[-1])
        generate(model, bpe, ["the", "cat and"], sampling)
    assert seen and not unused & set(torch.cat(seen).tolist())


@either_way
def test_ids_of_the_model_beyond_the_tokenizers_are_never_sampled(characters, sampling):
    """A vocabulary padded to a rounder number, for speed, has ids without text."""
    padded = random_model(len(CHARACTERS) + 5)
    favour(padded, range(len(CHARACTERS), len(CHARACTERS) + 5))
    assert len(generate(padded, characters, ["abc"], sampling)[0].text) == 10


# Text as it comes: stop strings, end of text, whole characters


class Pieces:
    """A tokenizer whose tokens are given strings."""

    def __init__(self, pieces: Sequence[str]):
        self.pieces = pieces

    def decoder(self):
        return self

    def push(self, ids: Sequence[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def flush(self) -> str:
        return ""


def until_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Read character by character; where a stop string has just been completed, the text ends before it."""
    for end in range(len(text) + 1):
        ending = [len(word) for word in stop if text[:end].endswith(word)]
        if ending:
            return text[: end - max(ending)], True
    return text, False


words = st.text("ab\n", max_size=5)


@settings(max_examples=500, deadline=None)
@given(st.lists(words, max_size=8), st.lists(words.filter(bool), max_size=3))
def test_streamed_text_ends_before_the_first_stop_string(pieces, stop):
    """However the text is cut into tokens: what was shown is the final text, and none of the stop string with it."""
    stream = TextStream(Pieces(pieces), tuple(stop))
    expected, stops = until_stop("".join(pieces), stop)
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        assert expected.startswith(shown)
        if stream.stopped:
            break
    shown += stream.finish()
    assert (shown, stream.text, stream.stopped) == (expected, expected, stops)


@settings(max_examples=200, deadline=None)
@given(st.lists(words, max_size=8), st.lists(words.filter(bool), max_size=3))
def test_text_is_held_back_no_longer_than_needed(pieces, stop):
    """What waits is the beginning of a stop string; without stop strings, nothing does."""
    stream = TextStream(Pieces(pieces), tuple(stop))
    shown = ""
    for i in range(len(pieces)):
        shown += stream.push(i)
        if stream.stopped:
            break
        waiting = "".join(pieces[: i + 1])[len(shown) :]
        assert not waiting or any(word.startswith(waiting) for word in stop)


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
    pieces = []
    completion = generate(
        scripted(bpe, whole),
        bpe,
        ["the"],
        Sampling(max_new_tokens=len(bpe.encode(whole)), temperature=0, stop=stop),
        on_text=lambda i, piece: pieces.append(piece),
    )[0]
    assert completion.text == "".join(pieces) == expected
    stopped_after = next((n for n in range(len(whole) + 1) if any(w in whole[:n] for w in stop)), len(whole))
    needed = next(n for n in range(99) if len(bpe.decode(bpe.encode(whole)[:n])) >= stopped_after)
    assert completion.tokens == needed  # not one more than it takes to know


def test_a_stop_string_in_the_prompt_does_not_count(bpe):
    model = scripted(bpe, " cat", prompt="the dog")
    sampling = Sampling(max_new_tokens=len(bpe.encode(" cat")), temperature=0, stop=("dog", "g c"))
    assert generate(model, bpe, ["the dog"], sampling)[0].text == " cat"


def test_a_single_stop_string_may_be_given_as_it_is(bpe):
    """`stop="dog"` in a notebook means what `stop=("dog",)` does, not any of its letters."""
    model = scripted(bpe, " cat and the dog")
    sampling = Sampling(max_new_tokens=30, temperature=0, stop="dog")
    assert generate(model, bpe, ["the"], sampling)[0].text == " cat and the "


def test_characters_of_several_tokens_are_shown_whole(bpe):
    whole = " naïve 😀👩‍👧 日本 end"
    script = bpe.encode(whole).tolist()
    assert len(bpe.encode("😀")) == 4
    pieces = []
    completion = generate(
        scripted(bpe, whole),
        bpe,
        ["the"],
        Sampling(max_new_tokens=len(script), temperature=0),
        on_text=lambda i, piece: pieces.append(piece),
    )[0]
    assert completion.text == "".join(pieces) == whole
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) > 5  # shown as it came


def test_a_character_cut_off_by_the_limit_becomes_one_replacement(bpe):
    script = bpe.encode(" 😀").tolist()
    pieces = []
    completion = generate(
        scripted(bpe, script),
        bpe,
        ["the"],
        Sampling(max_new_tokens=len(script) - 1, temperature=0),
        on_text=lambda i, piece: pieces.append(piece),
    )[0]
    assert completion.text == "".join(pieces) == " \ufffd"


def test_end_of_text_ends_the_text_and_is_not_in_it(bpe):
    script = [*bpe.encode(" cat").tolist(), bpe.end_of_text_id, *bpe.encode(" dog").tolist()]
    completion = generate(scripted(bpe, script), bpe, ["the"], Sampling(max_new_tokens=20, temperature=0))[0]
    assert completion.text == " cat"
    assert completion.tokens == len(bpe.encode(" cat")) + 1


def test_text_held_back_for_a_stop_string_is_shown_at_the_end_of_the_document(bpe):
    script = [*bpe.encode(" cat do").tolist(), bpe.end_of_text_id]
    pieces = []
    sampling = Sampling(max_new_tokens=20, temperature=0, stop=("dog",))
    completion = generate(scripted(bpe, script), bpe, ["the"], sampling, on_text=lambda i, p: pieces.append(p))[0]
    assert completion.text == "".join(pieces) == " cat do"


def test_a_text_that_has_ended_stays_as_it_is_while_others_go_on(characters):
    """Rows of one batch stop at different times, and each has its own text, streamed and returned."""
    model = random_model(len(CHARACTERS))
    prompts = ["a", "cab", "hh", "fed"]
    sampling = Sampling(max_new_tokens=12, temperature=1.5, top_p=1.0, seed=4, stop=("a",))
    free = texts(generate(model, characters, prompts, changed(sampling, stop=())))
    shown = [""] * 4

    def show(i: int, piece: str) -> None:
        shown[i] += piece

    stopped = generate(model, characters, prompts, sampling, on_text=show)
    expected = [text.split("a")[0] for text in free]
    assert len({len(text) for text in expected}) > 1
    assert texts(stopped) == shown == expected


# Settings


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is 0.0"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"stop": ("",)}, "empty stop string"),
        ({"stop": ""}, "empty stop string"),
    ],
)
def test_settings_out_of_range_are_refused(wrong, said):
    with pytest.raises(ValueError) as caught:
        Sampling(**wrong)
    assert said in str(caught.value)


def test_all_settings_out_of_range_are_reported_at_once():
    with pytest.raises(ValueError) as caught:
        Sampling(temperature=-1, top_k=-1, top_p=2)
    assert all(name in str(caught.value) for name in ("temperature", "top_k", "top_p"))
