"""Files are whole or absent, and JSON that cannot be read says where."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from common.errors import CheckpointError, ConfigError, DataError, UserError
from common.files import atomic_write, locked, read_json


def test_a_complete_write_replaces_the_file_and_leaves_nothing_beside(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"old")
    with atomic_write(path) as file:
        file.write(b"new")
        assert path.read_bytes() == b"old"  # until it is complete
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), ValueError("x")])
@pytest.mark.parametrize("existed", [True, False])
def test_a_write_that_fails_keeps_the_old_file_and_leaves_nothing_beside(
    tmp_path: Path, error: BaseException, existed: bool
) -> None:
    path = tmp_path / "a.bin"
    if existed:
        path.write_bytes(b"old")
    with pytest.raises(type(error)), atomic_write(path) as file:
        file.write(b"half of the new")
        raise error
    assert os.listdir(tmp_path) == (["a.bin"] if existed else [])
    assert not existed or path.read_bytes() == b"old"


def test_a_file_system_without_directory_sync_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def no_directories(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(22, "Invalid argument")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", no_directories)
    with atomic_write(tmp_path / "a.bin") as file:
        file.write(b"new")
    assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')  # as Windows editors save it
    assert read_json(tmp_path / "a.json", DataError) == {"a": 1}


@pytest.mark.parametrize("error", [ConfigError, DataError, CheckpointError])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{\n "a": 1\n "b": 2}', "line 3, column 2"),
        (b'{\n "a": 1,\n}', "line 2, column 8" if sys.version_info >= (3, 13) else "line 3, column 1"),
        (b'{"a": 1', "line 1, column 8"),
        (b"", "line 1, column 1"),
        (b"[1]", "list"),
        (b'"text"', "str"),
        (b"null", "NoneType"),
        (b'{"a": "\xe9"}', "byte 7"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "digits"),
        (b'{"a": ' * 100_000, "recursion"),
    ],
)
def test_json_that_cannot_be_read_names_the_file_and_the_place(
    tmp_path: Path, error: type[UserError], content: bytes, said: str
) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(error) as caught:
        read_json(path, error)
    assert str(path) in str(caught.value) and said in str(caught.value)


def test_a_file_system_without_locks_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", missing)
    for _ in range(2):  # also after one that was killed
        with locked(tmp_path / "run", lambda: UserError("busy")):
            (tmp_path / "run").mkdir(exist_ok=True)
        assert "does not support locks" in capsys.readouterr().out
