"""Tokens -> batches: lay out windows in a text, pack conversations into windows, draw batches.

A batch is a pure function of (seed, sequences seen so far). Each epoch cuts the training split into non-overlapping
windows at a fresh phase and visits every window once in a fresh order. So a run resumes exactly from one number, and
the batch size may change on the way."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.errors import ConfigError, DataError
from common.machine import available_ram
from common.output import byte_size
from model import IGNORE_INDEX
from tokenization.metadata import TokenMetadata, check_tokenizer, check_tokens, find_metadata, read_mask, read_tokens
from tokenization.token_folder import DEFAULT_FOLDER, holds_unfinished
from tokenizer import Tokenizer
from training.config import Config
from training.hardware import Hardware

COMPANION_KEY = "companion_sha256"  # in TokenData.fingerprint
PADDING = 0  # the loss ignores it; every vocabulary has this id


@dataclass(frozen=True)
class Layout:
    """The positions of both splits' windows among the tokens."""

    seq_len: int  # inputs per window
    windows: int  # training windows per epoch
    stride: int  # tokens between the starts of two windows
    spare: int  # unused training tokens; the first window may start up to this much later
    val_start: int
    val_windows: int
    val_tokens_per_byte: float | None  # tokens in the loss per byte; None if the bytes were not counted
    described: str
    has_mask: bool = False  # ids that do not count in the loss are stored as their complement, ~id


def layout_of_text(metadata: TokenMetadata, seq_len: int) -> Layout:
    """Lay out the windows of a text. Each shares one token with the next: its last target is the next window's first
    input."""
    windows = count_windows(metadata.train_tokens, seq_len)
    return Layout(
        seq_len=seq_len,
        windows=windows,
        stride=seq_len,
        spare=metadata.train_tokens - 1 - windows * seq_len,
        val_start=metadata.train_tokens,
        val_windows=(metadata.val_tokens - 1) // seq_len,
        val_tokens_per_byte=metadata.val_tokens / metadata.val_bytes if metadata.val_bytes else None,
        described=(
            f"{metadata.train_tokens:,} training tokens ({windows:,} windows of {seq_len}), "
            f"{metadata.val_tokens:,} validation tokens"
        ),
    )


