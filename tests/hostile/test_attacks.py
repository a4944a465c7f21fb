"""Files made to do harm: to take all memory, reach files elsewhere, run code; and what the scripts say to them."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import generate
from common.checkpoint import open_checkpoint
from common.errors import CheckpointError, DataError
from common.script import MAX_MESSAGE_CHARACTERS
from tests.conftest import Result
from tests.helpers import snapshot
from tests.hostile.mutations import DEEP
from tests.hostile.readers import Training, blogs_form, seal, use_model, use_tokens


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "ours")


@pytest.mark.parametrize(
    "name", ["../secret.bin", "{secret}", "link.bin", "folder/../../secret.bin", "./link.bin", ".."]
)
@pytest.mark.parametrize("key", ["bin_file", "tokenizer_file"])
def test_metadata_reaches_no_file_elsewhere(key: str, name: str, training: Training) -> None:
    """The link leads to the right file, and is refused all the same."""
    folder = training.token_folder
    secret = folder.parent / "secret.bin"
    shutil.copy(folder / ("tokens.bin" if key == "bin_file" else "tokenizer.json"), secret)
    (folder / "link.bin").symlink_to(secret)
    metadata = json.loads((folder / "tokens_metadata.json").read_text())
    (folder / "tokens_metadata.json").write_text(json.dumps({**metadata, key: name.format(secret=secret)}))
    with pytest.raises(DataError, match=f"{key} in .* is not a file in the same folder"):
        use_tokens(training.config)


def test_no_packed_file_is_unpacked_to_another_folder(training: Training) -> None:
    folder = training.token_folder
    shutil.copy(folder / "tokens.bin", folder / "packed.bin")
    subprocess.run(["gzip", str(folder / "packed.bin")], check=True)
    (folder / "target.bin").symlink_to(folder.parent / "made.bin")
    shutil.move(folder / "packed.bin.gz", folder / "target.bin.gz")
    metadata = json.loads((folder / "tokens_metadata.json").read_text())
    (folder / "tokens_metadata.json").write_text(json.dumps({**metadata, "bin_file": "target.bin"}))
    with pytest.raises(DataError, match="is not a file in the same folder"):
        use_tokens(training.config)
    assert not (folder.parent / "made.bin").exists()


@pytest.mark.parametrize(
    "name", ["../secret", "{secret}", "a/../../secret", "", ".", "..", "a\0b", "\ud800", "x" * 5000]
)
def test_a_manifest_reaches_no_file_elsewhere(name: str, training: Training) -> None:
    secret = training.checkpoint.parent / "secret"
    shutil.copy(training.checkpoint / "config.json", secret)
    manifest = json.loads((training.checkpoint / "manifest.json").read_text())
    manifest["files"][name.format(secret=secret)] = manifest["files"]["config.json"]
    (training.checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"is not a file name|is missing"):
        open_checkpoint(training.checkpoint)


class Bomb:
    """Unpickled without protection, it makes a folder."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("form", ["archive", "old", "plain"])
def test_no_file_runs_code(form: str, training: Training, tmp_path: Path) -> None:
    marker, name = tmp_path / "executed", "pytorch_model.bin"
    folder = blogs_form(training.checkpoint, tmp_path / "blog")
    held = {"state": {}, "param_groups": [], "head.weight": Bomb(marker)}
    if form == "plain":
        (folder / name).write_bytes(pickle.dumps(held))
    else:
        torch.save(held, folder / name, _use_new_zipfile_serialization=form == "archive")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        use_model(folder)
    assert not marker.exists()


def test_an_optimizers_state_of_other_shapes_is_refused(training: Training) -> None:
    path = training.checkpoint / "optimizer.safetensors"
    state = load_file(path)
    name = next(name for name in state if name.endswith("exp_avg"))
    for tensor in (torch.zeros(3), torch.zeros(1), state[name].int()):
        save_file({**state, name: tensor}, path)
        seal(training.checkpoint)
        with pytest.raises(CheckpointError, match=f"{name} is "):
            training.resume()


