"""A process that acts as another machine: with its own name, disk and clock (Linux namespaces)."""

from __future__ import annotations

import ctypes
import os
import time
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWUSER = 0x00020000, 0x04000000, 0x10000000
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18


@dataclass(frozen=True)
class Machine:
    """It sees `disk` at `mounted_at`; its clock is `clock_off` seconds ahead of the real one."""

    name: str
    disk: Path
    mounted_at: Path
    clock_off: float

    def become(self) -> None:
        """Make this process that machine. Raises OSError if the system forbids namespaces."""
        from training.keeping import lease

        libc = ctypes.CDLL(None, use_errno=True)
        user, group, is_root = os.getuid(), os.getgid(), os.geteuid() == 0
        check(libc.unshare(CLONE_NEWNS | CLONE_NEWUTS | (0 if is_root else CLONE_NEWUSER)))
        if not is_root:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {user} 1")
            Path("/proc/self/gid_map").write_text(f"0 {group} 1")
        check(libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        self.disk.mkdir(exist_ok=True)
        check(libc.mount(os.fsencode(self.disk), os.fsencode(self.mounted_at), None, MS_BIND, None))
        name = self.name.encode()
        check(libc.sethostname(name, len(name)))
        lease.system = lambda: self.name  # other machines do not know its process ids
        now = time.time
        time.time = lambda: now() + self.clock_off


def check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def is_possible(folder: Path) -> bool:
    """Whether this system allows it, tried in a new process with disks in `folder`."""
    (folder / "here").mkdir()
    pid = os.fork()
    if pid == 0:
        try:
            Machine("another", folder / "there", folder / "here", 0.0).become()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0
