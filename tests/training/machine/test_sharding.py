"""--shard, over gloo: slices of weights, gradients and state in each process, and the numbers of one process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from model import TransformerLanguageModel
from tests.forked import Forked
from tests.helpers import CPU, estimated
from tests.training.machine import sharded_steps
from tests.training.machine.launching import places
from training.config import parse_config
from training.machine import sharding
from training.machine.sharding import shard

SCRIPT = Path(sharded_steps.__file__)


def test_three_processes_have_the_numbers_of_one_and_each_keeps_a_third(
    train: Callable, train_flags: Callable, tmp_path: Path
) -> None:
    """The results of `sharded_steps` in one process, then in each of three. Seven sequences a step, two at a time: the
    processes have different numbers of sequences, and of micro-batches."""
    assert train(tmp_path / "base", max_steps=1, bias="false").code == 0
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat "}\n{"prompt": "one big"}\n')
    flags = train_flags(
        tmp_path / "run", batch_size=7, gradient_accumulation_steps=1, micro_batch_size=2, dropout=0, compile="off",
        eval_batches=1, eval_prompts=tmp_path / "prompts.jsonl", bias="false",
    )  # fmt: skip
    files = [tmp_path / f"{number}.json" for number in range(4)]
    started = [Forked([files[0], tmp_path / "base", *flags], script=SCRIPT)]
    started += [
        Forked([file, tmp_path / "base", *flags, "--shard"], environment=place, script=SCRIPT)
        for file, place in zip(files[1:], places(3), strict=True)
    ]
    told = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0] * 4, "\n".join(err for _, err in told)
    numbers = [json.loads(file.read_text()) for file in files]
    for name in sharded_steps.VARIANTS:
        one, *three = (each[name] for each in numbers)
        for result in three:
            for here, there in zip(result["steps"], one["steps"], strict=True):
                assert here == pytest.approx(there, rel=1e-5), name
            assert result["validation loss"] == pytest.approx(one["validation loss"], rel=1e-5), name
            assert result["answers"] == one["answers"], name
        assert three[0]["state"] == pytest.approx(one["state"], rel=1e-3), name  # rank 0 gathers it
    for name in ("adamw", "muon", "lora"):
        one, *three = (each[name]["kept"] for each in numbers)
        for parameters, weights, state in three:
            assert parameters == one[0], name
            assert (weights, state) == pytest.approx((one[1] / 3, one[2] / 3), rel=0.1), name
        assert sum(kept[1] for kept in three) == one[1], name
    # A block, and the head with the loss, each for training and for evaluation.
    assert [each["compiled"]["graphs"] for each in numbers[1:]] == [4, 4, 4]
    # An overflow in the rows of one process skips the update in all.
    assert [result["scaled"]["overflow"] for result in numbers] == [[1, 512]] * 4


def test_with_one_process_it_has_no_effect_and_says_so(train: Callable, tmp_path: Path) -> None:
    result = train(tmp_path / "run", ("--shard",), max_steps=1)
    assert result.code == 0 and "--shard has no effect: there is only one process" in result.out


def test_what_is_gathered_for_a_checkpoint_does_not_change_with_the_training() -> None:
    """A thread writes it while the training goes on. Every process keeps the number of updates whole."""
    kept = {"step": torch.tensor(3.0)}
    gathered = sharding.gather(kept)
    kept["step"] += 1
    assert gathered["step"].item() == 3


def outside_of_fake_mode(make: Callable) -> Callable:
    def made(*arguments: Any) -> Any:
        with unset_fake_temporarily():
            return make(*arguments)

    return made


@pytest.mark.parametrize(("vocab_size", "layers", "rows"), [(32_000, 4, 1), (2_000, 12, 8), (32_000, 6, 8)])
def test_the_estimate_is_the_peak_that_torch_tracks(
    train_flags: Callable, vocab_size: int, layers: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one of eight processes, without numbers, in bf16."""
    config = parse_config(
        train_flags(Path("run"), batch_size=8 * rows, gradient_accumulation_steps=1, num_layers=layers, embed_dim=1024,
                    num_heads=16, max_seq_len=256, bias="false", dropout=0)
    )  # fmt: skip
    config = dataclasses.replace(config, processes=8, shard=True)
    hardware = dataclasses.replace(CPU, precision="bf16")
    monkeypatch.setattr(sharding, "count", lambda: 8)
    monkeypatch.setattr(device_mesh, "init_device_mesh", outside_of_fake_mode(device_mesh.init_device_mesh))
    dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        with FakeTensorMode():
            model = TransformerLanguageModel(config.shape(vocab_size))
            estimate = estimated(config, model, hardware)
            shard(model, hardware)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=False)
            batch = torch.zeros(rows, 256, dtype=torch.long)
            tracker = FSDPMemTracker(model, optimizer)
            for _ in range(2):  # the first makes the optimizer's state
                tracker.reset_mod_stats()
                with tracker:
                    with hardware.autocast():
                        loss = model(batch, batch)
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    ((_, held),) = tracker.get_tracker_snapshot("peak").items()
    assert 0.98 * held["Total"] < estimate < 1.2 * held["Total"]
