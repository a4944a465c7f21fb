"""A captured decoding step gives the text of the uncaptured stream, token for token."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.output import say_once
from generation import sampling as sampling_module
from generation import stream
from generation.completion import generate
from generation.sampling import Sampling
from tests.generation.helpers import CHARACTERS, CONTEXT, changed, either_way, random_model
from tests.tape import TapeCapture

MODERN = {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
IMPORTED = {**MODERN, "norm_gain": True, "num_kv_heads": 1}


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[TapeCapture]:
    """Decode as on a GPU, on the CPU."""
    made: list[TapeCapture] = []

    def capture(device: object) -> TapeCapture:
        made.append(TapeCapture())
        return made[-1]

    monkeypatch.setattr(stream, "build_capture", capture)
    monkeypatch.setattr(sampling_module, "runs_ahead", lambda device: True)
    return made


@either_way
@pytest.mark.parametrize("form", [{}, MODERN, IMPORTED], ids=["gpt-2", "modern", "imported"])
@pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 1.5}], ids=["", "penalties"])
def test_the_text_is_that_of_the_uncaptured_stream(
    request: pytest.FixtureRequest, characters, sampling: Sampling, form: dict, penalties: dict
) -> None:
    """Rows of different lengths, to the end of the context and past it, more than once."""
    model = random_model(len(CHARACTERS), **form)
    prompts = ["a", "badge", "abcdefgh" * 2, "hh"], ["a", "badge", "hh"], ["cab", "e", "head"], ["fade"]
    sampling = changed(sampling, max_new_tokens=3 * CONTEXT, **penalties)
    expected = [generate(model, characters, rows, sampling) for rows in prompts]
    captures = request.getfixturevalue("captures")
    assert [generate(model, characters, rows, sampling) for rows in prompts] == expected
    assert [len(capture.tapes) for capture in captures] == [1, 1]  # none in a full context; three texts share one


def test_generation_is_uncaptured_if_recording_fails(
    monkeypatch: pytest.MonkeyPatch, characters, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(TapeCapture):
        def capture(self, work):
            work()
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore lines")

    model, rows = random_model(len(CHARACTERS)), ["a", "badge"]
    asked = Sampling(max_new_tokens=20, repetition_penalty=1.5)
    expected = generate(model, characters, rows, asked)
    say_once.cache_clear()
    monkeypatch.setattr(stream, "build_capture", lambda device: Failing())
    for _ in range(2):
        assert generate(model, characters, rows, asked) == expected
    assert (
        capsys.readouterr().out.count("Capturing CUDA graphs failed (CUDA error: operation not permitted when stream")
        == 1
    )


def test_two_texts_at_once_have_a_decoder_each(captures: list[TapeCapture]) -> None:
    model, bias = random_model(len(CHARACTERS)), torch.zeros(len(CHARACTERS))

    def begin(token: int) -> Iterator[list[int]]:
        return (tokens for tokens, _ in stream.stream(model, [[token]], Sampling(max_new_tokens=40), bias))

    alone = [list(begin(token)) for token in (1, 2)]
    at_once = list(zip(begin(1), begin(2), strict=True))
    assert [list(texts) for texts in zip(*at_once, strict=True)] == alone and len(captures) == 2
