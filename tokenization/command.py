"""Tokenize text into a complete token folder, with checked settings."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.chat import ChatTemplate, require_end_of_text_id
from common.errors import ConfigError, DataError
from common.files import atomic_write, name_input, sha256_file
from common.output import LOG_INTERVAL_SECONDS, byte_size, duration, log, progress_bar
from common.script import count_cores
from tokenization.conversations import read_conversations
from tokenization.corpus import Source, list_left_out
from tokenization.dedup import Repeats
from tokenization.documents import PIECE_CHARACTERS, Piece, read_pieces
from tokenization.encoding import Reader, encode_in_order, read_chunks, sample_evenly, split_index
from tokenization.extract import FORMAT_SUFFIXES, detect_format, find_files, find_missing_packages, make_readable
from tokenization.held_out import MAX_PASSAGE, MIN_PASSAGE, choose_held_out
from tokenization.metadata import FORMAT_VERSION, TokenMetadata, choose_dtype, find_metadata
from tokenization.report import DataReport
from tokenization.scripts import SAMPLE_CHARACTERS, WordForm, choose_word_form, describe_word_form
from tokenization.settings import DEFAULT_FOLDER, Settings
from tokenization.token_folder import (
    TokenFolder,
    TokenWriter,
    count_length,
    open_writer,
    pack,
    require_same_files,
    require_same_tokens,
)
from tokenizer import CharacterTokenizer, Tokenizer, character_counts, load_tokenizer
from tokenizer_bpe import MIN_VOCABULARY, BPETokenizer, TokenizerError

MAX_LISTED_NAMES = 5
NUM_LONGEST_TOKENS = 10
SMALL_VOCABULARY_SHARE = 0.75  # a vocabulary below this share of --vocab_size is reported


def tokenize_with(options: Settings, quiet: bool = False, may_replace: bool = True) -> Path:
    """Tokenize with checked settings. See `tokenize` in tokenize_local_bpe.py."""
    found = find_files(options)
    if options.format == "text" and detect_format(found, options.text_key) == "chat":
        raise DataError(f"{found[0].path} holds conversations. Add --format chat.")
    kind = choose_kind(options)
    if kind == "bpe" and options.unknown == "drop":
        raise ConfigError(
            "--unknown drop applies only to character tokenizers, because BPE encodes any text. Leave it out."
        )
    if options.format == "chat" and options.tokenizer_file:
        require_end_of_text_id(load_tokenizer(options.tokenizer_file))

    folder = TokenFolder.of(options.output_dir, kind, options.output_name)
    fingerprint = compute_fingerprint(found, options, kind)
    metadata = find_complete(folder, found, options, kind)
    if metadata:
        if not quiet:
            print(f"{folder.folder} is already complete for this text and these settings.")
        folder.discard_leftovers()
        if options.compress and not folder.packed.exists():
            pack(folder.bin, folder.packed)
    else:
        sources, skipped = make_readable(found, options)
        if not may_replace:
            require_same_files(folder.folder, options.input, sources, kind)
        total_bytes = sum(source.text_bytes for source in sources)
        if folder.metadata.exists():
            log.info(
                f"{describe_replaced(folder.metadata)} A run needs its tokens to continue: to keep both, use another "
                "--output_dir."
            )
        with folder.locked():
            folder.open_work(digest([fingerprint, options.chunk_size_mb, PIECE_CHARACTERS, MIN_PASSAGE, MAX_PASSAGE]))
            try:
                if not folder.awaits_publishing:
                    read, repeats = build_reader(sources, options)
                    held_out, note, copies = choose_held_out(read, 1 - options.train_split, total_bytes)
                    if note:
                        log.info(note)
                    skipped += list_left_out(options.input, FORMAT_SUFFIXES[options.format])
                    report = DataReport(sources, skipped, repeats, held_out, copies)
                    tokenizer = prepare_tokenizer(folder, read, options, kind, total_bytes)
                    if isinstance(tokenizer, BPETokenizer) and not options.tokenizer_file:
                        report.words = describe_word_form(tokenizer)
                    if isinstance(tokenizer, BPETokenizer) and tokenizer.encoder_note:
                        log.info(tokenizer.encoder_note)
                    if isinstance(tokenizer, BPETokenizer) and tokenizer.end_of_text_id is None:
                        log.info("Documents are not separated, because the tokenizer has no known end-of-text token.")
                    read = report.count_texts(read)
                    if held_out:
                        read = held_out.move_to_end(read)
                    written = encode_sources(folder, tokenizer, read, options, total_bytes)
                    described = describe_tokens(folder, written, tokenizer, report, options, fingerprint)
                    log.info(report.describe_held_out(1 - described.train_tokens / described.total_tokens))
                    if found_in_it := report.render_brief():
                        log.info(found_in_it)
                    if not may_replace:
                        require_same_tokens(folder, options.input, described)
                    folder.prepare_publishing(described, report.render_markdown(), options.compress)
            except (DataError, TokenizerError):
                folder.discard_work()  # the next attempt will have different text
                raise
            metadata = folder.publish()
    if not quiet:
        print_result(folder, metadata, options)
    return folder.metadata


def choose_kind(options: Settings) -> str:
    """Return "bpe" or "character". Raises ConfigError if the flags contradict each other."""
    if not options.tokenizer_file:
        return "character" if options.tokenizer == "char" else "bpe"
    kind = load_tokenizer(options.tokenizer_file).kind
    if options.tokenizer and not kind.startswith(options.tokenizer):
        raise ConfigError(f"--tokenizer is {options.tokenizer}, but {options.tokenizer_file} is a {kind} tokenizer.")
    return kind


def choose_folder(options: Settings) -> str:
    """Return the token folder for the trainer's `--input`, one per state of the text and vocabulary."""
    name, kind = name_input(options.input[0]), choose_kind(options)
    return str(Path(DEFAULT_FOLDER) / f"{name}-{compute_fingerprint(find_files(options), options, kind)[:8]}")


