"""docs/configuration.md says what the scripts know now. `python -m tests.docs.test_configuration` writes it again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic.fields import FieldInfo

import generation.settings
import tokenization.settings
from common.flags import convert
from common.output import cell, table_row
from common.validation import check, choices_of, extras, is_tuple, kind_of, limits_of
from tests.helpers import columns
from training.config import REPOSITORY, SCHEMA, Config

DOCUMENT = REPOSITORY / "docs" / "configuration.md"
KINDS = {int: "integer", float: "number", str: "text", bool: "`true`, `false`"}
METAVARS = {"FILE": "file", "PATH": "path", "FOLDER": "folder"}
IN_BRACKETS = re.compile(r" ?\[([^]]+)]")  # how help texts give a default that is not a plain value
HEAD = """\
# Configuration

Every key and flag of the three scripts, as in their `--help`. `python -m tests.docs.test_configuration` writes this
page.

## train_colab_mmap.py

Each key is a flag and a key of a JSON file: `--batch_size 64` is `"batch_size": 64`. `--config FILE` is looked up in
the current folder, then in `configs/`. Flags win over the file, and the file over defaults. A flag without a value
means `true`; `use_lr_scheduler` and `compile` also take `true` and `false`. `--debug` shows the traceback of an
error.
"""
PRE_TOKENIZER = """
## tokenize_local_bpe.py

A flag without a value means `true`.
"""
GENERATION = "\n## generate.py\n"


def reference() -> str:
    """The whole document."""
    lines = [HEAD, *option_tables(SCHEMA)]
    lines += [PRE_TOKENIZER, *option_tables(tokenization.settings.FLAGS, "flag")]
    lines += [GENERATION, *option_tables(generation.settings.FLAGS, "flag")]
    return "\n".join(lines) + "\n"


def option_tables(schema: Mapping[str, FieldInfo], called: str = "key") -> Iterator[str]:
    """The options, one table for each of their groups."""
    groups = {key: str(extras(f).get("group", "model")) for key, f in schema.items()}
    for number, group in enumerate(dict.fromkeys(groups.values())):
        names = {key: key if called == "key" else f"--{key}" for key in schema}
        rows = [key_row(names[key], f) for key, f in schema.items() if groups[key] == group]
        yield from ([""] if number else [])
        yield from (f"### {group.capitalize()}", "", *table([called, "default", "may be", "what it does"], rows))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [table_row(head), "|---" * len(head) + "|", *(table_row([cell(each) for each in row]) for row in rows)]


def key_row(key: str, f: FieldInfo) -> list[str]:
    """An option: its name, its default (in the help text's brackets, or plain), its values, what it does."""
    text = str(f.description)
    found = IN_BRACKETS.search(text)
    default = found[1] if found else ""
    default = code(default) if default and " " not in default else escaped(default)
    text = escaped(IN_BRACKETS.sub("", text, count=1))
    return [f"`{key}`", default if f.default in (None, ()) else code(f.default), allowed(f), text]


def escaped(text: str) -> str:
    return text.replace("<", r"\<").replace("*", r"\*")


def code(value: Any) -> str:
    """A value as in JSON; texts as typed."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def allowed(f: FieldInfo) -> str:
    """Describe the allowed values."""
    if choices := choices_of(f):
        return ", ".join(code(choice) for choice in choices)
    limits = [f"{said} {limit:,}" for said, limit in limits_of(f) if limit < 2**31 - 1]
    kind = f"{METAVARS.get(extras(f).get('metavar', ''), KINDS[kind_of(f)])}{', one or more' if is_tuple(f) else ''}"
    return ", ".join([kind, *([" and ".join(limits)] if limits else [])])


def test_the_document_is_up_to_date() -> None:
    """Else run `python -m tests.docs.test_configuration`, and commit what it writes."""
    assert DOCUMENT.read_text(encoding="utf-8") == reference()


def test_every_key_stands_in_it_once_with_values_that_are_taken() -> None:
    """Defaults and what a key may be can be typed; beyond a limit nothing is accepted."""
    trainer = reference().partition("## tokenize_local_bpe.py")[0]
    rows = {row[0].strip("`"): row for row in map(columns, trainer.splitlines()) if row and row[0].startswith("`")}
    assert sorted(rows) == sorted(SCHEMA)
    for key, (_, default, may_be, text) in rows.items():
        assert text
        if SCHEMA[key].default not in (None, ()):
            assert problems_with(key, convert(default.strip("`"), SCHEMA[key])) == []
        for word in re.findall(r"`([^`]+)`", may_be):
            assert problems_with(key, convert(word, SCHEMA[key])) == []
        for inside, limit in re.findall(r"(at least|at most|more than|less than) ([\d.,]*\d)", may_be):
            number = float(limit.replace(",", ""))
            outside = {"at least": number - 1, "at most": number + 1}.get(inside, number)
            whole = int(outside) if kind_of(SCHEMA[key]) is int else outside
            assert any(f"{inside} " in problem for problem in problems_with(key, whole))


def problems_with(key: str, value: object) -> list[str]:
    """Return the problems with the value itself, regardless of other settings."""
    problems: list[str] = []
    check(Config, {key: value, **({"num_heads": 1} if key == "embed_dim" else {})}, problems)
    return [problem for problem in problems if problem.startswith(f"{key} is {json.dumps(value)};")]


if __name__ == "__main__":
    DOCUMENT.write_text(reference(), encoding="utf-8")
