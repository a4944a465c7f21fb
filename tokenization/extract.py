"""Extract text from files. The text of other formats is written once, as JSON Lines or UTF-8, and then read like
any other: later steps need not know the format, and a kill repeats no more work than with plain text. Unreadable files
are left out."""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import importlib.util
import io
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import BinaryIO, Literal, NamedTuple

from common.chat import ChatTemplate
from common.errors import DataError, is_full_disk
from common.files import atomic_write, read_json, write_json
from common.output import LOG_INTERVAL_SECONDS, log, plural, printable, progress_bar
from tokenization import conversations
from tokenization.conversations import (
    are_conversations,
    extract_texts,
    is_conversation,
    is_of_slack,
    read_conversations,
    read_slack,
)
from tokenization.corpus import (
    NotUTF8Error,
    Source,
    UnreadableError,
    decode_blocks,
    find_obstacle,
    find_sources,
    read_blocks,
    source_at,
)
from tokenization.documents import BadRecord, Tally, find_text_key, read_records, read_text
from tokenization.encodings import count_errors, guess_encoding, has_chardet
from tokenization.examine import Examination, Finding, read_findings
from tokenization.isolation import IsolatedReader, Work
from tokenization.kinds import PLAIN_SUFFIXES, TEXT_SUFFIXES
from tokenization.settings import EXTRACTED, HUB, Settings
from tokenization.sources.archives import list_members
from tokenization.sources.hub import HubSource, find_hub_sources, hub_errors
from tokenization.sources.mail import read_eml, read_mbox
from tokenization.sources.markup import read_epub, read_html
from tokenization.sources.pandoc import FORMATS, build_reader, find_macros
from tokenization.sources.pdf import read_pdf
from tokenization.sources.plain import choose_cleaner, read_subtitles
from tokenization.sources.tables import Row, read_arrow, read_csv, read_parquet

READERS_VERSION = 4  # raise it when readers or signs change, so that older extracted files are not used
CLEANER_SAMPLE_CHARACTERS = 20_000  # the beginning of a text, which shows whether it needs cleaning
MAX_CLEANED_BYTES = 50_000_000  # a longer text stays as it is
MAX_JUDGED_ROWS = 1000  # at the beginning of a table, whose columns are compared
MAX_DOCUMENT_CHARACTERS = 5_000_000  # a longer document is split
STREAMED_SUFFIXES = (".parquet", ".arrow")  # read in parts on the hub; other files are copied first
LINE_SUFFIXES = (*PLAIN_SUFFIXES, ".csv", ".tsv")
FORMAT_SUFFIXES = {  # the last one, .zip, is not read inside another archive
    "text": TEXT_SUFFIXES,
    "chat": (*conversations.CHAT_SUFFIXES, ".csv", ".parquet", ".arrow", ".zip"),
}


class FileFormat(NamedTuple):
    """How to read one kind of file."""

    documents: Callable[[BinaryIO, str], Iterable[str | Row | BadRecord]]  # (open file, text_key) -> documents
    module: str | None = None  # required module
    package: str | None = None  # its name for pip, if different


def _read_json_documents(source: Source, text_key: str) -> Iterator[str | BadRecord]:
    """Yield the texts of a JSON file, including those of conversations."""
    bad: list[BadRecord] = []
    records = read_records(source, bad.append, lambda count: None)
    first = next(records, None)
    if first and is_of_slack(first.value):
        yield read_slack((record.value for record in (first, *records)), source)
        return
    for record in itertools.chain([first] if first else [], records):
        try:
            yield from extract_texts(record.value, text_key)
        except ValueError as problem:
            yield BadRecord(record.place, str(problem))
    yield from bad


def _without_key(
    documents: Callable[[BinaryIO], Iterable[str | Row | BadRecord]], module: str | None = None
) -> FileFormat:
    return FileFormat(lambda file, _: documents(file), module)


KINDS = {
    ".epub": _without_key(read_epub),
    ".html": _without_key(read_html, "trafilatura"),
    ".htm": _without_key(read_html, "trafilatura"),
    ".pdf": _without_key(read_pdf, "pypdfium2"),
    ".mbox": _without_key(read_mbox),
    ".eml": _without_key(read_eml),
    ".srt": _without_key(read_subtitles),
    ".vtt": _without_key(read_subtitles),
    ".csv": _without_key(read_csv),
    ".tsv": _without_key(read_csv),
    ".parquet": FileFormat(read_parquet, "pyarrow"),
    ".arrow": _without_key(read_arrow, "pyarrow"),
    **{
        suffix: _without_key(build_reader(suffix), "pypandoc")._replace(package="pypandoc_binary") for suffix in FORMATS
    },
}
JSON = (".json", ".jsonl")


