"""Turn text into a token folder: a binary token file, its tokenizer, and metadata.

python tokenize_local_bpe.py --input my_text.txt

Importable: `tokenize`.
"""

from __future__ import annotations

from common.script import check_flags, writing_script
from tokenization.settings import DEFAULT_FOLDER, Settings, parse_arguments

if __name__ == "__main__":
    check_flags(parse_arguments)  # before the imports, which take a second: --help should not wait

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from common.chat import ChatTemplate, require_end_of_text_id
from common.errors import INTERRUPTED, ConfigError, DataError
from common.files import atomic_write, sha256_file
from common.output import log, plural
from common.script import count_cores
from common.validation import check
from tokenization.conversations import read_conversations
from tokenization.corpus import Source, list_left_out
from tokenization.data_report import DataReport, describe_replaced, print_result, warn_of_small_vocabulary
from tokenization.dedup import Copies, Repeats
from tokenization.documents import Piece, read_pieces
from tokenization.encoding import Reader, concatenate, encode_in_order, read_chunks, sample_evenly, split_index
from tokenization.extract import FORMAT_SUFFIXES, detect_format, find_files, make_readable
from tokenization.fingerprint import choose_kind, compute_fingerprint, find_complete, work_fingerprint
from tokenization.held_out import choose_held_out
from tokenization.metadata import TokenMetadata, choose_dtype
from tokenization.progress import ByteProgress, run_in_background
from tokenization.scripts import SAMPLE_CHARACTERS, choose_word_form, describe_word_form
from tokenization.token_folder import (
    TokenFolder,
    TokenWriter,
    count_length,
    open_writer,
    pack,
    pack_mask,
    require_same_files,
    require_same_tokens,
)
from tokenizer import CharacterTokenizer, Tokenizer, character_counts, load_tokenizer
from tokenizer_bpe import BPETokenizer, TokenizerError


@writing_script(DataError)
def main(argv: Sequence[str] | None = None) -> int:
    settings = parse_arguments(argv)
    try:
        tokenize_text(settings)
    except KeyboardInterrupt:
        print("\nInterrupted. Run the same command to continue.", file=sys.stderr)
        return INTERRUPTED
    return 0


def tokenize(
    inputs: Sequence[str],
    output_dir: str | Path = DEFAULT_FOLDER,
    *,
    quiet: bool = False,
    may_replace: bool = True,
    **settings: Any,
) -> Path:
    """Tokenize text files into `output_dir`. `settings`: fields of Settings. Return the path of the
    metadata.

    An interrupted call is continued by the next call with the same inputs and settings; a complete
    folder is left as it is. Files of an earlier tokenization are replaced only at the end, and
    without `may_replace` only by the same tokens (DataError otherwise).

    Raises ConfigError, DataError or TokenizerError.
    """
    paths = {key: str(value) for key, value in settings.items() if isinstance(value, Path)}
    problems: list[str] = []
    given = {"input": [*map(str, inputs)], "output_dir": str(output_dir), **settings, **paths}
    checked = check(Settings, given, problems)
    if problems or checked is None:
        raise ConfigError("\n".join(problems))
    return tokenize_text(checked, quiet, may_replace)


def tokenize_text(settings: Settings, quiet: bool = False, may_replace: bool = True) -> Path:
    """As `tokenize`, with checked settings."""
    files = find_files(settings)
    if settings.format == "text" and detect_format(files, settings.text_key) == "chat":
        raise DataError(f"{files[0].path} holds conversations. Add --format chat.")
    kind = choose_kind(settings)
    if kind == "bpe" and settings.unknown == "drop":
        raise ConfigError(
            "--unknown drop applies only to character tokenizers, because BPE encodes any text. Leave it out."
        )
    if settings.format == "chat" and settings.tokenizer_file:
        require_end_of_text_id(load_tokenizer(settings.tokenizer_file))

    folder = TokenFolder.of(settings.output_dir, kind, settings.output_name)
    metadata = find_complete(folder, files, settings, kind)
    if metadata is not None:
        if not quiet:
            print(f"{folder.folder} is already complete for this text and these settings.")
        folder.discard_leftovers()
        if settings.compress and not folder.packed.exists():
            pack(folder.bin, folder.packed)
    else:
        sources, left_out = make_readable(files, settings)
        if not may_replace:
            require_same_files(folder.folder, settings.input, sources, kind)
        if folder.metadata.exists():
            log.info(describe_replaced(folder.metadata))
        fingerprint = compute_fingerprint(files, settings, kind)
        with folder.locked():
            folder.open_work(work_fingerprint(fingerprint, settings))  # kept from an interrupted call, or new
            try:
                if not folder.awaits_publishing:
                    left_out += list_left_out(settings.input, FORMAT_SUFFIXES[settings.format])
                    metadata, report = encode_text(folder, sources, left_out, settings, fingerprint, kind)
                    if not may_replace:
                        require_same_tokens(folder, settings.input, metadata)
                    folder.prepare_publishing(metadata, report.render_markdown(), settings.compress)
            except (DataError, TokenizerError):
                folder.discard_work()  # the next attempt will have different text
                raise
            metadata = folder.publish()
    if not quiet:
        print_result(folder, metadata, settings)
    return folder.metadata


