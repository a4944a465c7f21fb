"""Several processes that train one model, as torchrun starts them: one for each GPU, or on CPUs.

Each process takes its slice of a step's sequences. DistributedDataParallel averages the gradients (all-reduce) during
the backward pass. Only rank 0 prints and writes files; it broadcasts what the others need. Without torchrun there is
one process, and every function here returns at once.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.errors import ConfigError, ProcessLost, UserError
from common.machine import pick_device
from common.script import Place, place

if TYPE_CHECKING:
    from training.config import Config

RANK_0_TIMEOUT = datetime.timedelta(days=30)  # for work that rank 0 does alone: tokenizing, answering prompts
TIMEOUT_SECONDS = 600.0  # that processes wait for one of them, then the job ends
HEARTBEAT_SECONDS = 5.0  # how long to wait for another process's heartbeat
POLL_SECONDS = 0.5  # between two checks whether a heartbeat is wanted
# NCCL then writes its last collectives to a file for each rank if one of them hangs.
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
PARTS = ("data", "gradients", "update")  # of a step, in order

Made = TypeVar("Made")


class Group:
    """The processes of this job, as one of them sees them."""

    def __init__(self, here: Place, device: torch.device):
        """Raises what torch.distributed raises if not all processes join within TIMEOUT_SECONDS."""
        timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        self.here = here
        with silenced_stdout():
            if device.type == "cuda":  # NCCL kills the process at its timeout: the hosts, over gloo, time out before it
                for name, value in FLIGHT_RECORDER.items():
                    os.environ.setdefault(name, value)
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=2 * timeout)
            else:
                dist.init_process_group("gloo", timeout=timeout)
            self.hosts = dist.new_group(backend="gloo", timeout=timeout)  # communicate while the GPUs are busy
            self.patient_hosts = dist.new_group(backend="gloo", timeout=RANK_0_TIMEOUT)
        self.in_rank_0_only = False  # rank 0 runs code that the others do not
        self.rounds = 0  # calls of any_process: one a step
        self.part = 0  # index in PARTS
        self.store = open_store()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.answer_heartbeat, daemon=True, name="heartbeat")
        self.thread.start()

    def answer_heartbeat(self) -> None:
        """When another process asks for a heartbeat, answer with this process's progress."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            while not self.is_over.wait(POLL_SECONDS):
                if self.store.check(["heartbeat_wanted"]):
                    self.store.set(f"alive/{self.here.rank}", str(self.rounds * len(PARTS) + self.part))
                    return

    def close(self) -> None:
        self.is_over.set()
        self.thread.join()

    def close_after_error(self) -> None:
        """Close once the others could read this process's error. If rank 0 hosts the store, and not torchrun's agent,
        rank 0 leaves last."""
        self.close()
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.here.rank}", "")
        if self.here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            deadline = time.monotonic() + HEARTBEAT_SECONDS
            for rank in range(1, self.here.count):
                self.read(f"left/{rank}", deadline - time.monotonic())

    def read(self, key: str, seconds: float) -> str | None:
        """A value of the store; None if no process has set it within `seconds`."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_SECONDS / 4)
            return self.store.get(key).decode()
        return None

    def diagnose(self) -> tuple[str, int]:
        """Why a collective failed, as a sentence, and the rank that should print it: the lowest that is alive."""
        ranks = range(self.here.count)
        ended = {rank: error for rank in ranks if (error := self.read(f"ended/{rank}", 0)) is not None}
        with contextlib.suppress(RuntimeError):  # if rank 0 hosted the store, the store ended with it
            self.store.set("heartbeat_wanted", "")
        deadline = time.monotonic() + HEARTBEAT_SECONDS
        others = [rank for rank in ranks if rank not in {self.here.rank, *ended}]
        heartbeats = {rank: self.read(f"alive/{rank}", deadline - time.monotonic()) for rank in others}
        progress = {rank: int(heartbeat) for rank, heartbeat in heartbeats.items() if heartbeat is not None}
        speaker, of_all = min([self.here.rank, *progress]), f"of {self.here.count}"
        if ended:
            return " ".join(f"Process {rank} {of_all} ended: {error}" for rank, error in ended.items()), speaker
        if silent := [str(rank) for rank in others if rank not in progress]:
            sentence = (
                f"Process {' and '.join(silent)} {of_all} does not respond. It was killed (the system does this when "
                f"memory runs out) or stopped, or its machine is gone."
            )
        else:
            behind = " or ".join(str(rank) for rank in others if progress[rank] == min(progress.values()))
            sentence = f"Process {behind} {of_all} is alive, but the others waited for it for {TIMEOUT_SECONDS:g} s."
        return f"{sentence} Saved checkpoints are whole: run the same command to continue.", speaker


@contextlib.contextmanager
def silenced_stdout() -> Iterator[None]:
    """Discard what is written to standard output, also by C++ code: torch 2.9's gloo prints there, in each process, how
    many have joined."""
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


GROUP: Group | None = None  # None: a single process


def open_store() -> Store:
    """A key-value store of this job, new after each restart by torchrun. torchrun's agent hosts it, so it outlives the
    processes."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"gpt2/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Join the other processes that torchrun started; at the end, wait for them and leave the group.

    If another process is gone or hangs, one of those that are left raises ProcessLost, and the others exit.
    """
    global GROUP
    here = place()
    if here.count == 1:
        if config.shard:
            print("Note       --shard has no effect: there is only one process (torchrun starts several)")
        yield
        return
    try:
        GROUP = join(config, here)
        yield
        dist.barrier(GROUP.patient_hosts)  # torchrun kills the others when one exits, even while they save
        GROUP.close()
        dist.barrier(GROUP.hosts)  # no process needs the store any more, which may end with rank 0
        dist.destroy_process_group()
    except BaseException as error:
        end_all(error, here)
    finally:
        if GROUP is not None:
            GROUP.close()
        GROUP = None


def join(config: Config, here: Place) -> Group:
    device = pick_device(config.device if config.use_gpu else "cpu")
    if device.type == "cuda":
        if here.local_rank >= (gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"torchrun started {here.local_count} processes on this machine, which has {gpus} GPUs: "
                f"--nproc_per_node={gpus}, or --device cpu."
            )
        torch.cuda.set_device(device)
    group = Group(here, device)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    print(
        f"Processes  {here.count}, over {backend}: {config.sequences_per_process} of the {config.sequences_per_step} "
        f"sequences of a step each"
    )
    return group


def end_all(error: BaseException, here: Place) -> NoReturn:
    """Raise `error`, or ProcessLost if its cause lies in another process. One process prints the error, and the others
    exit with the same code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the others, before they have printed
    group, speaker = GROUP, here.rank
    if is_collective_error(error):
        if group is None:
            sentence = f"The {here.count} processes that torchrun started could not connect to each other ({error})."
        else:
            sentence, speaker = group.diagnose()
        cause, error = error, ProcessLost(sentence)
        error.__cause__ = cause
    elif group is not None:
        text = str(error) or type(error).__name__
        with contextlib.suppress(RuntimeError):
            group.store.set(f"ended/{here.rank}", text)
        if here.rank and group.read("ended/0", HEARTBEAT_SECONDS) == text:
            speaker = 0
        group.close_after_error()
    if isinstance(error, Exception) and not isinstance(error, UserError):
        get_error_handler().record_exception(error)  # torchrun prints the traceback in its table
    if here.rank == 0 or not isinstance(error, UserError):
        raise error
    if speaker == here.rank:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {error}\n".encode())
    sys.exit(error.exit_code)


