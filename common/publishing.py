"""How the folder of a checkpoint comes to its name, makes way for another and goes, wherever the process is killed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
from pathlib import Path

from common.files import sync_directory

STEP_NAME = re.compile(r"step_(\d{8})")
CHECKPOINT_NAME = re.compile(rf"best|{STEP_NAME.pattern}")
PUBLISHING = threading.Lock()  # held where a folder makes way for another of its name


def publish(temporary: Path, folder: Path, truncate: bool = False) -> None:
    """Give a complete folder its name. A folder of that name makes way first, to beside `temporary`, and is back if the
    machine dies between the two renames (`restore_interrupted`). `truncate` is that of `discard`."""
    sync_directory(temporary)
    replaced = temporary.with_name(f".old-{folder.name}")
    # On a Drive a rename may hang, and nobody copies from there: no save may have to wait for it.
    with contextlib.nullcontext() if truncate else PUBLISHING:
        if folder.exists():
            discard(replaced, truncate)
            os.replace(folder, replaced)
        try:
            os.replace(temporary, folder)
        except OSError:
            if replaced.exists():
                os.replace(replaced, folder)
            raise
    sync_directory(folder.parent)
    discard(replaced, truncate)


def restore_interrupted(parent: Path, truncate: bool = False) -> None:
    """Clean up after a process that was killed while saving into `parent`, nothing but what carries a name of ours.
    `truncate` is that of `discard`."""
    for old in parent.glob(".old-*"):
        if not CHECKPOINT_NAME.fullmatch(old.name.removeprefix(".old-")):
            continue
        folder = old.with_name(old.name.removeprefix(".old-"))
        if folder.exists():
            discard(old, truncate)
        else:
            os.replace(old, folder)
    for temporary in parent.glob(".tmp-*"):
        if CHECKPOINT_NAME.fullmatch(temporary.name.removeprefix(".tmp-")):
            discard(temporary, truncate)


def discard(folder: Path, truncate: bool = False, staging: Path | None = None) -> None:
    """Delete a checkpoint: gone from the succession of steps at once, even if the process is killed on the way.

    `truncate` empties its files first, for a Drive's bin counts against the quota. `staging` is the folder that it goes
    through, on the same disk; by default its own.
    """
    going = folder if folder.name.startswith(".") else (staging or folder.parent) / f".tmp-{folder.name}"
    with contextlib.suppress(OSError):
        if going != folder:
            shutil.rmtree(going, ignore_errors=True)
            os.replace(folder, going)
        for path in going.rglob("*") if truncate else ():
            if path.is_file():
                os.truncate(path, 0)
        shutil.rmtree(going, ignore_errors=True)
