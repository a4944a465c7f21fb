"""The quickstart corpus: deterministic, without contradictions, and never asking what is held out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from examples import conversations
from examples import topics as facts
from examples.topics import CAPITALS, CONTINENTS, topics
from tests.helpers import ROOT

REGENERATE = (
    "examples/held_out.jsonl is out of date; in the repository: python -c 'from examples import conversations as c; "
    'c.HELD_OUT_FILE.write_text(c.held_out_jsonl(), encoding="utf-8")\''
)


@pytest.fixture(scope="module")
def training_documents() -> list[str]:
    return list(conversations.documents())


@pytest.fixture(scope="module")
def training_counts(training_documents: list[str]) -> Counter[str]:
    return Counter(training_documents)


def test_the_same_seed_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    # Another hash seed would reorder any set that had crept into the generator.
    texts = []
    for hash_seed in ("1", "2"):
        output = tmp_path / f"{hash_seed}.txt"
        command = [sys.executable, "-m", "examples.conversations", "--output", str(output)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
        texts.append(output.read_bytes())
    assert texts[0] == texts[1]


def test_another_seed_gives_another_order_of_the_same_documents(training_documents: list[str]) -> None:
    other = list(conversations.documents(seed=1))
    assert other != training_documents
    assert sorted(other) == sorted(training_documents)


def test_written_text_has_a_separator_line_after_every_document(
    tmp_path: Path, training_documents: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "corpus.txt"
    conversations.main(["--output", str(output)])
    data = output.read_bytes()
    assert 2_000_000 <= len(data) <= 4_000_000
    assert data.decode() == "".join(f"{text}\n<|endoftext|>\n" for text in training_documents)
    total = re.search(r"^total.*$", capsys.readouterr().out, re.MULTILINE)
    assert total and total[0].split()[2:] == [f"{len(training_documents):,}", f"{len(data):,}"]


def test_import_needs_no_torch() -> None:
    code = "import sys, examples.conversations; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_every_state_has_one_capital() -> None:
    assert len(CAPITALS) == 193 + 4
    assert len(set(CAPITALS.values())) == len(CAPITALS)
    assert set(CONTINENTS) <= set(CAPITALS) and len(CONTINENTS) == len(CAPITALS) - 7
    assert Counter(CONTINENTS.values()) == {
        "Africa": 54,
        "Asia": 43,
        "Europe": 44,
        "North America": 23,
        "South America": 12,
        "Oceania": 14,
    }


def test_tables_have_no_entry_twice() -> None:
    assert (
        len(facts.TABLES["elements"])
        == len(dict(facts.TABLES["elements"]))
        == len({name for _, name in facts.TABLES["elements"]})
        == 118
    )
    numbers = {symbol: number for number, (symbol, _) in enumerate(facts.TABLES["elements"], start=1)}
    known = {"Ne": 10, "Ca": 20, "Zn": 30, "Sn": 50, "La": 57, "Lu": 71, "Au": 79, "U": 92, "Lr": 103, "Og": 118}
    assert {symbol: numbers[symbol] for symbol in known} == known
    words = [word for pair in facts.TABLES["opposites"] for word in pair]
    assert [word for word, count in Counter(words).items() if count > 1] == []
    assert len(facts.TABLES["opposites"]) >= 100
    assert sum(int(days[:2]) for _, days in facts.TABLES["months"]) == 365


def test_no_question_has_two_answers() -> None:
    answers: defaultdict[str, set[str]] = defaultdict(set)
    for topic in topics():
        for row in topic.rows:
            trained, held_out, answer = topic.fact(row)
            for question in trained + held_out:
                answers[question.casefold()].add(answer)
    assert {question: found for question, found in answers.items() if len(found) > 1} == {}


def test_documents_read_as_english(training_counts: Counter[str]) -> None:
    for text in training_counts:
        assert "\n" not in text and "  " not in text and "{" not in text and ".." not in text, text
        assert (text[0].isupper() or text[0].isdigit()) and text.endswith("."), text
    for text in (
        "What is the capital of France? The capital of France is Paris.",
        "Name the capital of the United States. The capital of the United States is Washington, D.C.",
        "On which continent is the Netherlands? The Netherlands is in Europe.",
        "What is the sum of 3 and 4? 3 plus 4 is 7.",
        "What sound does an owl make? An owl hoots.",
    ):
        assert training_counts[text] > 0, text


def test_every_capital_occurs_equally_often(training_documents: list[str]) -> None:
    endings = Counter(text[text.index("The capital of") :] for text in training_documents if "The capital of" in text)
    assert len(endings) == len(CAPITALS)
    assert set(endings.values()) == {36}


def test_held_out_questions_are_never_asked_and_their_facts_are_taught(training_documents: list[str]) -> None:
    text = "\n".join(training_documents)
    folded = text.casefold()
    rows = conversations.held_out()
    assert 50 <= len(rows) <= 70
    assert sum(row["topic"] == "capitals" for row in rows) == 40
    assert len({row["topic"] for row in rows}) >= 8
    for row in rows:
        assert row["prompt"].casefold() not in folded, row
        assert f" {row['answer']}\n" in text, row


def test_held_out_phrasings_are_taught_with_other_facts(training_counts: Counter[str]) -> None:
    listed = 0
    for topic in topics():
        for template, values in topic.held_out.items():
            assert template in topic.questions
            listed += len(values)
            for row in topic.rows:
                trained, held_out, answer = topic.fact(row)
                # The fact keeps at least two other phrasings in the text.
                assert not held_out or sum(f"{question} {answer}" in training_counts for question in trained) >= 2
            pattern = re.compile(re.sub(r"\\\{.\\\}", ".+", re.escape(template)))
            assert sum(bool(pattern.match(text)) for text in training_counts) >= len(values), template
    # A misspelt value would hold out nothing.
    found = sum(len(topic.fact(row)[1]) for topic in topics() for row in topic.rows)
    assert found == listed == len(conversations.held_out())


def test_held_out_file_is_what_the_generator_derives() -> None:
    assert conversations.HELD_OUT_FILE.read_text(encoding="utf-8") == conversations.held_out_jsonl(), REGENERATE