def find_files(settings: Settings) -> list[Source]:
    """Return the files that the inputs name, on this machine and then on the hub. Raises DataError."""
    suffixes = FORMAT_SUFFIXES[settings.format]
    remote = [name for name in settings.input if name.startswith(HUB)]
    found: list[Source] = find_sources([name for name in settings.input if name not in remote], suffixes)
    return found + [source for name in remote for source in find_hub_sources(name, suffixes, settings.max_mb)]


def detect_format(sources: Sequence[Source], text_key: str = Settings.text_key) -> Literal["text", "chat"]:
    """Return "chat" if all files hold conversations, else "text"."""
    settings = Settings(input=("",), text_key=text_key)
    with IsolatedReader() as isolated:
        for source in sources:
            if isinstance(source, HubSource):
                return "text"
            if source.suffix not in STREAMED_SUFFIXES:
                is_chat = are_conversations(source, text_key)
            else:
                try:
                    is_chat = bool(isolated.call(_find_chat_table, source, settings, lambda: None))
                except UnreadableError:
                    is_chat = False
            if not is_chat:
                return "text"
    return "chat"


def _find_chat_table(source: Source, settings: Settings) -> list[Source]:
    """Return a table if its first row is a conversation, else []."""
    row = next(_read_documents(source, KINDS[source.suffix], settings), None)
    return [source] if is_conversation(row, settings.text_key) else []


class Readable(NamedTuple):
    """Files that can be read as text, and those left out."""

    sources: list[Source]
    skipped: list[tuple[str, str]]  # (name, reason) of files without text


def make_readable(sources: Sequence[Source], settings: Settings) -> Readable:
    """Convert sources to files that can be read as text to their ends. Conversations among other files become text.
    Plain files are read here, all others in an isolated process.

    Raises DataError if no file has text.
    """
    readable = Readable([], [])
    with IsolatedReader() as isolated, OpeningProgress(len(sources)) as progress:

        def read(work: Work, source: Source, is_untrusted: bool) -> list[Source]:
            """Return the files that `work` makes of a source. If it cannot be read, return [] and record the reason."""
            try:
                if is_untrusted and not isinstance(source, HubSource):
                    return isolated.call(work, source, settings, progress.tell)
                return work(source, settings)
            except OSError as problem:
                if is_full_disk(problem):
                    raise
                readable.skipped.append((source.name, f"it cannot be read: {problem.strerror or problem}"))
                return []
            except DataError as problem:
                is_alone = len(sources) == 1 and source.member is None
                if not isinstance(problem, UnreadableError) and (is_alone or isinstance(source, HubSource)):
                    raise  # fail instead of skipping: there is no other file, or a retry may help
                readable.skipped.append((source.name, str(problem).removeprefix(source.place).strip(" ,:").rstrip(".")))
                return []

        for source in sources:
            progress.begin(source.name)
            for file in read(list_files, source, is_untrusted=source.suffix == ".zip"):
                if missing := find_missing_packages([file]):
                    readable.skipped.append((file.name, f"it needs {missing[0]} (pip install {missing[0]})"))
                    continue
                for text in read(_convert_to_text, file, is_untrusted=file.suffix in (*KINDS, ".json")):
                    if not text.is_named and (found := _find_strongest(text)):
                        readable.skipped.append((text.name, f"{found.description}. To read it, name it with --input"))
                        continue
                    readable.sources.append(text)
                    if text.left_out:
                        readable.skipped.append((text.name, text.left_out))
    if not readable.sources:
        reasons = "; ".join(f"{reason} ({name})" for name, reason in readable.skipped[:5])
        raise DataError(f"No file has text that can be read: {reasons}.")
    return readable


def _find_strongest(source: Source) -> Finding | None:
    """Return what is so much of a text that a folder's file with it is left out."""
    found = [finding for finding in read_findings(source.signs) if finding.share >= finding.sign.left_out_from]
    return max(found, key=lambda finding: finding.share, default=None)


