"""Command lines: argparse without its surprises, and the nearest name for one that is not known."""

from __future__ import annotations

import argparse
import difflib
import itertools
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from common.errors import ConfigError


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question that ends a message: the known name nearest to `name`; empty if none is near."""
    known = list(known)
    near = [word for word in known if word.startswith(name)] or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f" Did you mean {prefix}{near[0]}?" if near else ""


class Parser(argparse.ArgumentParser):
    """argparse without its habit of guessing abbreviated flags and of exiting by itself."""

    def __init__(self, **options: Any):
        width = min(120, max(80, shutil.get_terminal_size((110, 24)).columns))
        formatter = lambda prog: argparse.HelpFormatter(prog, max_help_position=32, width=width)  # noqa: E731
        super().__init__(allow_abbrev=False, formatter_class=formatter, **options)
        self.words: list[str] = []  # that were parsed last

    def parse_known_args(  # type: ignore[override]  # as below
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        self.words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def parse_args(  # type: ignore[override]  # its overloads are for a namespace of one's own
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
        """(flag, word, hint) wherever a word that argparse takes for a flag, and is none, stands where a value may."""
        known = self._option_string_actions
        for flag, word in itertools.pairwise(self.words):
            if flag in known and known[flag].nargs != 0 and word.startswith("-") and word.split("=")[0] not in known:
                yield flag, word, f" A value that begins with a dash is written {flag}={shlex.quote(word)}."

    def error(self, message: str) -> NoReturn:
        end = "" if message.endswith((".", "?")) else "."
        hints = [hint for flag, _, hint in self.dashed_values() if message.startswith(f"argument {flag}: expected")]
        raise ConfigError(f"{message}{end}{''.join(hints[:1])} `python {self.prog} --help` lists all flags.")


def add_debug(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """`--debug` is read by `common.errors.script`, which wraps every script's main."""
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
