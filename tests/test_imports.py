"""Imports go one way: tools, benchmarks, notebooks -> exchange, serving -> scripts -> wings -> common -> model,
tokenizers."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, SOURCES

GROUND = {"common", "model", "model_config", "tokenizer", "tokenizer_bpe"}
CONFIG = {"training.config"}
FLAGS = {"generation.request", "tokenization.settings"}  # so that one script can say which other has a flag
# A room is a folder, or a file beside rooms. It may import itself and what stands here.
MAY_IMPORT = {
    "model_config": set(),
    "model": {"model_config"},
    "tokenizer_bpe": set(),
    "tokenizer": {"tokenizer_bpe"},  # load_tokenizer opens a file of either kind
    "common": {"model", "model_config", "tokenizer", "tokenizer_bpe"},
    "tokenization": GROUND,
    "generation": GROUND | {"tokenization"},  # which reads the text to score
    "training.config": GROUND | CONFIG | FLAGS,
    "training.records": GROUND | CONFIG,
    "training": GROUND | {"tokenization", "generation"},
    "tokenize_local_bpe": GROUND | {"tokenization"},
    "generate": GROUND | {"tokenization", "generation"},
    "train_colab_mmap": GROUND | {"tokenization", "training", "tokenize_local_bpe"},
}
PRODUCT = set(MAY_IMPORT)
# Rooms beside each other do not import each other, and only notebooks import tools.
MAY_IMPORT["exchange"] = GROUND | {
    "training.state",  # a card tells how the training went
    "training.records",
    "generation.request",  # a Modelfile has generate.py's defaults
}
MAY_IMPORT["serving"] = GROUND | CONFIG | {"generation", "generate", "training.records"}
MAY_IMPORT["benchmarks"] = PRODUCT
MAY_IMPORT["tools"] = GROUND | {
    "exchange",
    "serving",
    "benchmarks",
    "generation",
    "training.config",
    "training.records",
}
MAY_IMPORT["notebooks"] = PRODUCT | {"exchange", "serving", "tools"}

FILES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in SOURCES if path.name != "__init__.py"}
OURS = {name.partition(".")[0] for name in (*MAY_IMPORT, "tests")}


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


def is_in(module: str, room: str) -> bool:
    return module == room or module.startswith(f"{room}.")


@pytest.mark.parametrize("module", FILES)
def test_a_file_imports_only_what_lies_below_it(module: str) -> None:
    room = max((room for room in MAY_IMPORT if is_in(module, room)), key=len)
    allowed = {room, *MAY_IMPORT[room]}
    wrong = {name for name in imports(FILES[module]) if not any(is_in(name, other) for other in allowed)}
    assert not wrong, f"{module} imports {wrong}"


def test_no_circle_of_files() -> None:
    graph = {module: {*imports(path)} - {module} for module, path in FILES.items()}
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) >= len(FILES)  # raises CycleError
