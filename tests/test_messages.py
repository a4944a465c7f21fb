"""Tests look only for words that the product prints.

A test that asserts the absence of a message passes for ever once the message is reworded, and so do the tests of
tests/cuda, which run only on a GPU.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
PRODUCT = TESTS.parent
PRODUCT_SUFFIXES = {".py", ".html", ".js", ".css", ".jinja"}
OUTPUTS = re.compile(r"\b(out|err|stdout|stderr|output|printed|message|messages|log|answer)\b")
PATTERN_CALLS = ("re.search", "re.findall", "re.match")
PARTS = re.compile(r"[^\w ,.'-]+|--\S+|\S*\d\S*|\S*[/_]\S*")  # between the runs of plain words in a message or pattern


def strings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def product_texts() -> str:
    """Every string of the product, in lower case."""
    texts = []
    for path in PRODUCT.rglob("*.*"):
        if path.suffix in PRODUCT_SUFFIXES and not path.is_relative_to(TESTS) and ".venv" not in path.parts:
            source = path.read_text(encoding="utf-8")
            texts += strings(ast.parse(source)) if path.suffix == ".py" else [source]
    return normalized("\n".join(texts))


def normalized(text: str) -> str:
    return re.sub(r"\s+", " ", text).lower()


def missing_words(literal: str, texts: str) -> list[str]:
    """Return the runs of words in a literal or pattern that are in none of the texts."""
    runs = [normalized(run).strip(" .,") for run in PARTS.split(literal)]
    return [run for run in runs if len(run) > 2 and run not in texts]


def messages(tree: ast.AST, absent_only: bool) -> list[ast.Constant]:
    """Return the literals and patterns that are looked for in an output; `absent_only`: of `"..." not in OUTPUT`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn if absent_only else ast.In | ast.NotIn):
            literal, output = node.left, ast.unparse(node.comparators[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in PATTERN_CALLS and not absent_only:
            literal, output = node.args[0], ast.unparse(node.args[1])
        elif isinstance(node, ast.Constant) and str(node.value).startswith("^") and not absent_only:
            literal, output = node, "printed"  # a pattern in a list
        else:
            continue
        if isinstance(literal, ast.Constant) and isinstance(literal.value, str) and OUTPUTS.search(output):
            found.append(literal)
    return found


def test_no_test_looks_for_a_message_that_the_product_does_not_print() -> None:
    texts, wrong = product_texts(), []
    for path in TESTS.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        literals = messages(tree, absent_only=path.parent.name != "cuda")
        looked_for = {literal.value for literal in messages(tree, absent_only=False)}
        own = normalized("\n".join(text for text in strings(tree) if text not in looked_for))  # a test's own text
        for literal in literals:
            if missing := [run for run in missing_words(literal.value, texts) if run not in own]:
                wrong.append(f"{path.relative_to(PRODUCT)}:{literal.lineno}: {missing}")
    assert not wrong, "\n".join(wrong)
