"""Several processes that train one model, as torchrun starts them: one for each GPU, or on CPUs.

A step's sequences are sliced over them, and gradients are added up by DistributedDataParallel while the backward pass
goes on. The first process alone prints and writes; the others get from it what they need. Without torchrun there is one
process, and every function here returns at once.
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

from common.errors import ConfigError, ProcessLost, UserError
from common.launch import Place, place
from common.machine import pick_device

if TYPE_CHECKING:
    from training.config import TrainConfig

PATIENCE = datetime.timedelta(days=30)  # with the first process where it works alone: tokenizing, answering prompts
SIGN_SECONDS = 5.0  # that a sign of life is waited for
POLL_SECONDS = 0.5  # between two looks whether one is asked for
PARTS = ("data", "forward", "backward", "optimizer")  # of a step, in their order

Made = TypeVar("Made")


class Group:
    """The processes of this job, seen from one of them."""

    def __init__(self, here: Place, seconds: float, device: torch.device):
        """Raises what torch.distributed raises if not all of them come within `seconds`."""
        wait = datetime.timedelta(seconds=seconds)
        self.here = here
        with hushed():
            if device.type == "cuda":  # NCCL ends the process where it loses patience: hosts notice before it does
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=2 * wait)
            else:
                dist.init_process_group("gloo", timeout=wait)
            self.hosts = dist.new_group(backend="gloo", timeout=wait)  # agree while GPUs are at work
            self.patient = dist.new_group(backend="gloo", timeout=PATIENCE)
        self.is_alone = False  # at work on what only the first process does
        self.rounds = 0  # of agreement
        self.part = 0  # of PARTS
        self.notes = connect()
        self.is_over = threading.Event()
        self.thread = threading.Thread(target=self.answer, daemon=True, name="sign-of-life")
        self.thread.start()

    def answer(self) -> None:
        """Give a sign of life when another process asks for it: how far this one has come."""
        with contextlib.suppress(RuntimeError):  # the notes are gone
            while not self.is_over.wait(POLL_SECONDS):
                if self.notes.check(["asked"]):
                    self.notes.set(f"alive/{self.here.rank}", str(self.rounds * len(PARTS) + self.part))
                    return

    def close(self) -> None:
        self.is_over.set()
        self.thread.join()

    def take_leave(self) -> None:
        """End by an error that the others hear of. Where it is the first process that keeps the notes, and no agent of
        torchrun, it is the last to go."""
        self.close()
        with contextlib.suppress(RuntimeError):
            self.notes.set(f"left/{self.here.rank}", "")
        if self.here.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            deadline = time.monotonic() + SIGN_SECONDS
            for rank in range(1, self.here.count):
                self.read(f"left/{rank}", deadline - time.monotonic())

    def read(self, key: str, seconds: float) -> str | None:
        """A note of another process; None if it is not there in time."""
        deadline = time.monotonic() + seconds
        with contextlib.suppress(RuntimeError):
            while not self.notes.check([key]):
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL_SECONDS / 4)
            return self.notes.get(key).decode()
        return None

    def what_happened(self, seconds: float) -> tuple[str, int]:
        """Why a collective failed, in a sentence, and the first of the processes that are left to say it."""
        ranks = range(self.here.count)
        ended = {rank: note for rank in ranks if (note := self.read(f"ended/{rank}", 0)) is not None}
        with contextlib.suppress(RuntimeError):  # where the first process kept the notes, they went with it
            self.notes.set("asked", "")
        deadline = time.monotonic() + SIGN_SECONDS
        others = [rank for rank in ranks if rank not in {self.here.rank, *ended}]
        signs = {rank: self.read(f"alive/{rank}", deadline - time.monotonic()) for rank in others}
        came = {rank: int(sign) for rank, sign in signs.items() if sign is not None}
        speaker, named = min([self.here.rank, *came]), f"of {self.here.count}"
        if ended:
            return " ".join(f"Process {rank} {named} ended: {note}" for rank, note in ended.items()), speaker
        if gone := [str(rank) for rank in others if rank not in came]:
            sentence = (
                f"Process {' and '.join(gone)} {named} gives no sign of life: killed (as the system does where memory "
                f"runs out), stopped, or gone with its machine."
            )
        else:
            behind = " or ".join(str(rank) for rank in others if came[rank] == min(came.values()))
            sentence = f"Process {behind} {named} is alive and did not come within {seconds:g} s (--process_timeout)."
        return f"{sentence} Checkpoints saved before are whole: the same command continues.", speaker


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Nothing written to standard output, not even past Python: torch 2.9's gloo counts there who has come, in each
    process, between the lines of the others."""
    kept = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


