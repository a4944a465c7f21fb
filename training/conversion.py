"""One value of a config file or a flag, to the type and the range of its key."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

from common.flags import suggest


def kind_of(f: dataclasses.Field[Any]) -> str:
    return str(f.type).split(" | ")[0]  # annotations are strings here: "int | None" -> "int"


def convert(value: Any, f: dataclasses.Field[Any], from_flag: bool) -> Any:
    """One value to its field's type. Raises ValueError saying what is allowed."""
    allowed, kind = f.metadata, kind_of(f)
    if value is None and f.default is None:
        return None
    if isinstance(value, str) and value in allowed.get("words", {}):
        return allowed["words"][value]
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
        if not isinstance(value, str) or not value:
            raise ValueError(f"one of {', '.join(choices)} is needed" if choices else "a text is needed")
        if choices and value not in choices:
            raise ValueError(f"allowed: {', '.join(choices)}.{suggest(value, choices)}")
        return value
    whole = kind == "int"
    words = "".join(f" or {word}" for word in allowed.get("words", ()))
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:  # or NaN
        raise ValueError(f"a whole number{words} is needed" if whole else "a number is needed")
    if whole and value != int(value):
        raise ValueError(f"a whole number{words} is needed")
    value = int(value) if whole else float(value)
    limits: dict[str, tuple[Callable[[float], bool], str]] = {
        "low": (lambda limit: value >= limit, "at least"),
        "above": (lambda limit: value > limit, "more than"),
        "high": (lambda limit: value <= limit, "at most"),
        "below": (lambda limit: value < limit, "less than"),
    }
    if not all(holds(allowed[name]) for name, (holds, _) in limits.items() if name in allowed):
        said = [f"{words} {allowed[name]:,}" for name, (_, words) in limits.items() if name in allowed]
        raise ValueError(f"allowed: {' and '.join(said)}")
    return value


def parse_word(word: str) -> Any:
    """A flag's word as JSON would read it: 64, 3e-4, true; also 1_000. Anything else stays a word."""
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    try:
        return int(word)
    except ValueError:
        try:
            return float(word)
        except ValueError:
            return word
