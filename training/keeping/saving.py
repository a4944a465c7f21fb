"""Saving during the training: the loop waits for a snapshot in memory, and a thread writes, flushes and verifies it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from common.checkpoint import Snapshot, prune, write_checkpoint
from common.errors import CheckpointError, is_out_of_memory
from common.machine import available_ram
from common.publishing import STEP_NAME

SNAPSHOT_SHARE = 0.5  # of the free memory, that a snapshot may take at the most


class Saver:
    """One save at a time. If it fails, the next call of `save`, `check` or `finish` raises its error."""

    def __init__(self, saved: Callable[[], None] = lambda: None):
        self.saved = saved  # called after each save, by the thread that made it
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.under_way: Future[None] | None = None
        self.write_seconds: float | None = None  # of the last folder that was written
        self.seconds_held = 0.0  # how long the training has waited for saves, in all
        self.closed = False

    def begin(self) -> None:
        """Start the thread now: later there may be no memory for it."""
        self.thread.submit(int).result()

    def save(self, folders: Sequence[Path], take: Callable[[bool], Snapshot], size: int) -> None:
        """Write the snapshot that `take(copy)` returns to each of the folders. `size`: about how many bytes it has.

        If there is too little memory for a copy, the training waits until the weights themselves are written.
        """
        began = time.perf_counter()
        self.finish()
        free, snapshot = available_ram(), None
        if free is None or size <= SNAPSHOT_SHARE * free:
            try:
                snapshot = take(True)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
        if snapshot is not None:
            self.under_way = self.thread.submit(self.write, folders, snapshot)
        else:
            self.write(folders, take(False))
        self.seconds_held += time.perf_counter() - began

    def write(self, folders: Sequence[Path], snapshot: Snapshot) -> None:
        for folder in folders:
            began = time.perf_counter()
            write_checkpoint(folder, snapshot, self.go_on)
            self.write_seconds = time.perf_counter() - began
            if STEP_NAME.fullmatch(folder.name):
                prune(folder.parent)
                self.news.put(f"Saved {folder}")
        self.saved()

    def go_on(self) -> None:
        """Raises CheckpointError after `close`: the folder may be another run's by now."""
        if self.closed:
            raise CheckpointError("The save was canceled.")

    def messages(self) -> Iterator[str]:
        """Messages on what was saved since the last call."""
        while not self.news.empty():
            yield self.news.get()

    def check(self) -> None:
        """Raises CheckpointError if the last save failed. Does not wait."""
        if self.under_way is not None and self.under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way. Raises CheckpointError if it fails."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            under_way.result()

    def close(self) -> None:
        """Cancel the save under way, and end the thread."""
        self.closed = True
        self.thread.shutdown(wait=True, cancel_futures=True)
