"""Command lines: settings are declared once, as fields of a dataclass; argparse without its surprises."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import itertools
import json
import numbers
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from common.errors import ConfigError

Schema: TypeAlias = Mapping[str, dataclasses.Field[Any]]
METAVARS = {"int": "N", "float": "X", "str": "TEXT", "bool": "true|false"}


def option(default: Any, group: str, help: str, **allowed: Any) -> Any:
    """A field of a dataclass that is a flag of the same name. `group` is its heading in --help; with "" it is no flag.

    `allowed`: `low`, `high` (inclusive), `below`, `above` (exclusive), `choices`; `switch`, the values for a bare flag
    (or JSON true) and for JSON false; `empty`, whether a text may be ""; `many`, whether several values follow the flag
    (without it, the flag of a tuple is repeated); `metavar`, the value's name in --help.
    """
    return dataclasses.field(default=default, metadata={"group": group, "help": help, **allowed})


def options_of(settings: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields of a dataclass that are options, by name."""
    return {f.name: f for f in dataclasses.fields(settings) if f.metadata}


def kind_of(f: dataclasses.Field[Any]) -> str:
    """ "int", "float", "str" or "bool"; for a tuple, that of its items."""
    return str(f.type).removeprefix("tuple[").split(",")[0].split(" | ")[0]  # annotations are strings here


