"""generate.py, called in this process."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

import generate


@pytest.fixture
def run(capsys) -> Callable[..., tuple[int, str, str]]:
    """Call the script in this process. Returns its exit code, stdout and stderr; an escaping exception fails."""

    def call(*argv: object) -> tuple[int, str, str]:
        code = generate.main([str(word) for word in argv])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def fails(run) -> Callable[..., str]:
    """Call the script with a mistake; returns its one message after checking the exit code."""

    def call(expected_code: int, *argv: object) -> str:
        code, _, err = run(*argv)
        assert code == expected_code, err
        assert err.startswith("error: ") and "Traceback" not in err and err.count("error:") == 1
        return err

    return call


@pytest.fixture
def rows(run) -> Callable[..., list[dict]]:
    """Call the script with --json; every line it prints has to be an object."""

    def call(*argv: object) -> list[dict]:
        code, out, err = run("--json", *argv)
        assert code == 0, err
        return [json.loads(line) for line in out.splitlines()]

    return call