GROUP: Group | None = None  # None: this process is the only one


def connect() -> Store:
    """The store of this job, as torchrun started it last: its agent keeps it, so it outlives every process."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(address, port, is_master=False, wait_for_workers=False)
    return PrefixStore(f"notes/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


@contextlib.contextmanager
def together(config: TrainConfig) -> Iterator[None]:
    """What happens inside, all processes do at the same time; they leave together. Raises ProcessLost in the one that
    says so, where another is gone or does not come."""
    global GROUP
    here = place()
    if here.count == 1:
        if config.shard_optimizer:
            print("Note       shard_optimizer: this is the only process, and keeps all of the optimizer's state")
        yield
        return
    try:
        GROUP = join(config, here)
        yield
        dist.barrier(GROUP.patient)  # torchrun ends all when one ends with an exit code, also the one that still saves
        GROUP.close()
        dist.barrier(GROUP.hosts)  # nobody asks for the notes any more, which may go with the first process
        dist.destroy_process_group()
    except BaseException as error:
        leave(error, here, config.process_timeout)
    finally:
        if GROUP is not None:
            GROUP.close()
        GROUP = None


def join(config: TrainConfig, here: Place) -> Group:
    device = pick_device(config.device if config.use_gpu else "cpu")
    if device.type == "cuda":
        if here.local_rank >= (gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"torchrun started {here.local_count} processes on this machine, which has {gpus} GPUs: "
                f"--nproc_per_node={gpus}, or --device cpu."
            )
        torch.cuda.set_device(device)
    group = Group(here, config.process_timeout, device)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    print(
        f"Processes  {here.count}, over {backend}: {config.sequences_per_process} of the {config.sequences_per_step} "
        f"sequences of a step each"
    )
    return group


def leave(error: BaseException, here: Place, seconds: float) -> NoReturn:
    """Raise `error`, or what it is about: one process tells, and the others end with the same exit code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # by which torchrun ends those that are left, mid-sentence
    group, speaker = GROUP, here.rank
    if is_of_others(error):
        if group is None:
            sentence = f"The {here.count} processes that torchrun started did not find each other ({error})."
        else:
            sentence, speaker = group.what_happened(seconds)
        cause, error = error, ProcessLost(sentence)
        error.__cause__ = cause
    elif group is not None:
        text = str(error) or type(error).__name__
        with contextlib.suppress(RuntimeError):
            group.notes.set(f"ended/{here.rank}", text)
        if here.rank and group.read("ended/0", SIGN_SECONDS) == text:
            speaker = 0
        group.take_leave()
    if here.rank == 0 or not isinstance(error, UserError):
        raise error
    if speaker == here.rank:
        with contextlib.suppress(OSError):
            os.write(2, f"error: {error}\n".encode())
    sys.exit(error.exit_code)


