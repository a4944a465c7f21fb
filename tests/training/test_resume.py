"""A run that is interrupted or killed ends with the weights of one that is not, to the bit."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forked import Forked
from tests.training.helpers import final_weights, measured, steps_of
from training.data import TokenData
from training.records import read_metrics

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("after", [3, 6, 13, 23])
def test_an_interrupted_run_ends_as_if_it_had_not_been(
    after: int, interrupt: Callable, train: Callable, unbroken: Path, tmp_path: Path
) -> None:
    """Before the first checkpoint, at one, after an evaluation and in the last step."""
    interrupt(tmp_path / "run", after)
    assert len(read_metrics(tmp_path / "run")) == after
    assert train(tmp_path / "run").code == 0
    assert final_weights(tmp_path / "run") == final_weights(unbroken)
    assert [row["step"] for row in measured(tmp_path / "run")] == list(range(1, 25))
    assert measured(tmp_path / "run") == measured(unbroken)
    best = [(folder / "best" / "model.safetensors").read_bytes() for folder in (tmp_path / "run", unbroken)]
    assert best[0] == best[1]
    seconds = [row["elapsed_seconds"] for row in read_metrics(tmp_path / "run")]
    assert seconds == sorted(seconds), "the clock of the run started again"


def test_a_run_with_muon_resumes_exactly(interrupt: Callable, train: Callable, tmp_path: Path) -> None:
    assert train(tmp_path / "unbroken", optimizer="muon").code == 0
    interrupt(tmp_path / "run", after=13, optimizer="muon")
    assert train(tmp_path / "run", optimizer="muon").code == 0
    assert final_weights(tmp_path / "run") == final_weights(tmp_path / "unbroken")
    assert measured(tmp_path / "run") == measured(tmp_path / "unbroken")


def no_step_is_short() -> None:
    """However fast the machine is: some 200 of these take longer than all that is killed."""
    batch = TokenData.batch

    def slow(*given: Any) -> Any:
        time.sleep(0.004)
        return batch(*given)

    TokenData.batch = slow


def test_sigkill_at_random_moments_changes_nothing(train_flags: Callable, tmp_path: Path) -> None:
    """Real processes, killed while they train, save, evaluate or write; then the same command once more."""
    flags = {"max_steps": 200, "checkpoint_steps": 7, "eval_interval": 40, "tie_embeddings": "true"}
    command, unbroken_command = (train_flags(tmp_path / name, **flags) for name in ("killed", "unbroken"))
    unbroken = Forked(unbroken_command)
    moments = random.Random(5)
    reached = []
    for session in range(3):
        process = Forked(command, first=no_step_is_short)
        said = []
        for line in iter(process.stdout.readline, ""):
            said.append(line)
            if line.startswith("Saved " if session else "Training "):  # the first session may end without a checkpoint
                break
        else:
            pytest.fail("".join([*said, process.stderr.read()]))
        time.sleep(moments.uniform(0.0, 0.2))
        process.kill()
        process.stdout.close()
        assert process.wait(30)
        reached.append(max(steps_of(tmp_path / "killed"), default=0))
    assert reached == sorted(reached)
    assert 0 < reached[-1] < 200, "the kills did not land in the middle of the run"
    last = Forked(command)
    out, err = last.communicate()
    assert last.returncode == 0, err
    assert "Continuing from" in out

    _, err = unbroken.communicate()
    assert unbroken.returncode == 0, err
    assert final_weights(tmp_path / "killed", 200) == final_weights(tmp_path / "unbroken", 200)
    assert measured(tmp_path / "killed") == measured(tmp_path / "unbroken")
    # No half-written file is left either.
    assert sorted(os.listdir(tmp_path / "killed")) == sorted(os.listdir(tmp_path / "unbroken"))
    assert sorted(os.listdir(tmp_path / "killed/checkpoints")) == sorted(os.listdir(tmp_path / "unbroken/checkpoints"))
