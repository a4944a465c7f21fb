"""Files as text. Those of other programs are written once, as JSON Lines or in UTF-8, and then read like any other: so
all that follows, and what a kill costs, is the same for every kind of file. What cannot be read is left out."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.util
import io
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO, Literal, NamedTuple

from common.chat import ChatTemplate
from common.errors import DataError
from common.files import atomic_write
from common.output import LOG_LINE_SECONDS, log, printable, progress_bar
from tokenization import conversations
from tokenization.conversations import are_conversations, messages_of, records
from tokenization.corpus import (
    PLAIN,
    SCHEME,
    SUFFIXES,
    NotUTF8,
    Source,
    Unreadable,
    decoded_blocks,
    find_sources,
    json_lines,
    key_of,
    record_of_line,
    source_at,
    text_of_record,
    unpacked_blocks,
    why_not,
)
from tokenization.isolation import Isolated, Work
from tokenization.settings import EXTRACTED, Settings
from tokenization.sources.archives import members_of
from tokenization.sources.hub import HubSource, hub_problems, hub_sources
from tokenization.sources.mail import eml_documents, mbox_documents
from tokenization.sources.markup import docx_documents, epub_documents, html_documents, odt_documents, rtf_documents
from tokenization.sources.pdf import pdf_documents
from tokenization.sources.tables import Row, arrow_rows, csv_rows, parquet_rows

LEAST_CONFIDENCE = 0.12  # of chardet, which is rarely above 0.5 for the encodings of western Europe
LONGEST_DOCUMENT = 5_000_000  # characters: a longer one becomes several
READ_IN_PARTS = (".parquet", ".arrow")  # on the hub; other files are copied first
OF_LINES = (*PLAIN, ".csv", ".tsv")
OF_FORMAT = {  # of the files in a folder; the last is not read in an archive
    "text": SUFFIXES,
    "chat": (*conversations.SUFFIXES, ".csv", ".parquet", ".arrow", ".zip"),
}


class Kind(NamedTuple):
    documents: Callable[[BinaryIO, str], Iterable[str | Row]]  # of an open file; the second is `text_key`
    package: str | None = None  # that it needs


def json_documents(file: BinaryIO, text_key: str) -> Iterator[str]:
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


def alone(documents: Callable[[BinaryIO], Iterable[str | Row]], package: str | None = None) -> Kind:
    return Kind(lambda file, _: documents(file), package)


KINDS = {
    ".epub": alone(epub_documents),
    ".docx": alone(docx_documents),
    ".odt": alone(odt_documents),
    ".rtf": alone(rtf_documents, "striprtf"),
    ".html": alone(html_documents, "trafilatura"),
    ".htm": alone(html_documents, "trafilatura"),
    ".pdf": alone(pdf_documents, "pypdfium2"),
    ".mbox": alone(mbox_documents),
    ".eml": alone(eml_documents),
    ".csv": alone(csv_rows),
    ".tsv": alone(csv_rows),
    ".parquet": Kind(parquet_rows, "pyarrow"),
    ".arrow": alone(arrow_rows, "pyarrow"),
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
    skipped: list[tuple[str, str]]  # the name of a file that gives no text, and why


def readable(sources: Sequence[Source], settings: Settings) -> Readable:
    """What the sources hold, as files that can be read as text to their ends. Conversations among other files are text,
    too. Plain files are read here, all others in a process of their own.

    Raises DataError if no file gives any text.
    """
    made = Readable([], [])
    with Isolated() as isolated, Progress(len(sources)) as progress:

        def read(work: Work, source: Source, is_foreign: bool) -> list[Source]:
            """What `work` makes of it; nothing, and a reason, if it cannot be read."""
            try:
                if is_foreign and not isinstance(source, HubSource):
                    return isolated.call(work, source, settings, progress.tell)
                return work(source, settings)
            except DataError as problem:
                is_alone = len(sources) == 1 and source.member is None
                if not isinstance(problem, Unreadable) and (is_alone or isinstance(source, HubSource)):
                    raise  # with its path; or because another try may read it
                made.skipped.append((source.name, str(problem).removeprefix(source.place).strip(" ,:").rstrip(".")))
                return []

        for source in sources:
            progress.begin(source.name)
            for file in read(files_of, source, is_foreign=source.suffix == ".zip"):
                if missing := missing_packages([file]):
                    made.skipped.append((file.name, f"it needs {missing[0]}: pip install {missing[0]}"))
                    continue
                made.sources.extend(read(as_text, file, is_foreign=file.suffix in KINDS))
    if not made.sources:
        reasons = "; ".join(f"{reason} ({name})" for name, reason in made.skipped[:5])
        raise DataError(f"No file gives text: {reasons}.")
    return made


class Progress:
    """Which file is opened: a bar, or a line now and then."""

    def __init__(self, total: int):
        self.total, self.number, self.name, self.told = total, 0, "", time.monotonic()
        self.bar = progress_bar(total=total, desc="Opening", unit="file", leave=False)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def begin(self, name: str) -> None:
        self.bar.update(bool(self.number))
        self.number, self.name = self.number + 1, name
        self.tell()

    def tell(self) -> None:
        self.bar.refresh()
        if self.bar.disable and time.monotonic() - self.told >= LOG_LINE_SECONDS:
            self.told = time.monotonic()
            log.info(f"Opening    file {self.number:,} of {self.total:,}: {printable(self.name)}")


def missing_packages(sources: Iterable[Source]) -> list[str]:
    """What would have to be installed to read all of the sources."""
    needed = {KINDS[source.suffix].package for source in sources if source.suffix in KINDS}
    return sorted(package for package in needed if package and importlib.util.find_spec(package) is None)


def files_of(source: Source, settings: Settings) -> list[Source]:
    """The members of an archive, or the file itself. On the hub, what cannot be read in parts is copied."""
    if isinstance(source, HubSource) and source.suffix not in READ_IN_PARTS:
        with hub_problems(source.name):
            source = written(source, source.suffix, beginning(source), "")
    return members_of(source) if source.suffix == ".zip" else [source]


def as_text(source: Source, settings: Settings) -> list[Source]:
    """The source if it is plain text, or a file with its text. Raises DataError."""
    if source.member is not None and (reason := why_not(source.name, OF_FORMAT[settings.format][:-1])):
        raise Unreadable(reason)
    is_chat, suffix = settings.format == "chat", source.suffix
    kind, note = None if is_chat and suffix == ".json" else KINDS.get(suffix), suffix[1:]
    if not is_chat and are_conversations(source, settings.text_key):
        kind, note = KINDS[".json"], "conversations as text (--format chat trains on their answers alone)"
    if kind is None:
        return [checked(source, settings)]
    if suffix in (".csv", ".tsv"):
        source = recoded(source, settings)
    with hub_problems(source.name) if isinstance(source, HubSource) else contextlib.nullcontext():
        of_settings = (settings.text_key, settings.format)
        return [written(source, ".jsonl", lines(source, kind, settings), source.note or note, *of_settings)]


def checked(source: Source, settings: Settings) -> Source:
    """The source in UTF-8, when it has been read to its end. Raises DataError."""
    source, size = source if settings.skip_bad_records else recoded(source, settings), 0

    def on_read(count: int) -> None:
        nonlocal size
        size += count

    if settings.format == "chat":
        for _ in records(source, lambda problem: None, on_read):
            pass
    elif source.is_jsonl:
        for number, position, line in json_lines(source, on_read):
            text_of_record(source, number, record_of_line(source, number, position, line), settings.text_key)
    else:
        size = source.text_bytes
    if not size:
        raise Unreadable("it is empty")
    return replace(source, text_bytes=size)


def written(source: Source, suffix: str, blocks: Iterable[bytes], note: str, *settings: str) -> Source:
    """A file with these blocks, which is kept. What it is made from, and how, gives it its name."""
    identity = [str(source.path), source.size, source.modified_ns, source.member, str(source.most_bytes), *settings]
    path = EXTRACTED / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}{suffix}"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, HubSource):
            log.info(f"Reading {source.name}")
        with atomic_write(path) as file:
            file.writelines(blocks)
    made = source_at(path, source.name, note)
    return replace(made, text_bytes=made.size)


def lines(source: Source, kind: Kind, settings: Settings) -> Iterator[bytes]:
    """The documents as JSON Lines. Raises Unreadable if there is none."""
    count = 0
    try:
        with source.open() as file:
            for document in kind.documents(file, settings.text_key):
                for record in records_of(document, settings):
                    line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
                    yield line
                    count += len(line)
                    if count >= source.most_bytes:
                        return
    except ImportError as error:  # a package that is there lacks another one
        raise Unreadable(f"it needs {kind.package}, which fails: {error}") from None
    if not count:
        raise Unreadable("it holds no text")


def records_of(document: str | Row, settings: Settings) -> Iterator[Row]:
    """The objects of its lines; none if it has no text."""
    key = settings.text_key
    if settings.format == "chat" and isinstance(document, dict):
        yield document
        return
    if isinstance(document, dict):
        column = key_of(document, key)
        if column is None:
            names = ", ".join(map(str, document))
            raise Unreadable(
                f'it has no column "{key}", but {names}: tokenize_local_bpe.py --text_key names the one with the text'
            )
        document = document[column]
        if not isinstance(document, str | None):
            raise Unreadable(f'its column "{column}" holds values of type {type(document).__name__}, not texts')
    while document and document.strip():
        most = document[:LONGEST_DOCUMENT]
        part = most if most == document else most[: most.rfind("\n") + 1] or most
        yield {key: part}
        document = document[len(part) :]


def beginning(source: Source) -> Iterator[bytes]:
    """The lines within its `most_bytes`, or the whole of a file that has no lines."""
    most, count = source.most_bytes if source.suffix in OF_LINES else math.inf, 0
    for block in unpacked_blocks(source):
        if count + len(block) > most:
            yield block[: block.rfind(b"\n", 0, int(most) - count) + 1]
            return
        yield block
        count += len(block)


def recoded(source: Source, settings: Settings) -> Source:
    """The source if it is UTF-8, else its text in UTF-8. Raises Unreadable if its encoding cannot be guessed."""
    size = 0

    def on_read(count: int) -> None:
        nonlocal size
        size += count

    try:
        for _ in decoded_blocks(source, on_read):
            pass
    except NotUTF8 as problem:
        encoding = problem.encoding or settings.encoding or guess(problem.sample)
        made = written(source, source.suffix, utf8_blocks(source, encoding), f"from {encoding}", encoding)
        return replace(made, is_converted=True)
    return replace(source, text_bytes=size)


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
