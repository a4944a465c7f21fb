"""Checkpoints: written whole or not at all, and verified by hash before they are loaded.

A checkpoint folder alone is enough to generate text, and with an optimizer state to continue training. It is written
under a temporary name, flushed, and renamed. `manifest.json`, written last, lists the size and SHA-256 of every file. A
folder that differs from its manifest is not loaded, nor one without a manifest, except the blog's form with
`pytorch_model.bin`. The best weights have no optimizer state. Imported weights have no training state either.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import pydantic.dataclasses
import safetensors.torch
import torch

from common.chat import AnyTemplate, template_from_dict
from common.errors import CheckpointError
from common.files import OF_RUN, STEP_NAME, read_json, sha256_file, write_json
from common.lora import LoRA, adapters_of, find_base, load_adapters, lora_of, merge
from common.tensors import Content, read_safetensors, read_weights, require_weights, weights_file, write_file
from common.validation import build, fields_of
from model import TransformerLanguageModel
from model_config import ModelConfig

T = TypeVar("T")
FORMAT_VERSION = 1
MANIFEST = "manifest.json"
BEST = "best"  # the folder of the best weights, in a run folder
WEIGHTS_FILES = ("model.safetensors", "config.json", "tokenizer.json")  # enough to generate
ADAPTERS = "adapter.safetensors"  # instead of the weights, if adapters for another checkpoint were trained
OPTIMIZER, STATE = "optimizer.safetensors", "training_state.json"  # best/ has no optimizer, imported weights neither
BYTES_A_PARAMETER = 12  # about, in a checkpoint: the weight and AdamW's two moments
# Keys of config.json besides the ModelConfig: ours, then the blog's.
CONFIG_EXTRAS = (
    "tokenizer_type",
    "total_parameters",
    "chat_template",
    "lora",
    "model_type",
    "architecture",
    "description",
    "model_name",
)


@pydantic.dataclasses.dataclass(frozen=True)
class Entry:
    size: int
    sha256: str


@pydantic.dataclasses.dataclass(frozen=True)
class Manifest:
    """manifest.json: the files of a checkpoint, by name."""

    files: dict[str, Entry]
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint folder whose files have been verified, or one in the blog's form, which has no hashes to verify."""

    path: Path

    def model_config(self) -> ModelConfig:
        """Read the shape of the model. Raises CheckpointError if config.json describes none. Unknown keys are reported
        and left out."""
        path = self.path / "config.json"
        values = read_json(path, CheckpointError)
        try:
            config = build(ModelConfig, {key: values[key] for key in fields_of(ModelConfig) if key in values})
        except ValueError as problem:
            raise CheckpointError(f"{path} does not describe a model: {problem}.") from None
        unknown = sorted(values.keys() - fields_of(ModelConfig) - set(CONFIG_EXTRAS))
        if unknown:
            print(f"Note: {path} has keys that this version does not know: {', '.join(unknown)}.", file=sys.stderr)
        return config

    def trusted_config(self) -> ModelConfig:
        """Read the `model_config`. Raises CheckpointError unless the weights have its shapes, so a wrong size in
        config.json cannot make a model that takes more memory than the weights."""
        config = self.model_config()
        with self.explaining_weights():
            require_weights(config, self.weights(shapes_only=True))
        return config

    def load_weights(self, model: TransformerLanguageModel) -> None:
        """Load the weights; if `model` has adapters, only these, because it has the weights of its base already."""
        with self.explaining_weights():
            if lora_of(model) is None:
                model.load_weights(self.weights())
            else:
                load_adapters(model, read_safetensors(self.path / ADAPTERS))

    def weights(self, shapes_only: bool = False) -> dict[str, torch.Tensor]:
        """Read the weights by name, with adapters merged into their base. `shapes_only`: on the meta device, reading
        only the file's header if the format has one.

        Raises ValueError or SafetensorError for a file of another kind, CheckpointError for a missing base.
        """
        if not (self.path / ADAPTERS).exists():
            return read_weights(self.path, shapes_only)
        lora = self.lora()
        if lora is None:
            raise ValueError(f'config.json has no "lora", which describes {ADAPTERS}')
        base = read_weights(find_base(lora, self.path), shapes_only)
        return merge(base, read_safetensors(self.path / ADAPTERS, shapes_only), lora, self.model_config())

    def weights_sha256(self) -> str:
        """Return the SHA-256 of its weights, or of its adapters: the same in every place that they are copied to."""
        adapters = self.path / ADAPTERS
        return sha256_file(adapters if adapters.exists() else weights_file(self.path))

    @contextlib.contextmanager
    def explaining_weights(self) -> Iterator[None]:
        """Turn the errors of loading weights into CheckpointError."""
        try:
            yield
        except (ValueError, KeyError, safetensors.SafetensorError) as problem:
            raise CheckpointError(f"The weights in {self.path} cannot be loaded: {problem}.") from None

    def tokenizer_path(self) -> Path:
        """Find the tokenizer. Raises CheckpointError if the folder has none."""
        for name in ("tokenizer.json", "bpe_tokenizer.json"):  # the second is the blog's
            if (self.path / name).exists():
                return self.path / name
        raise CheckpointError(f"{self.path} has no tokenizer.json; put the tokenizer of its training data there.")

    def chat_template(self) -> AnyTemplate | None:
        """Read the template of its training conversations, if any. Raises CheckpointError if it is not usable."""
        return self.from_config("chat_template", template_from_dict)

    def lora(self) -> LoRA | None:
        """Read the settings of its adapters; None if it has weights. Raises CheckpointError if they are not usable."""
        return self.from_config("lora", lambda values: build(LoRA, values))

    def from_config(self, key: str, build: Callable[[Any], T]) -> T | None:
        path = self.path / "config.json"
        value = read_json(path, CheckpointError).get(key)
        try:
            return None if value is None else build(value)
        except ValueError as problem:
            raise CheckpointError(f"{path} is not usable: {problem}.") from None

    def training_state(self) -> dict[str, Any]:
        return read_json(self.path / STATE, CheckpointError)

    def load_optimizer(self, optimizer: Any) -> None:
        try:
            optimizer.load_tensors(read_safetensors(self.path / OPTIMIZER))
        except FileNotFoundError:
            raise CheckpointError(
                f"{self.path} has weights and no optimizer state, so its training cannot continue: --init_from "
                f"{self.path} starts a new one from them."
            ) from None
        except (ValueError, safetensors.SafetensorError) as problem:
            raise CheckpointError(f"The optimizer state in {self.path} cannot be loaded: {problem}.") from None


