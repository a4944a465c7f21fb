"""Broken and hostile forms of a file, drawn from a seed: bytes that changed, JSON that says something else."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

DEEP = "[" * 20_000 + "]" * 20_000
# Values of every type, and of sizes nothing has. In place of those that Python's json does not write, a text that
# `dump` replaces.
RAW = {"<deep>": DEEP, "<digits>": "9" * 5_000, "<1e400>": "1e400", "<surrogate>": r'"\ud800"', "<nul>": r'"a\u0000b"'}
VALUES = (
    None, True, False, 0, 1, -1, 2, 2**31, 2**32, -(2**63), 2**63, 10**12, 10**18, 10**400, 0.5, 1.5, -0.0, 1e308,
    float("nan"), float("inf"), -float("inf"), "", "x", "0", "\x1b[31m", "../../etc/passwd", "/etc/passwd", "~", ".",
    "é" * 300, "x" * 50_000, [], [1], ["x", None], [[]], {}, {"a": 1}, {"": None}, *RAW,
)  # fmt: skip


class Mutation(NamedTuple):
    name: str
    content: bytes


def byte_mutations(content: bytes, count: int, seed: int) -> Iterator[Mutation]:
    random = np.random.RandomState(seed)
    yield Mutation("empty", b"")
    yield Mutation("other bytes", random.bytes(len(content)))
    yield Mutation("zeros", bytes(len(content)))
    yield Mutation("twice", content * 2)
    for i in range(count - 4):
        kind = ("flip", "truncate", "insert", "delete", "duplicate", "zero", "byte")[i % 7]
        # Headers decide more than what follows them: half of the places are among the first bytes.
        place = int(random.randint(min(len(content), 200) if i % 2 else len(content)))
        length = int(random.randint(1, 33))
        here = content[place : place + length]
        changed = {
            "flip": lambda: bytes([content[place] ^ 1 << int(random.randint(8))]),  # noqa: B023
            "byte": lambda: random.bytes(1),
            "truncate": lambda: b"",
            "insert": lambda: random.bytes(length) + here,  # noqa: B023
            "delete": lambda: b"",
            "duplicate": lambda: here + here,  # noqa: B023
            "zero": lambda: bytes(len(here)),  # noqa: B023
        }[kind]()
        taken = {"flip": 1, "byte": 1, "truncate": len(content)}.get(kind, length)
        yield Mutation(f"{kind} at {place} (seed {seed}, {i})", content[:place] + changed + content[place + taken :])


def json_mutations(value: Any, count: int, seed: int) -> Iterator[Mutation]:
    random = np.random.RandomState(seed)
    yield from text_mutations(json.dumps(value))
    for key in value if isinstance(value, dict) and len(value) < 60 else ():
        yield Mutation(f"without {key}", dump({k: v for k, v in value.items() if k != key}))
    for i in range(count):
        changed = copy.deepcopy(value)
        container, key, way = random_place(changed, random)
        kind = random.choice(["replace"] * 8 + ["remove", "rename", "twice"])
        if kind == "remove":
            del container[key]
        elif kind == "rename" and isinstance(container, dict):
            container[str(random.choice(["x", str(key).upper(), "", f"{key} "]))] = container.pop(key)
        elif kind == "twice" and isinstance(container, list):
            container.append(container[key])
        else:
            new = VALUES[random.randint(len(VALUES))]
            container[key] = new
            kind = f"is {str(new)[:20]!r}"
        yield Mutation(f"{way} {kind} (seed {seed}, {i})", dump(changed))


def header_mutations(content: bytes, count: int, seed: int) -> Iterator[Mutation]:
    """Mutate the header of a safetensors file, which is JSON after its length."""
    size = int.from_bytes(content[:8], "little")
    for name, header in json_mutations(json.loads(content[8 : 8 + size]), count, seed):
        yield Mutation(name, len(header).to_bytes(8, "little") + header + content[8 + size :])


def random_place(value: Any, random: np.random.RandomState) -> tuple[Any, Any, str]:
    """A container somewhere in a JSON value that is not empty, a key of it, and the way there."""
    way = []
    while True:
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = keys[random.randint(len(keys))]
        way.append(str(key))
        if not isinstance(value[key], dict | list) or not value[key] or random.rand() < 0.2:
            return value, key, ".".join(way)
        value = value[key]


def text_mutations(text: str) -> Iterator[Mutation]:
    """The same JSON in other encodings, and other things in its place."""
    yield Mutation("with a BOM", text.encode("utf-8-sig"))
    for encoding in ("utf-16", "utf-32-be"):
        yield Mutation(encoding, text.encode(encoding))
    yield Mutation("latin-1", text.replace('"', '"é', 1).encode("latin-1"))
    first, _, rest = text.partition(":")
    yield Mutation("a key twice", (first + ': "x", ' + first.lstrip("{") + ":" + rest).encode())
    yield Mutation("a comment", ("// comment\n" + text).encode())
    yield Mutation("a comma at the end", (text[:-1] + ",}").encode())
    yield Mutation("more after the end", (text + text).encode())
    yield Mutation("Python's quotes", text.replace('"', "'").encode())
    for other in ("null", "true", "0", '"x"', "[]", "{}", "NaN", *RAW.values()):
        yield Mutation(f"only {other[:10]}", other.encode())


def dump(value: Any) -> bytes:
    """JSON with the names in RAW replaced by what they stand for."""
    text = json.dumps(value, ensure_ascii=False)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    return text.encode()