def is_tuple(f: dataclasses.Field[Any]) -> bool:
    return str(f.type).startswith("tuple")


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question for the end of a message, with the known name nearest to `name`; "" if none is near."""
    known = list(known)
    near = [word for word in known if word.startswith(name)] or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


class Formatter(argparse.HelpFormatter):
    """Shows that a flag needs a value, although the parser accepts it without one (to report all missing values
    together). A switch that is off by default takes no value."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if (action.const is True and action.nargs == "?") or action.nargs == "*":
            return f"{action.metavar} [{action.metavar} ...]" if action.nargs == "*" else str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """argparse that neither guesses abbreviated flags nor exits by itself."""

    def __init__(self, **options: Any):
        width = min(120, max(80, shutil.get_terminal_size((110, 24)).columns))
        formatter = lambda prog: Formatter(prog, max_help_position=32, width=width)  # noqa: E731
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        self.words: list[str] = []  # the words that were parsed last

    def parse_known_args(  # type: ignore[override]  # as below
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def add_options(self, schema: Schema) -> None:
        """Add a flag for each option, under the heading of its group."""
        groups: dict[str, argparse._ArgumentGroup] = {}
        for key, f in schema.items():
            heading, is_set = f.metadata["group"], not (f.default is None or f.default is False or f.default == ())
            if not heading:
                continue
            groups[heading] = groups.get(heading) or self.add_argument_group(heading)
            default = f"{f.default:g}" if isinstance(f.default, float) else f.default
            text = f.metadata["help"] + (f" [{default}]" if is_set else "")
            takes: dict[str, Any] = {"nargs": "?", "const": True, "action": "append" if is_tuple(f) else "store"}
            if f.metadata.get("many"):
                takes = {"nargs": "*", "action": "extend"}
            metavar = "|".join(f.metadata.get("choices") or [metavar_of(f)])
            groups[heading].add_argument(
                f"--{key}", default=argparse.SUPPRESS, metavar=metavar, help=text.replace("%", "%%"), **takes
            )

    def read(self, argv: Sequence[str] | None, problems: list[str]) -> dict[str, Any]:
        """The typed flags, as strings; True for one without a value. Unknown words go to `problems`."""
        known, unknown = self.parse_known_args(argv)
        problems += self.unknown_words(unknown)
        return {key: value for key, value in vars(known).items() if value is not None and key != "debug"}

    def require_none(self, problems: Sequence[str]) -> None:
        """Raises ConfigError that lists the problems, if there are any."""
        if problems:
            raise ConfigError("\n".join([*problems, f"`python {self.prog} --help` lists all flags."]))

    def parse_args(  # type: ignore[override]  # its overloads are for other classes of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(self.unknown_words(unknown)))
        return known

    def unknown_words(self, words: Sequence[str]) -> list[str]:
        """What is wrong with words that no flag took, each with the nearest flag."""
        flags = [flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")]
        problems = []
        for before, word in zip(["", *words], words, strict=False):
            if word.startswith("-"):
                name = word.lstrip("-").split("=")[0]
                near = suggest(name, flags, prefix="--") if name else ""
                hints = [hint for _, value, hint in self.dashed_values() if value == word]
                problems.append(f"unknown flag {f'--{name}' if name else word}.{near or ''.join(hints[:1])}")
            elif not before.startswith("-"):  # after an unknown flag it is that flag's value
                problems.append(f"{word!r} belongs to no flag")
        return problems

    def dashed_values(self) -> Iterator[tuple[str, str, str]]:
        """(flag, word, hint) for each word after a flag that begins with a dash and is not a flag: probably a value."""
        known = self._option_string_actions
        for flag, word in itertools.pairwise(self.words):
            if flag in known and known[flag].nargs != 0 and word.startswith("-") and word.split("=")[0] not in known:
                yield flag, word, f" A value that begins with a dash is written {flag}={shlex.quote(word)}."

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        hints = [hint for flag, _, hint in self.dashed_values() if message.startswith(f"argument {flag}: expected")]
        raise ConfigError(f"{message}{end}{''.join(hints[:1])} `python {self.prog} --help` lists all flags.")


def add_debug(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`common.errors.script`, which wraps every script's main, reads `--debug`."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")


def metavar_of(f: dataclasses.Field[Any]) -> str:
    """The name of its value in --help."""
    return "" if f.default is False else str(f.metadata.get("metavar") or METAVARS[kind_of(f)])


def check_values(layer: Mapping[str, Any], schema: Schema, problems: list[str], source: str = "flag") -> dict[str, Any]:
    """Convert values to the types of their options. Unknown keys, values of a wrong type and values out of range go to
    `problems`. `source` is the values' file, "flag", or "" for neither."""
    checked = {}
    is_flag = source == "flag"
    for key, value in layer.items():
        where = f"--{key}" if is_flag else f"{key} in {source}" if source else key
        if key not in schema:
            problems.append(f"unknown key {where}.{suggest(key, schema)}")
            continue
        try:
            checked[key] = convert(value, schema[key], from_flag=is_flag)
        except ValueError as problem:
            is_missing = is_flag and (value is True or value == [] or (isinstance(value, list) and True in value))
            typed = parse_word(value) if isinstance(value, str) and kind_of(schema[key]) in ("int", "float") else value
            shown = "missing" if is_missing else json.dumps(typed, ensure_ascii=False, default=str)
            problems.append(f"{where} is {shown}; {problem}")
    return checked


def convert(value: Any, f: dataclasses.Field[Any], from_flag: bool) -> Any:
    """Convert one value to its field's type. Raises ValueError that says what is allowed."""
    if value is None and f.default is None:
        return None
    if not is_tuple(f):
        return convert_one(value, f, from_flag)
    values = list(value) if isinstance(value, list | tuple) else [value]
    if not values and from_flag:
        raise ValueError(f"at least one {metavar_of(f)} is needed")
    return tuple(convert_one(each, f, from_flag) for each in values)


def convert_one(value: Any, f: dataclasses.Field[Any], from_flag: bool) -> Any:
    allowed, kind = f.metadata, kind_of(f)
    if from_flag and isinstance(value, str) and (kind != "str" or "switch" in allowed):
        value = parse_word(value)
    if "switch" in allowed and isinstance(value, bool):
        value = allowed["switch"][0 if value else 1]
    if kind == "bool":
        if not isinstance(value, bool):
            raise ValueError("true or false is needed")
        return value
    if kind == "str":
        choices = allowed.get("choices")
        if not isinstance(value, str) or not (value or allowed.get("empty")):
            raise ValueError(f"one of {', '.join(choices)} is needed" if choices else "a text is needed")
        if choices and value not in choices:
            raise ValueError(f"allowed: {', '.join(choices)}.{suggest(value, choices)}")
        return value
    whole = kind == "int"
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):  # NumPy's too
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:  # or NaN
        raise ValueError("a whole number is needed" if whole else "a number is needed")
    if whole and value != int(value):
        raise ValueError("a whole number is needed")
    value = int(value) if whole else float(value)
    limits: dict[str, tuple[Callable[[float], bool], str]] = {
        "low": (lambda limit: value >= limit, "at least"),
        "above": (lambda limit: value > limit, "more than"),
        "high": (lambda limit: value <= limit, "at most"),
        "below": (lambda limit: value < limit, "less than"),
    }
    if not all(holds(allowed[name]) for name, (holds, _) in limits.items() if name in allowed):
        ranges = [f"{words} {allowed[name]:,}" for name, (_, words) in limits.items() if name in allowed]
        raise ValueError(f"allowed: {' and '.join(ranges)}")
    return value


def parse_word(word: str) -> Any:
    """The value of a flag's word: 64, 1_000, 3e-4, true. Any other word stays as it is."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for number in (int, float):
        with contextlib.suppress(ValueError):
            return number(word)
    return word
