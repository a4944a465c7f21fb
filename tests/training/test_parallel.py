"""Several processes that train one model, over gloo: the numbers of one process, one output, and an end if one dies."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import train_colab_mmap
from common.errors import ConfigError
from model import TransformerLanguageModel
from tests.forked import Forked
from tests.helpers import ALPHABET, CPU, estimated, rows_of, run_script, snapshot
from tests.training.helpers import steps_of
from tests.training.launching import free_port, join, places, torchrun, trained, without_gloo
from tokenize_local_bpe import tokenize
from training import hardware, memory, optimizer, parallel
from training.config import parse_config
from training.data import TokenData
from training.hardware import configure_device
from training.memory import describe_out_of_memory
from training.records import read_metrics
from training.stop import Stop

Process = Forked | subprocess.Popen[str]
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
LEARNING_RATE = 0.005  # of tests.helpers.flags_of_a_tiny_run
NUMBERS = ("train_loss", "grad_norm", "val_loss")
# No biases: the gradient of a key's bias is rounding alone, which AdamW would scale up to whole steps.
HALF = {
    "dropout": 0,
    "bias": "false",
    "max_steps": 12,
    "use_lr_scheduler": "constant",
    "eval_interval": 6,
}
WHOLE = HALF | {"max_steps": 24}


def wait_for(process: Process, start: str) -> None:
    assert process.stdout is not None
    said = []
    for line in iter(process.stdout.readline, ""):
        said.append(line)
        if line.startswith(start):
            return
    pytest.fail("".join(said))


def numbers(run_dir: Path) -> list[list[float]]:
    return [[row[key] for key in NUMBERS if key in row] for row in read_metrics(run_dir)]


def weights(run_dir: Path, step: int) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(run_dir / "checkpoints" / f"step_{step:08d}" / "model.safetensors")


def assert_same(ours: Path, theirs: Path, step: int) -> None:
    """Up to rounding: losses and norms in the six digits of metrics.jsonl, and weights to a thousandth of an update.
    Adam divides by the size of a weight's gradients: if that is close to zero, rounding that differs between CPUs
    becomes a part of an update."""
    assert len(numbers(ours)) == len(numbers(theirs))
    for here, there in zip(numbers(ours), numbers(theirs), strict=True):
        assert here == pytest.approx(there, rel=2e-5)
    torch.testing.assert_close(weights(ours, step), weights(theirs, step), rtol=1e-4, atol=0.001 * LEARNING_RATE)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text('{"prompt": "the cat ", "answer": "sat on a mat."}\n{"prompt": "one big"}\n')
    return path


@pytest.fixture(scope="module")
def one(train: Callable, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder after 24 steps by one process; beside it "half", the folder after 12. Tests do not change them."""
    folder = tmp_path_factory.mktemp("one")
    assert train(folder / "half", **HALF, eval_prompts=prompts).code == 0
    shutil.copytree(folder / "half", folder / "run")
    assert train(folder / "run", **WHOLE, eval_prompts=prompts).code == 0
    return folder / "run"