def is_of_others(error: BaseException) -> bool:
    """Whether a collective failed. gloo has no type of error of its own, but names its source file."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def count() -> int:
    return 1 if GROUP is None else GROUP.here.count


def rank() -> int:
    return 0 if GROUP is None else GROUP.here.rank


def reached(part: str) -> None:
    """The part of a step that begins here: what is told of this process where it hangs."""
    if GROUP is not None:
        GROUP.part = PARTS.index(part)


def on_first(make: Callable[[], Made]) -> Made:
    """What the first process makes, for all of them; the others wait. What it raises ends the others too. Not for use
    inside `make`: the others are not there to take what the first process sends."""
    if GROUP is None:
        return make()
    assert not GROUP.is_alone, "on_first inside on_first"
    sent: list[Any] = [None, None]
    if GROUP.here.rank == 0:
        GROUP.is_alone = True
        try:
            sent[0] = make()
        except BaseException as error:
            # What a user did wrong is told once; the wish to stop is everyone's.
            sent[1] = SystemExit(getattr(error, "exit_code", 1)) if isinstance(error, Exception) else error
            dist.broadcast_object_list(sent, 0, GROUP.patient)
            raise
        finally:
            GROUP.is_alone = False
    dist.broadcast_object_list(sent, 0, GROUP.patient)
    if sent[1] is not None:
        raise sent[1]
    return sent[0]


def any_process(*flags: bool) -> list[bool]:
    """Each of the flags, true if it is in any process. Hosts wait for each other; no GPU is waited for."""
    if GROUP is None or GROUP.is_alone:
        return list(flags)
    held = torch.tensor(flags, dtype=torch.float32)
    dist.all_reduce(held, dist.ReduceOp.MAX, GROUP.hosts)
    GROUP.rounds, GROUP.part = GROUP.rounds + 1, 0
    return [bool(flag) for flag in held.tolist()]


def slowest(seconds: float) -> float:
    """The longest time of any process."""
    if GROUP is None:
        return seconds
    held = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX, GROUP.hosts)
    return held.item()


def added_up(number: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor over all processes."""
    if GROUP is not None:
        dist.all_reduce(number)
    return number


def own_rows(rows: int) -> tuple[int, int]:
    """Where this process's share of a step's `rows` sequences begins, and how many they are: one more or less than
    those of others, where they do not come out even."""
    first, end = (rows * part // count() for part in (rank(), rank() + 1))
    return first, end - first


def data_parallel(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """The model, with the mean of its gradients over all processes where there are several."""
    if GROUP is None:
        return model
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def apart(step_model: Callable[..., torch.Tensor], is_apart: bool = True) -> contextlib.AbstractContextManager[None]:
    """Inside, gradients stay in the process that they are of: those of all micro-batches but the last."""
    return step_model.no_sync() if is_apart and GROUP is not None else contextlib.nullcontext()  # type: ignore[attr-defined]


def shared_out(work: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """`work` on a batch of independent things, (N, ...) -> (N, ...), of which each process does its share."""
    if GROUP is None:
        return work(batch)
    share = -(-len(batch) // count())
    mine = batch[share * rank() : share * (rank() + 1)]
    done = batch.new_zeros(share, *batch.shape[1:])  # in all processes of one size
    if len(mine):
        done[: len(mine)] = work(mine)
    parts = [torch.empty_like(done) for _ in range(count())]
    dist.all_gather(parts, done)
    return torch.cat(parts)[: len(batch)]


def share_tensors(tensors: Sequence[torch.Tensor], source: int = 0) -> None:
    """The numbers of one process, for all of them."""
    if GROUP is not None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), source)


def share_state(state: Any, source: int = 0) -> Any:
    """The structure of dicts and lists, with tensors in it, of one process, for all of them."""
    if GROUP is None:
        return state
    tensors: list[torch.Tensor] = []

    def outline(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return value.to("meta"), value.device.type
        return rebuilt(value, outline)

    def filled(value: Any) -> Any:
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
            tensors.append(torch.empty_like(value[0], device=value[1]))
            return tensors[-1]
        return rebuilt(value, filled)

    told = [outline(state) if rank() == source else None]
    dist.broadcast_object_list(told, source, GROUP.hosts)
    if rank() != source:
        state = filled(told[0])
    share_tensors(tensors, source)
    return state


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: change(held) for key, held in value.items()}
    return [change(held) for held in value] if isinstance(value, list) else value
