"""Read and write checkpoints. They are written completely or not at all, and verified by hash before they are loaded.

A checkpoint folder is enough to generate text and, with an optimizer state, to continue training. It is written under a
temporary name, flushed, and renamed. `manifest.json`, written last, lists the size and SHA-256 of every file. A folder
that differs from its manifest, or has none, is not loaded, except the format of the blog that this project began with
(`pytorch_model.bin`). Best weights have no optimizer state, imported weights no training state either.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pydantic.dataclasses
import safetensors.torch
import torch

from common.chat import Template, template_from_dict
from common.errors import CheckpointError
from common.files import RECORDS_FOLDER, STEP_NAME, flush_file, json_bytes, read_json, sha256_file, write_json
from common.lora import (
    ADAPTER_CONFIG,
    ADAPTERS,
    adapters_of,
    find_base,
    load_adapters,
    lora_of,
    merge_adapters,
    read_lora,
    stored_weights,
)
from common.tensors import read_safetensors, read_weights, require_shape
from common.validation import build, fields_of
from model import TransformerLanguageModel
from model_config import ModelConfig

Content = bytes | dict[str, torch.Tensor]  # content of a file
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
BEST = "best"  # the folder of the best weights
BASE = "base"  # that of the weights before a run with a companion began with one's own text
WITHOUT_OPTIMIZER = (BEST, BASE)
WEIGHTS_FILES = ("model.safetensors", "config.json", "tokenizer.json")  # enough to generate text
OPTIMIZER, STATE = "optimizer.safetensors", "training_state.json"  # optional
BYTES_PER_PARAMETER = 12  # the weight and AdamW's two moments
# Keys of config.json that are not ModelConfig fields: ours, then the blog's.
OTHER_CONFIG_KEYS = (
    "tokenizer_type",
    "total_parameters",
    "chat_template",
    "model_type",
    "architecture",
    "description",
    "model_name",
)


@pydantic.dataclasses.dataclass(frozen=True)
class ManifestEntry:
    size: int
    sha256: str


@pydantic.dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the files of a checkpoint by name."""

    files: dict[str, ManifestEntry]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder, or one in the blog's format, which has no hashes."""

    path: Path

    def model_config(self) -> ModelConfig:
        """Read the shape of the model. Prints a note on unknown keys. Raises CheckpointError if config.json describes
        no model."""
        path = self.path / "config.json"
        values = read_json(path, CheckpointError)
        try:
            config = build(ModelConfig, {key: values[key] for key in fields_of(ModelConfig) if key in values})
        except ValueError as problem:
            raise CheckpointError(f"{path} does not describe a model: {problem}.") from None
        unknown = sorted(values.keys() - fields_of(ModelConfig) - set(OTHER_CONFIG_KEYS))
        if unknown:
            print(f"Note: {path} has keys that this version does not know: {', '.join(unknown)}.", file=sys.stderr)
        return config

    def trusted_config(self) -> ModelConfig:
        """Read the shape of the model and check it against the weights, so that a wrong size in config.json cannot make
        a model that takes more memory than the weights. Raises CheckpointError if they differ."""
        config = self.model_config()
        with self.weights_errors():
            require_shape(config, read_weights(self.base(), shapes_only=True))
        return config

    def load_weights(self, model: TransformerLanguageModel) -> None:
        """Load the weights into `model`, with adapters merged into their base. If `model` has adapters, load only
        these, because it already has its base's weights."""
        lora = read_lora(self.path)
        with self.weights_errors():
            if lora_of(model) is not None:
                load_adapters(model, read_safetensors(self.path / ADAPTERS))
            elif lora is None:
                model.load_weights(read_weights(self.path))
            else:
                Checkpoint(find_base(lora, self.path)).load_weights(model)
                merge_adapters(model, self.path, lora)

    def base(self) -> Path:
        """Return the folder of the weights to which adapters are added; without adapters, this folder. Raises
        CheckpointError if it is missing."""
        lora = read_lora(self.path)
        return self.path if lora is None else Checkpoint(find_base(lora, self.path)).base()

    def weights_sha256(self) -> str:
        """Return the SHA-256 of the weights file, or of the adapters. It is the same for every copy."""
        return sha256_file(stored_weights(self.path))

    @contextlib.contextmanager
    def weights_errors(self) -> Iterator[None]:
        """Turn the errors of loading weights into CheckpointError."""
        try:
            yield
        except (ValueError, KeyError, safetensors.SafetensorError) as problem:
            raise CheckpointError(f"The weights in {self.path} cannot be loaded: {problem}.") from None

    def tokenizer_path(self) -> Path:
        """Return the path of the tokenizer. Raises CheckpointError if the folder has none."""
        for name in ("tokenizer.json", "bpe_tokenizer.json"):  # the blog's name is the second
            if (self.path / name).exists():
                return self.path / name
        raise CheckpointError(f"{self.path} has no tokenizer.json. Copy the tokenizer of its training data there.")

    def chat_template(self) -> Template | None:
        """Read the chat template, if any. Raises CheckpointError if it is invalid."""
        path = self.path / "config.json"
        value = read_json(path, CheckpointError).get("chat_template")
        try:
            return None if value is None else template_from_dict(value)
        except ValueError as problem:
            raise CheckpointError(f"{path} is not valid: {problem}.") from None

    def training_state(self) -> dict[str, Any]:
        return read_json(self.path / STATE, CheckpointError)

    def load_optimizer(self, optimizer: Any) -> None:
        try:
            optimizer.load_tensors(read_safetensors(self.path / OPTIMIZER))
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path} has no optimizer state, so its training cannot continue. Start a new run from its "
                f"weights with --init_from {self.path}."
            ) from None
        except (ValueError, safetensors.SafetensorError) as problem:
            raise CheckpointError(f"The optimizer state in {self.path} cannot be loaded: {problem}.") from None