def encode_text(
    folder: TokenFolder,
    sources: Sequence[Source],
    left_out: Sequence[tuple[str, str]],
    settings: Settings,
    fingerprint: str,
    kind: str,
) -> tuple[TokenMetadata, DataReport]:
    """Choose what is held out, learn or load the tokenizer, and encode the text into the work folder.
    `left_out`: (name, reason) of files without text."""
    total_bytes = sum(source.text_bytes for source in sources)
    read, repeats = build_reader(sources, settings)
    learned, learned_bytes = read, total_bytes
    if settings.own_text:  # this text is its companion
        own_sources = make_readable(find_files(settings.for_own_text()), settings).sources
        own, _ = build_reader(own_sources, settings)
        repeats = Copies(read, own)
        read = repeats.remove
        learned, learned_bytes = concatenate(own, read), total_bytes + sum(one.text_bytes for one in own_sources)
    held_out, note, copies = choose_held_out(read, 1 - settings.train_split, total_bytes)
    if note:
        log.info(note)
    report = DataReport(sources, left_out, repeats, held_out, copies)

    tokenizer = prepare_tokenizer(folder, learned, settings, kind, learned_bytes)
    if isinstance(tokenizer, BPETokenizer):
        if not settings.tokenizer_file:
            report.words = describe_word_form(tokenizer)
        if tokenizer.encoder_note:
            log.info(tokenizer.encoder_note)
        if tokenizer.end_of_text_id is None:
            log.info("Documents are not separated, because the tokenizer has no known end-of-text token.")

    read = report.count_texts(read)
    if held_out:
        read = held_out.move_to_end(read)
    writer = encode(folder, tokenizer, read, settings, total_bytes)
    metadata = describe_tokens(folder, writer, tokenizer, report, settings, fingerprint)
    if not settings.own_text:  # a companion is not evaluated
        log.info(report.describe_held_out(1 - metadata.train_tokens / metadata.total_tokens))
    if findings := report.render_brief():
        log.info(findings)
    return metadata, report


def build_reader(sources: Sequence[Source], settings: Settings) -> tuple[Reader, Repeats | Copies | None]:
    """Return a reader of the text, and the repeated text it leaves out with --dedup."""
    if settings.format == "chat":
        return functools.partial(read_conversations, sources, ChatTemplate()), None

    def read(on_read: Callable[[int], None]) -> Iterator[Piece]:
        return read_pieces(sources, settings.document_separator, settings.text_key, on_read)

    repeats = Repeats(read) if settings.dedup else None
    return (repeats.remove if repeats else read), repeats


def prepare_tokenizer(folder: TokenFolder, read: Reader, settings: Settings, kind: str, total_bytes: int) -> Tokenizer:
    """Return the tokenizer in the work folder: kept from before, copied from `tokenizer_file`, or
    learned."""
    path = folder.in_work(folder.tokenizer)
    if not path.exists():
        if settings.tokenizer_file:
            content = Path(settings.tokenizer_file).read_bytes()
        else:
            content = learn_tokenizer(read, settings, kind, total_bytes).to_json().encode()
        with atomic_write(path) as file:
            file.write(content)
    return load_tokenizer(path)