def count_windows(tokens: int, seq_len: int) -> int:
    """Return the number of windows (seq_len inputs and one more target) that fit at every phase; at least one."""
    return max(1, (tokens - seq_len) // seq_len)


def _pack_splits(
    tokens: np.ndarray, metadata: TokenMetadata, tokenizer: Tokenizer, seq_len: int
) -> tuple[np.ndarray, Layout]:
    """Pack the conversations of both splits into windows of seq_len + 1. Return (tokens,) and their layout.

    Raises DataError if the mask belongs to other tokens, ConfigError if no answer fits.
    """
    in_answer = read_mask(metadata)
    is_start = (tokens == tokenizer.start_id) & ~in_answer
    split, length = metadata.train_tokens, seq_len + 1
    if not is_start[0] or not is_start[split]:
        raise DataError(
            f"{metadata.path_beside('mask_file')} does not belong to {metadata.bin_file}: no conversation begins at "
            "the start of a split. Copy both files again, or run tokenize_local_bpe.py again."
        )
    train, val = (
        pack(tokens[part], in_answer[part], np.flatnonzero(is_start[part]), length)
        for part in (slice(split), slice(split, None))
    )
    for name, packed in (("training", train), ("validation", val)):
        if not packed.conversations:
            raise ConfigError(
                f"max_seq_len {seq_len} is too short for the conversations of {metadata.path}: every "
                f"{name} conversation is cut off before its answer. Use a larger --max_seq_len."
            )
    val_bytes = int(tokenizer.byte_lengths[val.ids].sum())
    lost = [
        f"{count:,} {what}"
        for count, what in (
            (train.cut + val.cut, "cut at the context length"),
            (train.left_out + val.left_out, "left out, because their first answer begins beyond the context length"),
        )
        if count
    ]
    described = (
        f"{train.conversations:,} conversations in {len(train.windows):,} windows of {seq_len} "
        f"({train.answers:,} tokens of answers to learn), {val.conversations:,} to validate"
        + (f"\nNote       conversations: {'; '.join(lost)}" if lost else "")
    )
    layout = Layout(
        seq_len=seq_len,
        windows=len(train.windows),
        stride=length,
        spare=0,
        val_start=train.windows.size,
        val_windows=len(val.windows),
        val_tokens_per_byte=val.answers / val_bytes if val_bytes else None,
        described=described,
        has_mask=True,
    )
    return np.concatenate([train.windows, val.windows]).reshape(-1), layout


class Packed(NamedTuple):
    """Conversations packed into windows.

    `windows`: (windows, length) int32; ids that do not count in the loss are stored as their complement, ~id.
    """

    windows: np.ndarray
    conversations: int  # conversations packed
    cut: int  # packed conversations longer than a window, which lose their end
    left_out: int  # conversations whose first `length` tokens hold no answer
    answers: int  # targets in the loss

    @property
    def ids(self) -> np.ndarray:
        """(answers,): the targets in the loss."""
        targets = self.windows[:, 1:]
        return targets[targets >= 0]


def pack(tokens: np.ndarray, counted: np.ndarray, starts: np.ndarray, length: int) -> Packed:
    """Pack conversations into windows by best-fit decreasing: the longest first, each into the fullest window that has
    room for it.

    tokens, counted (in the loss): (tokens,); starts: (conversations,), the first token of each.
    """
    lengths = np.minimum(np.diff(starts, append=len(tokens)), length)
    running = np.concatenate([[0], np.cumsum(counted)])
    learnable = running[starts + lengths] > running[starts]
    cut = int((np.diff(starts, append=len(tokens)) > length)[learnable].sum())
    kept = np.flatnonzero(learnable)
    order = kept[np.argsort(-lengths[kept], kind="stable")]

    rooms = 0  # bit r: some window has room for r more tokens
    with_room: dict[int, list[int]] = {}
    places = np.empty((len(order), 2), np.int64)  # window, column
    windows = 0
    for row, size in enumerate(lengths[order].tolist()):
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            window = windows
            room = length
            windows += 1
        places[row] = window, length - room
        if room > size:
            with_room.setdefault(room - size, []).append(window)
            rooms |= 1 << (room - size)

    packed = np.full((windows, length), ~PADDING, np.int32)
    ids = tokens.astype(np.int32)
    np.invert(ids, out=ids, where=~counted)
    for conversation, (window, column) in zip(order.tolist(), places.tolist(), strict=True):
        start, size = int(starts[conversation]), int(lengths[conversation])
        packed[window, column : column + size] = ids[start : start + size]
    return Packed(packed, len(order), cut, len(starts) - len(order), int((packed[:, 1:] >= 0).sum()))


MAX_RAM_TOKENS_SHARE = 0.7  # share of the available memory; the model and Python need the rest
MAX_GPU_TOKENS_SHARE = 0.2  # share of the GPU's memory; training needs the rest


class TokenData:
    """Verified tokens and their tokenizer. Training uses `batch` and `validation_batch`."""

    def __init__(
        self,
        metadata: TokenMetadata,
        tokens: np.ndarray,
        tokenizer: Tokenizer,
        tokenizer_file: bytes,
        layout: Layout,
        config: Config,
        device: torch.device,
        placement: str,
    ):
        self.metadata = metadata
        self.tokenizer_file = tokenizer_file  # verified bytes, because the folder may change or vanish
        self.tokenizer = tokenizer
        self.layout, self.seq_len = layout, layout.seq_len
        self.seed = config.seed
        self.device = device
        self.placement = placement
        self.is_16_bit = tokens.dtype.itemsize == 2
        # PyTorch has few operations on uint16: ids above 32,767 travel as negative int16 and `split` restores them.
        self.tokens = torch.from_numpy(tokens.view(np.int16) if self.is_16_bit else tokens)
        if placement == "gpu":
            self.tokens = self.tokens.to(device)
        self.reader = None if self.tokens.device.type == device.type else ReadAhead(self)
        self.val_windows = layout.val_windows
        self.companion: TokenData | None = None  # the text that is read first
        self.fingerprint = {
            "tokens_sha256": metadata.tokens_sha256,
            "tokenizer_sha256": metadata.tokenizer_sha256,
            "train_tokens": metadata.train_tokens,
        }
        if metadata.mask_sha256:
            self.fingerprint |= {"mask_sha256": metadata.mask_sha256}

    @classmethod
    def open(
        cls,
        config: Config,
        data_dir: str | None,
        seq_len: int,
        hardware: Hardware,
        companion_dir: str | None = None,
    ) -> TokenData:
        """Find, verify and load the tokens, and those of a companion. Raises DataError for bad files, ConfigError if
        the context is too long."""
        if companion_dir is not None:
            data, companion = (cls.open(config, folder, seq_len, hardware) for folder in (data_dir, companion_dir))
            data.companion = companion
            data.fingerprint |= {COMPANION_KEY: companion.metadata.tokens_sha256}
            return data
        bin_path, tokenizer_path, metadata_path = locate(config, data_dir)
        metadata = TokenMetadata.read(metadata_path)
        bin_path = bin_path or metadata.path_beside("bin_file")
        tokenizer_path = tokenizer_path or metadata.path_beside("tokenizer_file")
        is_chat = metadata.chat_template is not None
        for split, count in (("training", metadata.train_tokens), ("validation", metadata.val_tokens)):
            if count <= seq_len and not is_chat:
                raise ConfigError(
                    f"max_seq_len {seq_len} needs more than {seq_len} {split} tokens, and {metadata_path} has "
                    f"{count:,}. Lower --max_seq_len, or tokenize more text, or use another --train_split."
                )
        bytes_a_token = 4 if is_chat else metadata.numpy_dtype.itemsize
        placement = choose_placement(metadata.total_tokens * bytes_a_token, config, hardware)
        if is_chat and placement == "mmap":
            if config.placement == "mmap":
                raise ConfigError(
                    "--placement mmap works for text only, because conversations are packed in memory. Leave it out."
                )
            placement = "ram"
        tokens = read_tokens(bin_path, metadata, mapped=placement == "mmap")
        tokens_sha256 = check_tokens(bin_path, tokens, metadata)
        tokenizer, tokenizer_file = check_tokenizer(tokenizer_path, metadata)
        tokenizer_sha256 = hashlib.sha256(tokenizer_file).hexdigest()
        metadata = replace(metadata, tokens_sha256=tokens_sha256, tokenizer_sha256=tokenizer_sha256)
        layout = layout_of_text(metadata, seq_len)
        if is_chat:
            tokens, layout = _pack_splits(tokens, metadata, tokenizer, seq_len)
        data = cls(metadata, tokens, tokenizer, tokenizer_file, layout, config, hardware.device, placement)
        if data.reader is not None and hardware.processes > 1:
            data.reader.stride = config.sequences_per_step  # other processes read the rows in between
        return data

    @property
    def vocab_size(self) -> int:
        return self.metadata.vocab_size

    @property
    def windows(self) -> int:
        """Training windows in an epoch, which is a pass over the companion, if there is one."""
        return self.layout.windows if self.companion is None else self.companion.windows

    @property
    def gpu_bytes(self) -> int:
        """Bytes of the tokens on a GPU."""
        here = self.tokens.nbytes if self.tokens.is_cuda else 0
        return here if self.companion is None else here + self.companion.gpu_bytes

    def describe(self) -> str:
        m = self.metadata
        place = {"gpu": "GPU memory", "ram": "RAM", "mmap": "a memory map"}[self.placement]
        text = (
            f"Data       {m.total_tokens:,} tokens, vocabulary {m.vocab_size:,} ({m.tokenizer_type}), in {place}\n"
            f"Splits     {self.layout.described}"
        )
        return text if self.companion is None else f"{text}\nCompanion  {self.companion.layout.described}"

    def batch(self, sequences_seen: int, rows: int, switch: int | None = None) -> tuple[torch.Tensor, ...]:
        """Return the `rows` sequences that follow the first `sequences_seen`: inputs, targets and, for conversations,
        the column in which each token's conversation starts. Each is (rows, T) int64. `switch`: see `train_windows`."""
        read = self.reader.windows if self.reader else self.train_windows
        return self.split(read(sequences_seen, rows, switch))

    def validation_batch(self, first: int, rows: int, of: int) -> tuple[torch.Tensor, ...]:
        """Return `rows` windows, starting with number `first`, of `of` windows spread evenly over the split."""
        chosen = np.arange(first, first + rows, dtype=np.int64) * self.val_windows // of
        return self.split(self.gather(self.layout.val_start + chosen * self.layout.stride))

    def train_windows(self, first: int, rows: int, switch: int | None = None) -> torch.Tensor:
        """Return `rows` sequences of the shuffled stream, starting with number `first`, as `gather` does.

        With a companion, the stream is the companion's; from sequence number `switch` on, if there is one, every second
        one comes from the own text.
        """
        if self.companion is None:
            return self.train_own(first, rows)
        own_first, own_end = (0 if switch is None else (max(0, end - switch) + 1) // 2 for end in (first, first + rows))
        of_companion = self.companion.train_windows(first - own_first, rows - (own_end - own_first))
        if own_first == own_end:
            return of_companion
        both = torch.cat([of_companion, self.train_own(own_first, own_end - own_first)])
        after = np.arange(first, first + rows) - (switch or 0)
        is_own = (after >= 0) & (after % 2 == 0)
        return both[self._index(np.argsort(np.argsort(is_own, kind="stable")))]

    def train_own(self, first: int, rows: int) -> torch.Tensor:
        """As `train_windows`, without the companion."""
        layout = self.layout
        return self.gather(train_starts(first, rows, layout.windows, layout.spare, layout.stride, self.seed))

    def gather(self, starts: np.ndarray) -> torch.Tensor:
        """Return the windows that begin at `starts`, (rows,), as stored: (rows, T + 1), on the tokens' device."""
        # A view of all windows, then one indexed copy: no loop over rows.
        every_window = self.tokens.unfold(0, self.seq_len + 1, 1)
        return every_window[self._index(starts)]

    def _index(self, numbers: np.ndarray) -> torch.Tensor:
        """Return an index on the tokens' device. A GPU copies it from pinned memory, so that the host does not wait."""
        index = torch.from_numpy(numbers)
        return index.pin_memory().to(self.tokens.device, non_blocking=True) if self.tokens.is_cuda else index

    def split(self, windows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Split stored windows into what `batch` returns. Converted to int64 on the device, so fewer bytes are
        copied."""
        windows = windows.to(self.device).long()
        if self.is_16_bit:
            windows &= 0xFFFF
        # Contiguous, because torch.compile would compile the model again for other strides.
        inputs, targets = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        if not self.layout.has_mask:
            return inputs, targets
        start_id = self.tokenizer.start_id
        assert start_id is not None, "conversations are tokenized with a vocabulary that has one"
        columns = torch.arange(self.seq_len, device=inputs.device)
        starts = torch.where(inputs == ~start_id, columns, 0).cummax(dim=1).values  # no loss is counted on a start
        inputs = torch.where(inputs < 0, ~inputs, inputs)
        targets = torch.where(targets < 0, IGNORE_INDEX, targets)
        return inputs, targets, starts


class ReadAhead:
    """Prefetches batches: while the device works on one, a thread reads the next, into pinned memory for a GPU. So the
    host waits neither for the disk nor for the copy.

    Each batch has its own pinned buffer, which PyTorch reuses once the copy is done. A batch that was not prefetched
    (the first, or one of another size) is read on demand.
    """

    def __init__(self, data: TokenData):
        self.data = data
        self.device = data.device
        self.stride: int | None = None  # sequences between the starts of two batches; None: the size of the batch
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self.next: tuple[tuple[int, int, int | None], Future[torch.Tensor]] | None = None

    def windows(self, first: int, rows: int, switch: int | None = None) -> torch.Tensor:
        """Return (rows, T + 1) on the device. `switch`: see `TokenData.train_windows`."""
        expected, reading = self.next or (None, None)
        if reading is None or expected != (first, rows, switch):
            reading = self.thread.submit(self.fill, first, rows, switch)
        windows = reading.result().to(self.device, non_blocking=self.device.type == "cuda")
        following = first + (self.stride or rows)
        self.next = (following, rows, switch), self.thread.submit(self.fill, following, rows, switch)
        return windows

    def fill(self, first: int, rows: int, switch: int | None) -> torch.Tensor:
        windows = self.data.train_windows(first, rows, switch)
        return windows.pin_memory() if self.device.type == "cuda" else windows


def train_starts(first: int, rows: int, windows: int, spare: int, seq_len: int, seed: int) -> np.ndarray:
    """Return the starts, (rows,), in the split of `rows` sequences of the endless shuffled stream, starting with number
    `first`."""
    epochs, places = np.divmod(np.arange(first, first + rows, dtype=np.int64), windows)
    starts = np.empty(rows, dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        phase, order = _epoch_order(seed, epoch, windows, spare, seq_len)
        in_epoch = epochs == epoch
        starts[in_epoch] = phase + order[places[in_epoch]] * seq_len
    return starts


@lru_cache(maxsize=2)  # a batch may span two epochs
def _epoch_order(seed: int, epoch: int, windows: int, spare: int, seq_len: int) -> tuple[int, np.ndarray]:
    """Draw the phase of an epoch, at which its first window begins, and the order of its windows.

    Uses RandomState, not Generator, because NumPy will never change its stream (NEP 19): a run resumed years later with
    another NumPy still sees the same order.
    """
    random = np.random.RandomState([seed, epoch])
    phase = int(random.randint(0, min(spare, seq_len - 1) + 1))
    return phase, random.permutation(windows).astype(np.int64)


def locate(config: Config, data_dir: str | None) -> tuple[Path | None, Path | None, Path]:
    """Return the paths of the token file, the tokenizer and the metadata. The first two are None if the metadata names
    them.

    Raises DataError if the folder has no token file, or several."""
    if config.bin_file:
        assert config.tokenizer_file and config.metadata_file, "`contradictions` requires all three or none"
        return Path(config.bin_file), Path(config.tokenizer_file), Path(config.metadata_file)
    folder = Path(data_dir or DEFAULT_FOLDER)
    found = find_metadata(folder)
    if len(found) == 1:
        return None, None, found[0]
    if found:
        names = ", ".join(path.name for path in found)
        raise DataError(
            f"{folder} holds several token files ({names}). Move each into its own folder and use --data_dir, or name "
            "one with --bin_file, --tokenizer_file and --metadata_file."
        )
    if holds_unfinished(folder):
        raise DataError(f"The token file in {folder}/ is unfinished. Run the same tokenize_local_bpe.py command again.")
    where = f" --output_dir {folder}" if config.data_dir else ""
    make = f"python tokenize_local_bpe.py --input my_text.txt{where}"
    dial = "" if config.data_dir else "Train on a text: python train_colab_mmap.py --input my_text.txt --minutes 60. "
    raise DataError(f"No token file in {folder}/. {dial}To make a token file: {make}")


def choose_placement(size: int, config: Config, hardware: Hardware) -> str:
    """Choose the fastest memory that holds the tokens: gpu > ram > mmap. Raises ConfigError for `gpu` without a GPU."""
    if config.placement == "gpu" and not hardware.is_cuda:
        raise ConfigError("--placement gpu needs a CUDA GPU; --placement auto uses RAM here.")
    if config.placement != "auto":
        return config.placement
    if hardware.is_cuda and hardware.memory_bytes and size <= MAX_GPU_TOKENS_SHARE * hardware.memory_bytes:
        return "gpu"
    free = available_ram()
    size *= hardware.local_processes  # each process reads its own copy
    if free is None or size <= MAX_RAM_TOKENS_SHARE * free:
        return "ram"
    print(
        f"The tokens ({byte_size(size)}) do not fit in {byte_size(free)} of free RAM, so they are read from disk "
        "(mmap). Keep the file on a local disk: a network drive is slow."
    )
    return "mmap"
