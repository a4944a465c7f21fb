"""Saving beside the training: the loop waits for a snapshot in memory, and a thread writes, flushes and verifies it."""

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

SNAPSHOT_SHARE = 0.5  # of the free memory that a snapshot may take


class Saver:
    """One save at a time. A save that failed is raised by the next call of any method."""

    def __init__(self, saved: Callable[[], None] = lambda: None):
        self.saved = saved  # called by the thread after each save
        self.news: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="save")
        self.under_way: Future[None] | None = None
        self.seconds_held = 0.0  # that the training waited, in all
        self.closed = False

    def begin(self) -> None:
        """Start the thread while there is memory for it."""
        self.thread.submit(int).result()

    def save(self, folders: Sequence[Path], take: Callable[[bool], Snapshot], size: int) -> None:
        """Write the snapshot that `take(copy)` gives to each of the folders. `size` is about its bytes.

        Where memory is too short for a copy, the training waits until it is written.
        """
        began = time.perf_counter()
        self.finish()
        free = available_ram()
        snapshot = None
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
            write_checkpoint(folder, snapshot, self.go_on)
            if STEP_NAME.fullmatch(folder.name):
                prune(folder.parent)
                self.news.put(f"Saved {folder}")
        self.saved()

    def go_on(self) -> None:
        """Raises CheckpointError if nobody waits for what is being written: its folder may be another run's by now."""
        if self.closed:
            raise CheckpointError("The save was given up.")

    def heard(self) -> Iterator[str]:
        """What was saved since the last call."""
        while not self.news.empty():
            yield self.news.get()

    def check(self) -> None:
        """Raises CheckpointError if the last save failed; waits for nothing."""
        if self.under_way is not None and self.under_way.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the save under way. Raises CheckpointError if it fails."""
        if self.under_way is not None:
            under_way, self.under_way = self.under_way, None
            under_way.result()

    def close(self) -> None:
        """Give up what is not done yet, and end the thread."""
        self.closed = True
        self.thread.shutdown(wait=True, cancel_futures=True)
