"""Write docs/configuration.md: every key and flag of the three scripts, from their definitions.

python tests/docs/config_reference.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import generation.settings
import tokenization.settings
from common.errors import ConfigError
from common.files import atomic_write, read_json
from common.flags import Parser, add_debug
from common.output import cell, table_row
from common.script import script
from common.validation import about, choices_of, is_tuple, kind_of, limits_of
from training.config import REPOSITORY, SCHEMA

DOCUMENT = REPOSITORY / "docs" / "configuration.md"
KINDS = {int: "whole number", float: "number", str: "text", bool: "`true`, `false`"}
METAVARS = {"FILE": "file", "PATH": "path", "FOLDER": "folder"}
IN_BRACKETS = re.compile(r" ?\[([^]]+)]")  # how help texts give a default that is not a plain value

HEAD = """\
# Configuration

Every key and flag of the three scripts, written from where they are defined by `python tests/docs/config_reference.py`.
`--help` of each script says the same.

## train_colab_mmap.py

Each key can stand in a JSON file, and each is a flag: `"batch_size": 64` is `--batch_size 64`. `--config FILE` names
the file; it is looked up in the current folder and then in `configs/`. Flags win over the file, and the file over the
defaults. A key that is not known is an error that names the nearest one. A flag without a value stands for `true`;
`use_lr_scheduler` and `compile` take `true` and `false`, too. Where no default is given, nothing is set. `--debug`, a
flag alone, shows the traceback of an error.
"""
CONFIGS = """
### What the configs set

What is not named here is at its default.
"""
PRE_TOKENIZER = """
## tokenize_local_bpe.py

Where no default is given, nothing is set. A flag without a value stands for `true`. `--debug` is a flag here
too.
"""
GENERATION = """
## generate.py

As above; the groups are those of `--help`.
"""


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="tests/docs/config_reference.py", description="Write docs/configuration.md again.")
    add_debug(parser)
    parser.parse_args(argv)
    with atomic_write(DOCUMENT) as file:
        file.write(reference().encode())
    print(f"Wrote {DOCUMENT}")
    return 0


def reference() -> str:
    """The whole document."""
    lines = [HEAD, *option_tables(SCHEMA), CONFIGS, *table(["key", "set to"], config_rows())]
    lines += [PRE_TOKENIZER, *option_tables(tokenization.settings.FLAGS, "flag")]
    lines += [GENERATION, *option_tables(generation.settings.FLAGS, "flag")]
    return "\n".join(lines) + "\n"


def option_tables(schema: Mapping[str, FieldInfo], called: str = "key") -> Iterator[str]:
    """The options, one table for each of their groups."""
    for number, group in enumerate(dict.fromkeys(group_of(f) for f in schema.values())):
        names = {key: key if called == "key" else f"--{key}" for key in schema}
        rows = [key_row(names[key], f) for key, f in schema.items() if group_of(f) == group]
        yield from ([""] if number else [])
        yield from (f"### {group.capitalize()}", "", *table([called, "default", "may be", "what it does"], rows))


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [table_row(head), "|---" * len(head) + "|", *(table_row([cell(each) for each in row]) for row in rows)]


def group_of(f: FieldInfo) -> str:
    return str(about(f).get("group", "model"))


def key_row(key: str, f: FieldInfo) -> list[str]:
    """The row of an option: its name, its default, its values, what it does."""
    default, text = split_default(str(f.description))
    return [f"`{key}`", default if f.default in (None, ()) else code(f.default), allowed(f), text]


def split_default(text: str) -> tuple[str, str]:
    """A help text -> the default in its brackets, and the rest, both as Markdown."""
    found = IN_BRACKETS.search(text)
    default = found[1] if found else ""
    is_value = bool(default) and " " not in default  # one can type it
    return code(default) if is_value else escaped(default), escaped(IN_BRACKETS.sub("", text, count=1))


def escaped(text: str) -> str:
    return text.replace("<", r"\<").replace("*", r"\*")


def code(value: Any) -> str:
    """A value as in JSON; texts as typed."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def allowed(f: FieldInfo) -> str:
    """What may be given."""
    if choices := choices_of(f):
        return ", ".join(code(choice) for choice in choices)
    limits = [f"{said} {limit:,}" for said, limit in limits_of(f)]
    kind = f"{METAVARS.get(about(f).get('metavar', ''), KINDS[kind_of(f)])}{', one or more' * is_tuple(f)}"
    return ", ".join([kind, *([" and ".join(limits)] if limits else [])])


def config_rows() -> list[list[str]]:
    """Every key that a file in configs/ sets, in the order of the schema, with its configs by value."""
    files = {path.stem: read_json(path, ConfigError) for path in sorted((REPOSITORY / "configs").glob("*.json"))}
    rows = []
    for key in SCHEMA:
        by_value: dict[Any, list[str]] = {}
        for name, values in files.items():
            if key in values:
                by_value.setdefault(values[key], []).append(name)
        if by_value:
            said = [f"{code(value)} {', '.join(names)}" for value, names in sorted(by_value.items())]
            rows.append([f"`{key}`", "; ".join(said)])
    return rows


if __name__ == "__main__":
    sys.exit(main())
