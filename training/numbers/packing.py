"""Packs whole conversations into windows, so that no window boundary separates a question from its answer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

PADDING = 0  # any id that every vocabulary has: the loss ignores it


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
