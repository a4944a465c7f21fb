"""Text from a GPU: that of the CPU, by a CUDA graph, and without one where none can be recorded."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from common.checkpoint import open_checkpoint
from generation import cuda_graph
from generation.decoding import Completion, generate
from generation.sampling import Sampling
from model import TransformerLanguageModel
from tests.cuda.helpers import DEVICE, memory_limit, opened
from tests.generation.helpers import CHARACTERS, random_model
from tokenizer import CharacterTokenizer, load_tokenizer

pytestmark = pytest.mark.cuda

PROMPTS = ["a", "badge", "abcdefgh" * 2, "hh"]
SAMPLING = Sampling(max_new_tokens=60, temperature=1.0, seed=3)  # beyond the context of 48


@pytest.fixture
def characters() -> CharacterTokenizer:
    return CharacterTokenizer.train(CHARACTERS)


@pytest.fixture
def model() -> TransformerLanguageModel:
    """Large random weights in bf16, as `generate.py` takes them on a GPU."""
    model = random_model(len(CHARACTERS), embed_dim=128, max_seq_len=48)
    return model.to(DEVICE, torch.bfloat16)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Every graph that is recorded, by a recorder that has recorded nothing before."""
    graphs = []
    record = cuda_graph.record

    def noted(step: Callable[[], torch.Tensor]) -> tuple[object, torch.Tensor]:
        graph, logits = record(step)
        graphs.append(graph)
        return graph, logits

    monkeypatch.setattr(cuda_graph, "recorder", cuda_graph.Recorder())
    monkeypatch.setattr(cuda_graph, "record", noted)
    return graphs


def text(model: TransformerLanguageModel, characters: CharacterTokenizer) -> list[Completion]:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="no CUDA graph")
        return generate(model, characters, PROMPTS, SAMPLING)


def impossible(step: Callable[[], torch.Tensor]) -> object:
    raise RuntimeError("not here")


def text_without_graphs(model: TransformerLanguageModel, characters: CharacterTokenizer) -> list[Completion]:
    with pytest.MonkeyPatch.context() as patch, pytest.warns(UserWarning, match=r"no CUDA graph \(not here\)"):
        patch.setattr(cuda_graph, "record", impossible)
        return generate(model, characters, PROMPTS, SAMPLING)


def test_a_graph_is_recorded_and_gives_the_text_of_the_steps_it_replays(
    model: TransformerLanguageModel, characters: CharacterTokenizer, recorded: list
) -> None:
    expected = text_without_graphs(model, characters)
    assert text(model, characters) == expected
    assert len({completion.text for completion in expected}) == 4
    assert [type(graph) for graph in recorded] == [torch.cuda.CUDAGraph]


def test_a_recording_that_fails_leaves_everything_as_it_was(
    model: TransformerLanguageModel, characters: CharacterTokenizer, recorded: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waits for the device cannot be recorded. The next ones can, and memory can still be given back."""
    expected = text_without_graphs(model, characters)
    original, stream = TransformerLanguageModel.next_logits, torch.cuda.current_stream()

    def waiting(*given: object) -> torch.Tensor:
        logits = original(*given)
        if torch.cuda.is_current_stream_capturing():
            logits.sum().item()
        return logits

    with monkeypatch.context() as patch, pytest.warns(UserWarning, match="no CUDA graph"):
        patch.setattr(TransformerLanguageModel, "next_logits", waiting)
        assert generate(model, characters, PROMPTS, SAMPLING) == expected
    assert recorded == [] and gc.isenabled()
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    torch.cuda.empty_cache()  # fails as long as the allocator takes a recording to be under way
    assert text(model, characters) == expected and len(recorded) == 1


def test_the_allocators_cache_stays_as_it_is(
    model: TransformerLanguageModel, characters: CharacterTokenizer, recorded: list
) -> None:
    """What a step of training has left there is for the next one; and no recording takes more than the one before."""
    text(model, characters)
    torch.empty(2**28, dtype=torch.uint8, device=DEVICE)  # and freed at once
    text(model, characters)
    before = torch.cuda.memory_reserved()
    assert before >= 2**28
    for _ in range(3):
        text(model, characters)
    assert torch.cuda.memory_reserved() == before
    assert len(recorded) == 5


def test_where_no_memory_is_left_a_graph_gets_what_lies_in_the_cache(
    model: TransformerLanguageModel, characters: CharacterTokenizer, recorded: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While CUDA records, the allocator cannot empty its cache by itself."""
    expected = text_without_graphs(model, characters)  # leaves memory for all but the graph
    emptied = []
    empty_cache = torch.cuda.empty_cache
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1) or empty_cache())
    torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    with memory_limit(torch.cuda.memory_reserved()):
        assert text(model, characters) == expected
    assert emptied and len(recorded) == 1


def test_greedy_text_is_that_of_the_cpu(tmp_path: Path, train: Callable, token_folder: Path) -> None:
    """Of a model that has learned its text: in an untrained one the likeliest tokens are all but equal."""
    flags = {"precision": "fp32", "compile": "off", "dropout": 0.0, "eval_interval": 0, "checkpoint_steps": 0}
    result = train(tmp_path / "run", device=DEVICE, max_steps=300, **flags)
    assert result.code == 0, result.err
    checkpoint = open_checkpoint(tmp_path / "run")
    tokenizer = load_tokenizer(token_folder / "tokenizer.json")
    sampling = Sampling(max_new_tokens=40, temperature=0)  # beyond the context of 16
    texts = {}
    for device in ("cpu", DEVICE):
        model = TransformerLanguageModel(checkpoint.model_config())
        checkpoint.load_weights(model)
        completions = generate(model.to(device).eval(), tokenizer, ["the cat", "on a mat and saw", "d"], sampling)
        texts[device] = [completion.text for completion in completions]
    assert texts[DEVICE] == texts["cpu"]


def test_the_sampled_draws_are_those_of_the_cpu(tokens: Path) -> None:
    """The same seed gives the same text wherever it runs; in fp64, so that no draw falls between two tokens."""
    training = opened(tokens, "--compile", "off")
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=3)
    texts = []
    for device in (DEVICE, "cpu"):
        model = training.model.to(device, torch.float64).eval()
        texts.append([c.text for c in generate(model, training.data.tokenizer, ["\u0100\u0101"] * 2, sampling)])
    assert texts[0] == texts[1]
