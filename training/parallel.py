"""Data-parallel training under torchrun: one process per GPU, or several on CPUs.

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
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from common.errors import ConfigError, ProcessLost, UserError
from common.machine import pick_device
from common.script import World, is_main_process, world

if TYPE_CHECKING:
    from training.config import Config

MAIN_PROCESS_TIMEOUT = datetime.timedelta(days=30)  # rank 0 tokenizes and answers prompts alone, which may take long
HINT_SECONDS = 5.0
TIMEOUT_SECONDS = 600.0  # if processes wait longer for one of them, the job ends

T = TypeVar("T")


class ProcessGroups:
    """The process groups of this job."""

    def __init__(self, ranks: World, device: torch.device):
        """Join the job. Raises torch.distributed's errors if not all processes join within TIMEOUT_SECONDS."""
        timeout = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        hint = threading.Timer(HINT_SECONDS, _print_hint, (ranks,))
        hint.daemon = True
        hint.start()
        if device.type == "cuda":  # NCCL kills the process at its timeout; gloo has to time out first
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=2 * timeout)
        else:
            dist.init_process_group("gloo", timeout=timeout)
        hint.cancel()
        self.hosts = dist.new_group(backend="gloo", timeout=timeout)  # works while the GPUs are busy
        self.patient_hosts = dist.new_group(backend="gloo", timeout=MAIN_PROCESS_TIMEOUT)
        self.in_main_process_only = False  # inside `on_main_process`
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torchrun's store, which outlives this process
        store = TCPStore(address, port, is_master=False, wait_for_workers=False)
        self.store = PrefixStore(f"gpt2/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)

    def is_first_to_report(self, text: str) -> bool:
        """Return whether no other process has reported this error."""
        with contextlib.suppress(RuntimeError):  # the store may be gone
            return self.store.add(text, 1) == 1
        return True


def _print_hint(ranks: World) -> None:
    """Name the variables that make this process wait, if torchrun has not set them."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        with contextlib.suppress(OSError):  # to stderr of every rank, because there may be no rank 0
            os.write(
                2,
                f"Waiting for {ranks.size} processes, because RANK and WORLD_SIZE are set. If you did not use "
                "torchrun, press Ctrl-C and type: unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE\n".encode(),
            )


GROUP: ProcessGroups | None = None  # None in a single process


@contextlib.contextmanager
def process_group(config: Config) -> Iterator[None]:
    """Join the processes that torchrun started; at the end, wait for them and leave the group.

    If one process dies or hangs, the others raise ProcessLost. If several raise the same error, one prints it.
    """
    global GROUP
    ranks = world()
    if ranks.size == 1:
        yield
        return
    try:
        GROUP = join(config, ranks)
        yield
        dist.barrier(GROUP.patient_hosts)  # torchrun kills the others when one exits, even while they save
        dist.destroy_process_group()
    except BaseException as error:
        _exit_together(error, ranks)
    finally:
        GROUP = None


def require_single_process() -> None:
    """Raise ConfigError under torchrun, for a command that chooses the model."""
    if world().size > 1:
        raise ConfigError(
            "--input and --minutes alone choose the model in a single process only. Run this command once without "
            "torchrun and with --dry_run, then give torchrun the shape that it prints, as flags."
        )


def join(config: Config, ranks: World) -> ProcessGroups:
    device = pick_device(config.device if config.use_gpu else "cpu")
    if device.type == "cuda":
        if ranks.local_rank >= (gpus := torch.cuda.device_count()):
            raise ConfigError(
                f"torchrun started {ranks.local_size} processes on this machine, which has {gpus} GPUs. Use "
                f"--nproc_per_node={gpus}, or --device cpu."
            )
        torch.cuda.set_device(device)
    groups = ProcessGroups(ranks, device)
    backend = "NCCL" if device.type == "cuda" else "gloo"
    print(
        f"Processes  {ranks.size} ({backend}), each with {config.sequences_per_process} of the "
        f"{config.sequences_per_step} sequences of a step"
    )
    return groups


def _exit_together(error: BaseException, ranks: World) -> NoReturn:
    """Raise `error`, or ProcessLost if another process caused it. If another process has printed the same error, exit
    with its code."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it before the others have printed
    if is_collective_error(error):
        lost = ProcessLost(
            f"The {ranks.size} processes that torchrun started could not connect to each other ({error})."
            if GROUP is None
            else f"One of the {ranks.size} processes died, or did not answer for {TIMEOUT_SECONDS:g} s. Saved "
            "checkpoints are intact: run the same command to continue."
        )
        lost.__cause__ = error
        error = lost
    if not isinstance(error, UserError):
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # torchrun prints the traceback in its table
        raise error
    if GROUP is None or GROUP.is_first_to_report(str(error)):
        if ranks.rank == 0:
            raise error
        with contextlib.suppress(OSError):  # stderr may be closed
            os.write(2, f"error: {error}\n".encode())
    sys.exit(error.exit_code)


def is_collective_error(error: BaseException) -> bool:
    """Return whether a collective failed. gloo raises RuntimeError with its source file in the message."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def on_main_process(make: Callable[[], T]) -> T:
    """Run `make` on rank 0 and broadcast its result; the other ranks wait. If it raises, the others exit too.

    Do not nest calls: inside `make`, the other ranks do not receive.
    """
    if GROUP is None:
        return make()
    assert not GROUP.in_main_process_only, "on_main_process inside on_main_process"
    sent: list[Any] = [None, None]
    if is_main_process():
        GROUP.in_main_process_only = True
        try:
            sent[0] = make()
        except BaseException as error:
            # A user's mistake is printed once, by rank 0; an interruption (Ctrl-C) goes to all.
            sent[1] = SystemExit(getattr(error, "exit_code", 1)) if isinstance(error, Exception) else error
            dist.broadcast_object_list(sent, 0, GROUP.patient_hosts)
            raise
        finally:
            GROUP.in_main_process_only = False
    dist.broadcast_object_list(sent, 0, GROUP.patient_hosts)
    if sent[1] is not None:
        raise sent[1]
    return sent[0]


def any_process(flag: bool) -> bool:
    """Return whether the flag is true in any process."""
    return bool(max_over_processes(flag)[0])


def max_over_processes(*numbers: float) -> list[float]:
    """Return each number's maximum over all processes. An all-reduce between hosts, so no GPU is waited for."""
    if GROUP is None or GROUP.in_main_process_only:
        return list(numbers)
    held = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(held, dist.ReduceOp.MAX, GROUP.hosts)
    return held.tolist()


def sum_over_processes(number: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over all processes, in place."""
    if GROUP is not None:
        dist.all_reduce(number)
    return number


def mean_over_processes(number: torch.Tensor) -> torch.Tensor:
    return number if GROUP is None else sum_over_processes(number) / world().size


def own_seed(seed: int) -> int:
    """Return a seed that is different in each process."""
    return seed + (world().rank << 53)


def own_rows(rows: int) -> tuple[int, int]:
    """Return this process's slice of a step's `rows` sequences: the first row and the number of rows, which differ by
    at most one between processes."""
    ranks = world()
    first, end = (rows * part // ranks.size for part in (ranks.rank, ranks.rank + 1))
    return first, end - first


def data_parallel(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
    """Return the model, wrapped to average gradients if there are several processes."""
    if GROUP is None:
        return model
    parallel = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    parallel.broadcast_buffers = False  # set as an attribute, because torch 2.13 renames the argument
    return parallel


def no_sync(step_model: Callable[..., torch.Tensor], enabled: bool = True) -> contextlib.AbstractContextManager[None]:
    """Return a context without gradient averaging, used in all micro-batches but the last."""
    return getattr(step_model, "no_sync", contextlib.nullcontext)() if enabled else contextlib.nullcontext()


def map_over_processes(work: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    """Return `work(batch)` for N independent entries, (N, ...) -> (N, ...). Each process computes a share, and all get
    the whole result (all-gather)."""
    if GROUP is None:
        return work(batch)
    ranks = world()
    share = -(-len(batch) // ranks.size)
    mine = batch[share * ranks.rank : share * (ranks.rank + 1)]
    done = batch.new_zeros(share, *batch.shape[1:])  # all-gather needs the same size in all processes
    if len(mine):
        done[: len(mine)] = work(mine)
    parts = [torch.empty_like(done) for _ in range(ranks.size)]
    dist.all_gather(parts, done)
    return torch.cat(parts)[: len(batch)]


def copy_from_main_process(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors with those of the main process, in place."""
    if GROUP is not None:
        for tensor in tensors:
            dist.broadcast(tensor.detach(), 0)