@pytest.fixture
def reaped() -> Iterator[list[Process]]:
    """Processes to kill after the test."""
    processes: list[Process] = []
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_two_machines_give_the_numbers_of_one_process_which_ends_what_they_began(
    one: Path, train: Callable, train_flags: Callable, prompts: Path, tmp_path: Path
) -> None:
    """Twelve steps by one process on each machine, one sequence at a time. Only rank 0 prints and writes."""
    machines = ["--nnodes=2", "--master_addr=127.0.0.1", f"--master_port={free_port()}"]
    # The output of the second trainer alone: its torchrun may complain that the first machine left before it.
    to_files = ["--redirects=3", f"--log_dir={tmp_path / 'log'}"]
    commands = [
        torchrun(
            1,
            *train_flags("run", **HALF, eval_prompts=prompts, micro_batch_size=1),
            place=[*machines, f"--node_rank={number}", *(to_files if number == 1 else [])],
        )
        for number in range(2)
    ]
    (tmp_path / "second").mkdir()
    second = subprocess.Popen(commands[1], **PIPES, cwd=tmp_path / "second")
    first = subprocess.run(commands[0], capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    _, complaint = second.communicate(timeout=60)
    assert first.returncode == 0, first.stderr
    assert second.returncode == 0, complaint
    said = {path.name: without_gloo(path.read_text()) for path in (tmp_path / "log").rglob("std*.log")}
    assert said == {"stdout.log": "", "stderr.log": ""}
    assert not list((tmp_path / "second").iterdir())

    run, half = tmp_path / "run", one.with_name("half")
    assert_same(run, half, 12)
    for name in ("samples.jsonl", "samples.md"):
        assert (run / name).read_bytes() == (half / name).read_bytes()
    assert "Processes  2 (gloo), each with 4 of the 8 sequences of a step" in first.stdout
    for line in ("Device  ", "Training   steps", "Saved ", "step 12: validation loss", "Talk to it"):
        assert sum(told.startswith(line) for told in first.stdout.splitlines()) == (2 if line == "Saved " else 1), line
    assert sorted(snapshot(run)) == sorted(snapshot(half))
    assert json.loads((run / "config.json").read_text())["config"]["micro_batch_size"] == 1

    result = train(run, **WHOLE, eval_prompts=prompts)
    assert result.code == 0 and "step 12" in result.out
    assert_same(run, one, 24)


def test_two_processes_end_what_one_began_though_one_of_them_is_killed(
    one: Path, train: Callable, train_flags: Callable, tmp_path: Path, reaped: list[Process]
) -> None:
    """The job ends by itself and says why, and the same command continues."""
    for name in ("killed", "unbroken"):
        shutil.copytree(one.with_name("half"), tmp_path / name)
    longer = HALF | {"max_steps": 60}
    assert train(tmp_path / "unbroken", **longer).code == 0
    command = torchrun(2, *train_flags(tmp_path / "killed", **longer))
    launcher = subprocess.Popen(command, **PIPES)
    wait_for(launcher, "Saved ")
    os.kill(worker_of(launcher, rank=1), signal.SIGKILL)
    began = time.monotonic()
    _, err = launcher.communicate(timeout=60)
    assert time.monotonic() - began < 25
    assert launcher.returncode != 0
    (told,) = re.findall("error: .*", err)
    assert told.startswith("error: One of the 2 processes died") and "run the same command to continue" in told
    assert "rank      : 1" in err, "torchrun's table names it"
    assert 12 < steps_of(tmp_path / "killed")[0] < 60, "the kill did not land in the middle of the run"

    reaped += trained(2, *train_flags(tmp_path / "killed", **longer))
    for process in reaped:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert_same(tmp_path / "killed", tmp_path / "unbroken", 60)


def worker_of(launcher: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank that a torchrun has started."""
    for children in Path(f"/proc/{launcher.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            if f"RANK={rank}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
    pytest.skip("the system does not list child processes")


def rounding_as_in_fp32() -> None:
    optimizer.newton_schulz_dtype = lambda device: torch.float32


def test_muon_on_conversations_by_one_by_four_and_by_three(
    tmp_path: Path, reaped: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each continues from the checkpoint of the others. Processes get different numbers of sequences, with different
    numbers of tokens that count, and there are more of them than blocks. In bf16 Muon would enlarge differences in
    rounding."""
    monkeypatch.setattr(optimizer, "newton_schulz_dtype", lambda device: torch.float32)
    rows = [{"prompt": f"Fox {i}?", "completion": f"The fox {i} {'sleeps ' * (i % 7)}."} for i in range(120)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenize([str(tmp_path / "chats.jsonl")], tmp_path / "tokens", format="chat", vocab_size=300, quiet=True)
    flags = (
        f"--data_dir {tmp_path / 'tokens'} --num_layers 2 --embed_dim 16 --num_heads 2 --max_seq_len 64 --device cpu "
        "--batch_size 6 --micro_batch_size 1 --optimizer muon --tie_embeddings true --eval_interval 2 --eval_batches 3 "
        "--log_interval 1 --use_lr_scheduler constant --checkpoint_minutes 0 --bias false"
    ).split()
    several, one = ([*flags, "--output_dir", tmp_path / name] for name in ("several", "one"))
    assert run_script(train_colab_mmap.main, *several, "--max_steps", 2).code == 0
    for count, steps in ((4, 4), (3, 8)):
        processes = trained(count, *several, "--max_steps", steps, first=rounding_as_in_fp32)
        reaped += processes
        told = [process.communicate(timeout=100) for process in processes]
        assert [process.returncode for process in processes] == [0] * count, told
    assert run_script(train_colab_mmap.main, *several, "--max_steps", 10).code == 0
    assert run_script(train_colab_mmap.main, *one, "--max_steps", 10).code == 0
    for here, there in zip(numbers(tmp_path / "several"), numbers(tmp_path / "one"), strict=True):
        assert here == pytest.approx(there, rel=2e-5)


def test_a_signal_to_one_of_them_saves_once_and_ends_all(
    train_flags: Callable, tmp_path: Path, reaped: list[Process]
) -> None:
    flags = train_flags(tmp_path / "run", max_steps=10**6, checkpoint_steps=0, eval_interval=0)
    reaped += trained(2, *flags)
    wait_for(reaped[0], "step ")
    reaped[1].send_signal(signal.SIGTERM)
    told = [process.communicate(timeout=60) for process in reaped]
    assert [process.returncode for process in reaped] == [130, 130], told
    assert told[0][0].count("Saved ") == 1 and "The same command continues" in told[0][0]
    assert without_gloo("".join(told[1])) == ""
    (step,) = steps_of(tmp_path / "run")
    assert step == read_metrics(tmp_path / "run")[-1]["step"]


def hang_later() -> None:
    """Reading data hangs after some steps."""
    batch = TokenData.batch

    def hanging(data: TokenData, sequences_seen: int, *more: Any) -> Any:
        time.sleep(1000 if sequences_seen > 80 else 0)
        return batch(data, sequences_seen, *more)

    TokenData.batch = hanging
    impatient()


def impatient() -> None:
    """Let this process wait for the others for 3 s only."""
    parallel.TIMEOUT_SECONDS = 3.0


def test_a_process_that_hangs_ends_the_job_after_the_timeout(
    train_flags: Callable, tmp_path: Path, reaped: list[Process]
) -> None:
    """It gets no data."""
    flags = train_flags(tmp_path / "run", max_steps=10**6, checkpoint_steps=0, eval_interval=0)
    first, second = places(2)
    reaped += [Forked(flags, environment=first, first=impatient), Forked(flags, environment=second, first=hang_later)]
    wait_for(reaped[0], "step ")
    began = time.monotonic()
    _, err = reaped[0].communicate(timeout=60)
    assert 2 < time.monotonic() - began < 20
    assert reaped[0].returncode == 1
    assert err.startswith("error: One of the 2 processes died, or did not answer for 3 s")
    assert "Traceback" not in err


def test_a_process_that_never_joins_is_waited_for_until_the_timeout(
    train_flags: Callable, tmp_path: Path, reaped: list[Process]
) -> None:
    """Only the command on the second machine has a wrong flag: both report an error."""
    flags = train_flags(tmp_path / "run")
    first, second = places(2)
    wrong = [*flags, "--batch_sise", 4]
    reaped += [Forked(flags, environment=first, first=impatient), Forked(wrong, environment=second, first=impatient)]
    told = [process.communicate(timeout=60) for process in reaped]
    assert [process.returncode for process in reaped] == [1, 2]
    assert "error: The 2 processes that torchrun started could not connect to each other" in told[0][1]


def test_a_run_that_another_machine_began_is_not_begun_again(
    one: Path, train_flags: Callable, tmp_path: Path, reaped: list[Process]
) -> None:
    """torchrun may choose which machine has rank 0, and rank 0 looks for the run on its own disk."""
    machines = [tmp_path / "first", tmp_path / "second"]
    machines[0].mkdir()
    shutil.copytree(one, machines[1] / "run")
    reaped += trained(2, *train_flags("run", **WHOLE), folders=machines)
    told = "".join(process.communicate(timeout=60)[1] for process in reaped)  # the first that knows it prints it
    assert [process.returncode for process in reaped] == [4, 4]
    assert "on one machine" in told and "--node_rank=0 on the machine that has them" in told
    assert steps_of(machines[1] / "run") == steps_of(one) and steps_of(machines[0] / "run") == []


def compiles(works: bool, memory_bytes: int) -> None:
    """Let compiling work, quickly, or fail in this process, which sees `memory_bytes`."""
    compile_with = torch.compile

    def fails(*batch: torch.Tensor) -> Any:
        raise RuntimeError("no compiler found")

    torch.compile = (lambda model, **_: compile_with(model, backend="eager")) if works else lambda model, **_: fails  # type: ignore[assignment]
    hardware.total_ram = lambda: 2 * memory_bytes  # of both processes


def test_if_one_process_cannot_compile_all_take_the_same_smaller_micro_batch(
    train_flags: Callable, tmp_path: Path, reaped: list[Process]
) -> None:
    """There is memory for compiled code, and not for uncompiled code. Whichever process fails, rank 0 says so."""
    flags = {**WHOLE, "max_steps": 4, "eval_interval": 2, "precision": "fp32", "batch_size": 64, "max_seq_len": 64}
    flags |= {"gradient_accumulation_steps": 1}
    config = parse_config(train_flags(tmp_path / "run", **flags))
    with torch.device("meta"):
        model = TransformerLanguageModel(config.shape(len(ALPHABET)))
    with pytest.MonkeyPatch.context() as patch:
        join(patch, 2)
        needed = [estimated(config, model, dataclasses.replace(CPU, compiles=compiled)) for compiled in (True, False)]
    enough = int(sum(needed) / 2 / memory.MEMORY_SHARE)
    reaped += trained(2, *train_flags(tmp_path / "off", **flags, compile="off", micro_batch_size=16))
    told = [process.communicate(timeout=60) for process in reaped]
    assert [process.returncode for process in reaped] == [0, 0], told
    for name, works in (("first", (False, True)), ("second", (True, False))):
        words = train_flags(tmp_path / name, **flags, compile="on")
        pair = [
            Forked(words, environment=place, first=functools.partial(compiles, can, enough))
            for place, can in zip(places(2), works, strict=True)
        ]
        reaped += pair
        (out, err), of_second = (process.communicate(timeout=60) for process in pair)
        assert [process.returncode for process in pair] == [0, 0], (err, of_second)
        said = "failed in another process" if works[0] else "failed (no compiler found)"
        assert out.count(f"torch.compile {said}") == 1 and without_gloo(of_second[0]) == ""
        assert out.count("Memory     32 sequences at once would not fit: micro_batch_size 16") == 1
        assert_same(tmp_path / name, tmp_path / "off", 4)


def test_a_mistake_is_printed_once(train_flags: Callable, tmp_path: Path) -> None:
    """Each process makes it, and the first one tells it."""
    flags = train_flags(tmp_path / "run", data_dir=tmp_path / "nothing")
    ended = subprocess.run(torchrun(2, *flags), capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 1 and "exitcode  : 3" in ended.stderr
    assert ended.stderr.count("error: No token file in") == 1


def test_dry_run_counts_all_processes(train_flags: Callable, tmp_path: Path, reaped: list[Process]) -> None:
    flags = train_flags(tmp_path / "run")
    reaped += trained(2, *flags, "--dry_run")
    (out, err), of_second = (process.communicate(timeout=60) for process in reaped)
    assert [process.returncode for process in reaped] == [0, 0], err
    assert "24 of 128 tokens (8 sequences, 4 at once in each of 2 processes)" in out
    assert "Dry run: no run was written" in out and without_gloo("".join(of_second)) == ""
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "extra", "said"),
    [
        ({"batch_size": 1}, (), "torchrun started 3 processes for the 2 sequences of a step"),
        ({}, ("--profile",), "--profile runs in one process, and torchrun started 3"),
    ],
)
def test_flags_for_one_process_are_refused_with_several(
    changes: dict[str, Any], extra: tuple[str, ...], said: str, train_flags: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(monkeypatch, 3)
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_config([*train_flags(Path("run"), **changes), *extra])


def test_out_of_memory_in_one_process_names_the_flag_that_helps(
    train_flags: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process begins again alone: the others wait for it."""
    join(monkeypatch, 3)
    config = parse_config(train_flags(Path("run"), batch_size=24, gradient_accumulation_steps=1))
    shape, hardware = config.shape(10), configure_device(config, config.shape(10))
    assert (config.sequences_per_process, rows_of(config)) == (8, 8)
    assert "Add --micro_batch_size 4 to the same command" in describe_out_of_memory(config, shape, hardware, 8)
    with pytest.raises(MemoryError), Stop().abandonable():
        raise MemoryError


def test_leftover_variables_of_a_launcher_are_named_soon(train_flags: Callable, tmp_path: Path) -> None:
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    process = Forked(train_flags(tmp_path / "run"), environment=place | {"MASTER_PORT": str(free_port())})
    assert "unset RANK WORLD_SIZE" in process.stderr.readline()
    process.kill()


def test_empty_variables_of_a_launcher_do_not_count(train_flags: Callable, tmp_path: Path) -> None:
    empty = {"RANK": "", "WORLD_SIZE": "", "LOCAL_RANK": ""}
    process = Forked(train_flags(tmp_path / "run", max_steps=2), environment=empty)
    _, err = process.communicate()
    assert process.returncode == 0, err
