"""Tokenizers and a model that the tests of generation share."""

from __future__ import annotations

import pytest

from model import TransformerLanguageModel
from tests.generation.helpers import CHARACTERS, random_model
from tokenizer import CharacterTokenizer
from tokenizer_bpe import BPETokenizer


@pytest.fixture(scope="module")
def characters() -> CharacterTokenizer:
    return CharacterTokenizer.train(CHARACTERS)


@pytest.fixture(scope="module")
def bpe() -> BPETokenizer:
    """Bytes and a few merges: a character outside ASCII takes several tokens."""
    return BPETokenizer.train(["the cat and the dog and the hat"] * 4, vocab_size=270)


@pytest.fixture(scope="module")
def model() -> TransformerLanguageModel:
    return random_model(len(CHARACTERS))
