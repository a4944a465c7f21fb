"""Where the windows of a batch lie among the tokens: cut from a text, or packed with whole conversations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from common.errors import ConfigError, DataError
from tokenization.metadata import TokenMetadata, read_mask
from tokenizer import Tokenizer

PADDING = 0  # any id that every vocabulary has: the loss ignores it


@dataclass(frozen=True)
class Layout:
    """Where the windows of both splits lie among the tokens."""

    seq_len: int  # inputs of a window
    windows: int  # of an epoch
    stride: int  # tokens from one to the next
    spare: int  # training tokens that no window needs: the first window may start this much later
    val_start: int
    val_windows: int
    val_tokens_per_byte: float | None  # counts the tokens in the loss; None if the bytes were not counted
    described: str
    has_mask: bool = False  # an id that is not in the loss is stored as its complement, ~id


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
    """Return how many windows of seq_len inputs, and one more target, fit at every phase; at least one."""
    return max(1, (tokens - seq_len) // seq_len)


def pack_splits(
    tokens: np.ndarray, metadata: TokenMetadata, tokenizer: Tokenizer, seq_len: int
) -> tuple[np.ndarray, Layout]:
    """Pack the conversations of both splits into windows of seq_len + 1. Returns (tokens,) and their layout.

    Raises DataError if the mask belongs to other tokens, ConfigError if no answer fits.
    """
    in_answer = read_mask(metadata)
    is_start = (tokens == tokenizer.start_id) & ~in_answer
    split, length = metadata.train_tokens, seq_len + 1
    if not is_start[0] or not is_start[split]:
        raise DataError(
            f"{metadata.beside('mask_file')} is not the mask of {metadata.bin_file}: no conversation begins at the "
            "start of a split. Copy both again, or run tokenize_local_bpe.py again."
        )
    train, val = (
        pack(tokens[part], in_answer[part], np.flatnonzero(is_start[part]), length)
        for part in (slice(split), slice(split, None))
    )
    for name, packed in (("training", train), ("validation", val)):
        if not packed.conversations:
            raise ConfigError(
                f"max_seq_len {seq_len} is too short for the conversations of {metadata.path}: every "
                f"{name} conversation is cut off before its answer. Give a longer --max_seq_len."
            )
    val_bytes = int(tokenizer.byte_lengths[val.ids].sum())
    lost = [
        f"{count:,} {what}"
        for count, what in (
            (train.cut + val.cut, "longer than the context, without their end"),
            (train.left_out + val.left_out, "left out, because no answer is within the context"),
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
    """`windows`: (windows, length) int32. An id that is not in the loss is stored as its complement, ~id."""

    windows: np.ndarray
    conversations: int  # in the windows
    cut: int  # conversations in the windows that lost their end: they are longer than a window
    left_out: int  # conversations without an answer in the first window's length
    answers: int  # targets in the loss

    @property
    def ids(self) -> np.ndarray:
        """(answers,): the targets in the loss."""
        targets = self.windows[:, 1:]
        return targets[targets >= 0]


def pack(tokens: np.ndarray, counted: np.ndarray, starts: np.ndarray, length: int) -> Packed:
    """Pack conversations into windows by best-fit decreasing: the longest first, each into the fullest window that has
    room for it.

    tokens, counted: (tokens,); starts: (conversations,), where each begins. It ends where the next one begins.
    """
    lengths = np.minimum(np.diff(starts, append=len(tokens)), length)
    running = np.concatenate([[0], np.cumsum(counted)])
    learnable = running[starts + lengths] > running[starts]
    cut = int((np.diff(starts, append=len(tokens)) > length)[learnable].sum())
    kept = np.flatnonzero(learnable)
    order = kept[np.argsort(-lengths[kept], kind="stable")]

    rooms = 0  # bit r is set where a window has room for r more
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
            window, room, windows = windows, length, windows + 1
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