def stored_weights(model: TransformerLanguageModel) -> dict[str, torch.Tensor]:
    """Return the weights to keep: only the adapters if the model has any; a tied head once."""
    if lora_of(model) is not None:
        return adapters_of(model)
    weights = model.state_dict()
    if model.config.tie_embeddings:
        del weights["head.weight"]  # the same tensor as token_embedding.weight
    return weights


def stored_config(
    model: TransformerLanguageModel, tokenizer_type: str, chat: AnyTemplate | None = None
) -> dict[str, Any]:
    """Return the content of config.json. `total_parameters` is without adapters, because merging adds no parameters."""
    lora, adapters = lora_of(model), adapters_of(model)
    return {
        **model.config.to_dict(),
        "tokenizer_type": tokenizer_type,
        "total_parameters": model.num_parameters() - sum(tensor.numel() for tensor in adapters.values()),
        **({"chat_template": chat.to_dict()} if chat else {}),
        **({"lora": lora.to_dict()} if lora else {}),
    }


def write_files(folder: Path, contents: dict[str, Content]) -> None:
    """Write files, then the manifest that lists them. Errors are those of `write_file`."""
    written = {name: write_file(folder / name, content) for name, content in contents.items()}
    files = {name: Entry((folder / name).stat().st_size, sha256) for name, sha256 in written.items()}
    write_manifest(folder, files)


def listed_files(folder: Path) -> dict[str, Entry]:
    """Read which files the manifest lists. Raises CheckpointError."""
    try:
        return build(Manifest, read_json(folder / MANIFEST, CheckpointError)).files
    except ValueError as problem:
        raise CheckpointError(f"{MANIFEST} does not list files: {problem}.") from None


def write_manifest(folder: Path, files: dict[str, Entry]) -> None:
    write_json(folder / MANIFEST, asdict(Manifest(files)))


def entry_of(path: Path) -> Entry:
    return Entry(path.stat().st_size, sha256_file(path))


