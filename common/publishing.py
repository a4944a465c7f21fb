"""Checkpoint folders are published, replaced and deleted by renames, so a kill at any moment leaves no half of one."""

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
PUBLISHING = threading.Lock()  # held while one folder replaces another of its name


def publish(temporary: Path, folder: Path, truncate: bool = False) -> None:
    """Rename a complete folder `temporary` to `folder`. An older folder of that name is first renamed to `.old-<name>`
    beside `temporary`. If the machine dies between the two renames, `restore_interrupted` brings it back. `truncate` is
    that of `discard`."""
    sync_directory(temporary)
    replaced = temporary.with_name(f".old-{folder.name}")
    # No lock for the mirror: a rename on a Drive may hang, and a save would wait for it.
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
    """Clean up after a process that was killed while it saved into `parent`. Touches nothing but checkpoints under the
    names that `publish` and `discard` give them. `truncate` is that of `discard`."""
    for path in [*parent.glob(".old-*"), *parent.glob(".tmp-*")]:
        folder = path.with_name(path.name[len(".old-") :])
        if CHECKPOINT_NAME.fullmatch(folder.name):
            if path.name.startswith(".old-") and not folder.exists():
                os.replace(path, folder)
            else:
                discard(path, truncate)


def discard(folder: Path, truncate: bool = False, staging: Path | None = None) -> None:
    """Delete a checkpoint. It is renamed first, so it is never found half deleted. Errors are ignored.

    `truncate` empties its files before, because what is in a Drive's bin counts against the quota. `staging` is the
    folder that it is moved to first, on the same disk; by default it stays where it is.
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
