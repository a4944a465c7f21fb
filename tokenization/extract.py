"""Files as text. Those of other programs are written once, as JSON Lines or in UTF-8, and then read like any other: so
all that follows, and what a kill costs, is the same for every kind of file. What cannot be read is left out."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.util
import json
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO, Literal, NamedTuple

from common.chat import ChatTemplate
from common.errors import DataError, is_full_disk
from common.files import atomic_write
from common.output import LOG_INTERVAL_SECONDS, log, printable, progress_bar
from tokenization import conversations
from tokenization.conversations import are_conversations, read_conversations, texts_of
from tokenization.corpus import (
    PLAIN,
    SUFFIXES,
    NotUTF8,
    Source,
    Unreadable,
    decoded_blocks,
    find_sources,
    is_hidden,
    source_at,
    unpacked_blocks,
    why_not,
)
from tokenization.documents import BadRecord, Tally, key_of, records, text_of_record
from tokenization.encodings import TextCheck, guess, has_chardet
from tokenization.isolation import Isolated, Work
from tokenization.settings import DOCUMENT_SEPARATOR, EXTRACTED, HUB, Settings
from tokenization.sources.archives import members_of
from tokenization.sources.hub import HubSource, hub_problems, hub_sources
from tokenization.sources.mail import eml_documents, mbox_documents
from tokenization.sources.markup import epub_documents, html_documents
from tokenization.sources.pandoc import FORMATS, reader_of
from tokenization.sources.pdf import pdf_documents
from tokenization.sources.plain import cleaner_of, subtitle_documents
from tokenization.sources.tables import Row, arrow_rows, csv_rows, parquet_rows

READERS = 2  # the version of what is read how: a file that an older one has made is not used
BEGINNING = 20_000  # characters, in which a text shows that it has to be cleaned
LONGEST_CLEANED = 50_000_000  # bytes: a longer text stays as it is
LONGEST_DOCUMENT = 5_000_000  # characters: a longer one becomes several
MARK_OF_LINE = re.compile(rf"^{re.escape(DOCUMENT_SEPARATOR)}$", re.M)
READ_IN_PARTS = (".parquet", ".arrow")  # on the hub; other files are copied first
OF_LINES = (*PLAIN, ".csv", ".tsv")
OF_FORMAT = {  # of the files in a folder; the last is not read in an archive
    "text": SUFFIXES,
    "chat": (*conversations.SUFFIXES, ".csv", ".parquet", ".arrow", ".zip"),
}


class Kind(NamedTuple):
    documents: Callable[[BinaryIO, str], Iterable[str | Row | BadRecord]]  # of an open file; the second is `text_key`
    module: str | None = None  # that it needs
    package: str | None = None  # for pip, if it has another name


def json_documents(source: Source, text_key: str) -> Iterator[str | BadRecord]:
    """The texts of a JSON file, and those of its conversations."""
    bad: list[BadRecord] = []
    for record in records(source, bad.append, lambda count: None):
        try:
            yield from texts_of(record.value, text_key)
        except ValueError as problem:
            yield BadRecord(record.place, str(problem))
    yield from bad


def alone(documents: Callable[[BinaryIO], Iterable[str | Row | BadRecord]], module: str | None = None) -> Kind:
    return Kind(lambda file, _: documents(file), module)


KINDS = {
    ".epub": alone(epub_documents),
    ".html": alone(html_documents, "trafilatura"),
    ".htm": alone(html_documents, "trafilatura"),
    ".pdf": alone(pdf_documents, "pypdfium2"),
    ".mbox": alone(mbox_documents),
    ".eml": alone(eml_documents),
    ".srt": alone(subtitle_documents),
    ".vtt": alone(subtitle_documents),
    ".csv": alone(csv_rows),
    ".tsv": alone(csv_rows),
    ".parquet": Kind(parquet_rows, "pyarrow"),
    ".arrow": alone(arrow_rows, "pyarrow"),
    **{suffix: alone(reader_of(suffix), "pypandoc")._replace(package="pypandoc_binary") for suffix in FORMATS},
}
JSON = (".json", ".jsonl")


def find(settings: Settings) -> list[Source]:
    """The files that the inputs name, on this machine and then on the hub. Raises DataError."""
    suffixes = OF_FORMAT[settings.format]
    remote = [given for given in settings.input if given.startswith(HUB)]
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
            except OSError as problem:
                if is_full_disk(problem):
                    raise
                made.skipped.append((source.name, f"it cannot be read: {problem.strerror or problem}"))
                return []
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
                for text in read(as_text, file, is_foreign=file.suffix in (*KINDS, ".json")):
                    made.sources.append(text)
                    if text.left_out:
                        made.skipped.append((text.name, text.left_out))
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
        if self.bar.disable and time.monotonic() - self.told >= LOG_INTERVAL_SECONDS:
            self.told = time.monotonic()
            log.info(f"Opening    file {self.number:,} of {self.total:,}: {printable(self.name)}")


def missing_packages(sources: Iterable[Source]) -> list[str]:
    """What would have to be installed to read all of the sources."""
    kinds = {KINDS[source.suffix] for source in sources if source.suffix in KINDS}
    missing = [kind for kind in kinds if kind.module and importlib.util.find_spec(kind.module) is None]
    return sorted({str(kind.package or kind.module) for kind in missing})


def files_of(source: Source, settings: Settings) -> list[Source]:
    """The members of an archive, or the file itself. On the hub, what cannot be read in parts is copied."""
    if isinstance(source, HubSource) and source.suffix not in READ_IN_PARTS:
        with hub_problems(source.name):
            source = written(source, source.suffix, beginning(source), "")
    return members_of(source) if source.suffix == ".zip" else [source]


def as_text(source: Source, settings: Settings) -> list[Source]:
    """The source if it is plain text, or a file with its text. Raises DataError."""
    is_chat, suffix = settings.format == "chat", source.suffix
    if source.member is not None:
        if is_hidden(source.name.lstrip(".")):
            raise Unreadable("hidden")
        if reason := why_not(source.name, OF_FORMAT[settings.format][:-1]):
            raise Unreadable(reason)
    if suffix in JSON:
        is_text = suffix == ".jsonl" and not are_conversations(source, settings.text_key)
        read = checked if is_chat or is_text else made_from_json
        try:
            return [read(source, settings)]
        except (NotUTF8, Unreadable):
            converted = recoded(source, settings)
            if not converted.is_converted:
                raise
            return [read(converted, settings)]
    kind = KINDS.get(suffix)
    if kind is None:
        return [plain(source, settings)]
    if suffix in (".csv", ".tsv"):
        source = recoded(source, settings)
    with hub_problems(source.name) if isinstance(source, HubSource) else contextlib.nullcontext():
        made = written_lines(source, source.note or suffix[1:], settings, documents_of(source, kind, settings))
    return [checked(made, settings) if is_chat else made]


def documents_of(source: Source, kind: Kind, settings: Settings) -> Iterator[str | Row | BadRecord]:
    try:
        with source.open() as file:
            yield from kind.documents(file, settings.text_key)
    except ImportError as error:  # a package that is there lacks another one
        raise Unreadable(f"it needs {kind.module}, which fails: {error}") from None


def made_from_json(source: Source, settings: Settings) -> Source:
    note = source.note or source.suffix[1:]
    if are_conversations(source, settings.text_key):
        note = "conversations as text (--format chat trains on their answers alone)"
    return written_lines(source, note, settings, json_documents(source, settings.text_key))


def plain(source: Source, settings: Settings) -> Source:
    """A text file in UTF-8, without what is not its own text."""
    source = recoded(source, settings)
    if not source.text_bytes:
        raise Unreadable("it is empty")
    blocks = decoded_blocks(source, lambda count: None)
    first = next(blocks)
    cleaner = cleaner_of(first[:BEGINNING], source.suffix)
    if cleaner is None or source.text_bytes > LONGEST_CLEANED:
        return source
    clean, note = cleaner
    before = first + "".join(blocks)
    text = clean(before)
    if text == before:
        return source
    if not text.strip():
        raise Unreadable("it holds no text")
    made = written(source, source.suffix, [text.encode()], f"{source.note}, {note}".removeprefix(", "), note)
    return replace(made, is_converted=source.is_converted)


def checked(source: Source, settings: Settings) -> Source:
    """A file of JSON Lines whose records have been read to its end, with what has to be left out of it. Raises
    DataError."""
    size, tally, check = 0, Tally(), TextCheck()

    def on_read(count: int) -> None:
        nonlocal size
        size += count

    if settings.format == "chat":
        for _ in read_conversations([source], ChatTemplate(), on_read, tally.skip):
            tally.good += 1
    else:
        for record in records(source, tally.skip, on_read):
            try:
                check.add(text_of_record(record.value, settings.text_key))
                tally.good += 1
            except ValueError as problem:
                tally.skip(BadRecord(record.place, str(problem)))
    if not size:
        raise Unreadable("it is empty")
    tally.require_most()
    check.require_text()
    return replace(source, text_bytes=size, left_out=tally.describe())


def written(
    source: Source, suffix: str, blocks: Iterable[bytes], note: str, *settings: str, tally: Tally | None = None
) -> Source:
    """A file with these blocks, which is kept, and beside it what the `tally` of its records says. What it is made
    from, and how, gives it its name."""
    identity = [
        READERS,
        str(source.path),
        source.size,
        source.modified_ns,
        source.member,
        str(source.most_bytes),
        *settings,
    ]
    path = EXTRACTED / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}{suffix}"
    beside = path.with_suffix(".left_out")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, HubSource):
            log.info(f"Reading {source.name}")
        with atomic_write(path) as file:
            file.writelines(blocks)
            if tally and tally.bad:
                beside.write_text(tally.describe(), encoding="utf-8")
    made = source_at(path, source.name, note)
    left_out = beside.read_text(encoding="utf-8") if tally and beside.exists() else ""
    return replace(made, text_bytes=made.size, left_out=left_out)


def written_lines(source: Source, note: str, settings: Settings, documents: Iterable[str | Row | BadRecord]) -> Source:
    """The documents as JSON Lines. Raises Unreadable if there is none, if most cannot be used, or if they are no
    text."""
    tally, check, columns = Tally(), TextCheck(), Columns(settings.text_key)

    def blocks() -> Iterator[bytes]:
        count = 0
        for number, document in enumerate(documents, 1):
            if isinstance(document, BadRecord):
                tally.skip(document)
                continue
            if isinstance(document, dict) and settings.format == "text":
                try:
                    document = columns.text_of(document)
                except ValueError as problem:
                    tally.skip(BadRecord(f"row {number}", str(problem)))
                    continue
                if cleaner := cleaner_of(document[:BEGINNING], ""):  # a whole book of Project Gutenberg, say
                    document = cleaner[0](document)
            tally.good += 1
            for record in [document] if isinstance(document, dict) else records_of(check.add(document), settings):
                line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
                yield line
                count += len(line)
            if count >= source.most_bytes:
                break
        tally.require_most()
        if not count:
            raise Unreadable("it holds no text")
        check.require_text()

    return written(source, ".jsonl", blocks(), note, settings.text_key, settings.format, tally=tally)


class Columns:
    """Finds the text in the rows of a table: in the column that is named, or the only one that holds texts."""

    def __init__(self, text_key: str):
        self.text_key = text_key
        self.column: str | None = None

    def text_of(self, row: Row) -> str:
        """Raises Unreadable if no column can be meant, ValueError for a row whose value is no text."""
        if self.column is None:
            self.column = key_of(row, self.text_key) or only_text(row)
        if self.column is None:
            names = ", ".join(map(str, row))
            raise Unreadable(f'it has no column "{self.text_key}", but {names}: --text_key names the one with the text')
        value = row.get(self.column)
        if not isinstance(value, str | None):
            raise ValueError(f'its "{self.column}" is of type {type(value).__name__}, not a text')
        return value or ""


def only_text(row: Row) -> str | None:
    """The only column whose value in this row is a text and not a number."""
    texts = [name for name, value in row.items() if isinstance(value, str) and not is_number(value)]
    return texts[0] if len(texts) == 1 else None


def is_number(value: str) -> bool:
    try:
        float(value.replace(",", "."))
    except ValueError:
        return False
    return True


def records_of(document: str, settings: Settings) -> Iterator[Row]:
    """The objects of its lines; none if it has no text."""
    while document.strip():
        most = document[:LONGEST_DOCUMENT]
        part = most if most == document else most[: most.rfind("\n") + 1] or most
        yield {settings.text_key: part}
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
    """The source if it is UTF-8, else its text in UTF-8. Raises Unreadable if its encoding cannot be guessed, or if it
    is no text."""
    size, check, marks = 0, TextCheck(), 0

    def on_read(count: int) -> None:
        nonlocal size
        size += count

    try:
        for text in decoded_blocks(source, on_read):
            check.add(text)
            marks += text.count(DOCUMENT_SEPARATOR) and text.count(DOCUMENT_SEPARATOR) - len(MARK_OF_LINE.findall(text))
    except NotUTF8 as problem:
        encoding = problem.encoding or settings.encoding or guessed(problem.sample)
        made = written(source, source.suffix, utf8_blocks(source, encoding), f"from {encoding}", encoding)
        return replace(made, is_converted=True)
    check.require_text()
    return replace(source, text_bytes=size, inline_marks=marks)


def guessed(sample: bytes) -> str:
    if 0 in sample:
        raise Unreadable("it has zero bytes, as only UTF-16 has: --encoding utf-16-le reads it if it is that")
    if not has_chardet():
        raise Unreadable("it is not UTF-8: --encoding names its encoding, or `pip install chardet` guesses it")
    if encoding := guess(sample):
        return encoding
    raise Unreadable("it is not UTF-8, and its encoding cannot be guessed: --encoding names it")


def utf8_blocks(source: Source, encoding: str) -> Iterator[bytes]:
    decoder, check = codecs.getincrementaldecoder(encoding)(), TextCheck()
    try:
        for block in unpacked_blocks(source):
            yield check.add(decoder.decode(block)).encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"it is not {encoding} ({error.reason}): --encoding names another") from None
    check.require_text()