def problems_of(folder: Path) -> list[str]:
    """Return what is wrong with a checkpoint folder: files that are missing, too short or changed. Empty if it is
    whole."""
    if not (folder / MANIFEST).exists():
        return [f"{MANIFEST} is missing (the folder was never completed)"]
    try:
        files = listed_files(folder)
    except CheckpointError as problem:
        return [str(problem).rstrip(".")]
    weights = WEIGHTS_FILES if ADAPTERS not in files else (ADAPTERS, *WEIGHTS_FILES[1:])
    needed = [*weights, *(name for name in (OPTIMIZER, STATE) if OPTIMIZER in files or (folder / name).exists())]
    problems = [f"{MANIFEST} does not list {name}" for name in needed if name not in files]
    for name, entry in files.items():
        path = folder / name
        if Path(name).name != name.removeprefix(f"{OF_RUN}/"):
            problems.append(f"{name!r} is not a file name")
        elif not os.path.isfile(path):  # False also for a name that no file can have
            problems.append(f"{name} is missing")
        elif path.stat().st_size != entry.size:
            problems.append(f"{name} has {path.stat().st_size:,} bytes instead of {entry.size}")
        elif sha256_file(path) != entry.sha256:
            problems.append(f"{name} was altered (its SHA-256 differs)")
    return problems


def describe_damage(folder: Path, problems: Iterable[str]) -> str:
    there = ", ".join(sorted(path.name for path in folder.iterdir())) if folder.is_dir() else "nothing"
    return f"The checkpoint {folder} is damaged: {'; '.join(problems)}. There: {there}."


def step_folders(*parents: Path) -> list[Path]:
    """Return the complete checkpoints in the given folders, newest (highest step) first; of one step, those of the
    first parent first."""
    folders = [path for parent in parents if parent.is_dir() for path in parent.iterdir()]
    return sorted((path for path in folders if STEP_NAME.fullmatch(path.name)), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """Return the step in the name of one of `step_folders`."""
    match = STEP_NAME.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def newest_valid(*parents: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint in the folders `parents`; None if they have none. Damaged ones that are newer
    are reported and skipped. Raises CheckpointError listing what is wrong with each, if all are damaged."""
    damaged: list[str] = []
    for folder in step_folders(*parents):
        try:
            problems = problems_of(folder)
        except FileNotFoundError:
            problems = ["a file is gone"]
        if problems and not folder.exists():  # it made way for a newer one, in this moment
            return newest_valid(*parents)
        if not problems:
            for damage in damaged:
                print(f"Warning: {damage} Trying the one before it.", file=sys.stderr)
            return Checkpoint(folder)
        damaged.append(describe_damage(folder, problems))
    if damaged:
        raise CheckpointError("\n  ".join(["There is no whole checkpoint.", *damaged]))
    return None


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a checkpoint folder (ours, or the blog's without a manifest), or the newest whole checkpoint of a run
    folder.

    Raises CheckpointError that says what is there instead.
    """
    path = Path(path)
    if path.is_file():
        raise CheckpointError(f"{path} is a file; name its folder: {path.parent}.{list_checkpoints()}")
    if not path.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {path}.{list_checkpoints()}")
    if (path / "checkpoints").is_dir() or step_folders(path):
        checkpoint = newest_valid(path / "checkpoints", path)
        if checkpoint is None:
            raise CheckpointError(f"The run {path} has no checkpoint yet.{list_checkpoints()}")
        return checkpoint
    if any(step_folders(*path.glob("*/checkpoints"), *path.glob("*"))):  # a folder of runs, or a --checkpoint_dir
        return open_checkpoint(newest_run(path))
    if not (path / MANIFEST).exists():
        if (path / "pytorch_model.bin").exists():
            return Checkpoint(path)
        if not any((path / name).exists() for name in ("model.safetensors", "config.json")):
            raise CheckpointError(f"{path} is not a checkpoint or run folder.{list_checkpoints()}")
    problems = problems_of(path)
    if problems:
        raise CheckpointError(describe_damage(path, problems) + list_checkpoints())
    return Checkpoint(path)


def newest_run(runs: Path = Path("runs")) -> Path:
    """Find the run folder, or the mirror of a run, whose newest checkpoint was written last. Raises CheckpointError if
    there is none."""
    folders = step_folders(*runs.glob("*/checkpoints"), *runs.glob("*"))
    manifests = [folder / MANIFEST for folder in folders if (folder / MANIFEST).exists()]
    if not manifests:
        raise CheckpointError(
            f"There is no trained model in {runs.absolute()}/. Train one first, for instance: "
            "python train_colab_mmap.py --config quickstart.json; or name one with --checkpoint PATH."
        )
    parent = max(manifests, key=lambda path: path.stat().st_mtime_ns).parents[1]
    return parent.parent if parent.name == "checkpoints" else parent


def list_checkpoints() -> str:
    there = [str(path) for path in step_folders(*Path("runs").glob("*/checkpoints"))]
    return f" Checkpoints in runs/: {', '.join(there)}." if there else ""
