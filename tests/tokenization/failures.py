"""Ways in which reading a file fails. A module without torch, whose CUDA build exceeds the reader's limit of memory."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from tokenization.corpus import Source
from tokenization.settings import Settings


def crash(source: Source, settings: Settings) -> list[Source]:
    os.kill(os.getpid(), signal.SIGSEGV)
    return []


def sleep(source: Source, settings: Settings) -> list[Source]:
    time.sleep(60)
    return []


def fill_memory(source: Source, settings: Settings) -> list[Source]:
    return [source] * len(b"x" * 10**11)


def fill_disk(source: Source, settings: Settings) -> list[Source]:
    Path("large").write_bytes(bytes(20_000_000))
    return [source]


def fail(source: Source, settings: Settings) -> list[Source]:
    raise KeyError("nothing that anybody expected")
