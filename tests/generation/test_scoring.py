"""Scores against each token's log-probability, asked for one at a time; windows and batches change nothing."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from generation import scoring
from generation.scoring import Score, cut_windows, describe_score, render_score, score_documents, score_to_json
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.generation.helpers import CHARACTERS, CONTEXT, random_model
from tokenization import corpus
from tokenization.corpus import find_sources
from tokenization.documents import read_pieces
from tokenization.encoding import encode_documents
from tokenizer import CharacterTokenizer, Tokenizer
from tokenizer_bpe import BPETokenizer

cached_model = functools.lru_cache(random_model)
Logits = Callable[[torch.Tensor], torch.Tensor]


def parts(tokenizer: Tokenizer, text: str, size: int = 10**9) -> list[np.ndarray]:
    """The ids of a document, or of parts of it cut anywhere: vocabularies of single characters do not mind."""
    return [tokenizer.encode(text[i : i + size]) for i in range(0, max(1, len(text)), size)]


def score_path(model: TransformerLanguageModel, tokenizer: Tokenizer, path: Path, stride: int) -> list[Score]:
    documents = encode_documents(tokenizer, read_pieces(find_sources([str(path)])))
    return list(score_documents(model, tokenizer, documents, stride))


def one_by_one(logits: Logits, ids: Sequence[int], context: int, stride: int) -> float:
    """Nats of all ids but the first: each from a forward pass over what its window holds before it."""
    nats = 0.0
    for i in range(1, len(ids)):
        start = max(0, math.ceil((i - context) / stride)) * stride  # of the first window that reaches it
        assert i - start >= min(i, context - stride + 1)
        with torch.no_grad():
            nats -= logits(torch.tensor([ids[start:i]]))[0, -1].double().log_softmax(-1)[ids[i]].item()
    return nats


@given(
    length=st.integers(0, 60), context=st.integers(1, 20), data=st.data(),
    cuts=st.lists(st.integers(0, 60), max_size=5),
)  # fmt: skip
def test_windows_count_each_id_once_with_the_context_that_is_promised(length, context, data, cuts) -> None:
    stride = data.draw(st.integers(1, context))
    seen = []
    for window, first in cut_windows(
        np.split(np.arange(length), sorted(min(cut, length) for cut in cuts)), context, stride
    ):
        assert len(window) - 1 <= context
        assert (np.diff(window) == 1).all()
        seen += window[first:].tolist()
        assert window[first] - window[0] >= min(window[first], context - stride + 1)
    assert seen == list(range(1, length))


@settings(max_examples=40)
@given(
    texts=st.lists(st.text(CHARACTERS, max_size=45), max_size=4), context=st.sampled_from([1, 2, 7, CONTEXT]),
    size=st.integers(1, 50), data=st.data(),
)  # fmt: skip
def test_each_token_scores_what_a_plain_forward_pass_gives(texts, context, size, data) -> None:
    stride = data.draw(st.integers(1, context))
    model = cached_model(len(CHARACTERS), max_seq_len=context)
    tokenizer = CharacterTokenizer.train(CHARACTERS)
    scores = list(score_documents(model, tokenizer, [parts(tokenizer, text, size) for text in texts], stride))
    assert len(scores) == len(texts)
    for score, text in zip(scores, texts, strict=True):
        assert score.tokens == score.bytes == max(0, len(text) - 1)
        expected = one_by_one(model, tokenizer.encode(text).tolist(), context, stride)
        assert score.nats == pytest.approx(expected, abs=1e-9)


def test_an_end_of_text_token_predicts_the_first_one(bpe: BPETokenizer) -> None:
    model = cached_model(bpe.vocab_size)
    text = "the cat and the døg \U0001f600 and the hat, " * 3
    (score,) = score_documents(model, bpe, [parts(bpe, text)], stride=5)
    ids = [bpe.end_of_text_id, *bpe.encode(text).tolist()]
    assert (score.tokens, score.bytes) == (len(ids) - 1, len(text.encode()))
    assert (score.characters, score.cjk) == (len(text), 0)
    assert score.nats == pytest.approx(one_by_one(model, ids, CONTEXT, 5), abs=1e-9)
    assert score.bits_per_byte == pytest.approx(score.loss * score.tokens / math.log(2) / score.bytes)


def test_the_first_character_is_not_predicted_and_its_bytes_do_not_count() -> None:
    tokenizer = CharacterTokenizer.train("aé中😀")
    model = cached_model(tokenizer.vocab_size)
    texts = ["中aé", "aé😀", "é中", "é", ""]
    scores = list(score_documents(model, tokenizer, [parts(tokenizer, text) for text in texts], stride=1))
    assert [(score.tokens, score.bytes) for score in scores] == [(2, 3), (2, 6), (1, 3), (0, 0), (0, 0)]
    assert [(score.characters, score.cjk) for score in scores[:3]] == [(2, 0), (2, 0), (1, 1)]
    assert math.isnan(scores[3].loss) and math.isnan(scores[3].bits_per_byte)


@pytest.mark.parametrize("tokens_at_once", [1, 3 * CONTEXT, 1 << 20])
@pytest.mark.parametrize("logits_at_once", [1, 100, 1 << 20])
def test_batches_change_nothing(bpe, monkeypatch, tokens_at_once: int, logits_at_once: int) -> None:
    model = cached_model(bpe.vocab_size)
    texts = ["the cat", "x", "and the dog and the hat " * 9, "", "cats and dogs " * 4]
    expected = [score.nats for score in score_documents(model, bpe, [parts(bpe, text) for text in texts], stride=6)]
    monkeypatch.setattr(scoring, "BATCH_TOKENS", tokens_at_once)
    monkeypatch.setattr(scoring, "BATCH_LOGITS", logits_at_once)
    assert [
        score.nats for score in score_documents(model, bpe, [parts(bpe, text) for text in texts], 6)
    ] == pytest.approx(expected)


def test_more_overlap_costs_windows_and_never_skips(characters) -> None:
    """stride == context is what training does: windows beside each other, each token once in the loss."""
    model = cached_model(len(CHARACTERS))
    text = "abcdefgh" * 8 + "a"
    ids = torch.tensor(characters.encode(text).tolist())
    (score,) = score_documents(model, characters, [parts(characters, text)], CONTEXT)
    with torch.no_grad():
        loss = model(ids[:-1].view(-1, CONTEXT), ids[1:].view(-1, CONTEXT))
    assert score.loss == pytest.approx(loss.item(), abs=1e-6)  # the model's own loss is summed in fp32


@pytest.mark.parametrize("stride", [1, 12, 24])
def test_the_log_probabilities_are_those_of_hugging_face(bpe, stride: int) -> None:
    transformers = pytest.importorskip("transformers")

    shape = {"vocab_size": bpe.vocab_size, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 24}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(mean=1.0 if ".ln_" in name and name.endswith("weight") else 0.0, std=0.2)
    ours = TransformerLanguageModel(
        ModelConfig(bpe.vocab_size, 32, 4, 3, max_seq_len=24, activation="gelu_tanh", tie_embeddings=True)
    )
    ours.load_weights(renamed(theirs.state_dict()))
    text = "the cat and the dog and the hat, " * 6
    (score,) = score_documents(ours, bpe, [parts(bpe, text)], stride)
    ids = [bpe.end_of_text_id, *bpe.encode(text).tolist()]
    expected = one_by_one(lambda tokens: theirs(tokens).logits, ids, 24, stride) / score.tokens
    assert score.loss == pytest.approx(expected, abs=1e-4)
    assert abs(score.loss - math.log(bpe.vocab_size)) > 0.1  # there is something to compare


def renamed(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face's weights under our names; its Conv1D stores the transpose."""
    names = {
        "wte": "token_embedding", "wpe": "positional_embedding", "h": "blocks", "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out_proj", "mlp.c_fc": "feed_forward.fc1", "mlp.c_proj": "feed_forward.fc2",
        "ln_1": "norm1", "ln_2": "norm2", "lm_head": "head",
    }  # fmt: skip
    weights = {}
    for name, tensor in state.items():
        ours = f".{name.removeprefix('transformer.')}"
        for old, new in names.items():
            ours = ours.replace(f".{old}.", f".{new}.")
        conv1d = any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        weights[ours.removeprefix(".")] = tensor.T if conv1d else tensor
    return weights