def describe_replaced(path: Path) -> str:
    try:
        names = (
            ", ".join(map(escape_unprintable, TokenMetadata.read(path).source_names[:MAX_LISTED_NAMES]))
            or "another text"
        )
    except DataError:
        names = "another text"
    return f"{path.parent} holds the tokens of {names}, which are replaced."


def compute_fingerprint(sources: Sequence[Source], options: Settings, kind: str) -> str:
    """Return a hash of everything the tokens depend on: the files as they are now, and the settings."""
    settings = [FORMAT_VERSION, kind, options.train_split, options.text_key, options.document_separator]
    if options.format == "chat":
        settings += ["chat", ChatTemplate().to_dict()]
    if options.tokenizer_file:
        settings += [sha256_file(options.tokenizer_file), options.unknown]
    elif kind == "bpe":
        settings += [options.vocab_size, options.min_frequency, options.vocab_sample_mb]
    settings += [given for given in (options.encoding, options.dedup, *find_missing_packages(sources)) if given]
    named = sum(source.is_named for source in sources)  # these are read though they have signs that are left out
    settings += [f"{named} named"] if named and len(sources) > 1 else []
    settings += sorted({source.max_bytes for source in sources} - {math.inf})
    return digest([settings, [[str(source.path), source.size, source.modified_ns] for source in sources]])


