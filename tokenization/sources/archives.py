"""Zip archives: the files in them, read without unpacking them to the disk, and the parts of EPUB and Word files."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

from tokenization.corpus import MOST_UNPACKED, SMALL, Source, Unreadable

ENCRYPTED = 0x1  # a flag of a member


def members_of(source: Source) -> list[Source]:
    """The files in an archive. Two may have the same name."""
    with source.open() as file, opened(file) as archive:
        infos = [(number, info) for number, info in enumerate(archive.infolist()) if not info.is_dir()]
    if any(info.flag_bits & ENCRYPTED for _, info in infos):
        raise Unreadable("it has a password")
    if not infos:
        raise Unreadable("it holds no file")
    if sum(info.file_size for _, info in infos) > max(SMALL, MOST_UNPACKED * source.size):
        raise Unreadable(f"it unpacks to more than {MOST_UNPACKED} times its size, as only a bomb does")
    return [replace(source, name=f"{source.name}/{info.filename}", member=number) for number, info in infos]


@contextlib.contextmanager
def opened(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, OSError) as error:
        raise Unreadable(f"it is damaged ({error})") from None


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except KeyError:
        raise Unreadable(f"its part {name} is missing") from None
