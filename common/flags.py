"""Parse command lines. Settings are declared once, as fields of a pydantic dataclass."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from pydantic.fields import FieldInfo

import common
from common.errors import ConfigError
from common.validation import check, choices_of, extras, fields_of, is_tuple, kind_of, suggest

T = TypeVar("T")
METAVARS = {int: "N", float: "X", str: "TEXT", bool: "true|false"}


class Formatter(argparse.HelpFormatter):
    """Shows a flag's value as required, although the parser accepts the flag without one, to report all missing values
    together. A switch that is off by default takes no value."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if (action.const is True and action.nargs == "?") or action.nargs == "*":
            return f"{action.metavar} [{action.metavar} ...]" if action.nargs == "*" else str(action.metavar)
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """An argparse parser that does not guess abbreviated flags and never exits."""

    def __init__(self, prog: str, **options: Any):
        width = min(120, max(80, shutil.get_terminal_size((110, 24)).columns))
        formatter = lambda prog: Formatter(prog, max_help_position=32, width=width)  # noqa: E731
        super().__init__(prog, allow_abbrev=False, formatter_class=formatter, **options)
        self.words: list[str] = []  # the last parsed command line
        self.options: Mapping[str, FieldInfo] = {}
        self.elsewhere: Mapping[str, str] = {}
        version = f"gpt2-from-scratch {common.__version__}"
        self.add_argument("--version", action="version", version=version, help="print the version")
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")  # read by script()

    def parse_known_args(  # type: ignore[override]  # argparse's overloads have other namespace classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def add_options(self, options: Mapping[str, FieldInfo], elsewhere: Mapping[str, str] | None = None) -> None:
        """Add a flag for each option, grouped by heading. `elsewhere`: flag -> the script that has it."""
        self.options, self.elsewhere = options, elsewhere or {}
        groups: dict[str, argparse._ArgumentGroup] = {}
        for key, f in options.items():
            if word := extras(f).get("word"):
                count = "*" if is_tuple(f) else None if f.is_required() else "?"
                self.add_argument(key, nargs=count, default=argparse.SUPPRESS, metavar=word, help=f.description)
                continue
            heading = extras(f).get("group", "model")
            is_set = not (f.default is None or f.default is False or f.default == ())
            groups[heading] = groups.get(heading) or self.add_argument_group(heading)
            default = f"{f.default:g}" if isinstance(f.default, float) else f.default
            text = str(f.description) + (f" [{default}]" if is_set else "")
            takes: dict[str, Any] = {"nargs": "?", "const": True, "action": "append" if is_tuple(f) else "store"}
            if extras(f).get("many"):
                takes = {"nargs": "*", "action": "extend"}
            metavar = "|".join(choices_of(f) or [_metavar_of(f)])
            groups[heading].add_argument(
                f"--{key}", default=argparse.SUPPRESS, metavar=metavar, help=text.replace("%", "%%"), **takes
            )

    def read(self, argv: Sequence[str] | None, problems: list[str]) -> dict[str, Any]:
        """Return the given flags and values; True for a flag without one. Append unknown words to `problems`."""
        known, unknown = self.parse_known_args(argv)
        problems += self.unknown_words(unknown)
        typed = {key: value for key, value in vars(known).items() if value is not None and key != "debug"}
        return {
            key: convert(value, self.options[key]) if key in self.options else value for key, value in typed.items()
        }

    def require_none(self, problems: Sequence[str]) -> None:
        """Raise ConfigError listing the problems, if there are any."""
        if problems:
            raise ConfigError("\n".join([*problems, f"`python {self.prog} --help` lists all flags."]))

    def parse_args(  # type: ignore[override]  # argparse's overloads have other namespace classes
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        known, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error("; ".join(self.unknown_words(unknown)))
        return known

    def unknown_words(self, words: Sequence[str]) -> list[str]:
        """Describe words that belong to no flag, each with the nearest flag."""
        flags = [flag.removeprefix("--") for flag in self._option_string_actions if flag.startswith("--")]
        problems = []
        for before, word in zip(["", *words], words, strict=False):
            if word.startswith("-"):
                name = word.lstrip("-").split("=")[0]
                near = suggest(name, flags, prefix="--") if name else ""
                if name in self.elsewhere:
                    near = f" It is a flag of {self.elsewhere[name]}."
                hints = [hint for _, value, hint in self.dashed_values() if value == word]
                problems.append(f"unknown flag {f'--{name}' if name else word}.{near or ''.join(hints[:1])}")
            elif not before.startswith("-"):  # after an unknown flag it is that flag's value
                is_config = word.endswith(".json") and "config" in flags
                flag = next((flag for flag in ("input", "prompt") if flag in flags), "")
                flag = "config" if is_config else flag
                near = f" Did you mean --{flag} {shlex.quote(word)}?" if flag else ""
                problems.append(f"{word!r} belongs to no flag.{near}")
        return problems

    def dashed_values(self) -> Iterator[tuple[str, str, str]]:
        """Yield (flag, word, hint) for each word after a flag that begins with a dash but is not a flag, so probably a
        value."""
        known = self._option_string_actions
        for flag, word in itertools.pairwise(self.words):
            if flag in known and known[flag].nargs != 0 and word.startswith("-") and word.split("=")[0] not in known:
                yield flag, word, f" Write a value that begins with a dash as {flag}={shlex.quote(word)}."

    def settings(self, argv: Sequence[str] | None, model: type[T]) -> T:
        """Parse the command line into `model`, a pydantic dataclass whose fields are options and whose docstring
        describes the script. Raises ConfigError listing all problems."""
        options = fields_of(model)
        words = [
            f"[{word} ...]" if is_tuple(f) else word if f.is_required() else f"[{word}]"
            for f in options.values()
            if (word := extras(f).get("word"))
        ]
        self.usage = " ".join(["%(prog)s", *words, *(["[--FLAG VALUE ...]"] if len(words) < len(options) else [])])
        self.description = self.description or model.__doc__
        self.add_options(options)
        problems: list[str] = []
        values = self.read(argv, problems)
        names = {key: str(extras(f).get("word") or f"--{key}") for key, f in self.options.items()}
        settings = check(model, values, problems, names)
        self.require_none(problems)
        assert settings is not None
        return settings

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        hints = [hint for flag, _, hint in self.dashed_values() if message.startswith(f"argument {flag}: expected")]
        raise ConfigError(f"{message}{end}{''.join(hints[:1])} `python {self.prog} --help` lists all flags.")


def _metavar_of(f: FieldInfo) -> str:
    """Return the name of a field's value in --help."""
    return "" if f.default is False else str(extras(f).get("metavar") or METAVARS[kind_of(f)])


def convert(typed: Any, f: FieldInfo) -> Any:
    """Convert the value, or values, of a flag: "64" to 64, "true" to True, unless the field is a text."""
    if isinstance(typed, list):
        return tuple(convert(word, f) for word in typed)
    is_text = kind_of(f) is str and "switch" not in extras(f)
    return typed if is_text or not isinstance(typed, str) else _parse_word(typed)


def _parse_word(word: str) -> Any:
    """Convert a word to a number or boolean (64, 1_000, 3e-4, true), or return it unchanged."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    with contextlib.suppress(ValueError):
        return int(word)
    with contextlib.suppress(ValueError, OverflowError):
        number = float(word)
        return int(number) if number.is_integer() else number
    return word
