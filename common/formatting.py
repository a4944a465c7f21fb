"""Numbers, durations and generated text for people to read, in a terminal and in a Markdown table."""

from __future__ import annotations

import unicodedata


def printable(text: str) -> str:
    """Text without control characters, so that generated text cannot control the terminal."""
    return "".join(c for c in text if c in "\n\t" or unicodedata.category(c) != "Cc")


def cell(text: str) -> str:
    """Text that stays inside one cell of a Markdown table."""
    return " ".join(printable(text).split()).replace("|", "\\|")


def shortened(text: str, most: int) -> str:
    """The first `most` characters, with " ..." if there are more."""
    return text if len(text) <= most else f"{text[:most]} ..."


def table_row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def clock(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def byte_size(number: float) -> str:
    """Bytes: 1_600_000_000 -> 1.6 GB, 40_000 -> 40.0 kB"""
    for unit, least in (("GB", 1e9), ("MB", 1e6)):
        if number >= least:
            return f"{number / least:.1f} {unit}"
    return f"{number / 1e3:.1f} kB"


def si(number: float) -> str:
    """1234 -> 1.23k"""
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
