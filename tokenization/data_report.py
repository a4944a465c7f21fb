"""Write data_report.md (the text of each file, and what was left out and why), and describe the finished tokens."""

from __future__ import annotations

import contextlib
import itertools
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from common.errors import DataError
from common.output import byte_size, cell, log, plural, table_row
from tokenization.corpus import Source
from tokenization.dedup import NUM_EXAMPLES, Copies, Repeats
from tokenization.documents import Piece
from tokenization.encoding import Reader, SourceText, begins_document
from tokenization.examine import REPEATED, Examination, Finding, read_findings
from tokenization.held_out import HeldOut
from tokenization.kinds import UNKNOWN_SUFFIX
from tokenization.metadata import TokenMetadata, find_metadata
from tokenization.settings import Settings
from tokenization.token_folder import TokenFolder
from tokenizer import Tokenizer, load_tokenizer
from tokenizer_bpe import MIN_VOCABULARY

MAX_LISTED_FILES, MAX_PRINTED_LINES = 1000, 12
MAX_PRINTED_NAMES = 5  # files left out for one reason
MAX_LISTED_NAMES = 5  # files of the tokens that are replaced
NUM_LONGEST_TOKENS = 10
SMALL_VOCABULARY_SHARE = 0.75  # a vocabulary below this share of --vocab_size is reported


@dataclass
class FileCounts:
    documents: int = 0
    bytes: int = 0


class DataReport:
    """Collects what happens to each file while the text is encoded."""

    def __init__(
        self,
        sources: Sequence[Source],
        skipped: Sequence[tuple[str, str]],
        repeats: Repeats | Copies | None,
        held_out: HeldOut | None,
        copies: Mapping[tuple[Source, Source], float],
    ):
        """`skipped`: (name, reason) of files without text. `held_out`: None if the end of the text is held out.
        `copies`: share of a file's text that an earlier one holds, too."""
        self.files = {source: FileCounts() for source in sources}
        self.skipped, self.repeats, self.held_out = skipped, repeats, held_out
        self.copies = copies
        self.whole_text = Examination()  # small files show their habits only together
        self.words: list[str] = []  # differences of the vocabulary from GPT-2's

    def count_texts(self, read: Reader) -> Reader:
        """Return a reader of the same text that counts it by file."""

        def counted(on_read: Callable[[int], None]) -> Iterator[SourceText]:
            for piece in read(on_read):
                of_file = self.files[piece.source]
                of_file.documents += begins_document(piece)
                of_file.bytes += len(piece.text.encode())
                if isinstance(piece, Piece):
                    self.whole_text.add(piece.text)
                yield piece

        return counted

    @property
    def documents(self) -> int:
        return sum(of_file.documents for of_file in self.files.values())

    def describe_held_out(self, share: float) -> str:
        """Describe the held-out share of the tokens (`share`) or, if known, of each file's text."""
        return (
            self.held_out.describe() if self.held_out else f"Held out for validation: the end of the text ({share:.1%})"
        )

    def format_share(self, source: Source) -> str:
        return f"{self.held_out.share_of(source):.0%}" if self.held_out else ""

    def list_findings(self, limit: int) -> list[tuple[str, str]]:
        """Return (kind, text) of what a user may want to act on. `limit`: names listed per reason for leaving out
        files."""
        found = [("Words", line) for line in self.words]
        repeats = self.repeats.describe() if self.repeats else ""
        found += [("Repeated", f"left out: {repeats}")] if repeats else []
        by_sign: dict[str, list[tuple[Finding, str]]] = defaultdict(list)
        for source in self.files:
            for finding in read_findings(source.signs):
                if finding.hurts and not (finding.sign is REPEATED and self.repeats):
                    by_sign[finding.sign.name].append((finding, source.name))
        for finding in read_findings(self.whole_text.list_findings()):
            if finding.hurts and finding.sign.name not in by_sign:
                by_sign[finding.sign.name].append((finding, "The whole text"))
        for findings in by_sign.values():
            worst, _ = max(findings)
            names = _join_names([name for _, name in sorted(findings, reverse=True)], limit)
            found.append(("Note", f"{names}: {worst.description}; {worst.sign.advice}"))
        for (copy, first), share in self.copies.items():
            earlier = first.place if first.name == copy.name else first.name
            advice = "--dedup exact leaves out repeated documents"
            found.append(("Twice", f"{share:.0%} of {copy.name} also stands in {earlier}; {advice}"))
        names_by_line: dict[tuple[str, str], list[str]] = defaultdict(list)
        for source in self.files:
            if source.is_converted:
                names_by_line["Converted", source.note].append(source.name)
        for name, reason in sorted(self.skipped, key=lambda entry: entry[1] == UNKNOWN_SUFFIX):  # these last
            names_by_line["Left out", reason].append(name)
        return found + [(kind, f"{_join_names(names, limit)}: {line}") for (kind, line), names in names_by_line.items()]

    def render_brief(self) -> str:
        """Return the findings for the terminal."""
        lines = [f"{kind:<10} {cell(line)}" for kind, line in self.list_findings(MAX_PRINTED_NAMES)]
        more = [f"           and {len(lines) - MAX_PRINTED_LINES:,} more lines, in data_report.md"]
        lines = lines[:MAX_PRINTED_LINES] + more * (len(lines) > MAX_PRINTED_LINES)
        return "\n".join(lines).encode(errors="replace").decode()  # file names may hold any bytes

    def render_markdown(self) -> str:
        """Return the whole report."""
        gave = [of_file for of_file in self.files.values() if of_file.documents]
        size = sum(counts.bytes for counts in gave)
        documents = plural(self.documents, "document")
        lines = [f"- **Read**: {plural(len(gave), 'file')}: {byte_size(size)} of text in {documents}"]
        lines += [f"- **{kind}**: {cell(line)}" for kind, line in self.list_findings(MAX_LISTED_FILES)]
        if self.repeats:
            common = self.repeats.left_out.most_common(NUM_EXAMPLES)
            lines += [f"- **Repeated** {count:,} times: {cell(text)} ..." for text, count in common]
        for source in self.files:
            for finding in read_findings(source.signs):
                lines.append(f"- **Found** in {cell(source.name)}: {cell(finding.description)}")
        lines.append("\n| file | made from | documents | bytes of text | held out |\n|---|---|---:|---:|---:|")
        lines += [
            table_row(
                [
                    cell(source.name),
                    cell(source.note) or "text",
                    f"{counts.documents:,}",
                    f"{counts.bytes:,}",
                    self.format_share(source),
                ]
            )
            for source, counts in itertools.islice(self.files.items(), MAX_LISTED_FILES)
        ]
        return "\n".join(["# Data report\n", *lines]) + "\n"


