"""A kill, or a power cut, at a chosen operation on files; a power cut at any moment.

Python tells audit hooks (PEP 578) before it opens, renames or deletes a file or makes a folder. So nothing of the
program is patched, and each place where it may be killed can be tried. A power cut also takes away what was not on the
disk, as LazyFS does: the bytes of files without fsync, and names in a folder without a sync of the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")
HAS_BEGUN = "has_begun"  # a file on the `disk` of a power cut: what was there before is written down
Site = tuple[str, int]  # file and line of a call


@dataclass
class Kill:
    """Called in a process, it kills the process right before the operation of this number (from 0) that changes
    something in one of `folders`. Reading counts for nothing."""

    number: int
    folders: tuple[Path, ...]
    seen: int = 0

    def __call__(self) -> None:
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        elif event not in CHANGES:
            return
        if not isinstance(path := arguments[0], str | os.PathLike):
            return
        if any(Path(os.path.abspath(path)).is_relative_to(folder) for folder in self.folders):
            self.count()

    def count(self) -> None:
        self.seen += 1
        if self.seen == self.number + 1:
            os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class PowerCut(Kill):
    """A kill, after which `take_away` leaves in the folder what was on the disk. `disk`: a folder elsewhere for that.
    `without`: the place in the program whose fsync does nothing."""

    disk: Path = Path()
    without: Site | None = None
    held: list[int] = field(default_factory=list)  # open files: their numbers (inodes) are not used again
    lock: Any = field(default_factory=threading.Lock)

    def __call__(self) -> None:
        (self.folder,) = self.folders
        self.disk.mkdir()
        for path in (self.folder, *self.folder.rglob("*")):
            self.keep(os.open(path, os.O_RDONLY))
        (self.disk / HAS_BEGUN).touch()
        self.fsync = os.fsync
        os.fsync = self.sync
        super().__call__()

    def sync(self, descriptor: int) -> None:
        if not Path(os.readlink(f"/proc/self/fd/{descriptor}")).is_relative_to(self.folder):
            return self.fsync(descriptor)
        frame = sys._getframe(1)
        while frame.f_code.co_name == "sync_directory":
            frame = frame.f_back
        site = (os.path.basename(frame.f_code.co_filename), frame.f_lineno)
        with open(self.disk / "sites", "a") as file:
            file.write(json.dumps(site) + "\n")
        with self.lock:
            self.count()
            if site != self.without:
                self.keep(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY))

    def keep(self, descriptor: int) -> None:
        """Write down what is on the disk: the bytes of this file, or the names in this folder."""
        self.held.append(descriptor)
        status = os.fstat(descriptor)
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            with os.scandir(descriptor) as entries:
                content = json.dumps({entry.name: (entry.inode(), entry.is_dir()) for entry in entries}).encode()
        else:
            content = os.pread(descriptor, status.st_size, 0)
        temporary = self.disk / f"{status.st_ino}.tmp"
        temporary.write_bytes(content)
        temporary.replace(self.disk / str(status.st_ino))


def read_sites(disk: Path) -> set[Site]:
    """Return where the program has called fsync."""
    path = disk / "sites"
    return {tuple(json.loads(line)) for line in path.read_text().splitlines()} if path.exists() else set()


def take_away(folder: Path, disk: Path, keeps_names: bool) -> None:
    """Leave in `folder` what was on the disk. `keeps_names`: only bytes are lost. Without a `disk`, or if the process
    ended before it had begun, nothing is lost."""
    if (disk / HAS_BEGUN).exists():
        after = folder.with_name(f"{folder.name}.after")
        copy_disk(folder, disk, after, keeps_names)
        shutil.rmtree(folder)
        after.rename(folder)
    shutil.rmtree(disk, ignore_errors=True)


def copy_disk(folder: Path, disk: Path, target: Path, keeps_names: bool) -> None:
    """Write to `target` what was on the disk of `folder`."""
    _restore(folder.stat().st_ino, True, folder, target, disk, keeps_names, {})


def _restore(
    inode: int, is_folder: bool, place: Path, target: Path, disk: Path, keeps_names: bool, done: dict[int, Path]
) -> None:
    kept = disk / str(inode)
    if not is_folder:
        if inode in done:
            os.link(done[inode], target)
        else:
            target.write_bytes(kept.read_bytes() if kept.exists() else b"")
            done[inode] = target
        return
    target.mkdir()
    entries = json.loads(kept.read_text()) if kept.exists() else {}
    if keeps_names:
        with os.scandir(place) as found:
            entries = {entry.name: (entry.inode(), entry.is_dir()) for entry in found}
    for name, (number, is_dir) in entries.items():
        _restore(number, is_dir, place / name, target / name, disk, keeps_names, done)
