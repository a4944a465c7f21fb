"""The demo without its page: found checkpoints, texts side by side, conversations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import generate
from common.chat import ChatTemplate, Message
from common.errors import CheckpointError
from generation.completion import generate as complete_rows
from generation.sampling import Sampling
from generation.terminal import max_prompt_tokens
from serving import demo_model
from serving.demo_model import END_LABEL, Turn, complete, converse
from serving.models import Library
from tests.models import CHARACTERS, write_model

USUAL = {"max_new_tokens": 12, "temperature": 0.8, "top_k": 0, "top_p": 0.9, "repetition_penalty": 1.0, "seed": "7"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs, one of conversations, written in this order."""
    for step in (8, 9):
        write_model(tmp_path / "runs" / "letters" / "checkpoints" / f"step_{step:08}", CHARACTERS, std=step / 50)
    write_model(tmp_path / "runs" / "talker" / "best", chat=ChatTemplate(), max_seq_len=128)
    write_model(tmp_path / "runs" / "talker" / "checkpoints" / "step_00012000", chat=ChatTemplate(), max_seq_len=128)
    return tmp_path / "runs"


@pytest.fixture
def library(runs: Path) -> Library:
    return Library([runs], "cpu")


def names(library: Library) -> dict[str, str]:
    """The path of each checkpoint by the name it goes by."""
    return {found.name: str(found.path) for found in library.find()}


