"""TrainConfig: one schema for defaults, config files and flags (later ones win), every problem reported at once.

Torch is imported only when the values are checked together, so that `--help` answers at once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import ConfigError
from common.files import read_json
from common.flags import Parser, add_debug, check_values, option, options_of, suggest
from common.launch import place
from model_config import ACTIVATIONS, ModelConfig
from training.contradictions import contradictions

if TYPE_CHECKING:
    from common.lora import LoRA

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_SIZES = ("tiny", "small", "medium", "large", "xlarge", "gpt2_small", "gpt2_medium")
MOST_SEQUENCES = 1_000_000  # more must be a mistake
NOT_GIVEN = ("default", "memory", "out of memory")  # sources of values that no user gave


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Each field is a key of a config JSON and a flag of the same name."""

    # The order of fields is the order of --help.
    input: str | None = option(None, "data", "text file(s) to tokenize on first use, or builtin:conversations")
    tokenizer: str = option("bpe", "data", "tokenizer to train on --input", choices=("bpe", "char"))
    vocab_size: int = option(32_000, "data", "vocabulary to train on --input (bpe)", low=259, high=2**31 - 1)
    data_dir: str | None = option(None, "data", "token folder written by tokenize_local_bpe.py [datasets_cache]")
    bin_file: str | None = option(None, "data", "token file, with --tokenizer_file and --metadata_file")
    tokenizer_file: str | None = option(None, "data", "tokenizer of --bin_file")
    metadata_file: str | None = option(None, "data", "metadata of --bin_file")
    placement: str = option(
        "auto", "data", "where the tokens lie while training", choices=("auto", "gpu", "ram", "mmap")
    )
    model_size: str | None = option(None, "model", "take the model keys from configs/<model_size>.json")
    embed_dim: int = option(256, "model", "width of the residual stream", low=1)
    num_heads: int = option(4, "model", "attention heads; must divide embed_dim", low=1)
    num_layers: int = option(4, "model", "transformer blocks", low=1)
    ff_dim: int | None = option(None, "model", "hidden width of the feed-forward [4 * embed_dim; swiglu 8/3]", low=1)
    max_seq_len: int = option(256, "model", "context length in tokens", low=1)
    dropout: float = option(0.0, "model", "dropout probability", low=0.0, below=1.0)
    bias: bool = option(True, "model", "biases in linear layers and norms")
    tie_embeddings: bool = option(False, "model", "share the token embedding with the head")
    activation: str = option("gelu", "model", "feed-forward activation", choices=ACTIVATIONS)
    norm: str = option("layernorm", "model", "normalisation", choices=("layernorm", "rmsnorm"))
    position: str = option("learned", "model", "position information", choices=("learned", "rope"))
    qk_norm: bool = option(False, "model", "normalise queries and keys")
    logit_softcap: float = option(0.0, "model", "soft limit of the logits, 0 is off", low=0.0)
    embed_norm: bool = option(False, "model", "normalise the embeddings before the first block")
    zero_init: bool = option(False, "model", "start projections into the residual stream, and the head, at zero")

    epochs: int = option(10, "length", "passes over the training split", low=1)
    max_steps: int = option(0, "length", "optimizer steps in all; 0: as many as the epochs take", low=0)
    minutes: float = option(
        0.0,
        "length",
        "train for this long in all sessions, no further than the epochs; the learning rate falls in time to end "
        "then; 0 is off",
        low=0.0,
        high=100_000.0,
    )
    max_steps_per_epoch: int = option(0, "length", "end an epoch after this many steps, 0 is off", low=0)
    max_hours: float = option(
        0.0, "length", "stop, saved, once the run has taken this long in all its sessions, 0 is off", low=0.0
    )

    batch_size: int = option(32, "batch", "sequences per batch", low=1, high=MOST_SEQUENCES)
    gradient_accumulation_steps: int = option(1, "batch", "batches per optimizer step", low=1, high=MOST_SEQUENCES)
    micro_batch_size: int | None = option(
        None,
        "batch",
        "sequences at once: a matter of memory, not of the result (dropout's draws aside) [batch_size, or what fits]",
        low=1,
    )
    activation_checkpointing: bool = option(
        False, "batch", "keep only a block's input for the backward pass: less memory, a third more time"
    )

    optimizer: str = option(
        "adamw", "optimizer", "muon: Muon for the matrices inside blocks, AdamW for the rest", choices=("adamw", "muon")
    )
    learning_rate: float = option(1e-3, "optimizer", "peak learning rate (AdamW)", above=0.0)
    muon_learning_rate: float = option(
        0.02, "optimizer", "peak learning rate of Muon; follows the same curve", above=0.0
    )
    min_lr: float = option(1e-5, "optimizer", "learning rate at the end of the decay", low=0.0)
    warmup_steps: int = option(0, "optimizer", "steps of linear warmup", low=0)
    use_lr_scheduler: str = option(
        "cosine",
        "optimizer",
        "decay of the learning rate to min_lr",
        choices=("cosine", "linear", "constant"),
        switch=("cosine", "constant"),
    )
    cooldown: float = option(
        1.0, "optimizer", "share of the steps that the decay takes, up to the last", above=0.0, high=1.0
    )
    weight_decay: float = option(
        0.1, "optimizer", "decoupled weight decay: AdamW's matrices, or with muon those of Muon alone", low=0.0
    )
    beta2: float = option(0.95, "optimizer", "AdamW: decay of the second moment", low=0.0, below=1.0)
    grad_clip: float = option(1.0, "optimizer", "largest norm of the gradient, 0 is off", low=0.0)
    seed: int = option(1337, "optimizer", "seed of weights, data order and dropout", low=0, high=2**32 - 1)

    lora_rank: int = option(
        0, "adapters", "train adapters of this rank beside the weights of --init_from, which stay; 0 is off", low=0
    )
    lora_alpha: float = option(16.0, "adapters", "the adapters' output is scaled by lora_alpha / lora_rank", above=0.0)
    lora_targets: str = option(
        "attention,feed_forward,embeddings",
        "adapters",
        "layers that get adapters; the embeddings are those of tokens, and the head",
        choices=("attention,feed_forward,embeddings", "attention,feed_forward", "attention", "feed_forward"),
    )

    eval_interval: int = option(500, "evaluation", "steps between evaluations, 0 is off", low=0)
    eval_batches: int = option(50, "evaluation", "validation batches of batch_size; 0: the whole split", low=0)
    eval_prompts: str | None = option(
        None, "evaluation", "JSONL of {prompt, answer?} answered at each evaluation, or builtin:conversations"
    )
    stop_after_worse: int = option(
        0, "evaluation", "stop after this many evaluations in a row without a better validation loss, 0 is off", low=0
    )
    log_interval: int = option(10, "evaluation", "steps between reports, 0 is off", low=0)
    tensorboard: bool = option(False, "evaluation", "also write TensorBoard's event files into the run folder")
    units_per_hour: float | None = option(
        None, "evaluation", "Colab compute units the machine costs an hour, 0 is off [8 on an A100]", low=0.0
    )

    output_dir: str | None = option(None, "checkpoints", "run folder [runs/<config name>]")
    checkpoint_steps: int = option(0, "checkpoints", "steps between checkpoints, 0 is off", low=0)
    checkpoint_interval: int = option(3, "checkpoints", "epochs between checkpoints, 0 is off", low=0)
    checkpoint_minutes: float = option(15.0, "checkpoints", "minutes between checkpoints, 0 is off", low=0.0)
    checkpoint_dir: str | None = option(None, "checkpoints", "also copy each checkpoint here, Drive for instance")
    resume: str = option(
        "auto", "checkpoints", "auto: continue the run in output_dir; never: start over", choices=("auto", "never")
    )
    resume_from: str | None = option(None, "checkpoints", "continue from this checkpoint or run folder")
    init_from: str | None = option(None, "checkpoints", "start a new run from the weights of this checkpoint")

    device: str = option("auto", "hardware", "where to compute", choices=("auto", "cpu", "cuda", "mps"))
    use_gpu: bool = option(True, "hardware", "use a GPU if there is one")
    precision: str = option(
        "auto", "hardware", "arithmetic; weights stay fp32", choices=("auto", "bf16", "fp16", "fp32")
    )
    compile: str = option("auto", "hardware", "torch.compile", choices=("auto", "on", "off"), switch=("on", "off"))
    shard: bool = option(
        False,
        "hardware",
        "with torchrun: each process keeps a slice of weights, gradients and optimizer state (FSDP2); for large models",
    )
    dry_run: bool = option(False, "hardware", "check everything, time one step, forecast the run, write no run")
    profile: bool = option(False, "hardware", "time the parts of a step, say what limits it, write no run")

    name: str = "default"  # of the config file, or of the model size
    sources: dict[str, str] = field(default_factory=dict, compare=False)  # where each value came from
    processes: int = 1  # how many torchrun started; they share each step
    imported: dict[str, Any] = field(default_factory=dict)  # of `init_from`: what a model has and no flag changes

    @property
    def run_dir(self) -> Path:
        return Path(self.output_dir or Path("runs") / self.name).expanduser()

    @property
    def sequences_per_step(self) -> int:
        return self.batch_size * self.gradient_accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        return self.sequences_per_step * self.max_seq_len

    @property
    def is_sharded(self) -> bool:
        """Whether each process keeps only a slice of weights, gradients and the optimizer's state."""
        return self.shard and self.processes > 1

    @property
    def sequences_per_process(self) -> int:
        """Sequences of a step per process, rounded up: some processes may take one less."""
        return math.ceil(self.sequences_per_step / self.processes)

    @property
    def rows_at_once(self) -> int:
        """Sequences that go through the model at once. A process cuts its share of a step into micro-batches of this
        size; the last may be smaller."""
        slices = math.ceil(self.sequences_per_process / (self.micro_batch_size or self.batch_size))
        return math.ceil(self.sequences_per_process / slices)

    def values(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in SCHEMA}

    def is_given(self, key: str) -> bool:
        return self.sources.get(key, "default") != "default"

    def with_model(self, model: ModelConfig, source: str) -> TrainConfig:
        """Take the shape of a trained model. Raises ConfigError if a given key differs from it. With rotary positions,
        which have no weights, the given context may be shorter."""
        theirs = {key: value for key, value in model.to_dict().items() if key not in ("vocab_size", "dropout")}
        imported = {key: theirs.pop(key) for key in set(theirs) - set(MODEL_KEYS)}
        if self.is_given("max_seq_len") and model.position == "rope" and self.max_seq_len < model.max_seq_len:
            del theirs["max_seq_len"]
        ours = {key: getattr(self, key) for key in MODEL_KEYS}
        clashes = [
            f"{key} is {ours[key]!r} from {self.sources[key]}, {theirs[key]!r} in {source}"
            for key in theirs
            if self.is_given(key) and ours[key] != theirs[key]
        ]
        if clashes:
            raise ConfigError("\n  ".join([f"The weights of {source} are for another model:", *clashes]))
        sources = {**self.sources, **dict.fromkeys(theirs, source)}
        return dataclasses.replace(self, **theirs, sources=sources, imported=imported)

    def model_config(self, vocab_size: int) -> ModelConfig:
        return ModelConfig(vocab_size, **self.imported, **{key: getattr(self, key) for key in MODEL_KEYS})

    def lora(self, base: str = "any", base_sha256: str = "0" * 64) -> LoRA:
        """The adapters of this configuration. The defaults for the base suffice if only sizes matter."""
        from common.lora import LoRA

        return LoRA(self.lora_rank, self.lora_alpha, tuple(self.lora_targets.split(",")), base, base_sha256)


