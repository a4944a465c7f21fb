"""A round of `torture.py`: sessions that tokenize a text and train on it, while it kills, cuts the power, disturbs and
damages them."""

from __future__ import annotations

import contextlib
import ctypes
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.figure  # noqa: F401 (sessions import it on first use)
import torch

import tokenize_local_bpe
import train_colab_mmap
from benchmarks.measure import flag_words
from common.checkpoint import Checkpoint, find_problems, step_folders, step_of
from common.files import RECORDS_FOLDER, sha256_file
from tests.kills import PowerCut, take_away
from training import mirror, store
from training.text import EXAMPLES_DIR

STEPS = 60
TEXT_BYTES = 60_000
CLOCK = {"ms_per_step", "tokens_per_second", "peak_memory_gb", "elapsed_seconds"}  # different in any two runs
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ALLOWED = {0, 4, 130, -signal.SIGKILL}  # finished, a full disk, stopped, killed
SHARE = 0.4  # of its time after which a training is disturbed at the latest, so that it is disturbed often
LONGEST_SESSION = 120.0  # seconds, then it hangs
RETRY_SECONDS = 5.0  # on a full disk; for users half a minute, who may make room
CLOCKS_APART = 300.0  # seconds at most
NEVER = 10**9  # operations on files; a power cut comes at a moment instead


@dataclass
class Tally:
    """Counts of what was done and where kills hit, and every loss."""

    counts: Counter[str] = field(default_factory=Counter)
    losses: list[str] = field(default_factory=list)

    def require(self, holds: bool, loss: str) -> None:
        if not holds:
            self.losses.append(loss)
            print(f"LOSS       {loss}", flush=True)