def page_of(batches: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """The cards that a page shows after these events."""
    cards: list[dict[str, Any]] = []
    for event in (event for batch in batches for event in batch):
        assert event == json.loads(json.dumps(event))
        if "cards" in event:
            cards = [card | {"turns": [], "running": False} for card in event["cards"]]
            continue
        card = cards[event["card"]]
        if "turn" in event:
            card["turns"].append({"who": event["turn"], "text": event["text"], "tokens": []})
        elif "token" in event:
            card["turns"][-1]["tokens"].append(event["token"])
            card["turns"][-1]["text"] += event["token"][0]
        else:
            card.update({name: value for name, value in event.items() if name != "card"})
    return cards


# What is found


def test_checkpoints_are_found_wherever_the_place_is(runs: Path, library: Library) -> None:
    there = ["talker, step 12,000", "talker, best", "letters, step 9", "letters, step 8"]
    assert [found.name for found in library.find()] == there, "the newest run, and in it the newest checkpoint"
    assert [found.answers for found in library.find()] == [True, True, False, False]

    def found(*places: str) -> list[str]:
        return [found.name for found in Library([runs / place for place in places], "cpu").find()]

    assert found("letters") == there[2:] and found("letters/checkpoints/step_00000008") == there[3:]
    assert sorted(found("talker/best", "letters", "talker")) == sorted(there), "none twice"
    assert found("none") == [] and found("letters/checkpoints/step_00000008/model.safetensors") == []
    shutil.copytree(runs / "talker" / "best", runs / "gpt2")
    assert "gpt2" in [found.name for found in library.find()], "one that is no run's"
    (runs / "letters" / "checkpoints" / "step_00000009" / "manifest.json").unlink()
    (runs / "gpt2" / "config.json").write_text("[")
    assert set(names(library)) == {*there, "gpt2"} - {"letters, step 9"}, "half a checkpoint is none"


def test_a_model_is_read_once_and_again_when_its_folder_is_another(runs: Path, library: Library) -> None:
    best = names(library)["talker, best"]
    first = library.open(best)
    assert library.open(best) is first and first.chat == ChatTemplate()
    write_model(runs / "talker" / "best", chat=ChatTemplate(), max_seq_len=64)
    assert library.open(best).model.config.max_seq_len == 64


def test_nothing_is_opened_that_is_not_found(runs: Path, library: Library, tmp_path: Path) -> None:
    write_model(tmp_path / "elsewhere", CHARACTERS)
    for name in (str(tmp_path / "elsewhere"), str(runs / "letters"), f"{runs}/../elsewhere", "", "\0", "x" * 9999):
        with pytest.raises(CheckpointError, match="is gone"):
            library.open(name)


# Texts


@pytest.mark.parametrize("changes", [{}, {"temperature": 0}, {"top_k": 5, "top_p": 1, "repetition_penalty": 1.5}])
def test_texts_are_those_of_generate_side_by_side(library: Library, changes: dict[str, Any]) -> None:
    paths = names(library)
    chosen = [paths["letters, step 9"], paths["letters, step 8"]]
    cards = page_of(complete(library, chosen, "the cat", USUAL | changes))
    sampling = {name: value for name, value in (USUAL | changes | {"seed": 7}).items() if name != "max_new_tokens"}
    for card, path in zip(cards, chosen, strict=True):
        model, tokenizer = generate.load_model(path, "cpu")
        assert "the cat" + card["turns"][1]["text"] == generate.generate_text(
            model, tokenizer, "the cat", 12, **sampling
        )
        assert card["turns"][0] == {"who": "prompt", "text": "the cat", "tokens": []}
        assert card["note"].startswith("12 tokens, ") and card["note"].endswith("seed 7, token limit reached")
        assert "problem" not in card and not card["running"]
    assert [card["title"] for card in cards] == ["letters, step 9", "letters, step 8"]
    assert cards[0]["turns"] != cards[1]["turns"]


def test_each_token_tells_what_the_model_thought(library: Library) -> None:
    (card,) = page_of(complete(library, [names(library)["letters, step 9"]], "the", USUAL | {"temperature": 2}))
    for text, label, probability, rank, likeliest in card["turns"][1]["tokens"]:
        assert text == label and 0 < probability < 1
        shares = [share for _, share in likeliest]
        assert len(likeliest) == 8 and shares == sorted(shares, reverse=True)
        if rank <= len(likeliest):
            assert likeliest[rank - 1] == [label, probability]


def test_without_a_seed_texts_differ_from_time_to_time_and_not_from_card_to_card(runs: Path, library: Library) -> None:
    path = names(library)["letters, step 9"]
    seeds = set()
    for given in ("", None, "  "):
        cards = page_of(complete(library, [path, path], "the", USUAL | {"seed": given}))
        assert cards[0]["turns"] == cards[1]["turns"]
        seeds.add(cards[0]["note"].partition("seed")[2])
    assert len(seeds) == 3


def test_a_model_of_conversations_is_asked_the_prompt(library: Library) -> None:
    path = names(library)["talker, best"]
    (card,) = page_of(complete(library, [path], "What is it?", USUAL))
    assert card["turns"][0] == {"who": "user", "text": "What is it?", "tokens": []}
    model, tokenizer = generate.load_model(path, "cpu")
    ids = ChatTemplate().prompt_ids(tokenizer, [Message("user", "What is it?")])
    (expected,) = complete_rows(model, tokenizer, [ids], Sampling(12, seed=7))
    assert card["turns"][1]["text"] == expected.text.lstrip()
    (card,) = page_of(complete(library, [path], " \n", USUAL))
    assert card["problem"] == "This is a chat model. Type a question." and card["turns"] == []


def test_a_text_may_begin_with_nothing_and_the_end_is_a_token(library: Library) -> None:
    (card,) = page_of(complete(library, [names(library)["letters, step 9"]], "", USUAL))
    assert len(card["turns"][1]["tokens"]) == 12
    talker = library.open(names(library)["talker, best"])

    def certain(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits).index_fill_(-1, torch.tensor([talker.tokenizer.end_of_text_id]), 50.0)

    talker.model.head.register_forward_hook(certain)
    (card,) = page_of(complete(library, [names(library)["talker, best"]], "Why?", USUAL))
    assert card["turns"][1]["tokens"][-1][:2] == ["", END_LABEL] and card["note"].endswith(
        "seed 7, stopped at the end of the text"
    )
    assert card["turns"][1]["text"] == ""


def test_what_is_wrong_with_one_checkpoint_leaves_the_others(runs: Path, library: Library) -> None:
    paths = names(library)
    chosen = [paths[name] for name in ("letters, step 8", "talker, best", "letters, step 9")]
    library.open(chosen[0])
    shutil.rmtree(chosen[0])
    weights = Path(chosen[1]) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    gone, damaged, whole = page_of(complete(library, chosen, "the cat", USUAL))
    assert gone["problem"] == f"The checkpoint {chosen[0]} is gone. Choose another."
    assert "is damaged: model.safetensors has" in damaged["problem"] and damaged["title"] == "talker, best"
    assert len(whole["turns"][1]["tokens"]) == 12
    (card,) = page_of(complete(library, chosen[2:], "ÄÖ", USUAL))
    assert "2 characters are not in the vocabulary: 'Ä'" in card["problem"]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("a bug")])
