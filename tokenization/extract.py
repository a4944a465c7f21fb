"""Files that are not UTF-8 text, as text. Each is written once, as JSON Lines or in UTF-8, and then read like any
other: so all that follows, and what a kill costs, is the same for every kind of file."""

from __future__ import annotations

import codecs
import contextlib
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from common.chat import ChatTemplate
from common.errors import DataError
from common.files import atomic_write
from common.output import log, progress_bar
from tokenization import conversations
from tokenization.conversations import are_conversations, messages_of
from tokenization.corpus import (
    BLOCK_BYTES,
    PLAIN,
    SCHEME,
    SUFFIXES,
    NotUTF8,
    Source,
    decoded_blocks,
    find_sources,
    source_at,
    unpacked_blocks,
    unpacked_name,
)
from tokenization.settings import EXTRACTED, Settings
from tokenization.sources.archives import Unreadable, open_member, opened
from tokenization.sources.hub import HubSource, hub_problems, hub_sources
from tokenization.sources.markup import docx_documents, epub_documents, html_documents
from tokenization.sources.pdf import pdf_documents
from tokenization.sources.tables import Row, arrow_rows, csv_rows, parquet_rows

LEAST_CONFIDENCE = 0.12  # of chardet, which is rarely above 0.5 for the encodings of western Europe
READ_IN_PARTS = (".parquet", ".arrow")  # on the hub; other files are copied first
OF_LINES = (*PLAIN, ".csv", ".tsv")
OF_FORMAT = {
    "text": SUFFIXES,
    "chat": (*conversations.SUFFIXES, ".csv", ".parquet", ".arrow"),
}  # of the files in a folder


class Kind(NamedTuple):
    documents: Callable[[BinaryIO, Source, str], Iterable[str | Row]]  # of an open file; the last is `text_key`
    package: str | None = None  # that it needs


def json_documents(file: BinaryIO, source: Source, text_key: str) -> Iterator[str]:
    """The texts of an array or of lines; of a conversation, that of the template."""
    text = io.TextIOWrapper(file, "utf-8-sig")
    try:
        is_array = text.read(1) == "["
        text.seek(0)
        for value in json.load(text) if is_array else map(json.loads, filter(str.strip, text)):
            is_text = isinstance(value, dict) and isinstance(value.get(text_key), str)
            parts = [(value[text_key], False)] if is_text else ChatTemplate().parts(messages_of(value))
            yield "".join(part for part, _ in parts)
    except (ValueError, RecursionError):
        raise Unreadable("its records are neither conversations nor texts") from None


KINDS = {
    ".epub": Kind(lambda file, source, _: epub_documents(file, source.size)),
    ".docx": Kind(lambda file, source, _: docx_documents(file, source.size)),
    ".html": Kind(lambda file, *_: html_documents(file), "trafilatura"),
    ".htm": Kind(lambda file, *_: html_documents(file), "trafilatura"),
    ".pdf": Kind(lambda file, *_: pdf_documents(file), "pypdfium2"),
    ".csv": Kind(lambda file, *_: csv_rows(file)),
    ".tsv": Kind(lambda file, *_: csv_rows(file)),
    ".parquet": Kind(lambda file, _, text_key: parquet_rows(file, text_key), "pyarrow"),
    ".arrow": Kind(lambda file, *_: arrow_rows(file), "pyarrow"),
    ".json": Kind(json_documents),
}


def find(settings: Settings) -> list[Source]:
    """The files that the inputs name, on this machine and then on the hub. Raises DataError."""
    suffixes = OF_FORMAT[settings.format]
    remote = [given for given in settings.input if given.startswith(SCHEME)]
    found: list[Source] = find_sources([given for given in settings.input if given not in remote], suffixes)
    return found + [source for given in remote for source in hub_sources(given, suffixes, settings.max_mb)]


def format_of(sources: Sequence[Source], text_key: str = Settings.text_key) -> Literal["text", "chat"]:
    """chat, if there is nothing but files of conversations."""
    is_chat = all(not isinstance(source, HubSource) and are_conversations(source, text_key) for source in sources)
    return "chat" if is_chat else "text"


class Readable(NamedTuple):
    sources: list[Source]
    skipped: dict[str, str]  # why a file gives no text, by its name


def readable(sources: Sequence[Source], settings: Settings) -> Readable:
    """What the sources hold, as files that can be read as text. Conversations among other files are text, too.

    Raises DataError if no file gives any.
    """
    files = made(sources, files_of)
    texts = made(files.sources, lambda source: [as_text(source, settings)])
    return Readable(texts.sources, files.skipped | texts.skipped)


def in_utf8(sources: Sequence[Source], settings: Settings) -> Readable:
    """Likewise with the files that are not UTF-8 converted."""
    return made(sources, lambda source: [recoded(source, settings)])


def made(sources: Sequence[Source], make: Callable[[Source], list[Source]]) -> Readable:
    made = Readable([], {})
    for source in progress_bar(iterable=sources, desc="Opening", unit="file", leave=False):
        try:
            made.sources.extend(make(source))
        except Unreadable as reason:
            made.skipped[source.name] = str(reason)
    if not made.sources:
        reasons = "; ".join(f"{reason} ({name})" for name, reason in itertools.islice(made.skipped.items(), 5))
        raise DataError(f"No file gives text: {reasons}.")
    return made


def missing_packages(sources: Iterable[Source]) -> list[str]:
    """What would have to be installed to read all of the sources."""
    needed = {KINDS[source.suffix].package for source in sources if source.suffix in KINDS}
    return sorted(package for package in needed if package and importlib.util.find_spec(package) is None)


