"""A run that trains adapters: its base stays to the bit, its checkpoints are small, and it resumes as any run does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import generate
from common.checkpoint import open_checkpoint
from common.lora import add_adapters
from model import TransformerLanguageModel
from tests.helpers import CPU, estimated, snapshot
from tests.training.helpers import checkpoint_of, measured, steps_of
from training.config import Config
from training.records import CONFIG, read_metrics

FILES = {"adapter.safetensors", "config.json", "tokenizer.json", "manifest.json"}
FILES |= {"optimizer.safetensors", "training_state.json"}


@pytest.fixture(scope="module")
def finished(train: Callable, unbroken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of adapters, for the weights of `unbroken`. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("finished") / "lora"
    before = snapshot(unbroken)
    result = train(folder, init_from=unbroken, lora_rank=4)
    assert (
        result.code == 0
        and "LoRA       rank 4 on attention, feed_forward, embeddings: 2,552 parameters are trained" in result.out
    )
    assert snapshot(unbroken) == before, "the base was changed"
    assert "17,816 parameters, 2,552 of them trained" in result.out
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "lora")
    return tmp_path / "lora"


def adapters(run: Path, step: int = 24) -> bytes:
    return (run / "checkpoints" / f"step_{step:08d}" / "adapter.safetensors").read_bytes()


def test_the_base_stays_to_the_bit_and_what_is_kept_is_small(finished: Path, unbroken: Path) -> None:
    losses = [row["val_loss"] for row in read_metrics(finished) if "val_loss" in row]
    base = [row["val_loss"] for row in read_metrics(unbroken) if "val_loss" in row]
    assert losses[-1] < base[-1] - 0.01, "nothing was learned"
    for folder in (finished / "best", finished / "checkpoints" / "step_00000024"):
        files = {path.name for path in folder.iterdir()}
        assert files == (FILES - {"optimizer.safetensors"} if folder.name == "best" else FILES)
        held = safetensors.torch.load_file(folder / "adapter.safetensors")
        assert all(name.endswith((".lora_A", ".lora_B")) for name in held)
        assert sum(tensor.numel() for tensor in held.values()) == 2552
        for name in files & {"optimizer.safetensors"}:
            kept = safetensors.torch.load_file(folder / name)
            assert sum(tensor.numel() for name, tensor in kept.items() if name.endswith(".exp_avg")) == 2552
        described = json.loads((folder / "config.json").read_text())
        assert described["lora"] == {
            "rank": 4,
            "alpha": 16.0,
            "targets": ["attention", "feed_forward", "embeddings"],
            "base": str(unbroken / "checkpoints" / "step_00000024"),
            "base_sha256": snapshot(unbroken)["checkpoints/step_00000024/model.safetensors"],
        }
        assert described["total_parameters"] == 15_264, "those of the merged model"
    merged, base_weights = open_checkpoint(finished).weights(), open_checkpoint(unbroken).weights()
    changed = {name for name in merged if not torch.equal(merged[name], base_weights[name])}
    modules = ("attention.qkv", "attention.out_proj", "feed_forward.fc1", "feed_forward.fc2")
    assert changed == {*(f"blocks.0.{module}.weight" for module in modules), "token_embedding.weight", "head.weight"}


@pytest.mark.parametrize("after", [3, 13])
def test_an_interrupted_run_ends_as_if_it_had_not_been(
    after: int, interrupt: Callable, train: Callable, unbroken: Path, finished: Path, tmp_path: Path
) -> None:
    flags = {"init_from": unbroken, "lora_rank": 4}
    interrupt(tmp_path / "run", after, **flags)
    assert train(tmp_path / "run", **flags).code == 0
    assert adapters(tmp_path / "run") == adapters(finished)
    assert measured(tmp_path / "run") == measured(finished)
    folders = [folder / "checkpoints" / "step_00000024" for folder in (tmp_path / "run", finished)]
    one, other = ((folder / "optimizer.safetensors").read_bytes() for folder in folders)
    assert one == other


def test_in_bf16_and_with_activation_checkpointing(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    flags = {"init_from": unbroken, "lora_rank": 4, "max_steps": 6, "eval_interval": 0}
    plain = train(tmp_path / "plain", **flags)
    less = train(tmp_path / "less", **flags, extra=("--activation_checkpointing",))
    half = train(tmp_path / "half", **flags, precision="bf16")
    assert plain.code == less.code == half.code == 0
    assert adapters(tmp_path / "plain", 6) == adapters(tmp_path / "less", 6)
    losses = [[row["train_loss"] for row in read_metrics(tmp_path / name)] for name in ("plain", "half")]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# What contradicts it


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lora_rank": 4}, "name it with --init_from CHECKPOINT"),
        ({"lora_alpha": 8}, "lora_alpha (flag) applies only with --lora_rank N"),
        ({"lora_targets": "attention"}, "lora_targets (flag) applies only with --lora_rank N"),
        ({"lora_rank": 4, "init_from": "a", "optimizer": "muon"}, "add --optimizer adamw"),
        ({"lora_rank": -1}, "--lora_rank is"),
        ({"lora_rank": 4, "init_from": "a", "lora_alpha": 0}, "--lora_alpha is"),
        ({"lora_rank": 4, "init_from": "a", "lora_targets": "head"}, "attention, feed_forward"),
    ],
    ids=str,
)
def test_flags_that_would_do_nothing_are_refused(
    flags: dict[str, Any], said: str, train: Callable, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", **flags)
    assert result.code == 2 and said in result.err and not (tmp_path / "run").exists()


def test_a_rank_beyond_the_models_width_is_refused(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    result = train(tmp_path / "run", init_from=unbroken, lora_rank=33)
    assert result.code == 2 and "lora_rank 33" in result.err and "8 is usual" in result.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 8}, "lora_rank: 4 in the checkpoint, 8 now"),
        ({"lora_alpha": 8}, "lora_alpha: 16.0 in the checkpoint, 8.0 now"),
        ({"lora_targets": "attention"}, "'embeddings') in the checkpoint, ('attention',) now"),
        ({"lora_rank": None}, "lora_rank: 4 in the checkpoint, 0 now"),
    ],
    ids=str,
)
def test_other_adapters_cannot_take_over_a_run(
    changes: dict[str, Any], said: str, train: Callable, copy: Path, unbroken: Path
) -> None:
    before = snapshot(copy)
    result = train(copy, **{"init_from": unbroken, "lora_rank": 4, "max_steps": 30, **changes})
    assert result.code == 4 and said in result.err and "Traceback" not in result.err
    assert snapshot(copy) == before


def test_a_run_without_adapters_does_not_continue_with_some(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    result = train(copy_of, init_from=copy_of, lora_rank=4, max_steps=30)
    assert result.code == 4 and "did not start from" in result.err
    result = train(tmp_path / "new", resume_from=copy_of, lora_rank=4)
    assert result.code == 4 and "--init_from" in result.err and "was trained without adapters" in result.err


def test_adapters_are_no_base_of_others(train: Callable, finished: Path, tmp_path: Path) -> None:
    """They are a base for full training: merged, as everywhere else."""
    result = train(tmp_path / "second", init_from=finished, lora_rank=4)
    assert result.code == 4 and "python tools/merge_lora.py" in result.err
    full = train(tmp_path / "full", init_from=finished, max_steps=2, dropout=0.0)
    assert full.code == 0 and (tmp_path / "full" / "checkpoints" / "step_00000002" / "model.safetensors").exists()


def test_another_base_in_the_place_of_the_old_is_refused(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    flags = {"init_from": copy_of, "lora_rank": 4}
    assert train(tmp_path / "lora", **flags, max_steps=6).code == 0
    assert train(copy_of, seed=5, resume="never").code == 0
    result = train(tmp_path / "lora", **flags, max_steps=12)
    assert result.code == 4 and "holds adapters for other weights" in result.err and str(copy_of) in result.err
    code = generate.main(["--checkpoint", str(tmp_path / "lora"), "--prompt", "the", "--device", "cpu"])
    assert code == 4


# The rest of a run


def test_a_base_in_the_run_that_makes_way_is_refused(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    """Its adapters would name a base that is no longer there."""
    shutil.copytree(copy_of, tmp_path / "own")
    result = train(tmp_path / "own", init_from=tmp_path / "own", lora_rank=4, resume="never")
    assert result.code == 4 and "--resume never would rename" in result.err
    assert (tmp_path / "own" / "checkpoints").exists()


def test_the_runs_own_config_continues_it(train: Callable, copy: Path) -> None:
    import train_colab_mmap

    own = copy / CONFIG
    content = json.loads(own.read_text())
    content["config"]["output_dir"] = str(copy)
    own.write_text(json.dumps(content))
    assert train_colab_mmap.main(["--config", str(own), "--max_steps", "30"]) == 0
    assert steps_of(copy) == [30, 24]


def test_a_lost_folder_comes_back_from_the_mirror(
    interrupt: Callable, train: Callable, unbroken: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "drive").mkdir()
    flags = {"init_from": unbroken, "lora_rank": 4, "checkpoint_dir": tmp_path / "drive" / "copies"}
    assert train(tmp_path / "run", **flags, max_steps=12).code == 0
    copies = tmp_path / "drive" / "copies" / "run"
    assert {path.name for path in checkpoint_of(copies, 12).iterdir()} == FILES | {"run"}
    shutil.rmtree(tmp_path / "run")
    assert train(tmp_path / "run", **flags, max_steps=18).code == 0
    assert steps_of(tmp_path / "run") == [18, 12]


@pytest.mark.parametrize("look", ["--dry_run", "--profile"])
def test_dry_run_and_profile_write_no_run(look: str, train: Callable, unbroken: Path, tmp_path: Path) -> None:
    result = train(tmp_path / "run", init_from=unbroken, lora_rank=4, extra=(look,))
    assert result.code == 0 and "no run was written" in result.out and "Warning" not in result.out, result.err
    assert not (tmp_path / "run").exists()


# What it takes


@pytest.mark.parametrize(
    "targets", ["attention,feed_forward,embeddings", "attention,feed_forward", "attention", "feed_forward"]
)
def test_the_estimate_counts_what_autograd_keeps(targets: str) -> None:
    config = Config(
        embed_dim=128, num_layers=4, max_seq_len=64, batch_size=4, init_from="base", lora_rank=8, lora_targets=targets
    )
    model = TransformerLanguageModel(config.shape(512))
    add_adapters(model, config.lora())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    held = sum(size for address, size in kept.items() if address not in own)
    state = 4 * model.num_parameters() + 8 * model.num_parameters(trained_only=True)
    forecast = estimated(config, model, CPU) - state
    assert held < forecast < 1.35 * held