def test_a_model_that_fails_while_writing_is_reported(
    library: Library, error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_model, "SHOW_INTERVAL_SECONDS", 0.0)
    calls = iter(range(100))

    def fail(*_: Any) -> None:
        if next(calls) == 5:
            raise error

    paths = names(library)
    library.open(paths["letters, step 9"]).model.ln_f.register_forward_pre_hook(fail)
    cards = page_of(complete(library, [paths["letters, step 9"], paths["letters, step 8"]], "the", USUAL))
    is_bug = isinstance(error, RuntimeError)
    assert ("The program failed: RuntimeError" if is_bug else "does not fit in memory") in cards[0]["problem"]
    assert [len(card["turns"][1]["tokens"]) for card in cards] == [5, 12] and not cards[0]["running"]
    assert cards[0]["note"] == ""
    assert ("RuntimeError: a bug" in capsys.readouterr().err) == is_bug


def test_a_text_ends_when_nobody_asks_for_more(library: Library) -> None:
    path = names(library)["letters, step 9"]
    passes = []
    library.open(path).model.ln_f.register_forward_pre_hook(lambda *_: passes.append(1))
    batches = complete(library, [path], "the", USUAL | {"max_new_tokens": 10**6})
    shown = [next(batches) for _ in range(6)]
    batches.close()  # as the page does when it is stopped
    made = len(passes)
    assert page_of(shown)[0]["running"] and 0 < made < 10**5


# Conversations


def talk(library: Library, history: list[Turn], question: str, **changes: Any) -> tuple[dict[str, Any], list[Turn]]:
    name = names(library)["talker, best"]
    batches, turns = zip(*converse(library, name, history, question, USUAL | changes), strict=True)
    (card,) = page_of(batches)
    assert [(turn.who, turn.text, turn.tokens) for turn in turns[-1]] == [
        (turn["who"], turn["text"], turn["tokens"]) for turn in card["turns"]
    ]
    return card, turns[-1]


def test_a_conversation_is_the_template_and_what_follows(library: Library) -> None:
    first, history = talk(library, [], "What is it?")
    assert [turn["who"] for turn in first["turns"]] == ["user", "model"]
    second, history = talk(library, history, "And that?")
    assert second["turns"][:2] == first["turns"] and len(history) == 4
    served = library.open(names(library)["talker, best"])
    sampling = Sampling(12, seed=7)
    said = [
        Message("user", "What is it?"),
        Message("assistant", first["turns"][1]["text"]),
        Message("user", "And that?"),
    ]
    ids = ChatTemplate().prompt_ids(served.tokenizer, said, max_prompt_tokens(served.model, sampling))
    (expected,) = complete_rows(served.model, served.tokenizer, [ids], sampling)
    assert second["turns"][3]["text"] == expected.text.lstrip()


def test_a_question_that_cannot_be_asked_leaves_the_conversation_as_it_was(library: Library) -> None:
    before = [Turn("user", "What?"), Turn("model", "A cat.")]
    for question, changes, said in (
        ("", {}, "Type a question"),
        ("why " * 400, {}, "The last question has"),
        ("Why?", {"top_p": 3}, "top_p is 3"),
    ):
        card, history = talk(library, before, question, **changes)
        assert said in card["problem"] and history == before and card["note"] == ""
    letters = names(library)["letters, step 9"]
    for name, said in ((letters, "was not trained on conversations"), (None, "Choose a checkpoint.")):
        (card,) = page_of([events for events, _ in converse(library, name, [], "Why?", USUAL)])
        assert said in card["problem"]


def test_forgotten_turns_are_reported(library: Library) -> None:
    history: list[Turn] = []
    for i in range(6):  # 128 tokens hold two or three of them
        history += [Turn("user", f"What is the cat number {i}?"), Turn("model", "the cat sat on a mat and saw one.")]
    card, _ = talk(library, history, "Why?")
    assert "the oldest turns were dropped" in card["note"]
    assert len(card["turns"]) == 14, "the page shows them still"


def test_without_a_model_the_message_says_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"No trained model in .*/runs/, a/. Train one"):
        Library([tmp_path / "runs", Path("a")], "cpu").require_any()