def _join_names(names: Sequence[str], limit: int) -> str:
    more = f" and {len(names) - limit:,} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def warn_of_small_vocabulary(tokenizer: Tokenizer, settings: Settings) -> None:
    """Print a note if a learned vocabulary is much smaller than requested."""
    if tokenizer.vocab_size == MIN_VOCABULARY < settings.vocab_size:
        log.info(
            f"Warning: the vocabulary has only single bytes, because no pair of bytes occurs {settings.min_frequency} "
            "times in the text. Use more text, a larger --vocab_sample_mb or a lower --min_frequency."
        )
    elif tokenizer.vocab_size < SMALL_VOCABULARY_SHARE * settings.vocab_size:
        log.info(
            f"The vocabulary has {tokenizer.vocab_size:,} tokens, not {settings.vocab_size:,}, because no other pair "
            f"occurs {settings.min_frequency} times in the text. More text gives more tokens."
        )


def describe_replaced(path: Path) -> str:
    """Describe the tokens that a finished tokenization will replace. `path`: their metadata."""
    names: list[str] = []
    with contextlib.suppress(DataError):
        names = TokenMetadata.read(path).source_names[:MAX_LISTED_NAMES]
    text = ", ".join(map(_escape_unprintable, names)) or "another text"
    return (
        f"{path.parent} holds the tokens of {text}, which are replaced. A run needs its tokens to continue: to keep "
        "both, use another --output_dir."
    )


def print_result(folder: TokenFolder, metadata: TokenMetadata, settings: Settings) -> None:
    """Print counts, a sample, the files, and the command that trains on them."""
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
        whole_characters = (_escape_unprintable(text) for text in texts if "\ufffd" not in text)
        longest = itertools.islice(whole_characters, NUM_LONGEST_TOKENS)
        print("Longest tokens:", ", ".join(f'"{text}"' for text in longest))
    sample = np.fromfile(folder.bin, metadata.numpy_dtype, count=60)
    beginning = tokenizer.decode(sample).rstrip("\ufffd")  # the last token may hold a part of a character
    print(f'The text begins: "{_escape_unprintable(beginning)}"')
    print("Files:")
    for path in (folder.bin, folder.packed, folder.mask, folder.tokenizer, folder.report, folder.metadata):
        if path.exists():
            print(f"  {path}  {path.stat().st_size:,} bytes")
    print(f"\nTrain on it:\n  {_build_training_command(folder, metadata, settings.tokenizer_file)}")


def _escape_unprintable(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _build_training_command(folder: TokenFolder, metadata: TokenMetadata, tokenizer_file: str | None) -> str:
    """Return the command that trains on these files. If `tokenizer_file` belongs to a checkpoint, it starts from that.
    It names each file if the folder has other tokens, too."""
    data = f" --data_dir {shlex.quote(str(folder.folder))}"
    if len(find_metadata(folder.folder)) > 1:
        files = (("bin_file", folder.bin), ("tokenizer_file", folder.tokenizer), ("metadata_file", folder.metadata))
        data = "".join(f" --{flag} {shlex.quote(str(path))}" for flag, path in files)
    source = Path(tokenizer_file or "").parent
    if tokenizer_file and (metadata.chat_template or (source / "config.json").is_file()):
        run = Path("runs") / ("chat" if metadata.chat_template else folder.folder.name)
        init, out = shlex.quote(str(source)), shlex.quote(str(run))
        chat_flags = ""
        if metadata.chat_template:
            chat_flags = " --epochs 3 --learning_rate 1e-4 --eval_interval 50 --stop_after_worse 3"
        return f"python train_colab_mmap.py{data} --init_from {init} --output_dir {out}{chat_flags}"
    return f"python train_colab_mmap.py{data} --minutes 60"
