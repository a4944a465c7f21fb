"""Checkpoints are whole or absent: whatever the disk does, what can be loaded is what was saved."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from common import checkpoint
from common.checkpoint import (
    find_newest_run,
    find_newest_valid,
    find_problems,
    open_checkpoint,
    to_cpu,
    write_file,
)
from common.errors import CheckpointError
from common.files import sha256_file
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import SOURCES, flip
from tests.models import save_checkpoint
from tokenizer import CharacterTokenizer
from training.config import Config
from training.optimizer import Optimizer, build_optimizer

CONTRACT = {
    "model.safetensors", "config.json", "tokenizer.json", "optimizer.safetensors", "training_state.json",
    "manifest.json",
}  # fmt: skip
HASHED = sorted(CONTRACT - {"manifest.json"})


def trained(seed: int = 0, steps: int = 1, **options: Any) -> tuple[TransformerLanguageModel, Optimizer]:
    torch.manual_seed(seed)
    shape = {"embed_dim": 16, "num_heads": 2, "num_layers": 1, "max_seq_len": 8}
    model = TransformerLanguageModel(ModelConfig(vocab_size=13, **shape, **options))
    optimizer = build_optimizer(model, Config(learning_rate=0.01))
    take_steps(model, optimizer, steps)
    return model, optimizer


def take_steps(model: TransformerLanguageModel, optimizer: Optimizer, steps: int) -> None:
    tokens = torch.arange(16).view(2, 8) % 13
    for _ in range(steps):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def save(tmp_path: Path) -> Callable[..., Path]:
    """`save(folder, seed=...)` saves a model of its own there, below tmp_path."""
    tokenizer = tmp_path / "tokenizer.json"
    CharacterTokenizer.train("abcdefghijklm").save(tokenizer)

    def write(name: str, seed: int = 0) -> Path:
        model, optimizer = trained(seed)
        folder = tmp_path / name
        save_checkpoint(folder, model, optimizer, tokenizer.read_bytes(), "character", {"step": seed})
        return folder

    return write


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def test_weights_and_optimizer_come_back_bit_for_bit(tmp_path: Path, save: Callable[..., Path]) -> None:
    for tied in (False, True):
        model, optimizer = trained(steps=3, tie_embeddings=tied, position="rope" if tied else "learned")
        folder = tmp_path / f"tied_{tied}"
        save("any")  # for its tokenizer
        save_checkpoint(
            folder, model, optimizer, (tmp_path / "tokenizer.json").read_bytes(), "character", {"step": 3, "x": [1.5]}
        )

        loaded = open_checkpoint(folder)
        assert loaded.model_config() == model.config
        assert loaded.training_state() == {"step": 3, "x": [1.5]}
        other, other_optimizer = trained(seed=9, tie_embeddings=tied, position=model.config.position)
        loaded.load_weights(other)
        loaded.load_optimizer(other_optimizer)
        assert (other.head.weight is other.token_embedding.weight) is tied
        # The next steps agree only if the moments and the step counts came back as well.
        for steps in (0, 2):
            take_steps(model, optimizer, steps)
            take_steps(other, other_optimizer, steps)
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, other.state_dict()[name]), name
        for ours, theirs in zip(optimizer.state.values(), other_optimizer.state.values(), strict=True):
            assert all(torch.equal(ours[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_the_folder_holds_the_contracts_files_and_the_manifest_describes_them(save: Callable[..., Path]) -> None:
    folder = save("c")
    assert {path.name for path in folder.iterdir()} == CONTRACT
    entries = json.loads((folder / "manifest.json").read_text())["files"]
    assert sorted(entries) == HASHED
    for name, entry in entries.items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    described = json.loads((folder / "config.json").read_text())
    assert (described["tokenizer_type"], described["vocab_size"]) == ("character", 13)
    assert described["total_parameters"] == trained()[0].num_parameters()
    assert find_problems(folder) == []


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip], ids=["missing", "truncated", "altered"])
@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_damage_to_any_file_is_found_and_named(name: str, damage: Callable, save: Callable[..., Path]) -> None:
    folder = save("c")
    if name == "manifest.json" and damage is flip:
        manifest = (folder / name).read_text()
        (folder / name).write_text(manifest.replace('"sha256": "', '"sha256": "0', 1))  # still JSON, one hash wrong
        name = ""
    else:
        damage(folder / name)
        if name == "manifest.json" and damage is cut:  # a final newline is no loss
            cut(folder / name)
    assert any(name in problem for problem in find_problems(folder))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    message = str(caught.value)
    assert caught.value.exit_code == 4
    assert name in message and str(folder) in message
    assert all(path.name in message for path in folder.iterdir())  # what is there instead


def test_weights_alone_are_a_checkpoint_if_the_manifest_means_it(save: Callable[..., Path], tmp_path: Path) -> None:
    """As import_hf.py writes it: no state of a training, and none on the list."""
    folder = save("step_00000001")
    contents = {name: (folder / name).read_bytes() for name in checkpoint.WEIGHTS_FILES}
    (tmp_path / "weights").mkdir()
    checkpoint.write_files(tmp_path / "weights", contents)
    assert find_problems(tmp_path / "weights") == []
    model, _ = trained(seed=1)
    open_checkpoint(tmp_path / "weights").load_weights(model)
    (tmp_path / "half").mkdir()
    checkpoint.write_files(tmp_path / "half", contents | {"optimizer.safetensors": b"state"})
    assert find_problems(tmp_path / "half") == ["manifest.json does not list training_state.json"]


def test_a_checkpoint_is_replaced_by_the_new_one_and_nothing_is_left_over(save: Callable[..., Path]) -> None:
    folder = save("runs/a/best", seed=1)
    before = contents(folder)
    save("runs/a/best", seed=2)
    assert open_checkpoint(folder).training_state() == {"step": 2}
    assert contents(folder)["model.safetensors"] != before["model.safetensors"]
    assert os.listdir(folder.parent) == ["best"]


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Inside, a file that grows beyond `size` bytes is an error of the system, as a full disk is."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_at_any_file_leaves_the_checkpoints_as_they_were(save: Callable[..., Path]) -> None:
    save("run/checkpoints/step_00000001", seed=1)
    best = save("run/best", seed=1)
    run, before = best.parent, contents(best.parent)
    sizes = sorted({path.stat().st_size for path in best.iterdir()})
    assert len(sizes) > 4
    for size in [0, *(each - 1 for each in sizes)]:
        for target in ("run/best", "run/checkpoints/step_00000002"):
            with files_of_at_most(size), pytest.raises(CheckpointError, match="File too large") as caught:
                save(target, seed=2)
            assert caught.value.exit_code == 4 and "Free some space" in str(caught.value)
            assert contents(run) == before, f"{size} bytes a file"
            assert sorted(os.listdir(run / "checkpoints")) == ["step_00000001"]
    assert find_problems(best) == []


@pytest.mark.parametrize("broken", ["model.safetensors", "manifest.json"])
def test_the_newest_whole_checkpoint_is_found_and_the_damage_reported(
    broken: str, save: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = save("run/checkpoints/step_00000009"), save("run/checkpoints/step_00000010")
    (bad / broken).write_bytes((bad / broken).read_bytes()[:50])
    found = find_newest_valid(bad.parent)
    assert found is not None and found.path == good
    told = capsys.readouterr().err
    assert str(bad) in told and broken in told and "optimizer.safetensors" in told
    assert open_checkpoint(bad.parents[1]).path == good  # a run folder stands for its newest whole checkpoint
    shutil.rmtree(good)
    for find in (lambda: find_newest_valid(bad.parent), lambda: open_checkpoint(bad.parents[1])):
        with pytest.raises(CheckpointError, match=f"All checkpoints are damaged(.|\n)*{bad} is damaged: .*{broken}"):
            find()
    assert find_newest_valid(bad.parent / "none") is None


def test_newest_run_is_the_one_written_last(save: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"train_colab_mmap\.py") as caught:
        find_newest_run(tmp_path / "runs")
    assert caught.value.exit_code == 4
    older, newer = save("runs/b/checkpoints/step_00000900"), save("runs/a/checkpoints/step_00000003")
    os.utime(older / "manifest.json", (1_000, 1_000))
    os.utime(newer / "manifest.json", (2_000, 2_000))
    assert find_newest_run(tmp_path / "runs") == tmp_path / "runs" / "a"
    os.utime(older / "manifest.json", (3_000, 3_000))
    assert find_newest_run(tmp_path / "runs") == tmp_path / "runs" / "b"


def test_no_source_loads_a_pickle_it_does_not_trust() -> None:
    """torch.load runs code that is in the file unless weights_only=True; np.load with allow_pickle likewise."""
    found = 0
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None), *(alias.name for alias in node.names)]
                assert not {"dill", "joblib", "shelve"} & set(names), source
            if not isinstance(node, ast.Call):
                continue
            called, keywords = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called == "torch.load":
                found += 1
                assert keywords.get("weights_only") == "True", f"{source}:{node.lineno}"
            assert keywords.get("allow_pickle", "False") == "False", f"{source}:{node.lineno}"
            assert called not in ("pickle.load", "pickle.loads"), f"{source}:{node.lineno}"
    assert found


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.marker),)


def test_the_blogs_checkpoint_form_loads(tmp_path: Path) -> None:
    model, _ = trained(seed=3)
    blog = tmp_path / "blog"
    blog.mkdir()
    described = {**model.config.to_dict(), "model_type": "transformer", "total_parameters": 1}
    (blog / "config.json").write_text(json.dumps(described))
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({**state, "causal_mask": torch.ones(8, 8)}, blog / "pytorch_model.bin")
    other, _ = trained(seed=4)
    open_checkpoint(blog).load_weights(other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_unknown_keys_are_reported_and_an_invalid_config_is_refused(
    save: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save("c")
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**described, "experts": 8}))
    assert checkpoint.Checkpoint(folder).model_config() == trained()[0].config
    told = capsys.readouterr().err
    assert "experts" in told and "tokenizer_type" not in told
    for broken in ({**described, "vocab_size": None}, {"embed_dim": 4}, {**described, "num_heads": 3}):
        (folder / "config.json").write_text(json.dumps(broken))
        with pytest.raises(CheckpointError, match=r"config\.json"):
            checkpoint.Checkpoint(folder).model_config()


def test_a_path_without_a_checkpoint_is_refused_with_its_name(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            open_checkpoint(path)


def test_a_file_of_tensors_is_the_librarys_with_its_hash(tmp_path: Path) -> None:
    tensors = {"weights": torch.randn(3, 4), "empty": torch.zeros(0, 4)}
    assert write_file(tmp_path / "a.safetensors", tensors) == sha256_file(tmp_path / "a.safetensors")
    read = safetensors.torch.load_file(tmp_path / "a.safetensors")
    assert read.keys() == tensors.keys() and all(torch.equal(read[name], tensors[name]) for name in tensors)


def test_a_copy_on_the_host_does_not_change_with_the_original() -> None:
    tensors = {"step": torch.tensor(1.0)}
    copied, shared = to_cpu(tensors, copy=True), to_cpu(tensors, copy=False)
    tensors["step"] += 1
    assert (copied["step"].item(), shared["step"].item()) == (1.0, 2.0)