@dataclass
class Session:
    """A script in its own process: forked, because importing torch takes longer than the work here."""

    main: Callable[[list[str]], int]
    argv: list[str]
    log: Path
    folder: Path  # where it runs, on the machine's disk
    machine: Machine | None = None  # None: this one

    def start(self, largest_file: int | None = None, cut: PowerCut | None = None) -> int:
        """Returns the process id. Writing a file beyond `largest_file` bytes fails, like on a full disk. `cut`: writes
        down what is on the disk."""
        self.log.unlink(missing_ok=True)  # of the last session: a kill may come before this one opens its own
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            with open(self.log, "wb", buffering=0) as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if self.machine is not None:
                self.machine.become()
            if largest_file is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
            os.chdir(self.folder)
            if cut is not None:
                cut()
            code = self.main(self.argv)
            sys.stdout.flush()
            sys.stderr.flush()
        except KeyboardInterrupt:  # after the end of the script, before the end of the process
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def wait(pid: int, seconds: float) -> int | None:
    """The exit code of a process, negative for a signal; None if it is still running after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)


class Round:
    """A text, tokenized and trained on in its own folder, or by the trainer, with a companion."""

    def __init__(self, folder: Path, texts: list[Path], moments: random.Random, tally: Tally, has_two_machines: bool):
        self.folder, self.moments, self.tally, self.has_two_machines = folder, moments, tally, has_two_machines
        self.text, *self.companion = texts
        self.tokens, self.disk, self.drive = folder / "tokens", folder / "disk", folder / "drive"
        self.run = self.disk / "run"
        (self.drive / "MyDrive").mkdir(parents=True)
        self.disk.mkdir()

    def tokenizing(self) -> Session:
        flags = ["--input", str(self.text), "--output_dir", str(self.tokens), "--vocab_size", "300"]
        flags += ["--chunk_size_mb", "0.002", "--num_workers", "1"]
        return Session(tokenize_local_bpe.main, flags, self.folder / "log", self.disk)

    def training(self, machine: Machine | None = None) -> Session:
        flags: dict[str, Any] = {
            "output_dir": self.run, "checkpoint_dir": self.copies.parent, "device": "cpu",
            "num_layers": 1, "embed_dim": 32, "num_heads": 2, "max_seq_len": 16, "dropout": 0.1, "batch_size": 4,
            "max_steps": STEPS, "log_interval": 1, "eval_interval": 10, "eval_batches": 4, "checkpoint_steps": 4,
            "checkpoint_interval": 0, "checkpoint_minutes": 0, "compile": "off",
        }  # fmt: skip
        if self.companion:
            flags |= {"input": self.text, "companion": self.companion[0], "vocab_size": 300}
        else:
            flags["data_dir"] = self.tokens
        log = self.folder / ("log" if machine is None else f"log of {machine.name}")
        return Session(train_colab_mmap.main, flag_words(flags), log, self.disk, machine)

    @property
    def copies(self) -> Path:
        return self.drive / "MyDrive" / "copies" / self.run.name

    def sessions(self) -> dict[str, Session]:
        return ({} if self.companion else {"tokenizing": self.tokenizing()}) | {"training": self.training()}

    def finish(self) -> list[float]:
        """Finish undisturbed. Return the seconds that each session took."""
        seconds = []
        for session in self.sessions().values():
            started = time.monotonic()
            code = wait(session.start(), LONGEST_SESSION)
            if code != 0:
                raise RuntimeError(f"an undisturbed session ended with {code}:\n{session.output()}")
            seconds.append(time.monotonic() - started)
        return seconds

    def suffer(self, seconds: list[float]) -> None:
        """Finish in spite of kills and damage. Undisturbed, the sessions take these `seconds`."""
        for (name, session), latest in zip(self.sessions().items(), seconds, strict=True):
            while not self.disturb(name, session, 1.1 * latest if name == "tokenizing" else SHARE * latest):
                pass

    def disturb(self, name: str, session: Session, latest: float) -> bool:
        """One session, disturbed at a random moment up to `latest` seconds. True if it finished everything."""
        expected = None
        if name == "training":
            self.lose_something()
            expected = max(whole(self.run / "checkpoints") | whole(self.copies), default=0)
        what = self.moments.choices(
            ["kill", "power cut", "stop signal", "full disk", "unmount", "two machines"], [60, 25, 10, 5, 5, 10]
        )[0]
        if name == "tokenizing" and what in ("stop signal", "unmount", "two machines"):
            what = "kill"  # it handles no signals and has no mirror
        if what == "two machines" and not self.has_two_machines:
            what = "kill"
        limit = self.moments.randrange(1, 60_000) if what == "full disk" else None
        disk = self.folder.with_name(f"{self.folder.name}.disk")
        cut = PowerCut(NEVER, (self.folder,), disk=disk) if what == "power cut" else None
        pid = session.start(limit, cut)
        code = None if what == "full disk" else wait(pid, self.moments.uniform(0.0, latest))
        if code is None and what == "kill":
            os.kill(pid, signal.SIGKILL)
            self.tally.counts[f"SIGKILL while {name}"] += 1
        elif code is None and what == "power cut":
            os.kill(pid, signal.SIGKILL)
            self.tally.counts[f"power cuts while {name}"] += 1
        elif code is None and what == "stop signal":
            os.kill(pid, self.moments.choice(STOP_SIGNALS))
            self.tally.counts["signals that ask to stop"] += 1
        elif code is None and what == "unmount" and (self.drive / "MyDrive" / "copies").exists():
            self.unmount(pid)
        elif code is None and what == "two machines":
            self.train_elsewhere(pid)
        if code is None:
            code = wait(pid, LONGEST_SESSION)
        if code is None:
            os.kill(pid, signal.SIGKILL)
            wait(pid, LONGEST_SESSION)
            code = 1
            self.tally.require(False, f"a session hung:\n{session.output()}")
        if what == "full disk" and code != 0:
            self.tally.counts[f"full disk while {name}"] += 1
        self.examine(name, session, code, what, expected)
        if cut is not None:
            take_away(self.folder, disk, keeps_names=self.moments.random() < 0.5)
        # After these, copies may be missing; the next session writes them.
        return code == 0 and what not in ("full disk", "unmount", "two machines")

    def train_elsewhere(self, pid: int) -> None:
        """One or two other machines train the run and are killed, stopped or left alone, while this one sleeps or goes
        on. If it sleeps, it wakes up meanwhile or afterwards."""
        machines = [
            Machine(name, self.folder / f"disk of {name}", self.disk, self.moments.uniform(-CLOCKS_APART, CLOCKS_APART))
            for name in ("another", "a third")[: self.moments.choice([1, 1, 2])]
        ]
        sleeps = self.moments.random() < 0.7
        if sleeps:
            os.kill(pid, signal.SIGSTOP)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # a rename under way is done by then
        expected = None
        if sleeps and len(machines) == 1:
            there = whole(machines[0].disk / self.run.name / "checkpoints") | whole(self.copies)
            expected = max(there, default=0)
        sessions = [self.training(machine) for machine in machines]
        others = [session.start() for session in sessions]
        for number, (session, other) in enumerate(zip(sessions, others, strict=True)):
            what = self.moments.choice(["kill", "stop signal", "nothing"])
            code = wait(other, self.moments.uniform(0.0, 2.0))
            if sleeps and number == 0 and self.moments.random() < 0.3:
                os.kill(pid, signal.SIGCONT)
                self.tally.counts["woken beside another machine"] += 1
            if code is None and what == "kill":
                os.kill(other, signal.SIGKILL)
                self.tally.counts["SIGKILL while training elsewhere"] += 1
            elif code is None and what == "stop signal":
                os.kill(other, signal.SIGINT)
            code = wait(other, LONGEST_SESSION) if code is None else code
            if code is None:
                os.kill(other, signal.SIGKILL)
                code = wait(other, LONGEST_SESSION)
                self.tally.require(False, f"a session elsewhere hung:\n{session.output()}")
            self.examine("training elsewhere", session, 1 if code is None else code, what, expected)
        how = "asleep" if sleeps else "awake"
        self.tally.counts[f"{len(machines)} other machine{'s' * (len(machines) > 1)}, the first {how}"] += 1
        if sleeps:
            os.kill(pid, signal.SIGCONT)

    def unmount(self, pid: int) -> None:
        """Unmount the Drive, which leaves an empty folder, and mount it again."""
        away = self.folder / "away"
        self.drive.rename(away)
        self.drive.mkdir()
        time.sleep(self.moments.uniform(0.0, 0.5))
        self.tally.require(list(self.drive.iterdir()) == [], "something was written where the Drive was unmounted")
        shutil.rmtree(self.drive)
        away.rename(self.drive)
        self.tally.counts["Drive unmounted and back"] += 1

    def lose_something(self) -> None:
        """Damage a checkpoint or lose the machine, if something remains to continue from."""
        chance = self.moments.random()
        here, there = whole(self.run / "checkpoints"), whole(self.copies)
        if chance < 0.05 and there:
            shutil.rmtree(self.run, ignore_errors=True)
            self.tally.counts["run folder lost"] += 1
        elif chance < 0.15 and len(here | there) > 1 and here:
            damage(self.run / "checkpoints" / f"step_{max(here):08d}", self.moments)
            self.tally.counts["newest checkpoint damaged"] += 1
        elif chance < 0.25 and len(there) > 1 and max(there) < STEPS:  # what is finished is not copied again
            damage(step_folders(self.copies)[0], self.moments)
            self.tally.counts["newest copy damaged"] += 1

    def examine(self, name: str, session: Session, code: int, what: str, expected: int | None) -> None:
        """Count where the kill hit, and check what the session did."""
        output = session.output()
        also = {"full disk": {3}, "unmount": {2}}.get(what, set())  # no space for the tokens; no Drive at the start
        allowed = ALLOWED | also
        if what == "stop signal" and ("First step" not in output or (self.run / "summary.md").exists()):
            # The signal came before the first step, or after the end.
            allowed |= {-number for number in STOP_SIGNALS}
        self.tally.require(code in allowed and "Traceback" not in output, f"{name} ended with {code}:\n{output}")
        if code == -signal.SIGKILL:
            for place, folder in (("saving", self.run), ("copying to the mirror", self.copies)):
                if any(folder.glob(".tmp-*")) or any(folder.glob("checkpoints/.tmp-*")):
                    self.tally.counts[f"of the kills: while {place}"] += 1
            if name == "training" and output.rstrip().endswith("..."):
                self.tally.counts["of the kills: while evaluating or waiting for a copy"] += 1
        if expected and (begun := re.search(r"^Training   steps (\d+) to", output, re.MULTILINE)):
            # Another machine that woke up meanwhile may have copied a later step.
            message = f"continued from step {begun[1]}, before {expected}, the newest:\n{output}"
            self.tally.require(int(begun[1]) >= expected, message)


def whole(folder: Path) -> set[int]:
    """The steps of the undamaged checkpoints in a folder."""
    return {step_of(path) for path in step_folders(folder) if not find_problems(path)}


def damage(checkpoint: Path, moments: random.Random) -> None:
    """Cut a file short, flip a bit, or delete it."""
    path = moments.choice(sorted(path for path in checkpoint.iterdir() if path.is_file()))
    data = bytearray(path.read_bytes())
    how = moments.choice(["cut", "bit", "gone"])
    if how == "gone":
        path.unlink()
    else:
        place = moments.randrange(len(data))
        data[place] ^= 1 << moments.randrange(8)
        path.write_bytes(data[:place] if how == "cut" else data)


def result(of: Round) -> dict[str, str]:
    """The outcome of a round without times: hashes of tokens, weights, optimizer, best weights, and metrics. Copies of
    several sessions must be the same."""
    name, best = f"step_{STEPS:08d}", of.run / "best"
    final, copies = of.run / "checkpoints" / name, list(of.copies.glob(f"{name}-*"))
    scored = [(copy, score) for copy in of.copies.glob("best_*") if (score := store.read_best_state(copy))]
    winners = [copy for copy, score in scored if not any(store.is_better(other, score) for _, other in scored)]
    tokens = [path for folder in (of.tokens, of.disk / "datasets_cache") for path in folder.glob("**/*.bin")]
    files = {f"{path.parent.name}/{path.name}": [path] for path in tokens if not path.parent.name.startswith(".")}
    files |= {f"{name} at the end": [final / name] for name in ("model.safetensors", "optimizer.safetensors")}
    files |= {"copies at the end": [copy / "optimizer.safetensors" for copy in copies]}
    bases = [path / "model.safetensors" for path in (of.run / "base", *of.copies.glob("base-*"))]
    files |= {"base": bases, "best": [best / "model.safetensors"]}
    files |= {"copies of best": [copy / "model.safetensors" for copy in winners]}
    found = {key: distinct([sha256_file(path) for path in paths if path.exists()]) for key, paths in files.items()}
    found["metrics"] = distinct([rows_of(of.run)])
    # A session that was stopped in the last evaluation copied its last step, too.
    whole_copies = [copy for copy in copies if store.read_state(Checkpoint(copy)).state.evaluated_step == STEPS]
    found["metrics of the copies"] = distinct([rows_of(copy / RECORDS_FOLDER) for copy in whole_copies])
    return found


def distinct(values: list[str]) -> str:
    return " and ".join(sorted(set(values))) or "missing"


def rows_of(folder: Path) -> str:
    """The metrics without times."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return json.dumps([{key: value for key, value in json.loads(line).items() if key not in CLOCK} for line in lines])


