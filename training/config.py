"""The settings of a run: their ranges, help texts and contradictions. Read from defaults, a config file and flags;
later ones win, and all problems are reported at once.

This module does not import torch, so that `--help` answers at once."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from common.errors import ConfigError
from common.files import name_input, read_json
from common.flags import Parser
from common.script import world
from common.validation import STRICT, NonEmptyText, check, extras, fields_of, option, options_of, suggest
from generation.request import FLAGS as GENERATION_FLAGS
from model_config import ModelConfig, Size, setting
from tokenization.settings import FLAGS as TOKENIZATION_FLAGS
from tokenization.settings import HUB

if TYPE_CHECKING:
    from common.lora import LoRA


# The quickstart's text, and questions that it does not ask in these words.
BUILTIN_CONVERSATIONS = "builtin:conversations"
REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_SIZES = ("tiny", "small", "medium", "large", "xlarge", "gpt2_small", "gpt2_medium")
INTERNAL_FIELDS = ("name", "sources", "forecast")
MIN_MINUTES = 0.0001
Count = Annotated[int, Field(ge=0)]
Number = Annotated[float, Field(ge=0)]
Sequences = Annotated[int, Field(ge=1, le=1_000_000)]  # a larger number must be a mistake


@dataclass(frozen=True, config=ConfigDict(allow_inf_nan=False))
class Forecast:
    """The dial's forecast for a run."""

    bits_per_byte: float
    error: float  # half of the interval
    tokens_per_second: float
    cpu_share: float = 1.0  # CPU time / time of the timed steps; below 1, other programs used the CPU
    minutes: float = 0.0  # the forecast is for this --minutes
    alone: float | None = None  # bits per byte without the companion, if there is one


@dataclass(frozen=True, config=STRICT)
class DataKeys:
    """The settings that name the training text."""

    input: NonEmptyText | None = option(
        None, "data", "text file(s) to tokenize on first use, or builtin:conversations", scope="place"
    )
    tokenizer: Literal["bpe", "char"] = option("bpe", "data", "tokenizer to train on --input", scope="place")
    text_key: NonEmptyText = option("text", "data", "key or column of --input that holds the text", scope="place")
    max_mb: float | None = option(
        None,
        "data",
        "megabytes of text to take from an hf:// --input, spread over its files [as much as fits --minutes]",
        gt=0,
        scope="place",
    )
    companion: NonEmptyText | None = option(
        None,
        "data",
        "a second, larger text to train on first",
        scope="place",
    )
    data_dir: NonEmptyText | None = option(
        None, "data", "token folder written by tokenize_local_bpe.py [datasets_cache]", scope="place"
    )
    bin_file: NonEmptyText | None = option(
        None, "data", "token file, with --tokenizer_file and --metadata_file", scope="place"
    )
    tokenizer_file: NonEmptyText | None = option(None, "data", "tokenizer of --bin_file", scope="place")
    metadata_file: NonEmptyText | None = option(None, "data", "metadata of --bin_file", scope="place")
    placement: Literal["auto", "gpu", "ram", "mmap"] = option(
        "auto", "data", "where to keep tokens during training", scope="place"
    )
    model_size: Literal[MODEL_SIZES] | None = option(  # type: ignore[valid-type]
        None, "model", "take the model keys from configs/<model_size>.json", scope="place"
    )