def test_weights_that_are_not_finite_are_refused_and_those_that_overflow_crash_nothing(training: Training) -> None:
    blog = blogs_form(training.checkpoint, training.checkpoint.parent.parent / "blog")
    state = torch.load(blog / "pytorch_model.bin", weights_only=True)
    for value in (np.nan, np.inf):
        torch.save({**state, "ln_f.weight": torch.full_like(state["ln_f.weight"], value)}, blog / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"not finite: ln_f\.weight"):
            use_model(blog)
    torch.save({name: torch.full_like(tensor, 1e30) for name, tensor in state.items()}, blog / "pytorch_model.bin")
    use_model(blog)


def test_the_scripts_say_so_with_their_exit_codes(training: Training, tmp_path: Path) -> None:
    """The worst of it, as a user would meet it."""
    import train_colab_mmap

    marker, theirs = tmp_path / "executed", training.checkpoint
    flags = ["--data_dir", str(training.token_folder), "--device", "cpu", "--max_steps", "4", "--batch_size", "2"]
    flags += ["--embed_dim", "16", "--num_heads", "2", "--num_layers", "1", "--max_seq_len", "8", "--dropout", "0.1"]
    run = ["--output_dir", str(training.config.run_dir)]

    def train(*more: str) -> Result:
        return called(train_colab_mmap.main, [*flags, *more])

    def write(content: bytes | str | dict, path: Path) -> None:
        if isinstance(content, dict):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        seal(theirs)

    def refused(code: int, said: str, result: Result) -> None:
        assert result.code == code and said in result.err, result.err
        assert "error: " in result.err and "Traceback" not in result.err
        assert len(result.err.partition("error: ")[2]) <= MAX_MESSAGE_CHARACTERS + 20

    config = tmp_path / "config.json"
    for content, said in ((DEEP, "not usable JSON"), ('{"seed": NaN}', "seed"), (json.dumps({"x" * 10**5: 1}), "xxx")):
        config.write_text(content)
        refused(2, said, called(train_colab_mmap.main, ["--config", str(config)]))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(DEEP)
    refused(3, "line 1", train("--eval_prompts", str(prompts), "--output_dir", str(tmp_path / "new")))

    files = {name: (theirs / name).read_bytes() for name in os.listdir(theirs)}
    described, state = (json.loads(files[name]) for name in ("config.json", "training_state.json"))
    attacks: list[tuple[str, bytes | str | dict, int, str]] = [
        ("training_state.json", {**state, "step": float("-inf")}, 4, "step is -Infinity"),
        ("training_state.json", {**state, "evaluated_step": "x"}, 4, "evaluated_step"),
        ("training_state.json", {**state, "ending_seconds": -1.0}, 4, "ending_seconds"),
        ("optimizer.safetensors", pickle.dumps({"state": Bomb(marker)}), 4, "optimizer state"),
        ("config.json", {**described, "num_layers": 10**7}, 4, "num_layers"),
        ("manifest.json", DEEP, 4, "manifest.json"),
    ]
    for name, content, code, said in attacks:
        write(content, theirs / name)
        if name == "manifest.json":
            (theirs / name).write_text(DEEP)
        before = snapshot(training.config.run_dir)
        refused(code, said, train(*run))
        assert snapshot(training.config.run_dir) == before
        write(files[name], theirs / name)
    for name, content, code, said in (
        ("config.json", {**described, "embed_dim": 10**9, "head_dim": None}, 4, "no model can have this shape"),
        ("config.json", {**described, "max_seq_len": 2**31 - 1}, 4, "positional_embedding.weight"),
        ("tokenizer.json", DEEP, 3, "tokenizer.json"),
        ("model.safetensors", b"\xff" * 100, 4, "weights"),
    ):
        write(content, theirs / name)
        refused(code, said, called(generate.main, ["--checkpoint", str(theirs), "--device", "cpu"]))
        if name == "config.json":
            refused(code, said, called(train_colab_mmap.main, [
                *flags[:8], "--init_from", str(theirs), "--output_dir", str(tmp_path / "new")
            ]))  # fmt: skip
        write(files[name], theirs / name)
    assert train(*run).code == 0  # all is as it was
    assert not marker.exists() and not (tmp_path / "new").exists()


def called(main: Callable[[list[str]], int], argv: list[str]) -> Result:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(argv)
    return Result(code, out.getvalue(), err.getvalue())
