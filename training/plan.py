"""What a run is made of: its shape, the settings of its text, its prompts, the base of its adapters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from common.checkpoint import Checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import CHECKPOINT_NAME, sha256_file
from common.lora import find_base, read_lora
from common.tensors import meta_model
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.fingerprint import choose_folder
from tokenization.metadata import TokenMetadata, find_metadata
from tokenization.settings import Settings
from training.config import BUILTIN_CONVERSATIONS, Config
from training.data import count_windows, locate
from training.evaluate import read_prompts
from training.run import Prompt
from training.schedule import total_steps
from training.state import Previous, TrainState
from training.text import EXAMPLES_DIR, input_settings


def estimate_steps(config: Config, data_dir: str | None, seq_len: int) -> int:
    """Estimate the steps of the whole run from the counts in the metadata."""
    metadata = TokenMetadata.read(locate(config, data_dir)[-1])
    return total_steps(TrainState(), count_windows(metadata.train_tokens, seq_len), config)


def describe_repetition(windows: int, config: Config) -> str:
    """Return a note if a step takes more sequences than there are training windows, else an empty string."""
    sequences = config.sequences_per_step
    if sequences <= windows:
        return ""
    return (
        f"\nNote       a step takes {sequences:,} sequences and the text has only {windows:,}, so each step is "
        f"{sequences / windows:.1f} epochs. For several steps per epoch, try --batch_size "
        f"{max(1, windows // config.gradient_accumulation_steps // 10)}"
    )


def describe_model(config: Config, model: TransformerLanguageModel, base: Checkpoint | None) -> str:
    """Describe the size of a model and of its adapters, if there is a `base`. `model`: on the meta device."""
    shape = model.config
    text = (
        f"Model      {meta_model(shape).num_parameters():,} parameters: {shape.num_layers} layers x {shape.embed_dim}, "
        f"{shape.num_heads} heads, context {shape.max_seq_len}"
    )
    if base is not None:
        text += (
            f"\nLoRA       rank {config.lora_rank} on {config.lora_targets.replace(',', ', ')}: "
            f"{model.num_parameters(trained_only=True):,} parameters are trained, those of {base.path} are frozen"
        )
    return text


def choose_shape(config: Config, previous: Previous) -> ModelConfig:
    """Return the requested shape, or that of the trained model if `init_from` names one or adapters need it.

    Raises ConfigError if an explicit key differs from the trained model. With rotary positions, which have no weights,
    the context may be shorter.
    """
    if previous.source is None or not (config.init_from or config.lora_rank):
        return config.shape(config.vocab_size)
    trained, source = previous.source.trusted_config(), str(previous.source.path)
    if config.lora_rank and "embeddings" in config.lora_targets:
        trained = replace(trained, tie_embeddings=False)  # each of the two gets its own adapters
    kept = {key: value for key, value in trained.to_dict().items() if key not in ("vocab_size", "dropout")}
    if config.is_explicit("max_seq_len") and trained.position == "rope" and config.max_seq_len < trained.max_seq_len:
        kept["max_seq_len"] = config.max_seq_len
    clashes = [
        f"{key} is {getattr(config, key)!r} ({config.sources[key]}), but {value!r} in {source}"
        for key, value in kept.items()
        if config.is_explicit(key) and getattr(config, key) != value
    ]
    if clashes:
        head = f"These settings do not fit the weights of {source}. Leave them out, or leave out --init_from:"
        raise ConfigError("\n  ".join([head, *clashes]))
    return replace(trained, **kept, dropout=config.dropout)


def text_settings(
    config: Config, previous: Previous, tokenizer_file: str | None = None, own_text: str | None = None
) -> Settings:
    """Return the tokenizer settings for `input`. Tokens go into `data_dir`, or a folder for this state of the text. A
    continued run keeps its tokenizer; one that starts from other weights takes theirs. Beside a companion, the own
    text takes that one's `tokenizer_file`; for the companion, `own_text` names the own text."""
    settings = replace(input_settings(config), own_text=own_text)
    kept = _find_kept_tokenizer(config, previous)
    if config.companion and not own_text:
        tokenizer_file = tokenizer_file or kept
    if config.init_from and previous.source is not None:
        tokenizer_file = str(previous.source.tokenizer_path())
    if tokenizer_file:
        settings = replace(settings, tokenizer_file=tokenizer_file)
    else:
        settings = replace(settings, tokenizer=config.tokenizer, vocab_size=config.vocab_size)
    folder = config.data_dir or choose_folder(settings)
    names = [path.name.removesuffix("_metadata.json") for path in find_metadata(Path(folder))]
    return replace(
        settings,
        output_dir=folder,
        output_name=names[0] if len(names) == 1 and names[0] not in ("tokens", "tokens_bpe") else None,
        tokenizer_file=kept or settings.tokenizer_file,
    )


def _find_kept_tokenizer(config: Config, previous: Previous) -> str | None:
    """Return the tokenizer file of a continued run, so that `input` becomes the same tokens even with another version
    of `tokenizers`. None if the tokenizer settings have changed."""
    if previous.checkpoint is None or previous.saved is None or not previous.is_own:
        return None
    path, saved = previous.checkpoint.tokenizer_path(), previous.saved
    has_same_settings = all(saved.config.get(key) == getattr(config, key) for key in ("tokenizer", "vocab_size"))
    return str(path) if has_same_settings and sha256_file(path) == saved.data.get("tokenizer_sha256") else None


def read_run_prompts(config: Config) -> list[Prompt]:
    """Read the prompts to answer at each evaluation; [] if none are named."""
    if not config.eval_prompts:
        return []
    return read_prompts(
        EXAMPLES_DIR / "held_out.jsonl" if config.eval_prompts == BUILTIN_CONVERSATIONS else config.eval_prompts
    )


def find_adapter_base(config: Config, previous: Previous) -> Checkpoint | None:
    """Return the base of the adapters, or None without adapters. When resuming, it is the base recorded in the
    checkpoint, because `init_from` may lead to newer weights by now; otherwise `init_from`.

    Raises CheckpointError for a base that is missing or would be renamed.
    """
    if not config.lora_rank:
        return None
    assert previous.source is not None, "`contradictions` requires one"
    base, lora = previous.source, read_lora(previous.source.path)
    if lora is not None and previous.checkpoint is not None:
        base = Checkpoint(find_base(lora, base.path))
    if config.resume == "never" and base.path.resolve().is_relative_to(config.run_dir.resolve()):
        raise CheckpointError(
            f"--resume never would rename {config.run_dir}, which contains the base of the adapters, {base.path}. "
            "Choose another --output_dir."
        )
    if CHECKPOINT_NAME.fullmatch(base.path.name):
        print(
            f"Note       adapters need their base: keep a copy of {base.path}, which its run replaces if it continues"
        )
    return base