SCHEMA = options_of(TrainConfig)
MODEL_KEYS = tuple(f.name for f in dataclasses.fields(ModelConfig) if f.name in SCHEMA and f.name != "vocab_size")


def parse_config(argv: Sequence[str] | None = None) -> TrainConfig:
    """Defaults <- config file <- flags. Raises ConfigError listing every problem found in any of them."""
    problems: list[str] = []
    flags = read_flags(argv, problems)
    config_name = flags.pop("config", None)
    layers: list[tuple[str, dict[str, Any]]] = []
    name = "default"
    if config_name is not None:
        path = find_config(config_name)
        content = read_json(path, ConfigError)
        name = path.resolve().parent.name if is_resolved(content) else path.stem
        layers.append((str(path), given(content) if is_resolved(content) else content))
    layers.append(("flag", flags))

    values: dict[str, Any] = {key: f.default for key, f in SCHEMA.items()}
    sources = dict.fromkeys(SCHEMA, "default")
    for source, layer in layers:
        checked = check_values(layer, SCHEMA, problems, source)
        if checked.get("model_size"):
            size = checked["model_size"]
            name = size if config_name is None else name
            for key, value in model_size_keys(size, problems).items():
                values[key], sources[key] = value, f"model_size {size}"
        # This layer overrides the run's length.
        if ("epochs" in checked or checked.get("minutes")) and "max_steps" not in checked:
            values["max_steps"], sources["max_steps"] = 0, source
        if checked.get("max_steps") and "minutes" not in checked:
            values["minutes"], sources["minutes"] = 0.0, source
        for key, value in checked.items():
            values[key], sources[key] = value, source
        if checked.get("max_steps") and "epochs" in checked:
            problems.append(f"epochs and max_steps both set the length of the run ({source}); give one of them")
        if checked.get("max_steps") and checked.get("minutes"):
            problems.append(f"minutes and max_steps both set the length of the run ({source}); give one of them")
    processes = place().count
    problems += contradictions(values, sources, processes)
    try:
        TrainConfig(**values).model_config(vocab_size=1)
    except ValueError as problem:
        problems.append(str(problem))
    if problems:
        of_file = "" if config_name is None else f" of {layers[0][0]}"
        raise ConfigError("\n  ".join([f"The configuration{of_file} is not valid:", *problems]))
    return TrainConfig(**values, name=name, sources=sources, processes=processes)