class OpeningProgress:
    """Shows which file is being opened: a bar, or a line now and then."""

    def __init__(self, total: int):
        self.total, self.number, self.name, self.logged_at = total, 0, "", time.monotonic()
        self.bar = progress_bar(total=total, desc="Opening", unit="file", leave=False)

    def __enter__(self) -> OpeningProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def begin(self, name: str) -> None:
        self.bar.update(bool(self.number))
        self.number, self.name = self.number + 1, name
        self.tell()

    def tell(self) -> None:
        self.bar.refresh()
        if self.bar.disable and time.monotonic() - self.logged_at >= LOG_INTERVAL_SECONDS:
            self.logged_at = time.monotonic()
            log.info(f"Opening    file {self.number:,} of {self.total:,}: {printable(self.name)}")


def find_missing_packages(sources: Iterable[Source]) -> list[str]:
    """Return the packages that have to be installed to read the sources."""
    kinds = {KINDS[source.suffix] for source in sources if source.suffix in KINDS}
    missing = [kind for kind in kinds if kind.module and importlib.util.find_spec(kind.module) is None]
    return sorted({str(kind.package or kind.module) for kind in missing})


def list_files(source: Source, settings: Settings) -> list[Source]:
    """Return the members of an archive, or the file itself. A file on the hub is copied, unless it can be read in
    parts."""
    if isinstance(source, HubSource) and source.suffix not in STREAMED_SUFFIXES:
        with hub_errors(source.name):
            source = _write_extracted(source, source.suffix, _read_up_to_limit(source), "")
    return list_members(source) if source.suffix == ".zip" else [source]


def _convert_to_text(source: Source, settings: Settings) -> list[Source]:
    """Return a plain-text source itself, or a file with the extracted text. Raises DataError."""
    is_chat, suffix = settings.format == "chat", source.suffix
    if source.refusal:
        raise UnreadableError(source.refusal)
    if source.member is not None and (reason := find_obstacle(source, "", FORMAT_SUFFIXES[settings.format][:-1])):
        raise UnreadableError(reason)
    if suffix in JSON:
        is_text = suffix == ".jsonl" and not are_conversations(source, settings.text_key)
        read = _check_records if is_chat or is_text else _convert_json
        try:
            return [read(source, settings)]
        except (NotUTF8Error, UnreadableError):
            converted = _convert_encoding(source, settings)
            if not converted.is_converted:
                raise
            return [read(converted, settings)]
    kind = KINDS.get(suffix)
    if kind is None:
        return [_convert_plain(source, settings)]
    if suffix in (".csv", ".tsv"):
        source = _convert_encoding(source, settings)
    with hub_errors(source.name) if isinstance(source, HubSource) else contextlib.nullcontext():
        text_source = _write_lines(source, source.note or suffix[1:], settings, _read_documents(source, kind, settings))
    return [_check_records(text_source, settings) if is_chat else text_source]


def _read_documents(source: Source, kind: FileFormat, settings: Settings) -> Iterator[str | Row | BadRecord]:
    try:
        with source.open() as file:
            macros = find_macros(source) if source.suffix == ".tex" else b""
            yield from kind.documents(io.BytesIO(macros + file.read()) if macros else file, settings.text_key)
    except ImportError as error:  # an installed package may lack another one
        raise UnreadableError(f"it needs {kind.module}, which cannot be imported: {error}") from None


def _convert_json(source: Source, settings: Settings) -> Source:
    note = source.note or source.suffix[1:]
    if are_conversations(source, settings.text_key):
        note = "conversations as text (with --format chat, training learns only the answers)"
    return _write_lines(source, note, settings, _read_json_documents(source, settings.text_key))


def _convert_plain(source: Source, settings: Settings) -> Source:
    """Return a text file in UTF-8, without boilerplate, such as the licence of Project Gutenberg."""
    source = _convert_encoding(source, settings)
    if not source.text_bytes:
        raise UnreadableError("it is empty")
    blocks = decode_blocks(source, lambda count: None)
    first = next(blocks)
    cleaner = choose_cleaner(first[:CLEANER_SAMPLE_CHARACTERS], source.suffix)
    if cleaner is None or source.text_bytes > MAX_CLEANED_BYTES:
        return source
    clean, note = cleaner
    before = first + "".join(blocks)
    text = clean(before)
    if text == before:
        return source
    if not text.strip():
        raise UnreadableError("it has no text")
    check = Examination()
    text_source = _write_extracted(
        source,
        source.suffix,
        [check.add(text).encode()],
        f"{source.note}, {note}".removeprefix(", "),
        note,
        check=check,
    )
    return replace(text_source, is_converted=source.is_converted)


