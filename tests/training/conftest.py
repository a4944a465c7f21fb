"""Runs that are interrupted, finished, or a copy of a finished one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import Killed
from tests.training.helpers import at_step, die, save_at_once


@pytest.fixture
def interrupt(train: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`interrupt(output_dir, after=10, ...)`: a run whose process is gone once `after` steps are done."""

    def run(folder: Path, after: int, **changes: Any) -> None:
        with monkeypatch.context() as patch:
            save_at_once(patch)
            at_step(patch, after, die)
            with pytest.raises(Killed):
                train(folder, **changes)

    return run


@pytest.fixture(scope="module")
def unbroken(train: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of the standard flags. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("unbroken") / "run"
    assert train(folder).code == 0
    return folder


@pytest.fixture
def copy_of(unbroken: Path, tmp_path: Path) -> Path:
    """A copy of the finished run that a test may do with as it likes."""
    shutil.copytree(unbroken, tmp_path / "run")
    return tmp_path / "run"