def is_resolved(content: dict[str, Any]) -> bool:
    """Whether a JSON file is the config.json of a run folder: every value, and where it came from."""
    return isinstance(content.get("config"), dict) and isinstance(content.get("sources"), dict)


def given(resolved: dict[str, Any]) -> dict[str, Any]:
    """The values of a run's resolved configuration that the user gave: with them the run can continue."""
    once = ("resume", "dry_run", "profile")  # these belong to a command, not to the run
    values = {
        key: value
        for key, value in resolved["config"].items()
        if resolved["sources"].get(key, "default") not in NOT_GIVEN and key not in once
    }
    return that_count(values)


def that_count(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a run, except those that had no effect on it."""
    if values.get("max_steps"):  # max_steps overrides epochs
        values = {key: value for key, value in values.items() if key != "epochs"}
    if values.get("optimizer") != "muon":
        values = {key: value for key, value in values.items() if key != "muon_learning_rate"}
    if not values.get("lora_rank"):
        values = {key: value for key, value in values.items() if not key.startswith("lora_")}
    return values


def find_config(name: str) -> Path:
    """Look up a path or a bare name in the current folder, then in configs/, with or without .json."""
    names = [name] if name.endswith(".json") else [name, f"{name}.json"]
    folders = [Path(), Path("configs"), REPOSITORY / "configs"]
    for folder in folders:
        for candidate in names:
            if (folder / candidate).is_file():
                return folder / candidate
    there = sorted({path.name for folder in folders[1:] for path in folder.glob("*.json")})
    raise ConfigError(
        f"There is no config {name} in {Path.cwd()} or in configs/.{suggest(Path(name).name, there)} "
        f"There are: {', '.join(there)}."
    )


def model_size_keys(size: str, problems: list[str]) -> dict[str, Any]:
    if size not in MODEL_SIZES:
        problems.append(f"model_size is {size!r}; allowed: {', '.join(MODEL_SIZES)}.{suggest(size, MODEL_SIZES)}")
        return {}
    return preset(size)


def preset(size: str) -> dict[str, Any]:
    """The model keys of one of MODEL_SIZES."""
    keys = read_json(REPOSITORY / "configs" / f"{size}.json", ConfigError)
    return {key: value for key, value in keys.items() if key in MODEL_KEYS}


def read_flags(argv: Sequence[str] | None, problems: list[str]) -> dict[str, Any]:
    """The flags that were typed, as strings (True for a flag without a value)."""
    parser = Parser(
        prog="train_colab_mmap.py",
        usage="%(prog)s --config FILE [--KEY VALUE ...]",
        description="Train a GPT-2 class language model on a token file. Every flag is also a key of the config file; "
        "flags win. Running the same command again continues the run.",
        epilog="Example: python train_colab_mmap.py --config gpt2_small.json --batch_size 32",
    )
    parser.add_argument("--config", metavar="FILE", help="JSON file of keys, looked up here and in configs/")
    add_debug(parser)
    parser.add_options(SCHEMA)
    return parser.read(argv, problems)
