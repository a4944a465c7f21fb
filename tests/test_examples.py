"""The quickstart's text: what is asked of the model is never asked in it, and it says the answer."""

from __future__ import annotations

import gzip
import json

from training.text import EXAMPLES_DIR


def test_held_out_questions_are_never_asked_and_their_facts_are_taught() -> None:
    text = gzip.decompress((EXAMPLES_DIR / "conversations.txt.gz").read_bytes()).decode()
    rows = [json.loads(line) for line in (EXAMPLES_DIR / "held_out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 65 and sum(row["topic"] == "capitals" for row in rows) == 40
    folded = text.casefold()
    for row in rows:
        assert row["prompt"].casefold() not in folded, row
        assert text.count(f" {row['answer']}\n") >= 2, row