@dataclass(frozen=True, config=STRICT)
class Config(ModelConfig, DataKeys):
    """All settings of a run. Each field with a description is a key of a config JSON and a flag of the same name.

    The order of fields is the order of --help.
    """

    vocab_size: int = option(
        32_000, "data", "vocabulary to train on --input (bpe)", ge=259, le=2**31 - 1, scope="place"
    )
    embed_dim: Size = setting(256, "width of the residual stream")
    num_heads: Size = setting(4, "attention heads; must divide embed_dim")
    num_layers: Size = setting(4, "transformer blocks")
    max_seq_len: Size = setting(256, "context length in tokens")

    epochs: int = option(10, "length", "passes over the training split", ge=1, of=("max_steps", 0))
    max_steps: Count = option(0, "length", "optimizer steps in all; 0: as many as the epochs take")
    minutes: float = option(
        0.0,
        "length",
        "time budget across sessions, capped by --epochs; the decay finishes within it; 0 is off",
        ge=0,
        le=100_000,
    )
    max_steps_per_epoch: Count = option(0, "length", "end an epoch after this many steps, 0 is off")
    max_hours: Number = option(0.0, "length", "stop, saved, once the run has taken this long across sessions, 0 is off")

    batch_size: Sequences = option(32, "batch", "sequences per batch")
    gradient_accumulation_steps: Sequences = option(1, "batch", "batches per optimizer step")
    micro_batch_size: int | None = option(
        None,
        "batch",
        "sequences per forward pass; affects memory, not results (dropout's draws aside) [batch_size, or what fits]",
        ge=1,
        scope="place",
    )
    activation_checkpointing: bool = option(
        False, "batch", "keep only a block's input for the backward pass: less memory, a third more time"
    )

    optimizer: Literal["adamw", "muon"] = option(
        "adamw", "optimizer", "muon: Muon for the matrices inside blocks, AdamW for the rest", scope="fixed"
    )
    learning_rate: float = option(1e-3, "optimizer", "peak learning rate (AdamW)", gt=0)
    muon_learning_rate: float = option(
        0.02, "optimizer", "peak learning rate of Muon; follows the same curve", gt=0, of=("optimizer", "muon")
    )
    muon_momentum: float = option(
        0.95, "optimizer", "momentum of Muon (Nesterov's)", ge=0, lt=1, of=("optimizer", "muon")
    )
    min_lr: Number = option(1e-5, "optimizer", "learning rate at the end of the decay")
    warmup_steps: Count = option(0, "optimizer", "steps of linear warmup")
    use_lr_scheduler: Literal["cosine", "linear", "constant"] = option(
        "cosine", "optimizer", "decay of the learning rate to min_lr", switch=("cosine", "constant")
    )
    cooldown: float = option(1.0, "optimizer", "fraction of training spent decaying the learning rate", gt=0, le=1)
    weight_decay: Number = option(
        0.1, "optimizer", "decoupled weight decay: AdamW's matrices, or with muon those of Muon alone"
    )
    beta2: float = option(0.95, "optimizer", "AdamW: decay of the second moment", ge=0, lt=1)
    grad_clip: Number = option(1.0, "optimizer", "largest norm of the gradient, 0 is off")
    seed: int = option(1337, "optimizer", "seed of weights, data order and dropout", ge=0, lt=2**32)

    lora_rank: Count = option(
        0, "adapters", "LoRA rank; the weights of --init_from stay frozen; 0 is off", scope="fixed"
    )
    lora_alpha: float = option(
        16.0,
        "adapters",
        "the adapters' output is scaled by lora_alpha / lora_rank",
        gt=0,
        of=("lora_rank", None),
        scope="fixed",
    )
    lora_targets: Literal[
        "attention,feed_forward,embeddings", "attention,feed_forward", "attention", "feed_forward"
    ] = option(
        "attention,feed_forward,embeddings",
        "adapters",
        "layers that get adapters; the embeddings are those of tokens, and the head",
        of=("lora_rank", None),
        scope="fixed",
    )

    eval_interval: Count = option(500, "evaluation", "steps between evaluations, 0 is off")
    eval_batches: Count = option(50, "evaluation", "validation batches of batch_size; 0: the whole split")
    eval_prompts: NonEmptyText | None = option(
        None, "evaluation", "JSONL of {prompt, answer?} answered at each evaluation, or builtin:conversations"
    )
    stop_after_worse: Count = option(
        0, "evaluation", "stop after this many evaluations in a row without a better validation loss, 0 is off"
    )
    log_interval: Count | None = option(
        None, "evaluation", "steps between reports, 0 is off [10; on one GPU as many as take 0.2 s]"
    )
    tracker: Literal["tensorboard", "trackio", "wandb"] | None = option(
        None, "evaluation", "also show the losses there, each with its own package"
    )
    units_per_hour: float | None = option(
        None, "evaluation", "Colab compute units the machine costs an hour, 0 is off [8 on an A100]", ge=0
    )

    output_dir: NonEmptyText | None = option(None, "checkpoints", "run folder [runs/<config name>]", scope="place")
    checkpoint_steps: Count = option(0, "checkpoints", "steps between checkpoints, 0 is off")
    checkpoint_interval: Count = option(3, "checkpoints", "epochs between checkpoints, 0 is off")
    checkpoint_minutes: Number = option(15.0, "checkpoints", "minutes between checkpoints, 0 is off")
    checkpoint_dir: NonEmptyText | None = option(
        None, "checkpoints", "also copy each checkpoint here, Drive for instance", scope="place"
    )
    resume: Literal["auto", "never"] = option(
        "auto", "checkpoints", "auto: continue the run in output_dir; never: start over", scope="command"
    )
    resume_from: NonEmptyText | None = option(
        None, "checkpoints", "continue from this checkpoint or run folder", scope="place"
    )
    init_from: NonEmptyText | None = option(
        None, "checkpoints", "start a new run from the weights of this checkpoint", scope="place"
    )

    device: Literal["auto", "cpu", "cuda", "mps"] = option("auto", "hardware", "where to compute")
    use_gpu: bool = option(True, "hardware", "use a GPU if there is one")
    precision: Literal["auto", "bf16", "fp16", "fp32"] = option("auto", "hardware", "arithmetic; weights stay fp32")
    compile: Literal["auto", "on", "off"] = option("auto", "hardware", "torch.compile", switch=("on", "off"))
    graphs: Literal["auto", "off"] = option(
        "auto", "hardware", "auto: capture steps as CUDA graphs where memory suffices, so that the GPU need not wait"
    )
    threads: int | None = option(
        None, "hardware", "threads of a CPU [one a core, or fewer if --minutes alone finds that faster]", ge=1, le=1024
    )
    dry_run: bool = option(
        False, "hardware", "check everything, take two steps, forecast the run, write no run", scope="command"
    )
    profile: bool = option(
        False, "hardware", "time the parts of a step, say what limits it, write no run", scope="command"
    )

    name: str = "default"  # name of the config file or model size
    sources: dict[str, str] = Field(default_factory=dict)  # key -> where its value came from
    forecast: Forecast | None = None  # None unless training/dial.py chose the model

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir or Path("runs") / self.name).expanduser()

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def sequences_per_process(self) -> int:
        """Sequences per step and process, rounded up: some processes may take one less."""
        return math.ceil(self.sequences_per_step / world().size)

    def rows_at_once(self, micro_batch_size: int) -> int:
        """Return the sequences per forward pass, at most `micro_batch_size`. A process cuts its share of a step into
        micro-batches of this size; the last may be smaller."""
        return math.ceil(self.sequences_per_process / math.ceil(self.sequences_per_process / micro_batch_size))

    @property
    def needs_dial(self) -> bool:
        """Whether training/dial.py chooses the model: a text or its tokens are given, and neither shape nor weights."""
        is_from_file = any(source not in ("default", "flag") for source in self.sources.values())
        if is_from_file or self.model_size or self.init_from or self.resume_from:
            return False
        has_shape = self.is_explicit("num_layers") or self.is_explicit("embed_dim")
        if self.minutes:
            return bool(self.input or ((self.data_dir or self.bin_file) and not has_shape))
        has_length = self.is_explicit("epochs") or self.is_explicit("max_steps")
        return bool(self.input) and not (has_shape or has_length or self.data_dir)

    def values(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in SCHEMA}

    def is_explicit(self, key: str) -> bool:
        return self.sources.get(key, "default") != "default"

    def fill_in(self) -> None:
        """Do nothing: `shape` fills in what was not given."""

    def head_contradictions(self) -> list[str]:
        """List contradictions between width and heads, unless the dial will choose one of them."""
        are_given = self.is_explicit("embed_dim") and self.is_explicit("num_heads")
        return super().head_contradictions() if are_given or not self.needs_dial else []

    def shape(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(**{key: getattr(self, key) for key in fields_of(ModelConfig)} | {"vocab_size": vocab_size})

    def lora(self, base: str = "any", base_sha256: str = "0" * 64) -> LoRA:
        """Return the description of the adapters. Where only sizes matter, the defaults for the base suffice."""
        from common.lora import TARGETS, LoRA

        modules: Any = (module for target in self.lora_targets.split(",") for module in TARGETS[target])
        return LoRA(self.lora_rank, self.lora_alpha, tuple(sorted(modules)), base, base_sha256)

    def contradictions(self) -> list[str]:
        """List contradictions between settings, and with the number of processes."""
        problems = super().contradictions()

        def where(key: str) -> str:
            return self.sources.get(key, "default")

        named_files = [key for key in ("bin_file", "tokenizer_file", "metadata_file") if getattr(self, key)]
        if named_files and len(named_files) < 3:
            missing = " and ".join(
                f"--{key}" for key in ("bin_file", "tokenizer_file", "metadata_file") if key not in named_files
            )
            problems.append(f"--{named_files[0]} needs {missing} beside it (or use --data_dir FOLDER for all three)")
        if named_files and self.data_dir:
            problems.append("--data_dir and --bin_file both name the tokens; give one of them")
        if named_files and self.input:
            problems.append("--input and --bin_file both name the data; give one of them")
        if not self.input:
            problems += [
                f"{key} applies to --input only; leave it out"
                for key in ("tokenizer", "vocab_size", "text_key")
                if self.is_explicit(key)
            ]
        if self.needs_dial and not self.minutes:
            problems.append(
                f"--input {self.input} needs a number of minutes, such as --minutes 60, for which the model, its "
                "vocabulary and the epochs are chosen, or a --config"
            )
        if self.companion and (not self.input or self.data_dir):
            problems.append("--companion needs --input, which names your own text, and no --data_dir")
        if self.max_mb and not any(text and text.startswith(HUB) for text in (self.input, self.companion)):
            problems.append(f"max_mb applies only to an --input that begins with {HUB}; leave it out")
        if self.input and self.input.startswith(HUB) and not (self.max_mb or self.needs_dial):
            problems.append(f"--input {self.input} may be very large: add --max_mb 500 to read only that much")
        problems += [
            f"{key} ({where(key)}) applies only with --{of} {value or 'N'}; leave it out"
            for key, (of, value) in CONDITIONS.items()
            if self.is_explicit(key) and not _has_effect(key, vars(self)) and key != "epochs"
            if not (where(of) == "flag" and where(key) != "flag")  # flags win
        ]
        if self.lora_rank and self.optimizer == "muon":
            problems.append("lora_rank trains adapters, which needs AdamW; add --optimizer adamw")
        if self.lora_rank and not (self.init_from or self.resume_from):
            problems.append("lora_rank needs a trained model to adapt; name it with --init_from CHECKPOINT")
        if self.use_lr_scheduler == "constant" and where("cooldown") == "flag":
            problems.append("cooldown applies only with --use_lr_scheduler cosine or linear; leave it out")
        if self.minutes and self.use_lr_scheduler == "constant":
            problems.append(
                "minutes needs a learning rate that decays; add --use_lr_scheduler linear, or limit the time by "
                "--max_hours"
            )
        if 0 < self.minutes < MIN_MINUTES:
            problems.append(f"minutes is {self.minutes:g}; allowed: 0 (off), or at least {MIN_MINUTES:g}")
        if self.minutes and self.cooldown == 1 and self.is_explicit("cooldown"):
            problems.append(
                "cooldown 1 decays from the first step, and with minutes the last step is not known by then; give a "
                "--cooldown below 1"
            )
        if self.input and where("init_from") == "flag":
            problems += [
                f"{key} has no effect with --init_from, because its tokenizer is used; leave it out"
                for key in ("tokenizer", "vocab_size")
                if where(key) == "flag"
            ]
        is_overruled = where("tokenizer") == "flag" and where("vocab_size") != "flag"
        if self.tokenizer == "char" and self.is_explicit("vocab_size") and not is_overruled:
            problems.append("vocab_size has no effect with tokenizer char; leave it out")
        if self.min_lr > self.learning_rate and self.use_lr_scheduler != "constant":
            problems.append(
                f"min_lr {self.min_lr:g} ({where('min_lr')}) is above learning_rate {self.learning_rate:g} "
                f"({where('learning_rate')})"
            )
        problems += [
            f"{key} {value!r} is not UTF-8, so safetensors cannot open files in it; choose another folder"
            for key, value in (("output_dir", self.output_dir), ("checkpoint_dir", self.checkpoint_dir))
            if any("\ud800" <= character <= "\udfff" for character in value or "")
        ]
        rows = self.sequences_per_step
        if (self.micro_batch_size or 1) > rows:
            problems.append(f"micro_batch_size {self.micro_batch_size} is above the {rows} sequences of a step")
        if world().size > rows:
            problems.append(
                f"torchrun started {world().size} processes for the {rows} sequences of a step (batch_size * "
                f"gradient_accumulation_steps): --nproc_per_node={rows} at most, or a larger --batch_size"
            )
        if self.profile and world().size > 1:
            problems.append(
                f"--profile runs in one process, and torchrun started {world().size}; use python "
                "train_colab_mmap.py ... --profile"
            )
        if self.device in ("cuda", "mps") and not self.use_gpu:
            problems.append(f"--device {self.device} and --use_gpu false contradict each other")
        if self.dry_run and self.profile:
            problems.append("--dry_run and --profile each replace the training; give one of them")
        if self.resume_from and self.resume == "never":
            problems.append("--resume_from and --resume never contradict each other")
        if self.resume_from and self.init_from:
            problems.append("--resume_from continues a run, --init_from starts a new one; give one of them")
        if self.stop_after_worse and not self.eval_interval:
            problems.append("--stop_after_worse needs evaluations; give an --eval_interval above 0")
        return problems


SCHEMA = options_of(Config)
MODEL_KEYS = tuple(options_of(ModelConfig))
CONDITIONS = {key: extras(f)["of"] for key, f in SCHEMA.items() if "of" in extras(f)}


def _has_effect(key: str, values: Mapping[str, Any]) -> bool:
    """Return whether a key has an effect with these values of the others."""
    of, value = CONDITIONS.get(key, (key, None))
    return key not in CONDITIONS or (bool(values.get(of)) if value is None else values.get(of) == value)


def is_resolved(content: dict[str, Any]) -> bool:
    """Return whether this is a run folder's config.json, which records each value with its source."""
    return isinstance(content.get("config"), dict) and isinstance(content.get("sources"), dict)


def scope_of(key: str) -> str:
    """Return the scope of a key (see `option`). The shape of the model is fixed, except its dropout."""
    if key in MODEL_KEYS:
        return "run" if key == "dropout" else "fixed"
    return str(extras(SCHEMA[key]).get("scope", "run")) if key in SCHEMA else "run"


OTHER_SCRIPTS_FLAGS = {
    **dict.fromkeys(GENERATION_FLAGS.keys() - SCHEMA.keys(), "generate.py"),
    **dict.fromkeys(TOKENIZATION_FLAGS.keys() - SCHEMA.keys(), "tokenize_local_bpe.py"),
}


def parse_config(argv: Sequence[str] | None = None, chosen: Mapping[str, Any] | None = None, by: str = "") -> Config:
    """Combine defaults, config file and flags; later ones win. `chosen` stands in for a config file: settings that a
    part of the program has chosen, `by` names it.

    Raises ConfigError listing every problem found in any of them.
    """
    problems: list[str] = []
    flags = _trainer_parser().read(argv, problems)
    config_name = flags.pop("config", None)
    layers: list[tuple[str, dict[str, Any]]] = [(by, dict(chosen))] if chosen else []
    name = "default"
    text = flags.get("input") or flags.get("data_dir") or flags.get("bin_file")
    if config_name is None and isinstance(text, str) and flags.get("minutes"):
        name = name_input(text.removeprefix("builtin:")) or name
    if config_name is not None:
        path = _find_config(config_name)
        content = read_json(path, ConfigError)
        name = path.resolve().parent.name if is_resolved(content) else path.stem
        layers.append((str(path), _explicit_values(content) if is_resolved(content) else content))
    layers.append(("flag", flags))

    values: dict[str, Any] = {}
    sources = dict.fromkeys(SCHEMA, "default")
    for source, layer in layers:
        if (size := layer.get("model_size")) in MODEL_SIZES:
            name = name if config_name is not None else size
            values |= _read_preset(size)
            sources |= dict.fromkeys(_read_preset(size), f"model_size {size}")
        # A layer that sets the length of the run replaces the earlier length.
        for key, others in (("max_steps", ("epochs", "minutes")), ("minutes", ("max_steps",))):
            if key not in layer and any(layer.get(other) for other in others):
                values.pop(key, None)
                sources[key] = "default"
        for key in ("epochs", "minutes"):
            if layer.get("max_steps") and layer.get(key):
                problems.append(f"{key} and max_steps both set the length of the run ({source}); give one of them")
        values |= layer
        sources |= dict.fromkeys(layer, source)
    values |= {"name": name, "sources": sources}

    names = {key: f"--{key}" if source == "flag" else f"{key} in {source}" for key, source in sources.items()}
    sourced = (*problems, *(f"--{key} is " for key in flags))  # these name their source
    config = check(Config, values, problems, names, SCHEMA | {key: fields_of(Config)[key] for key in INTERNAL_FIELDS})
    if problems or config is None:
        place = ""
        if config_name is not None and not all(problem.startswith(sourced) for problem in problems):
            place = f" in {layers[0][0]}"
        raise ConfigError("\n  ".join([f"The configuration{place} is not valid:", *problems]))
    return config


def _explicit_values(resolved: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the user gave, from a run's resolved configuration. They suffice to continue the run."""
    values, sources = resolved["config"], resolved["sources"]
    return {
        key: value
        for key, value in values.items()
        if sources.get(key, "default") != "default" and scope_of(key) != "command" and _has_effect(key, values)
    }


def _find_config(name: str) -> Path:
    """Find a config by path or bare name, in the current folder, then in configs/, with or without .json."""
    names = [name] if name.endswith(".json") else [name, f"{name}.json"]
    folders = [Path(), Path("configs"), REPOSITORY / "configs"]
    for folder in folders:
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    available = sorted({path.name for folder in folders[1:] for path in folder.glob("*.json")})
    raise ConfigError(
        f"No config {name} in {Path.cwd()} or in configs/.{suggest(Path(name).name, available)} Available: "
        f"{', '.join(available)}."
    )


def _read_preset(size: str) -> dict[str, Any]:
    """Read the model keys of one of MODEL_SIZES."""
    keys = read_json(REPOSITORY / "configs" / f"{size}.json", ConfigError)
    return {key: value for key, value in keys.items() if key in MODEL_KEYS}


@functools.cache
def _trainer_parser() -> Parser:
    parser = Parser(
        prog="train_colab_mmap.py",
        usage="%(prog)s --config FILE [--KEY VALUE ...]",
        description="Train a GPT-2 class language model on a token file. Every flag is also a key of the config file; "
        "flags win. Running the same command again continues the run.",
        epilog="Example: python train_colab_mmap.py --config gpt2_small.json --batch_size 32",
    )
    parser.add_argument("--config", metavar="FILE", help="JSON file of keys, looked up here and in configs/")
    parser.add_options(SCHEMA, OTHER_SCRIPTS_FLAGS)
    return parser
