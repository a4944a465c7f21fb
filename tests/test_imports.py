"""Arrows point one way: scripts -> wings -> common ground -> model and tokenizers."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import FOLDERS, ROOT, SOURCES

GROUND = {"common", "model", "tokenizer", "tokenizer_bpe"}
MAY_IMPORT = {
    "model": set(),
    "tokenizer": {"tokenizer_bpe"},  # load_tokenizer, which takes a file of either kind
    "tokenizer_bpe": {"tokenizer"},
    "common": {"model", "tokenizer"},
    "tokenization": GROUND,
    "generation": GROUND,
    "training": GROUND | {"tokenization", "generation"},
    "tokenize_local_bpe": GROUND | {"tokenization"},
    "generate": GROUND | {"tokenization", "generation"},
    "examples": {"common"},
    "train_colab_mmap": GROUND | {"tokenization", "training", "tokenize_local_bpe", "examples"},
}
MAY_IMPORT["benchmarks"] = set(MAY_IMPORT)
MAY_IMPORT["tools"] = MAY_IMPORT["benchmarks"] | {"benchmarks"}
TWO_WAYS = {"tokenizer", "tokenizer_bpe"}

FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES if path.name != "__init__.py"}
OURS = {*MAY_IMPORT, "tests"}


def imports(path: Path) -> Iterator[str]:
    """Every module of ours that a file imports, in functions and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] in OURS)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in FILES or node.module.partition(".")[0] in OURS:
                    yield whole if whole in FILES else node.module


def test_the_table_names_every_room() -> None:
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert {path.stem for path in ROOT.glob("*.py")} | folders == set(MAY_IMPORT)
    assert folders == set(FOLDERS)


@pytest.mark.parametrize("module", FILES)
def test_a_file_imports_only_what_lies_below_it(module: str) -> None:
    room = module.partition(".")[0]
    wrong = {name for name in imports(FILES[module]) if name.partition(".")[0] not in {room, *MAY_IMPORT[room]}}
    assert not wrong, f"{module} imports {wrong}"


def test_no_circle_of_files() -> None:
    graph = {module: {*imports(path)} - ({module} | TWO_WAYS) for module, path in FILES.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(FILES)  # raises CycleError