def run_rounds(least_kills: int, seed: int, scratch: Path) -> tuple[int, Tally]:
    """Rounds in the folder `scratch` until there are enough kills. Returns their number and what happened."""
    prepare_to_fork()
    tally, moments = Tally(), random.Random(seed)
    texts = [scratch / "text.txt", scratch / "companion.txt"]
    has_two_machines = is_possible(scratch)
    if not has_two_machines:
        print("Note: this system forbids namespaces, so no second machine trains.", flush=True)
    content = gzip.decompress((EXAMPLES_DIR / "conversations.txt.gz").read_bytes())
    texts[0].write_bytes(content[:TEXT_BYTES])
    texts[1].write_bytes(content[-TEXT_BYTES:])
    kinds = []  # the texts, the seconds and the result of an undisturbed round
    for number in (1, 2):
        unbroken = Round(scratch / f"unbroken_{number}", texts[:number], moments, tally, False)
        kinds.append((texts[:number], unbroken.finish(), result(unbroken)))
    kills = rounds = 0
    while kills < least_kills:
        rounds += 1
        with_companion = rounds % 3 == 0
        given, seconds, expected = kinds[with_companion]
        suffering = Round(scratch / f"round_{rounds}", given, moments, tally, has_two_machines)
        suffering.suffer(seconds)
        for name, value in result(suffering).items():
            tally.require(value == expected[name], f"round {rounds}: {name} differs from the undisturbed round")
        kills = sum(count for name, count in tally.counts.items() if name.startswith("SIGKILL"))
        print(f"Round {rounds}: {kills:,} kills, {len(tally.losses)} losses", flush=True)
        with contextlib.suppress(OSError):
            shutil.rmtree(suffering.folder)
    return rounds, tally


def prepare_to_fork() -> None:
    """Do once what each forked session would repeat, and shorten the wait for a full disk."""
    vars(mirror).update(LAST_RETRY_SECONDS=RETRY_SECONDS)
    torch.set_num_threads(1)  # a process with threads cannot be forked
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], fused=True)


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
