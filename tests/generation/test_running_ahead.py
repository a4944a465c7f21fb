"""What generation does on a GPU, which takes the next step before the host reads the token; here on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from generation import decoding, sampling
from generation.decoding import generate
from generation.sampling import Sampling
from model import TransformerLanguageModel
from tests.generation.helpers import CHARACTERS, CONTEXT, GREEDY, SAMPLED, changed, either_way, random_model, texts


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (decoding, sampling):
            patch.setattr(module, "runs_ahead", lambda device: True)
        yield


def test_generation_leaves_cudnns_attention_out_and_back_in(model, characters):
    """cuDNN plans each new length anew."""
    seen = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    generate(model, characters, ["abc"], changed(GREEDY, max_new_tokens=3))
    assert not any(seen) and len(seen) == 2 and torch.backends.cuda.cudnn_sdp_enabled()


@either_way
@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_running_ahead_gives_the_same_text(characters, sampling, penalty):
    """Rows of different lengths, to the end of the context and past it, more than once."""
    model = random_model(len(CHARACTERS))
    prompts = ["a", "badge", "abcdefgh" * 2, "hh"]
    sampling = changed(sampling, max_new_tokens=3 * CONTEXT, repetition_penalty=penalty)
    expected = generate(model, characters, prompts, sampling)
    with as_on_a_gpu():
        assert generate(model, characters, prompts, sampling) == expected
    assert len(set(texts(expected))) == 4


def test_running_ahead_streams_and_stops_the_same(bpe):
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
def test_running_ahead_with_few_tokens(model, characters, count):
    sampling = changed(SAMPLED, max_new_tokens=count)
    expected = generate(model, characters, ["abc"], sampling)
    with as_on_a_gpu():
        assert generate(model, characters, ["abc"], sampling) == expected


@pytest.mark.parametrize("context", [1, 2, 3])
def test_running_ahead_in_the_smallest_contexts(characters, context):
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
