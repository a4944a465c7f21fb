"""Make a run from a configuration. Each decision is printed with its reason."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from common.checkpoint import Checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import CHECKPOINT_NAME, sha256_file
from common.lora import LoRA, add_adapters, find_base, read_lora
from common.script import is_rank_0
from common.tensors import meta_model
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.command import choose_folder, tokenize_with
from tokenization.metadata import TokenMetadata, find_metadata
from tokenization.settings import Settings
from tokenization.token_folder import REPORT
from training.config import BUILTIN_CONVERSATIONS, Config
from training.data import TokenData, count_windows, locate
from training.evaluate import check_prompts, read_prompts
from training.hardware import choose_attention, detect_hardware
from training.memory import build_on_meta, fit_micro_batch, memory_advice, return_freed_memory, smallest_rows
from training.mirror import Mirror
from training.parallel import on_rank_0
from training.resume import find_previous
from training.run import Prompt, Run
from training.schedule import last_step
from training.state import Previous, TrainState
from training.store import Store
from training.text import EXAMPLES_DIR, input_settings
from training.tracker import require_tracker


def make_run(config: Config, lock: contextlib.ExitStack | None = None) -> tuple[Run, Previous]:
    """Find what earlier sessions left, tokenize `input` if needed, and build the run with initial weights. Nothing of
    the run folder is loaded yet. `lock`: lock the folder until this stack is closed; None for a dry run.

    Raises ConfigError, DataError or CheckpointError for what cannot be done, MemoryExhausted if one sequence does not
    fit.
    """
    require_tracker(config)
    mirror = Mirror(config.run_dir, config.checkpoint_dir) if config.checkpoint_dir and is_rank_0() else None
    previous, shape, data_dir, prompts, base, lora = on_rank_0(lambda: decide(config, mirror, lock))
    was_compiled = previous.saved.state.compiled if previous.saved else None
    hardware = detect_hardware(config, shape, was_compiled, estimate_steps(config, data_dir, shape.max_seq_len))
    print(hardware.describe())
    if hardware.is_cuda:  # garbage of an earlier run in this process (a notebook, --companion) holds memory
        return_freed_memory(hardware.device)
    data = TokenData.open(config, data_dir, shape.max_seq_len, hardware)
    choose_attention(data.layout.has_mask)
    print(data.describe() + describe_repetition(data.windows, config))
    check_prompts(prompts, data)

    shape = replace(shape, vocab_size=data.vocab_size)
    sizes = build_on_meta(config, shape)
    print(
        f"Model      {meta_model(shape).num_parameters():,} parameters: {shape.num_layers} layers x {shape.embed_dim}, "
        f"{shape.num_heads} heads, context {shape.max_seq_len}"
    )
    if base is not None and lora is not None:
        print(
            f"LoRA       rank {config.lora_rank} on {config.lora_targets.replace(',', ', ')}: "
            f"{sizes.num_parameters(trained_only=True):,} parameters are trained, those of {base.path} are frozen"
        )
    size, source = smallest_rows(*fit_micro_batch(config, sizes, hardware, data.gpu_bytes))

    with memory_advice(config, shape, hardware, lambda: config.rows_at_once(size)):
        torch.manual_seed(config.seed)
        model = TransformerLanguageModel(shape).to(hardware.device)
        model.activation_checkpointing = config.activation_checkpointing
        if base is not None and lora is not None:
            base.load_weights(model)
            add_adapters(model, lora)
        if hardware.is_cuda:  # the dial, or an earlier run in this process, may have had a higher peak
            torch.cuda.reset_peak_memory_stats()
        return Run(config, hardware, data, prompts, model, size, source, mirror), previous


def estimate_steps(config: Config, data_dir: str | None, seq_len: int) -> int:
    """Estimate the steps of the whole run from the counts in the metadata."""
    metadata = TokenMetadata.read(locate(config, data_dir)[-1])
    return last_step(TrainState(), count_windows(metadata.train_tokens, seq_len), config)


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
    theirs = {key: value for key, value in trained.to_dict().items() if key not in ("vocab_size", "dropout")}
    if config.is_explicit("max_seq_len") and trained.position == "rope" and config.max_seq_len < trained.max_seq_len:
        theirs["max_seq_len"] = config.max_seq_len
    clashes = [
        f"{key} is {getattr(config, key)!r} ({config.sources[key]}), but {value!r} in {source}"
        for key, value in theirs.items()
        if config.is_explicit(key) and getattr(config, key) != value
    ]
    if clashes:
        head = f"These settings do not fit the weights of {source}. Leave them out, or leave out --init_from:"
        raise ConfigError("\n  ".join([head, *clashes]))
    return replace(trained, **theirs, dropout=config.dropout)


class Decision(NamedTuple):
    """The decisions of rank 0 for all processes."""

    previous: Previous
    shape: ModelConfig
    data_dir: str | None  # the token folder, if one was named or made
    prompts: list[Prompt]
    base: Checkpoint | None  # the adapters' base
    lora: LoRA | None


def decide(config: Config, mirror: Mirror | None, lock: contextlib.ExitStack | None) -> Decision:
    """Find the checkpoint to continue, find or make the token folder, and read the prompts. Rank 0 does this."""
    if lock is not None:
        lock.enter_context(Store(config.run_dir).locked())
    previous = find_previous(config, mirror, will_train=lock is not None)
    shape = choose_shape(config, previous)
    detect_hardware(config, shape)  # reports what the machine lacks before a long text is tokenized
    prompts, base = read_run_prompts(config), find_adapter_base(config, previous)
    lora = None if base is None else config.lora(str(base.path), base.weights_sha256())
    data_dir = find_or_tokenize(config, previous)
    if config.input:
        print(f"Report     {Path(str(data_dir), REPORT)}: what was read from each file, and what was left out")
    return Decision(previous, shape, data_dir, prompts, base, lora)


def find_or_tokenize(config: Config, previous: Previous) -> str | None:
    """Return the token folder, or None if none is named. Tokenize `input` if that was not done yet.

    Raises DataError if `data_dir` holds the tokens of another text, because other runs may need them.
    """
    if not config.input:
        return config.data_dir
    settings = text_settings(config, previous)
    tokenize_with(settings, quiet=True, may_replace=not config.data_dir)
    return settings.output_dir


def text_settings(config: Config, previous: Previous) -> Settings:
    """Return the tokenizer settings for `input`. Tokens go into `data_dir`, or a folder for this state of the text. A
    continued run keeps its tokenizer; one that starts from other weights takes theirs."""
    settings = input_settings(config)
    if config.init_from and previous.source is not None:
        settings = replace(settings, tokenizer_file=str(previous.source.tokenizer_path()))
    else:
        settings = replace(settings, tokenizer=config.tokenizer, vocab_size=config.vocab_size)
    folder = config.data_dir or choose_folder(settings)
    names = [path.name.removesuffix("_metadata.json") for path in find_metadata(Path(folder))]
    return replace(
        settings,
        output_dir=folder,
        output_name=names[0] if len(names) == 1 and names[0] not in ("tokens", "tokens_bpe") else None,
        tokenizer_file=find_kept_tokenizer(config, previous) or settings.tokenizer_file,
    )


def find_kept_tokenizer(config: Config, previous: Previous) -> str | None:
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