def to_cpu(tensors: dict[str, torch.Tensor], copy: bool = False) -> dict[str, torch.Tensor]:
    """Return the tensors on the CPU; with `copy`, always new ones."""
    return {name: tensor.detach().to("cpu", copy=copy).contiguous() for name, tensor in tensors.items()}


def build_weights_files(model: TransformerLanguageModel, copy: bool = False) -> dict[str, Content]:
    """Return the files of the weights: the adapters if the model has any; a tied head once. With `copy`, they do not
    change while the training goes on."""
    lora = lora_of(model)
    if lora is not None:
        adapters = to_cpu(adapters_of(model), copy)
        return {ADAPTERS: adapters, ADAPTER_CONFIG: json_bytes({"peft_type": "LORA", **asdict(lora)})}
    weights = model.state_dict()
    if model.config.tie_embeddings:
        del weights["head.weight"]  # the same tensor as token_embedding.weight
    return {WEIGHTS_FILES[0]: to_cpu(weights, copy)}


def build_stored_config(
    model: TransformerLanguageModel, tokenizer_type: str, chat: Template | None = None
) -> dict[str, Any]:
    """Return the content of config.json. `total_parameters` excludes adapters, because merging adds no parameters."""
    adapters = adapters_of(model) if lora_of(model) else {}
    return {
        **model.config.to_dict(),
        "tokenizer_type": tokenizer_type,
        "total_parameters": model.num_parameters() - sum(tensor.numel() for tensor in adapters.values()),
        **({"chat_template": chat.to_dict()} if chat else {}),
    }