def is_collective_error(error: BaseException) -> bool:
    """Whether a collective failed. gloo raises RuntimeError, but names its source file in the message."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def count() -> int:
    return 1 if GROUP is None else GROUP.here.count


def rank() -> int:
    return 0 if GROUP is None else GROUP.here.rank


def note_part(part: str) -> None:
    """Note which part of a step begins, so that the process that hangs can be found by its progress."""
    if GROUP is not None:
        GROUP.part = PARTS.index(part)


def on_rank_0(make: Callable[[], Made]) -> Made:
    """Run `make` on rank 0 only, and broadcast its result; the other ranks wait. If it raises, the others exit too.

    Calls cannot be nested: inside `make`, the other ranks do not receive.
    """
    if GROUP is None:
        return make()
    assert not GROUP.in_rank_0_only, "on_rank_0 inside on_rank_0"
    sent: list[Any] = [None, None]
    if GROUP.here.rank == 0:
        GROUP.in_rank_0_only = True
        try:
            sent[0] = make()
        except BaseException as error:
            # A user's mistake is printed once, by rank 0; an interruption (Ctrl-C) goes to all.
            sent[1] = SystemExit(getattr(error, "exit_code", 1)) if isinstance(error, Exception) else error
            dist.broadcast_object_list(sent, 0, GROUP.patient_hosts)
            raise
        finally:
            GROUP.in_rank_0_only = False
    dist.broadcast_object_list(sent, 0, GROUP.patient_hosts)
    if sent[1] is not None:
        raise sent[1]
    return sent[0]


def any_process(*flags: bool) -> list[bool]:
    """For each flag, whether it is true in any process. An all-reduce between hosts: no GPU is waited for."""
    if GROUP is None or GROUP.in_rank_0_only:
        return list(flags)
    held = torch.tensor(flags, dtype=torch.float32)
    dist.all_reduce(held, dist.ReduceOp.MAX, GROUP.hosts)
    GROUP.rounds, GROUP.part = GROUP.rounds + 1, 0
    return [bool(flag) for flag in held.tolist()]


def max_over_ranks(seconds: float) -> float:
    """The largest of the processes' times."""
    if GROUP is None:
        return seconds
    held = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX, GROUP.hosts)
    return held.item()


def all_reduce_sum(number: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place."""
    if GROUP is not None:
        dist.all_reduce(number)
    return number


def own_rows(rows: int) -> tuple[int, int]:
    """This process's slice of a step's `rows` sequences: its first row, and its number of rows. The numbers of two
    processes differ by one at most."""
    first, end = (rows * part // count() for part in (rank(), rank() + 1))
    return first, end - first


def data_parallel(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The model. With several processes, its gradients are averaged over them."""
    if GROUP is None:
        return model
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def no_sync(step_model: Callable[..., torch.Tensor], enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside, DistributedDataParallel does not average gradients: for all micro-batches but the last."""
    return getattr(step_model, "no_sync", contextlib.nullcontext)() if enabled else contextlib.nullcontext()


def map_over_ranks(work: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """`work` on a batch whose N entries are independent, (N, ...) -> (N, ...). Each process does its share of them, and
    all get the whole result (all-gather)."""
    if GROUP is None:
        return work(batch)
    share = -(-len(batch) // count())
    mine = batch[share * rank() : share * (rank() + 1)]
    done = batch.new_zeros(share, *batch.shape[1:])  # of the same size in all processes, as all-gather needs it
    if len(mine):
        done[: len(mine)] = work(mine)
    parts = [torch.empty_like(done) for _ in range(count())]
    dist.all_gather(parts, done)
    return torch.cat(parts)[: len(batch)]


def broadcast_tensors(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """Overwrite the tensors with those of rank `source`."""
    if GROUP is not None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), source)
