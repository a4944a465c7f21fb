"""Read zip archives without unpacking them to disk, and the parts of EPUB files."""

from __future__ import annotations

import contextlib
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from typing import BinaryIO

from tokenization.corpus import ALWAYS_ALLOWED_BYTES, MAX_UNPACK_RATIO, Source, UnreadableError

ENCRYPTED = 0x1  # flag of a member


def list_members(source: Source) -> list[Source]:
    """Return the files in an archive; two may have the same name. Raises UnreadableError."""
    with source.open() as file, open_zip(file) as archive:
        infos = [(number, info) for number, info in enumerate(archive.infolist()) if not info.is_dir()]
    if any(info.flag_bits & ENCRYPTED for _, info in infos):
        raise UnreadableError("it has a password")
    if not infos:
        raise UnreadableError("it has no files")
    if sum(info.file_size for _, info in infos) > max(ALWAYS_ALLOWED_BYTES, MAX_UNPACK_RATIO * source.size):
        raise UnreadableError(f"it unpacks to more than {MAX_UNPACK_RATIO} times its size, like a zip bomb")
    members = (
        replace(source, name=f"{source.name}/{info.filename}", member=number, kind="", is_named=False)
        for number, info in infos
    )
    return [member.look() for member in members]


@contextlib.contextmanager
def open_zip(file: BinaryIO) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(file) as archive:
            yield archive
    except (zipfile.BadZipFile, OSError) as error:
        raise UnreadableError(f"it is damaged ({error})") from None


def read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)
    except KeyError:
        raise UnreadableError(f"its part {name} is missing") from None
