"""Running ahead as on a GPU, which takes the next step before the host reads the token; here on the CPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from generation import sampling, stream
from generation.completion import generate
from generation.sampling import Sampling
from tests.generation.helpers import CHARACTERS, CONTEXT, GREEDY, changed, either_way, random_model, texts


@contextlib.contextmanager
def as_on_a_gpu() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (stream, sampling):
            patch.setattr(module, "runs_ahead", lambda device: True)
        yield


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


def test_running_ahead_stops_the_same(bpe):
    """Stop strings, the end of the text and pieces of characters: decided on the host, a step late."""
    model, prompts = random_model(bpe.vocab_size, max_seq_len=64), ["the", "cat and", "dog"]
    sampling = Sampling(max_new_tokens=120, temperature=1.0, top_p=1.0, stop=("a", "th"), seed=5)

    expected = generate(model, bpe, prompts, sampling)
    with as_on_a_gpu():
        assert generate(model, bpe, prompts, sampling) == expected
    assert all(completion.tokens < 120 for completion in expected)


def test_on_a_gpu_the_next_step_is_queued_before_a_token_is_read(model, characters):
    steps, steps_when_shown = [], []
    hook = model.ln_f.register_forward_hook(lambda *_: steps.append(1))
    for ahead in (False, True):
        steps.clear()
        with as_on_a_gpu() if ahead else contextlib.nullcontext():
            tokens = stream.stream(model, [[1]], changed(GREEDY, max_new_tokens=2), torch.zeros(len(CHARACTERS)))
            steps_when_shown.append([len(steps) for _ in tokens])
    hook.remove()
    assert steps_when_shown == [[1, 2], [2, 2]]
