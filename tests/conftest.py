"""Shared by the tests: tiny token folders, and the trainer called in this process as a user would call it."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import io
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

# Before torch is imported, here and in the processes that tests start: models this small lose time to threads that wait
# for each other, and as many tests run at a time as there are cores.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

from common.output import print_log
from tests import leftovers
from tests.helpers import flags_of_a_tiny_run, generated_text, write_tokens

# How long an example takes says how busy the machine is. In CI a change is judged by itself, not by the examples drawn
# that day; all other runs go on looking for new ones.
hypothesis.settings.register_profile("any machine", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("any machine")
print_log()  # as every script does: what a test expects must not depend on the tests before it

# A script in the background (nohup, &) ignores signals, and so would all that the tests start and send them to.
for name, handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if hasattr(signal, name) and signal.getsignal(getattr(signal, name)) == signal.SIG_IGN:
        signal.signal(getattr(signal, name), handler)


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores: a third of the time, tests wait for processes, pages and timeouts."""
    return (os.cpu_count() or 1) + 1


class Result(NamedTuple):
    """How a command ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import only files with such tests for `-m extras` and `-m quick`: importing all takes as long as running them."""
    mark = config.option.markexpr
    is_python = mark in ("extras", "quick") and collection_path.suffix == ".py"
    return True if is_python and f"mark.{mark}" not in collection_path.read_text(encoding="utf-8") else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `cuda` are skipped where there is no GPU, those marked `extras(package)` where that is missing."""
    for item in items:
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        for mark in item.iter_markers("extras"):
            if missing := [package for package in mark.args if importlib.util.find_spec(package) is None]:
                item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Make a test's random numbers independent of the tests before it, whose order varies.

    Training collects garbage when it begins; freezing keeps that from scanning everything that tests have imported.
    """
    torch.manual_seed(0)
    gc.freeze()


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """End the processes that a test started, also if it fails."""
    leftovers.STARTED.clear()
    with leftovers.ended():
        yield
    for process in leftovers.STARTED:
        if process.returncode is None:
            process.kill()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Path]:
    """A pipe that nobody writes into. Whoever waits for that fails after a while."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("POSIX")
    os.mkfifo(tmp_path / "pipe")

    def fail(*_: object) -> None:
        raise AssertionError("waited for a writer")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(30)
    yield tmp_path / "pipe"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A character token folder of 30 KB of text. Not to be changed by a test."""
    return write_tokens(tmp_path_factory.mktemp("data") / "tiny", generated_text(30_000))


@pytest.fixture(scope="session")
def short_token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token folder so short that an epoch of 8 sequences a step takes about twenty steps."""
    return write_tokens(tmp_path_factory.mktemp("data") / "short", generated_text(3_000, seed=1))


@pytest.fixture(scope="session")
def train_flags(token_folder: Path) -> Callable[..., list[str]]:
    """`train_flags(output_dir, key=value, ...)`: the command line of a tiny run on `token_folder`."""
    return functools.partial(flags_of_a_tiny_run, token_folder)


@pytest.fixture(scope="session")
def train(train_flags: Callable[..., list[str]]) -> Callable[..., Result]:
    """`train(output_dir, key=value, ..., extra=[...])` runs the trainer in this process and captures what it prints."""

    def run(output_dir: Path, extra: tuple[str, ...] = (), **changes: object) -> Result:
        from matplotlib.figure import Figure

        import train_colab_mmap

        out, err = io.StringIO(), io.StringIO()
        gc.freeze()  # the training before took away what was frozen
        with contextlib.ExitStack() as around:
            around.enter_context(contextlib.redirect_stdout(out))
            around.enter_context(contextlib.redirect_stderr(err))
            # Drawing loss_curve.png takes as long as all else here. What runs as a script draws it.
            around.enter_context(pytest.MonkeyPatch.context()).setattr(Figure, "draw", lambda *_: None)
            code = train_colab_mmap.main([*train_flags(output_dir, **changes), *extra])
        return Result(code, out.getvalue(), err.getvalue())

    return run
