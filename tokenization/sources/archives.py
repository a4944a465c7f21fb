"""Zip archives, as such and as what EPUB and Word files are."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator
from typing import IO, BinaryIO

from common.errors import DataError

MOST_UNPACKED = 200  # bytes from a packed one; text comes to ten, and a bomb to a thousand
SMALL = 10_000_000  # bytes: so many may come from any archive


class Unreadable(DataError):
    """Why a file gives no text. The others are read."""


@contextlib.contextmanager
def opened(file: BinaryIO, size: int) -> Iterator[zipfile.ZipFile]:
    """An archive of `size` bytes. Raises Unreadable if it is damaged, or would fill the disk."""
    with problems_named("it"), zipfile.ZipFile(file) as archive:
        if sum(info.file_size for info in archive.infolist()) > max(SMALL, MOST_UNPACKED * size):
            raise Unreadable(f"it unpacks to more than {MOST_UNPACKED} times its size, as only a bomb does")
        yield archive


@contextlib.contextmanager
def open_member(archive: zipfile.ZipFile, name: str) -> Iterator[IO[bytes]]:
    """Gives at most the bytes that the archive's directory says. Raises Unreadable."""
    with problems_named(f"its part {name}"), archive.open(name) as member:
        yield member


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    with open_member(archive, name) as member:
        return member.read()


@contextlib.contextmanager
def problems_named(what: str) -> Iterator[None]:
    try:
        yield
    except KeyError:
        raise Unreadable(f"{what} is missing") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise Unreadable(f"{what} is damaged ({error})") from None
    except RuntimeError:  # so says zipfile
        raise Unreadable("it has a password") from None