def find_complete(folder: TokenFolder, sources: Sequence[Source], options: Settings, kind: str) -> TokenMetadata | None:
    """Return the metadata if the folder is complete for this text and these settings, else None. A vocabulary learned
    from the text counts if it equals `tokenizer_file`."""
    metadata = folder.complete_metadata(compute_fingerprint(sources, options, kind))
    if metadata is None and options.tokenizer_file:
        learned = folder.complete_metadata(compute_fingerprint(sources, replace(options, tokenizer_file=None), kind))
        if learned and learned.tokenizer_sha256 == sha256_file(options.tokenizer_file):
            return learned
    return metadata


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def prepare_tokenizer(
    folder: TokenFolder,
    read: Reader,
    options: Settings,
    kind: str,
    total_bytes: int,
) -> Tokenizer:
    """Return the tokenizer in the work folder: kept from before, copied from `tokenizer_file`, or trained."""
    path = folder.in_work(folder.tokenizer)
    if not path.exists():
        if options.tokenizer_file:
            content = Path(options.tokenizer_file).read_bytes()
        else:
            content = train_tokenizer(read, options, kind, total_bytes).to_json().encode()
        with atomic_write(path) as file:
            file.write(content)
    return load_tokenizer(path)


def train_tokenizer(read: Reader, options: Settings, kind: str, total_bytes: int) -> Tokenizer:
    with ByteProgress("Learning the vocabulary", total_bytes) as progress:
        pieces = read(progress.add)
        if kind == "character":
            return CharacterTokenizer.train(
                piece.text + piece.line_break for piece in pieces if isinstance(piece, Piece)
            )
        form = sample_word_form(read, total_bytes)
        sample = sample_evenly((piece.text for piece in pieces), options.vocab_sample_mb * 1e6 / total_bytes)
        texts = progress.until_end(sample)
        trained: BPETokenizer = run_in_background(
            lambda: BPETokenizer.train(texts, options.vocab_size, options.min_frequency, *form),
            lambda: progress.wait("counting and merging pairs"),
        )
    if trained.vocab_size == MIN_VOCABULARY < options.vocab_size:
        log.info(
            f"Warning: the vocabulary has only single bytes, because no pair of bytes occurs {options.min_frequency} "
            "times in the text. Use more text, a larger --vocab_sample_mb or a lower --min_frequency."
        )
    elif trained.vocab_size < SMALL_VOCABULARY_SHARE * options.vocab_size:
        log.info(
            f"The vocabulary has {trained.vocab_size:,} tokens, not {options.vocab_size:,}, because no other pair "
            f"occurs {options.min_frequency} times in the text. More text gives more tokens."
        )
    return trained


def sample_word_form(read: Reader, total_bytes: int) -> WordForm:
    """Choose how to split the text into words, by a sample spread over all of it."""
    pieces = read(lambda count: None)
    return choose_word_form(sample_evenly((piece.text for piece in pieces), SAMPLE_CHARACTERS / total_bytes))


def build_reader(sources: Sequence[Source], options: Settings) -> tuple[Reader, Repeats | None]:
    """Return a reader of the text, and the repeated text it leaves out with --dedup."""
    if options.format == "text":

        def read(on_read: Callable[[int], None]) -> Iterator[Piece]:
            return read_pieces(sources, options.document_separator, options.text_key, on_read)

        repeats = Repeats(read) if options.dedup else None
        return (repeats.remove if repeats else read), repeats
    return functools.partial(read_conversations, sources, ChatTemplate()), None


def run_in_background(function: Callable[[], Any], while_waiting: Callable[[], Any]) -> Any:
    """Call `function` in another thread, and `while_waiting` about once a second. Learning merges is one long native
    call, which Ctrl-C could not interrupt in the main thread."""
    result: Future[Any] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # raised again in the caller's thread
            result.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    while not result.done():
        try:
            result.exception(timeout=1)  # Windows delivers Ctrl-C only between waits
        except TimeoutError:
            while_waiting()
    return result.result()


def encode_sources(
    folder: TokenFolder,
    tokenizer: Tokenizer,
    read: Reader,
    options: Settings,
    total_bytes: int,
) -> TokenWriter:
    """Encode all text that is not yet in the work folder, in order. Return the writer with counts and hash of all
    tokens."""
    dtype = choose_dtype(tokenizer.vocab_size)
    workers = options.num_workers or count_cores()
    chunks = read_chunks(read, options.chunk_size_mb * 1e6)
    with (
        open_writer(folder, dtype, tokenizer.byte_lengths) as writer,
        ByteProgress("Encoding", total_bytes) as progress,
    ):
        for chunk in islice(chunks, writer.chunks):
            progress.start_at(chunk.bytes_read)
        for chunk, encoded in encode_in_order(tokenizer, chunks, options.unknown, dtype, workers):
            writer.append(*encoded)
            progress.advance_to(chunk.bytes_read)
    return writer


