"""Generator of the quickstart corpus: a few megabytes of short questions with true answers.

    What is the capital of France? The capital of France is Paris.
    <|endoftext|>

Every fact is asked in several phrasings that share one form of answer, and the answer restates the question. For a few
facts one phrasing is held out: that question never occurs in the text, while the same fact in other words does, and
the same words about other facts do. A model that answers it has learned the fact apart from its wording.

    python -m examples.conversations --output quickstart.txt
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.files import atomic_write
from examples.topics import topics

SEPARATOR = "<|endoftext|>"
HELD_OUT_FILE = Path(__file__).with_name("held_out.jsonl")


def documents_with_topics() -> Iterator[tuple[str, str]]:
    """(topic name, document), in the order of the tables."""
    for topic in topics():
        for index, row in enumerate(topic.rows):
            questions, _, answer = topic.fact(row)
            for repeat in range(topic.repeats):
                # Starting at `index` spreads the remainder of repeats / phrasings evenly over the phrasings.
                yield topic.name, f"{questions[(index + repeat) % len(questions)]} {answer}"


def documents(seed: int = 0) -> Iterator[str]:
    """All documents of the training text in an order drawn from `seed`: one line each, without the separator."""
    # Sorting by random() rather than shuffle(): Python promises the same random() sequence in every version, no more.
    rng = random.Random(seed)
    ranked = [(rng.random(), text) for _, text in documents_with_topics()]
    ranked.sort()
    for _, text in ranked:
        yield text


def held_out() -> list[dict[str, str]]:
    """The questions that the training text never asks, each with `prompt`, `answer` and `topic`."""
    rows: list[dict[str, str]] = []
    for topic in topics():
        for row in topic.rows:
            _, questions, answer = topic.fact(row)
            rows.extend({"prompt": question, "answer": answer, "topic": topic.name} for question in questions)
    return rows


def held_out_jsonl() -> str:
    """What examples/held_out.jsonl holds: one JSON object a line. The file is kept beside the code for evaluation."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in held_out())


def write(path: str | Path) -> None:
    """Write the training text in UTF-8, a separator line after each document; `path` is never left half written."""
    with atomic_write(path) as file:
        for text in documents():
            file.write(f"{text}\n{SEPARATOR}\n".encode())


def statistics() -> dict[str, tuple[int, int, int]]:
    """For each topic: (facts, documents, bytes of its documents with their separators)."""
    fact_counts: Counter[str] = Counter()
    for topic in topics():
        fact_counts[topic.name] += len(topic.rows)
    document_counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for name, text in documents_with_topics():
        document_counts[name] += 1
        sizes[name] += len(f"{text}\n{SEPARATOR}\n".encode())
    return {name: (fact_counts[name], document_counts[name], sizes[name]) for name in fact_counts}


def main(argv: Sequence[str] | None = None) -> None:
    """Write the corpus and print what is in it."""
    parser = argparse.ArgumentParser(description="Write the quickstart corpus: questions and answers about true facts.")
    parser.add_argument("--output", required=True, help="text file to write, for example quickstart.txt")
    arguments = parser.parse_args(argv)
    write(arguments.output)
    rows = statistics()
    print(f"{'topic':<14}{'facts':>8}{'documents':>12}{'bytes':>12}")
    for name, counts in [*rows.items(), ("total", tuple(map(sum, zip(*rows.values(), strict=True))))]:
        print(f"{name:<14}{counts[0]:>8,}{counts[1]:>12,}{counts[2]:>12,}")
    print(f"{len(held_out())} questions held out: {HELD_OUT_FILE}")
    print(f"Wrote {arguments.output}")


if __name__ == "__main__":
    main()