def _check_records(source: Source, settings: Settings) -> Source:
    """Read a JSON Lines file to its end, and return it with its size and the records left out. Raises DataError."""
    size, tally, check = 0, Tally(), Examination()

    def on_read(count: int) -> None:
        nonlocal size
        size += count

    if settings.format == "chat":
        for _ in read_conversations([source], ChatTemplate(), on_read, tally.skip):
            tally.good += 1
    else:
        for record in read_records(source, tally.skip, on_read):
            try:
                check.add(read_text(record.value, settings.text_key))
                tally.good += 1
            except ValueError as problem:
                tally.skip(BadRecord(record.place, str(problem)))
    if not size:
        raise UnreadableError("it is empty")
    tally.require_most()
    return replace(source, text_bytes=size, left_out=tally.describe(), signs=check.finish())


def _write_extracted(
    source: Source,
    suffix: str,
    blocks: Iterable[bytes],
    note: str,
    *settings: str,
    check: Examination | None = None,
    tally: Tally | None = None,
) -> Source:
    """Write `blocks` to a file in EXTRACTED, named by a hash of the source and the settings, unless it exists. Keep
    what `check` found and `tally` counted in a file beside it."""
    identity = [
        READERS_VERSION,
        str(source.path),
        source.size,
        source.modified_ns,
        source.member,
        str(source.max_bytes),
        *settings,
    ]
    path = EXTRACTED / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}{suffix}"
    beside = path.with_suffix(".found.json")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(source, HubSource):
            log.info(f"Reading {source.name}")
        with atomic_write(path) as file:
            file.writelines(blocks)
            seen = {"signs": check.finish() if check else "", "left_out": tally.describe() if tally else ""}
            if any(seen.values()):
                write_json(beside, seen)
    text_source = source_at(path, source.name, note)
    found = read_json(beside, DataError) if beside.exists() else {}
    return replace(text_source, text_bytes=text_source.size, is_named=source.is_named, **found)


def _write_lines(source: Source, note: str, settings: Settings, documents: Iterable[str | Row | BadRecord]) -> Source:
    """Write documents as JSON Lines. Raises UnreadableError if there are none, if most are unusable, or if they are not
    text."""
    tally, check = Tally(), Examination()

    def blocks() -> Iterator[bytes]:
        count = 0
        for document in documents if settings.format == "chat" else _read_rows(documents, settings.text_key):
            if isinstance(document, BadRecord):
                tally.skip(document)
                continue
            tally.good += 1
            for record in [document] if isinstance(document, dict) else split_document(check.add(document), settings):
                line = json.dumps(record, ensure_ascii=False, default=str).encode(errors="replace") + b"\n"
                yield line
                count += len(line)
            if count >= source.max_bytes:
                break
        tally.require_most()
        if not count:
            raise UnreadableError("it has no text")

    return _write_extracted(
        source, ".jsonl", blocks(), note, settings.text_key, settings.format, check=check, tally=tally
    )


def _read_rows(documents: Iterable[str | Row | BadRecord], text_key: str) -> Iterator[str | BadRecord]:
    """Yield documents, and the texts of rows: those of the named column, of conversations, or of the only column with
    texts, if it holds most of the letters. Raises UnreadableError if no column fits."""
    rest, first, column = iter(documents), list[str | Row | BadRecord](), None
    for document in rest:
        first.append(document)
        if not isinstance(document, BadRecord):
            break
    if first and isinstance(row := first[-1], dict) and not is_conversation(row, text_key):
        column = find_text_key(row, text_key)
        if column is None:
            first += itertools.islice(rest, MAX_JUDGED_ROWS)
            column = _find_only_text([row for row in first if isinstance(row, dict)], text_key)
    for number, row in enumerate(itertools.chain(first, rest), 1):
        if isinstance(row, BadRecord):
            yield row
            continue
        try:
            texts = [row] if isinstance(row, str) else _read_row(row, column, text_key)
        except ValueError as problem:
            yield BadRecord(f"row {number}", str(problem))
            continue
        for text in texts:
            cleaner = choose_cleaner(text[:CLEANER_SAMPLE_CHARACTERS], "")  # such as a book of Project Gutenberg
            yield cleaner[0](text) if cleaner else text