def files_of(source: Source) -> list[Source]:
    """The members of an archive, or the file itself. On the hub, what cannot be read in parts is copied."""
    if isinstance(source, HubSource) and source.suffix not in READ_IN_PARTS:
        with hub_problems(source.name):
            source = written(source, source.suffix, beginning(source), "")
    return unzipped(source) if source.suffix == ".zip" else [source]


def as_text(source: Source, settings: Settings) -> Source:
    """The source if it is plain text, or a file with its text. Raises Unreadable."""
    is_chat, suffix = settings.format == "chat", source.suffix
    kind, note = None if is_chat and suffix == ".json" else KINDS.get(suffix), suffix[1:]
    if not is_chat and are_conversations(source, settings.text_key):
        kind, note = KINDS[".json"], "conversations as text (--format chat trains on their answers alone)"
    if kind is None:
        return source
    if missing := missing_packages([source]):
        raise Unreadable(f"it needs {missing[0]}: pip install {missing[0]}")
    if suffix in (".csv", ".tsv"):
        source = recoded(source, settings)
    with hub_problems(source.name) if isinstance(source, HubSource) else contextlib.nullcontext():
        of_settings = (settings.text_key, settings.format)
        return written(source, ".jsonl", lines(source, kind, settings), source.note or note, *of_settings)


def written(source: Source, suffix: str, blocks: Iterable[bytes], note: str, *settings: str) -> Source:
    """A file with these blocks, which is kept. What it is made from, and how, gives it its name."""
    identity = [str(source.path), source.size, source.modified_ns, str(source.most_bytes), *settings]
    path = EXTRACTED / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, HubSource):
            log.info(f"Reading {source.name}")
        with atomic_write(path) as file:
            file.writelines(blocks)
    return source_at(path, source.name, note)


def lines(source: Source, kind: Kind, settings: Settings) -> Iterator[bytes]:
    """The documents as JSON Lines. Raises Unreadable if there is none."""
    count = 0
    try:
        with source.open() as file:
            for document in kind.documents(file, source, settings.text_key):
                if record := record_of(document, settings):
                    line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
                    yield line
                    count += len(line)
                    if count >= source.most_bytes:
                        return
    except ImportError as error:  # a package that is there lacks another one
        raise Unreadable(f"it needs {kind.package}, which fails: {error}") from None
    if not count:
        raise Unreadable("it holds no text")


def record_of(document: str | Row, settings: Settings) -> Row | None:
    """The object of a line, or None if it has no text."""
    key = settings.text_key
    if settings.format == "chat" and isinstance(document, dict):
        return document
    if isinstance(document, dict):
        if key not in document:
            names = ", ".join(map(str, document))
            raise Unreadable(f'it has no column "{key}", but {names}: --text_key names the one that holds the text')
        document = document[key]
        if not isinstance(document, str | None):
            raise Unreadable(f'its column "{key}" holds values of type {type(document).__name__}, not texts')
    return {key: document} if document and document.strip() else None


def beginning(source: Source) -> Iterator[bytes]:
    """The lines within its `most_bytes`, or the whole of a file that has no lines."""
    most, count = source.most_bytes if source.suffix in OF_LINES else math.inf, 0
    for block in unpacked_blocks(source):
        if count + len(block) > most:
            yield block[: block.rfind(b"\n", 0, int(most) - count) + 1]
            return
        yield block
        count += len(block)


def unzipped(source: Source) -> list[Source]:
    """The members that are read, as files."""
    with source.open() as file, opened(file, source.size) as archive:
        members = []
        for info in archive.infolist():
            name = unpacked_name(info.filename)
            if name.endswith(SUFFIXES[:-1]) and not info.is_dir():
                with open_member(archive, info.filename) as member:
                    blocks = iter(functools.partial(member.read, BLOCK_BYTES), b"")
                    suffix = "".join(Path(info.filename.lower()).suffixes[-2:])
                    text = written(source, suffix, blocks, "in an archive", info.filename)
                members.append(replace(text, name=f"{source.name}/{info.filename}"))
    if not members:
        raise Unreadable("it holds no file that can be read")
    return members


def recoded(source: Source, settings: Settings) -> Source:
    """The source if it is UTF-8, else its text in UTF-8. Raises Unreadable if its encoding cannot be guessed."""
    try:
        for _ in decoded_blocks(source, lambda count: None):
            pass
    except NotUTF8 as problem:
        encoding = problem.encoding or settings.encoding or guess(problem.sample)
        made = written(source, source.suffix, utf8_blocks(source, encoding), f"from {encoding}", encoding)
        return replace(made, is_converted=True)
    return source


def guess(sample: bytes) -> str:
    if 0 in sample:
        raise Unreadable("it has zero bytes, as only UTF-16 has: --encoding utf-16-le reads it if it is that")
    if importlib.util.find_spec("chardet") is None:
        raise Unreadable("it is not UTF-8: --encoding names its encoding, or `pip install chardet` guesses it")
    import chardet

    guessed = chardet.detect(sample)
    if guessed["encoding"] and guessed["confidence"] >= LEAST_CONFIDENCE:
        return str(guessed["encoding"])
    raise Unreadable("it is not UTF-8, and its encoding cannot be guessed: --encoding names it")


def utf8_blocks(source: Source, encoding: str) -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        for block in unpacked_blocks(source):
            yield decoder.decode(block).encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not {encoding} ({error.reason}): --encoding names another") from None
