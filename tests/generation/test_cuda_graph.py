"""A step of fixed shapes, read one step late: what a GPU does, on the CPU."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Iterator

import pytest
import torch

from generation import cuda_graph, decoding
from generation import sampling as sampling_module
from generation.cuda_graph import StaticKVCache
from generation.decoding import generate
from generation.sampling import Sampling
from model import KVCache, TransformerLanguageModel
from tests.generation.helpers import CHARACTERS, CONTEXT, GREEDY, SAMPLED, changed, either_way, random_model, texts


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
        for module in (decoding, sampling_module):
            patch.setattr(module, "runs_ahead", lambda device: True)
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


class Graph:
    """Stands in for torch.cuda.CUDAGraph: knows its pool, and cannot end what was not permitted."""

    permitted = True

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        self.place = pool

    def capture_end(self) -> None:
        if not self.permitted:
            raise RuntimeError("operation failed due to a previous error during capture")

    def pool(self) -> tuple[int, int]:
        return self.place


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the allocator is told while graphs are recorded, without a GPU."""
    told, handles = [], itertools.count()
    fakes = {
        "CUDAGraph": Graph,
        "Stream": object,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "current_device": lambda: 0,
        "graph_pool_handle": lambda: (0, next(handles)),
        "empty_cache": lambda: told.append("empty"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("end", "release"):
        call = "_cuda_endAllocateToPool" if name == "end" else "_cuda_releasePool"
        monkeypatch.setattr(torch._C, call, lambda device, pool, name=name: told.append(name), raising=False)
    monkeypatch.setattr(cuda_graph, "recorder", cuda_graph.Recorder())
    return told


def test_a_graph_takes_over_the_memory_of_one_whose_logits_nobody_reads_any_more(told):
    graphs, logits = [], []
    for kept in (True, True, False, False):
        graph, result = cuda_graph.record(lambda: torch.zeros(1))
        graphs.append(graph)
        logits.append(result if kept else None)
        del result
    assert [graph.pool()[1] for graph in graphs] == [0, 1, 2, 2]
    assert told == []


def test_a_recording_that_finds_no_memory_is_tried_again_with_an_empty_cache(told):
    outcomes = [torch.OutOfMemoryError("CUDA out of memory"), torch.zeros(1)]

    def step() -> torch.Tensor:
        assert not gc.isenabled()
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    assert isinstance(cuda_graph.record(step)[0], Graph)
    assert told == ["empty"] and not outcomes and gc.isenabled()


def test_the_allocator_is_told_the_end_of_a_recording_that_fails(told, monkeypatch):
    """By its first error, which says more than that there was one."""

    def step() -> torch.Tensor:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Graph, "permitted", False)
    with pytest.raises(RuntimeError, match="not permitted"):
        cuda_graph.record(step)
    assert told == ["end", "release"] and gc.isenabled()
    with pytest.raises(RuntimeError, match="previous error"):
        cuda_graph.record(lambda: torch.zeros(1))
    assert told == ["end", "release"] * 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@either_way
def test_a_gpu_gives_the_text_of_the_cpu(model, characters, sampling):
    prompts = ["a", "badge", "abcdefgh" * 2, "hh"]
    sampling = changed(sampling, max_new_tokens=3 * CONTEXT, repetition_penalty=1.5)
    on_gpu = random_model(len(CHARACTERS)).cuda()
    assert generate(on_gpu, characters, prompts, sampling) == generate(model, characters, prompts, sampling)