def write_file(path: Path, content: Content) -> str:
    """Write bytes, or tensors as a safetensors file, and flush them to disk. Return the file's SHA-256. Raises
    OSError."""
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        try:
            safetensors.torch.save_file(content, path, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from None
    flush_file(path)
    return sha256_file(path)


def write_files(folder: Path, contents: dict[str, Content]) -> None:
    """Write files and then their manifest. Raises what `write_file` raises."""
    written = {name: write_file(folder / name, content) for name, content in contents.items()}
    files = {name: ManifestEntry((folder / name).stat().st_size, sha256) for name, sha256 in written.items()}
    write_manifest(folder, files)


def read_manifest(folder: Path) -> dict[str, ManifestEntry]:
    """Return the files that the manifest lists. Raises CheckpointError if it is missing or invalid."""
    try:
        return build(Manifest, read_json(folder / MANIFEST, CheckpointError)).files
    except ValueError as problem:
        raise CheckpointError(f"{MANIFEST} does not list files: {problem}.") from None


def write_manifest(folder: Path, files: dict[str, ManifestEntry]) -> None:
    write_json(folder / MANIFEST, asdict(Manifest(files)))


def make_entry(path: Path) -> ManifestEntry:
    return ManifestEntry(path.stat().st_size, sha256_file(path))


def find_problems(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint folder (files missing, too short or changed); [] if it is intact."""
    if not (folder / MANIFEST).exists():
        return [f"{MANIFEST} is missing (the folder was not completed)"]
    try:
        files = read_manifest(folder)
    except CheckpointError as problem:
        return [str(problem).rstrip(".")]
    weights = WEIGHTS_FILES if ADAPTERS not in files else (ADAPTERS, ADAPTER_CONFIG, *WEIGHTS_FILES[1:])
    needed = [*weights, *(name for name in (OPTIMIZER, STATE) if OPTIMIZER in files or (folder / name).exists())]
    problems = [f"{MANIFEST} does not list {name}" for name in needed if name not in files]
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name.removeprefix(f"{RECORDS_FOLDER}/"):
            problems.append(f"{name!r} is not a file name")
        elif not os.path.isfile(path):  # also False for an impossible name
            problems.append(f"{name} is missing")
        elif path.stat().st_size != entry.size:
            problems.append(f"{name} has {path.stat().st_size:,} bytes instead of {entry.size}")
        elif sha256_file(path) != entry.sha256:
            problems.append(f"{name} was altered (its SHA-256 differs)")
    return problems


def describe_damage(folder: Path, problems: Iterable[str]) -> str:
    names = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "nothing"
    return f"The checkpoint {folder} is damaged: {'; '.join(problems)}. It contains {names}."


def step_folders(*parents: Path) -> list[Path]:
    """Return the checkpoints in the given folders, newest (highest step) first. For equal steps, the order of `parents`
    decides."""
    folders = [path for parent in parents if parent.is_dir() for path in parent.iterdir()]
    return sorted((path for path in folders if STEP_NAME.fullmatch(path.name)), key=step_of, reverse=True)


def run_steps(parent: Path) -> list[Path]:
    """Return the checkpoints of all runs and mirrors in `parent`, newest first. Hidden folders are no runs."""
    runs = [path for path in parent.glob("*") if not path.name.startswith(".")]
    return step_folders(*(run / "checkpoints" for run in runs), *runs)


def step_of(folder: Path) -> int:
    """Return the step in the name of a checkpoint folder."""
    match = STEP_NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def find_newest_valid(*parents: Path) -> Checkpoint | None:
    """Return the newest intact checkpoint in the folders `parents`; None if they are empty. Print a warning for newer
    damaged ones. Raises CheckpointError listing the damage if all are damaged."""
    damaged: list[str] = []
    for folder in step_folders(*parents):
        try:
            problems = find_problems(folder)
        except FileNotFoundError:
            problems = ["a file is gone"]
        if problems and not folder.exists():  # deleted meanwhile, because there is a newer one
            return find_newest_valid(*parents)
        if not problems:
            for damage in damaged:
                print(f"Warning: {damage} Using {folder} instead.", file=sys.stderr)
            return Checkpoint(folder)
        damaged.append(describe_damage(folder, problems))
    if damaged:
        raise CheckpointError("\n  ".join(["All checkpoints are damaged.", *damaged]))
    return None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder (ours, or the blog's without a manifest), or the newest intact checkpoint of a run
    folder. Raises CheckpointError if there is none.
    """
    path = Path(path)
    if path.is_file():
        folder = f" Name its folder, {path.parent}, instead." if (path.parent / "config.json").is_file() else ""
        raise CheckpointError(f"{path} is a file, not a checkpoint folder.{folder}{_list_checkpoints()}")
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {path}.{_list_checkpoints()}")
    if (path / "checkpoints").is_dir() or step_folders(path):
        checkpoint = find_newest_valid(path / "checkpoints", path)
        if checkpoint is None:
            raise CheckpointError(f"The run {path} has no checkpoint yet.{_list_checkpoints()}")
        return checkpoint
    if run_steps(path):  # runs/, or a --checkpoint_dir
        return open_checkpoint(find_newest_run(path))
    if not (path / MANIFEST).exists():
        if (path / "pytorch_model.bin").exists():
            return Checkpoint(path)
        if not any((path / name).exists() for name in ("model.safetensors", "config.json")):
            raise CheckpointError(f"{path} is not a checkpoint or run folder.{_list_checkpoints()}")
    problems = find_problems(path)
    if problems:
        raise CheckpointError(describe_damage(path, problems) + _list_checkpoints())
    return Checkpoint(path)


def find_newest_run(runs: Path = Path("runs")) -> Path:
    """Return the run folder or mirror with the most recently written checkpoint. Raises CheckpointError if there is
    none."""
    manifests = [folder / MANIFEST for folder in run_steps(runs) if (folder / MANIFEST).exists()]
    if not manifests:
        raise CheckpointError(
            f"No trained model in {runs.absolute()}/. Train one first, for instance with python train_colab_mmap.py "
            "--config quickstart.json, or name one with --checkpoint PATH."
        )
    parent = max(manifests, key=lambda path: path.stat().st_mtime_ns).parents[1]
    return parent.parent if parent.name == "checkpoints" else parent


def _list_checkpoints() -> str:
    existing = [str(path) for path in run_steps(Path("runs"))]
    return f" Checkpoints in runs/: {', '.join(existing)}." if existing else ""
