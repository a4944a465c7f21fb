"""The plan of a run: what will be done, decided in one pass, each decision printed with its reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from common.checkpoint import Checkpoint
from common.errors import CheckpointError, ConfigError
from common.files import CHECKPOINT_NAME, sha256_file
from common.lora import LoRA, add_adapters, find_base
from common.tensors import weights_file
from model import TransformerLanguageModel
from model_config import ModelConfig
from tokenization.command import folder_of, tokenize_with
from tokenization.corpus import find_sources
from tokenization.extract import format_of
from tokenization.metadata import metadata_files
from tokenization.settings import Settings
from tokenization.token_folder import REPORT
from training.config import Config
from training.data import TokenData
from training.hardware import Hardware, detect_hardware
from training.memory import fit_micro_batch, memory_advice
from training.optimizer import build_optimizer
from training.parallel import on_rank_0
from training.prompts import Prompt, check_prompts, read_prompts
from training.resume import Old
from training.schedule import repetition
from training.step import Trainer
from training.text import EXAMPLE, EXAMPLES, text_of


@dataclass(frozen=True)
class Plan:
    """What will be done. `make_plan` decides it, `build` makes what a step works on."""

    config: Config  # what was asked
    hardware: Hardware  # device, precision, compiling
    data: TokenData
    prompts: list[Prompt]
    shape: ModelConfig
    base: Checkpoint | None  # that adapters are for
    lora: LoRA | None
    micro_batch_size: int
    micro_batch_source: str


def make_plan(config: Config, old: Old) -> Plan:
    """Decide what to do about `config`, after what was there before. Tokenizes `input` on first use.

    Raises ConfigError, DataError or CheckpointError for what cannot be done, MemoryExhausted if one sequence does not
    fit.
    """
    asked = on_rank_0(lambda: old.shape(config))
    hardware = detect_hardware(config, asked, on_rank_0(lambda: old.saved.state.compiled if old.saved else None))
    print(hardware.describe())

    data_dir = on_rank_0(lambda: tokenized(config, old))
    prompts = on_rank_0(lambda: questions(config))
    data = TokenData.open(config, data_dir, asked.max_seq_len, hardware)
    if data.layout.has_mask:  # with a mask, cuDNN's attention can give gradients that are not finite (pytorch 196678)
        torch.backends.cuda.enable_cudnn_sdp(False)
    print(data.describe() + repetition(data.windows, config))
    check_prompts(prompts, data)

    shape = replace(asked, vocab_size=data.vocab_size)
    with torch.device("meta"):
        model = TransformerLanguageModel(shape)
    print(
        f"Model      {model.num_parameters():,} parameters: {shape.num_layers} layers x {shape.embed_dim}, "
        f"{shape.num_heads} heads, context {shape.max_seq_len}"
    )

    base = on_rank_0(lambda: base_of_adapters(config, old, shape))
    lora = None
    if base is not None:
        lora = on_rank_0(lambda: config.lora(str(base.path), sha256_file(weights_file(base.path))))
        with torch.device("meta"):
            add_adapters(model, lora)
        print(
            f"LoRA       rank {config.lora_rank} on {config.lora_targets.replace(',', ', ')}: "
            f"{model.num_parameters(trained_only=True):,} parameters train, those of {base.path} stay frozen"
        )
        if lora.end_modules and shape.embed_norm and shape.is_gated:
            print("           adapters for peft need --lora_targets attention,feed_forward with this form of the model")
    size, source = on_rank_0(lambda: fit_micro_batch(config, model, hardware, data.gpu_bytes))
    return Plan(config, hardware, data, prompts, shape, base, lora, size, source)


def build(plan: Plan) -> Trainer:
    """What a step works on: the model with its first weights, its optimizer, the data."""
    config, hardware, rows = plan.config, plan.hardware, plan.config.rows_at_once(plan.micro_batch_size)
    with memory_advice(config, plan.shape, hardware, rows):
        torch.manual_seed(config.seed)
        model = TransformerLanguageModel(plan.shape).to(hardware.device)
        model.activation_checkpointing = config.activation_checkpointing
        if plan.base is not None and plan.lora is not None:
            plan.base.load_weights(model)
            add_adapters(model, plan.lora)
        if hardware.is_cuda:  # the dial and an earlier run in this process had peaks of their own
            torch.cuda.reset_peak_memory_stats()
        return Trainer(
            config,
            hardware,
            plan.data,
            plan.prompts,
            model,
            build_optimizer(model, config),
            hardware.grad_scaler(),
            model,
            plan.micro_batch_size,
            plan.micro_batch_source,
        )


def tokenized(config: Config, old: Old) -> str | None:
    """The token folder, if one is named. Tokenizes `input`, if there is one, on first use: into `data_dir`, or else
    into a folder of this state of the text alone. A run that is continued keeps its tokenizer; one that starts from
    other weights takes theirs.

    Raises DataError if `data_dir` holds the tokens of another text, which other runs may need.
    """
    if not config.input:
        return config.data_dir
    text = text_of(config.input)
    asked = Settings(input=(text,), format=format_of(find_sources([text])))
    if config.init_from and old.source is not None:
        asked = replace(asked, tokenizer_file=str(old.source.tokenizer_path()))
    else:
        asked = replace(asked, tokenizer=config.tokenizer, vocab_size=config.vocab_size)
    folder = config.data_dir or folder_of(asked)
    names = [path.name.removesuffix("_metadata.json") for path in metadata_files(Path(folder))]
    settings = replace(
        asked,
        output_dir=folder,
        output_name=names[0] if len(names) == 1 and names[0] not in ("tokens", "tokens_bpe") else None,
        tokenizer_file=old.tokenizer(config) or asked.tokenizer_file,
    )
    metadata = tokenize_with(settings, quiet=True, may_replace=not config.data_dir)
    print(f"Report     {metadata.with_name(REPORT)}: what each file gave, and what was left out")
    return folder


def questions(config: Config) -> list[Prompt]:
    """The prompts that the run answers at each evaluation."""
    if not config.eval_prompts:
        return []
    return read_prompts(EXAMPLES / "held_out.jsonl" if config.eval_prompts == EXAMPLE else config.eval_prompts)


def base_of_adapters(config: Config, old: Old, shape: ModelConfig) -> Checkpoint | None:
    """The checkpoint that adapters are for, if the configuration asks for some: that of the run that is continued, for
    by now `init_from` may lead to a newer one; for a run that starts, what it leads to.

    Raises ConfigError for a rank larger than the model, CheckpointError for a base that is missing or unsuitable.
    """
    if not config.lora_rank:
        return None
    narrowest = min(shape.embed_dim, shape.ff_dim)
    if config.lora_rank > narrowest:
        raise ConfigError(
            f"lora_rank is {config.lora_rank}, and the model's matrices have {narrowest} rows or columns: a rank "
            "beyond that adds nothing. 8 is usual."
        )
    assert old.source is not None, "the configuration names one"
    base, lora = old.source, old.source.lora()
    if lora is not None and old.checkpoint is not None:
        base = Checkpoint(find_base(lora, base.path))
    elif lora is not None:
        raise CheckpointError(
            f"{base.path} holds adapters, and those of --lora_rank are for whole weights: python "
            f"tools/merge_lora.py {base.path} OUT makes them, to start from with --init_from OUT."
        )
    elif old.checkpoint is not None and not old.own:
        raise CheckpointError(
            f"{base.path} was trained without adapters, and cannot go on with some: --init_from "
            f"{base.path} instead of --resume_from starts a new run that adapts it."
        )
    if config.resume == "never" and base.path.resolve().is_relative_to(config.run_dir.resolve()):
        raise CheckpointError(
            f"The adapters would be for {base.path}, which --resume never sets aside with the run that is in "
            f"{config.run_dir}: choose another --output_dir."
        )
    if CHECKPOINT_NAME.fullmatch(base.path.name):
        print(f"Note       adapters need their base, and {base.path} is replaced when its run trains on: keep a copy")
    return base