def describe_tokens(
    folder: TokenFolder,
    written: TokenWriter,
    tokenizer: Tokenizer,
    report: DataReport,
    options: Settings,
    fingerprint: str,
) -> TokenMetadata:
    """Return the metadata of the tokens in the work folder. Reads only the end of the token file, which may be
    large."""
    total = written.tokens
    ends = np.memmap(folder.document_ends, "<i8", "r") if written.documents else np.zeros(0, np.int64)
    held_out = report.held_out.documents if report.held_out else 0
    if not 0 < held_out < len(ends):
        report.held_out = None
    mask: dict[str, Any] = {}
    if options.format == "chat" and len(ends) < 2:
        raise DataError(f"Found {len(ends)} conversations, but training and validation need one each.")
    if 0 < held_out < len(ends):
        split = int(ends[len(ends) - held_out - 1])
    elif options.format == "chat":
        split = split_index(total, ends, options.train_split, tolerance=1.0)  # cuts no conversation
    else:
        split = split_index(total, ends, options.train_split)
    if options.format == "chat":
        packed = np.packbits(np.memmap(folder.in_answer, bool, "r")).tobytes()
        with atomic_write(folder.in_work(folder.mask)) as file:
            file.write(packed)
        sha256 = hashlib.sha256(packed).hexdigest()
        mask = {"mask_file": folder.mask.name, "mask_sha256": sha256, "chat_template": ChatTemplate()}
    train_bytes = written.text_bytes_before(split, folder.in_work(folder.bin))
    tokens = np.memmap(folder.in_work(folder.bin), written.dtype, "r")
    return TokenMetadata(
        path=folder.metadata,
        vocab_size=tokenizer.vocab_size,
        total_tokens=total,
        train_split_index=split,
        dtype="uint16" if written.dtype.itemsize == 2 else "int32",
        tokenizer_type="bpe" if tokenizer.kind == "bpe" else "character",
        bin_file=folder.bin.name,
        tokenizer_file=folder.tokenizer.name,
        tokens_sha256=written.sha256.hexdigest(),
        tokenizer_sha256=sha256_file(folder.in_work(folder.tokenizer)),
        val_bytes=written.text_bytes - train_bytes,
        val_characters=count_length(tokens[split:], character_counts(tokenizer)[:, 0]),
        train_bytes=train_bytes,
        train_split=options.train_split,
        documents=report.documents,
        source_files=tuple({"name": source.name, "size": source.size} for source in report.files),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        **mask,
    )


def print_result(folder: TokenFolder, metadata: TokenMetadata, options: Settings) -> None:
    tokenizer = load_tokenizer(folder.tokenizer)
    total = metadata.total_tokens
    documents = "documents" if metadata.chat_template is None else "conversations"
    print(
        f"\n{total:,} tokens from {metadata.text_bytes:,} bytes of text in {metadata.documents:,} {documents}: "
        f"{metadata.text_bytes / total:.2f} bytes per token\n"
        f"Vocabulary: {tokenizer.vocab_size:,} ({tokenizer.kind})\n"
        f"Training: {metadata.train_tokens:,} tokens; validation: {metadata.val_tokens:,} tokens"
    )
    if tokenizer.kind == "bpe":
        lengths = tokenizer.byte_lengths
        texts = (tokenizer.decode([i]) for i in np.argsort(-lengths, kind="stable"))
        whole = itertools.islice((text for text in texts if "\ufffd" not in text), NUM_LONGEST_TOKENS)
        print("Longest tokens:", ", ".join(f'"{escape_unprintable(text)}"' for text in whole))
    sample = np.fromfile(folder.bin, metadata.numpy_dtype, count=60)
    beginning = tokenizer.decode(sample).rstrip("\ufffd")  # the last token may hold a part of a character
    print(f'The text begins: "{escape_unprintable(beginning)}"')
    print("Files:")
    for path in (folder.bin, folder.packed, folder.mask, folder.tokenizer, folder.report, folder.metadata):
        if path.exists():
            print(f"  {path}  {path.stat().st_size:,} bytes")
    print(f"\nTrain on it:\n  {build_training_command(folder, metadata, options.tokenizer_file)}")