def test_a_long_document_scores_as_one_that_is_encoded_whole(bpe, tmp_path, monkeypatch) -> None:
    """Cut into pieces on the way, smaller ones than usual."""
    monkeypatch.setattr(corpus, "BLOCK_BYTES", 1 << 14)
    monkeypatch.setattr("tokenization.documents.PIECE_CHARACTERS", 1 << 14)
    model = cached_model(bpe.vocab_size)
    text = "the cat and\nthe dog and  the hat \n\n" * 1500
    path = tmp_path / "long.txt"
    path.write_bytes(text.encode())
    (document,) = [list(document) for document in encode_documents(bpe, read_pieces(find_sources([str(path)])))]
    assert len(document) > 2
    (scored,) = score_path(model, bpe, path, CONTEXT)
    (whole,) = score_documents(model, bpe, [parts(bpe, text)], CONTEXT)
    assert (scored.tokens, scored.bytes) == (whole.tokens, whole.bytes)
    assert scored.nats == pytest.approx(whole.nats)


def test_a_loss_beyond_all_floats_is_infinite_and_json_says_null() -> None:
    score = Score(nats=1e6, tokens=10, bytes=10)
    assert (score.loss, score.perplexity) == (1e5, math.inf)
    row = score_to_json(score)
    names = ["tokens", "bytes", "characters", "loss", "perplexity", "bits_per_byte", "bits_per_character"]
    assert list(row) == names
    assert row["perplexity"] is None and row["loss"] == 1e5
    assert "inf" in render_score("a.txt", score)


@pytest.mark.parametrize(
    ("bits", "said"), [(0.2, "by heart"), (1.9, "real words"), (7.9, "nothing"), (8.04, "worse than chance")]
)
def test_a_score_in_words(bits: float, said: str) -> None:
    assert said in describe_score(Score(nats=bits * 100 * math.log(2), tokens=30, bytes=100, characters=100))
    assert "nothing was predicted" in describe_score(Score())


def test_a_score_is_read_by_the_character() -> None:
    nats = 2.3 * 100 * math.log(2)
    hindi = describe_score(Score(nats, tokens=30, bytes=253, characters=100))
    assert "0.91 bits per byte, 2.30 per character" in hindi and "pieces of words" in hindi
    chinese = describe_score(Score(nats, tokens=60, bytes=260, characters=100, cjk=80))
    assert "alphabets only" in chinese
