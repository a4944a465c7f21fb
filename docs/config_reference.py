"""docs/configuration.md: every key and flag of the three scripts, from where they are defined.

python docs/config_reference.py
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Python looks beside the script, not in the project
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import generate
import tokenize_local_bpe
from common.errors import ConfigError, script
from common.files import atomic_write, read_json
from common.flags import Parser, add_debug
from common.formatting import cell, table_row
from training.config import REPOSITORY, SCHEMA
from training.conversion import kind_of

DOCUMENT = REPOSITORY / "docs" / "configuration.md"
KINDS = {"int": "whole number", "float": "number", "str": "text", "bool": "`true`, `false`"}
METAVARS = {"N": "whole number", "X": "number", "TEXT": "text", "FILE": "file", "PATH": "path", "FOLDER": "folder"}
LIMITS = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}
IN_BRACKETS = re.compile(r" ?\[([^]]+)]")  # how help texts give a default that is no plain value

HEAD = """\
# Configuration

Every key and flag of the three scripts, written from where they are defined by `python docs/config_reference.py`.
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

Where no default is given, nothing is set; where nothing is taken, the flag stands alone.
"""
GENERATION = """
## generate.py

As above; the groups are those of `--help`.
"""


@script
def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="config_reference.py", description="Write docs/configuration.md anew.")
    add_debug(parser)
    parser.parse_args(argv)
    with atomic_write(DOCUMENT) as file:
        file.write(reference().encode())
    print(f"Wrote {DOCUMENT}")
    return 0


def reference() -> str:
    """The whole document."""
    lines = [HEAD]
    for group in dict.fromkeys(f.metadata["group"] for f in SCHEMA.values()):
        keys = [key_row(key, f) for key, f in SCHEMA.items() if f.metadata["group"] == group]
        lines += [f"### {group.capitalize()}", "", *table(["key", "default", "may be", "what it does"], keys), ""]
    lines[-1] = CONFIGS
    lines += table(["key", "set to"], config_rows())
    lines += [PRE_TOKENIZER, *flag_tables(tokenize_local_bpe.build_parser())]
    lines += [GENERATION, *flag_tables(generate.build_parser())]
    return "\n".join(lines) + "\n"


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    return [table_row(head), "|---" * len(head) + "|", *(table_row([cell(each) for each in row]) for row in rows)]


def key_row(key: str, f: dataclasses.Field[Any]) -> list[str]:
    """Of a key of the trainer: its name, its default, what it may be, what it does."""
    default, text = split_default(f.metadata["help"])
    return [f"`{key}`", default if f.default is None else code(f.default), allowed(f), text]


def split_default(text: str) -> tuple[str, str]:
    """A help text -> the default that it gives in brackets, and the rest, both as Markdown."""
    found = IN_BRACKETS.search(text)
    default = found[1] if found else ""
    is_value = bool(default) and " " not in default  # that could be typed
    return code(default) if is_value else escaped(default), escaped(IN_BRACKETS.sub("", text, count=1))


def escaped(text: str) -> str:
    return text.replace("<", r"\<").replace("*", r"\*")


def code(value: Any) -> str:
    """A value as it is written in JSON; texts as they are typed."""
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def allowed(f: dataclasses.Field[Any]) -> str:
    """What `training.conversion.convert` accepts."""
    if choices := f.metadata.get("choices"):
        return ", ".join(code(choice) for choice in choices)
    limits = [
        f"{said} {f.metadata[name]:{',' if kind_of(f) == 'int' else 'g'}}"
        for name, said in LIMITS.items()
        if name in f.metadata
    ]
    words = [f"or {code(word)}" for word in f.metadata.get("words", ())]
    return ", ".join([KINDS[kind_of(f)], *([" and ".join(limits)] if limits else []), *words])


def config_rows() -> list[list[str]]:
    """Every key that a file in configs/ sets, in the order of the schema, and the configs by value."""
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


def flag_tables(parser: Parser) -> Iterator[str]:
    """The flags of a script, one table for each of its groups."""
    groups = [(group.title, [flag_row(action) for action in group._group_actions]) for group in parser._action_groups]
    groups = [(title, [row for row in rows if row[0] != "`--help`"]) for title, rows in groups]
    for number, (title, rows) in enumerate((title, rows) for title, rows in groups if rows):
        if number:
            yield ""
        if title != "options":
            yield from (f"### {str(title).capitalize()}", "")
        yield from table(["flag", "default", "takes", "what it does"], rows)


def flag_row(action: argparse.Action) -> list[str]:
    default, text = split_default(action.help or "")
    choices = action.choices or str(action.metavar).split("|")
    if action.nargs == 0:
        takes = ""
    elif str(action.metavar) in METAVARS:
        takes = METAVARS[str(action.metavar)] + ("s, one or more" if action.nargs == "+" else "")
    else:
        takes = ", ".join(code(choice) for choice in choices)
    return [f"`{action.option_strings[-1]}`", default, takes, text]


if __name__ == "__main__":
    sys.exit(main())