def learn_tokenizer(read: Reader, settings: Settings, kind: str, total_bytes: int) -> Tokenizer:
    with ByteProgress("Learning the vocabulary", total_bytes) as progress:
        pieces = read(progress.add)
        if kind == "character":
            return CharacterTokenizer.train(
                piece.text + piece.line_break for piece in pieces if isinstance(piece, Piece)
            )
        small_sample = sample_evenly(
            (piece.text for piece in read(lambda count: None)), SAMPLE_CHARACTERS / total_bytes
        )
        form = choose_word_form(small_sample)
        sample = sample_evenly((piece.text for piece in pieces), settings.vocab_sample_mb * 1e6 / total_bytes)
        texts = progress.until_end(sample)
        tokenizer: BPETokenizer = run_in_background(
            lambda: BPETokenizer.train(texts, settings.vocab_size, settings.min_frequency, *form),
            lambda: progress.wait("counting and merging pairs"),
        )
    warn_of_small_vocabulary(tokenizer, settings)
    return tokenizer


def encode(
    folder: TokenFolder, tokenizer: Tokenizer, read: Reader, settings: Settings, total_bytes: int
) -> TokenWriter:
    """Encode all text that is not yet in the work folder, in order. Return the writer with counts and
    hash of all tokens."""
    dtype = choose_dtype(tokenizer.vocab_size)
    chunks = read_chunks(read, settings.chunk_size_mb * 1e6)
    with (
        open_writer(folder, dtype, tokenizer.byte_lengths) as writer,
        ByteProgress("Encoding", total_bytes) as progress,
    ):
        for chunk in islice(chunks, writer.chunks):  # encoded before the interruption
            progress.start_at(chunk.bytes_read)
        workers = settings.num_workers or count_cores()
        for chunk, encoded in encode_in_order(tokenizer, chunks, settings.unknown, dtype, workers):
            writer.append(*encoded)
            progress.advance_to(chunk.bytes_read)
    return writer


def describe_tokens(
    folder: TokenFolder,
    writer: TokenWriter,
    tokenizer: Tokenizer,
    report: DataReport,
    settings: Settings,
    fingerprint: str,
) -> TokenMetadata:
    """Return the metadata of the tokens in the work folder. Reads only the end of the token file,
    which may be large."""
    total = writer.tokens
    is_chat = settings.format == "chat"
    ends = np.memmap(folder.document_ends, "<i8", "r") if writer.documents else np.zeros(0, np.int64)
    if is_chat and len(ends) < 2:
        raise DataError(
            f"Found {plural(len(ends), 'conversation')}, but training and validation need one each. --format chat "
            "reads .jsonl and .json; leave it out for text."
        )
    if report.held_out and 0 < report.held_out.documents < len(ends):
        split = int(ends[-report.held_out.documents - 1])
    else:  # the end of the text
        report.held_out = None
        split = split_index(total, ends, settings.train_split, cuts_documents=not is_chat)
    train_bytes = writer.text_bytes_before(split, folder.in_work(folder.bin))
    tokens = np.memmap(folder.in_work(folder.bin), writer.dtype, "r")
    return TokenMetadata(
        path=folder.metadata,
        vocab_size=tokenizer.vocab_size,
        total_tokens=total,
        train_split_index=split,
        dtype="uint16" if writer.dtype.itemsize == 2 else "int32",
        tokenizer_type="bpe" if tokenizer.kind == "bpe" else "character",
        bin_file=folder.bin.name,
        tokenizer_file=folder.tokenizer.name,
        tokens_sha256=writer.sha256.hexdigest(),
        tokenizer_sha256=sha256_file(folder.in_work(folder.tokenizer)),
        val_bytes=writer.text_bytes - train_bytes,
        val_characters=count_length(tokens[split:], character_counts(tokenizer)[:, 0]),
        train_bytes=train_bytes,
        train_split=settings.train_split,
        documents=report.documents,
        source_files=tuple({"name": source.name, "size": source.size} for source in report.files),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint,
        chat_template=ChatTemplate() if is_chat else None,
        mask_file=folder.mask.name if is_chat else None,
        mask_sha256=pack_mask(folder) if is_chat else None,
    )


if __name__ == "__main__":
    sys.exit(main())