def escape_unprintable(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def build_training_command(folder: TokenFolder, metadata: TokenMetadata, tokenizer_file: str | None) -> str:
    """Return the command that trains on these files. If `tokenizer_file` belongs to a checkpoint, it starts from that.
    It names each file if the folder has other tokens, too."""
    data = f" --data_dir {shlex.quote(str(folder.folder))}"
    if len(find_metadata(folder.folder)) > 1:
        named = (("bin_file", folder.bin), ("tokenizer_file", folder.tokenizer), ("metadata_file", folder.metadata))
        data = "".join(f" --{flag} {shlex.quote(str(path))}" for flag, path in named)
    source = Path(tokenizer_file or "").parent
    if tokenizer_file and (metadata.chat_template or (source / "config.json").is_file()):
        run = Path("runs") / ("chat" if metadata.chat_template else folder.folder.name)
        init, out = shlex.quote(str(source)), shlex.quote(str(run))
        gently = " --epochs 3 --learning_rate 1e-4 --eval_interval 50 --stop_after_worse 3"
        gently = gently if metadata.chat_template else ""
        return f"python train_colab_mmap.py{data} --init_from {init} --output_dir {out}{gently}"
    return f"python train_colab_mmap.py{data} --minutes 60"


class ByteProgress:
    """Shows progress in bytes: a bar in a terminal, else a line now and then."""

    def __init__(self, what: str, total: int):
        self.what = what
        self.total = total
        self.done = self.done_before = 0
        self.is_all_read = False
        self.bar = progress_bar(desc=what, total=total, unit="B", unit_scale=True, mininterval=0.5)
        self.began = self.last_line = time.monotonic()

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def start_at(self, done: int) -> None:
        """Count `done` bytes of an earlier session, which do not count towards the speed."""
        self.bar.update(done - self.done)
        self.bar.unpause()
        self.done = self.done_before = done
        self.began = time.monotonic()

    def add(self, count: int) -> None:
        self.advance_to(self.done + count)

    def advance_to(self, done: int) -> None:
        self.bar.update(done - self.done)
        self.done = done
        if seconds := self.seconds_if_due():
            speed = (done - self.done_before) / seconds
            left = f", {duration((self.total - done) / speed)} left" if speed else ""
            share = f"{done / self.total:.0%} of {byte_size(self.total)}"
            print(f"{self.what}: {share}, {byte_size(speed)}/s{left}", flush=True)

    def until_end(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield the texts. After the last one, `wait` reports that all are read."""
        yield from texts
        self.is_all_read = True

    def wait(self, what: str) -> None:
        """Report that `what` is running and for how long, once all texts are read. Call it about once a second."""
        if self.is_all_read:
            self.bar.bar_format = "{desc}: text read, " + what + " [{elapsed}]"
        self.bar.refresh()
        if self.is_all_read and (seconds := self.seconds_if_due()):
            print(f"{self.what}: text read, {what}, {duration(seconds)} so far", flush=True)

    def seconds_if_due(self) -> float:
        """Return the seconds since the start if a line is due, else 0."""
        now = time.monotonic()
        if not self.bar.disable or now - self.last_line < LOG_INTERVAL_SECONDS:
            return 0.0
        self.last_line = now
        return now - self.began