def _read_row(row: Row, column: str | None, text_key: str) -> list[str]:
    """Return the text in a column of a row, or those of a conversation. Raises ValueError."""
    if column is None:
        return extract_texts(row, text_key)
    value = row.get(column)
    if not isinstance(value, str | None):
        raise ValueError(f'its "{column}" is of type {type(value).__name__}, not a text')
    return [value or ""]


def _find_only_text(rows: Sequence[Row], text_key: str) -> str:
    """Return the only column with texts that are not numbers. Raises UnreadableError if it has few of the letters."""
    letters, texts = Counter[str](), set[str]()
    for name, value in (pair for row in rows for pair in row.items()):
        letters[name] += sum(map(str.isalpha, str(value)))
        if isinstance(value, str) and not _is_number(value):
            texts.add(name)
    if len(texts) != 1 or 2 * letters[min(texts)] < letters.total():
        names = ", ".join(map(str, rows[0]))
        raise UnreadableError(f'it has no column "{text_key}". Columns: {names}. Choose one with --text_key')
    return texts.pop()


def _is_number(value: str) -> bool:
    try:
        float(value.replace(",", "."))
    except ValueError:
        return False
    return True


def split_document(document: str, settings: Settings) -> Iterator[Row]:
    """Yield the records of a document, several if it is very long; none if it has no text."""
    while document.strip():
        head = document[:MAX_DOCUMENT_CHARACTERS]
        part = head if head == document else head[: head.rfind("\n") + 1] or head
        yield {settings.text_key: part}
        document = document[len(part) :]


def _read_up_to_limit(source: Source) -> Iterator[bytes]:
    """Yield the lines within `max_bytes` of a source, or the whole of a file without lines."""
    limit, count = source.max_bytes if source.suffix in LINE_SUFFIXES else math.inf, 0
    for block in read_blocks(source):
        if count + len(block) > limit:
            yield block[: block.rfind(b"\n", 0, int(limit) - count) + 1]
            return
        yield block
        count += len(block)


def _convert_encoding(source: Source, settings: Settings) -> Source:
    """Return a UTF-8 source itself, or a file converted to UTF-8. Raises UnreadableError if its encoding cannot be
    guessed, or if it is not text."""
    size, check = 0, Examination()

    def on_read(count: int) -> None:
        nonlocal size
        size += count

    try:
        for text in decode_blocks(source, on_read):
            check.add(text)
    except NotUTF8Error as problem:
        encoding, note = problem.encoding or settings.encoding, ""
        errors = 0 if encoding else count_errors(read_blocks(source))
        if errors:
            encoding, note = "utf-8", f", in which {plural(errors, 'character')} cannot be decoded"
        encoding = encoding or _require_guess(problem.sample)
        check, note = Examination(), f"from {encoding}{note}"
        blocks = _reencode(source, encoding, check)
        text_source = _write_extracted(source, source.suffix, blocks, note, encoding, check=check)
        return replace(text_source, is_converted=True)
    return replace(source, text_bytes=size, signs=check.finish())


def _require_guess(sample: bytes) -> str:
    if 0 in sample:
        raise UnreadableError("it contains NUL bytes, so it is binary or UTF-16; for UTF-16, use --encoding utf-16-le")
    if not has_chardet():
        raise UnreadableError(
            "it is not UTF-8; name its encoding with --encoding, or `pip install chardet` to guess it"
        )
    if encoding := guess_encoding(sample):
        return encoding
    raise UnreadableError("it is not UTF-8, and its encoding cannot be guessed; name it with --encoding")


def _reencode(source: Source, encoding: str, check: Examination) -> Iterator[bytes]:
    is_utf8 = codecs.lookup(encoding).name == "utf-8"
    decoder = codecs.getincrementaldecoder(encoding)("replace" if is_utf8 else "strict")
    try:
        for block in read_blocks(source):
            yield check.add(decoder.decode(block)).encode()
        yield decoder.decode(b"", final=True).encode()
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is not {encoding} ({error.reason}); name another with --encoding") from None
