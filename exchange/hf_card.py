"""README.md of an exported model: what it is, how it was trained, and how to use it (hf_card.md.jinja).

The facts come from the checkpoint and its run folder. It contains no path and no file name: others read the card.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from common.files import OF_RUN
from common.lora import LoRA
from common.output import cell
from exchange.hf_model import FORMS, hf_kind
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_base import valid_unicode
from training.checkpoints.state import Saved, read_state
from training.reports.records import CONFIG, Sample, read_metrics, read_samples

RECIPE = (
    "optimizer", "learning_rate", "muon_learning_rate", "min_lr", "use_lr_scheduler", "warmup_steps", "cooldown",
    "weight_decay", "grad_clip", "batch_size", "gradient_accumulation_steps", "dropout", "seed",
)  # fmt: skip
LOSSES = {
    "train_loss": "training loss",
    "val_loss": "validation loss",
    "val_bits_per_byte": "validation bits per byte",
}


def model_card(
    checkpoint: Checkpoint,
    model: TransformerLanguageModel,
    tokenizer: Tokenizer,
    name: str,
    lora: LoRA | None = None,
    base: str = "",
) -> str:
    """The card of a model that is exported as the folder `name`; or of its adapters `lora`, for a base in the folder
    `base`."""
    from jinja2 import Environment  # which torch brings along

    config, saved = model.config, known_state(checkpoint)
    kind = hf_kind(config)
    if lora:
        what: dict[str, Any] = {
            "rank, alpha": f"{lora.rank}, {lora.alpha:g}",
            "of": ", ".join(lora.end_modules + lora.block_modules),
        }
    else:
        what = {
            "parameters": f"{model.num_parameters():,}",
            "layers x width, heads": f"{config.num_layers} x {config.embed_dim}, {config.num_heads}",
            "feed-forward": f"{config.ff_dim:,}, {config.activation}",
            "context": f"{config.max_seq_len:,} tokens",
            "vocabulary": f"{tokenizer.vocab_size:,} ({tokenizer.kind})",
            "norm, positions": f"{config.norm}, {config.position}",
        }
    sections = {"What it is": what}
    from_scratch = saved is not None and not saved.state.initialized_from
    if saved:
        sections["What it was trained on"] = training_facts(saved, run_of(checkpoint.path))
        adamw = saved.config.get("optimizer") == "adamw"
        keys = [key for key in RECIPE if key in saved.config and not (adamw and key == "muon_learning_rate")]
        sections["Recipe"] = {key: str(saved.config[key])[:40] for key in keys}
    sample = newest_sample(checkpoint, saved)
    environment = Environment(autoescape=False, keep_trailing_newline=True)
    environment.filters |= {"cell": lambda value: cell(valid_unicode(str(value))), "json": json.dumps}
    template = environment.from_string(Path(__file__).with_name("hf_card.md.jinja").read_text(encoding="utf-8"))
    return template.render(
        lora=lora,
        tags=["lora"] if lora else [kind, *["trained-from-scratch"] * from_scratch],
        name=name,
        about=f"LoRA adapters for {cell(base)}." if lora else f"A language model ({FORMS[kind].model_class}).",
        base=base,
        config=config,
        tokenizer=tokenizer,
        end="" if tokenizer.end_of_text_id is None else tokenizer.decode([tokenizer.end_of_text_id]),
        is_chat=checkpoint.chat_template() is not None,
        prompt=example_prompt(checkpoint, tokenizer),
        sections=sections,
        samples=list(zip(sample.prompts, sample.answers, strict=True)) if sample else [],
    )


def known_state(checkpoint: Checkpoint) -> Saved | None:
    """The training state; None if there is none, or none that can be read."""
    with contextlib.suppress(CheckpointError):
        return read_state(checkpoint)
    return None


def run_of(checkpoint: Path) -> Path | None:
    """The folder with the records of its run: runs/x for runs/x/best and runs/x/checkpoints/step_00000100, run/ in a
    copy."""
    parent = checkpoint.resolve().parent
    run_dir = parent.parent if parent.name == "checkpoints" else parent
    if (checkpoint / OF_RUN).is_dir():
        run_dir = checkpoint / OF_RUN
    return run_dir if (run_dir / CONFIG).exists() else None


def training_facts(saved: Saved, run_dir: Path | None) -> dict[str, Any]:
    step = saved.state.step
    facts: dict[str, Any] = {}
    if saved.state.initialized_from:
        facts["started from"] = "the weights of another model"
    if type(tokens := saved.data.get("train_tokens")) is int:
        facts["training text"] = f"{tokens:,} tokens"
    if isinstance(digest := saved.data.get("tokens_sha256"), str):
        facts["SHA-256 of the tokens"] = digest[:64]
    facts |= {"steps": f"{step:,}", "tokens seen": f"{saved.state.tokens:,}"}
    rows = [row for row in read_metrics(run_dir) if row["step"] <= step] if run_dir else []
    for key, name in LOSSES.items():
        if measured := [row for row in rows if type(row.get(key)) in (int, float)]:
            facts[name] = f"{measured[-1][key]:.4f} (at step {measured[-1]['step']:,})"
    return facts


def newest_sample(checkpoint: Checkpoint, saved: Saved | None) -> Sample | None:
    """The answers of the last evaluation up to the checkpoint's step."""
    run_dir = run_of(checkpoint.path)
    if run_dir is None or saved is None:
        return None
    return next((each for each in reversed(read_samples(run_dir)) if each.step <= saved.state.step), None)


def example_prompt(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """A prompt of its run, else a word or a character that its vocabulary has."""
    sample = newest_sample(checkpoint, known_state(checkpoint))
    usual = "Once upon a time" if checkpoint.chat_template() is None else "What is the capital of France?"
    for prompt in [*(sample.prompts if sample else []), usual, "the"]:
        with contextlib.suppress(ValueError):  # a character that the vocabulary lacks
            tokenizer.encode(prompt)
            return valid_unicode(prompt)
    return tokenizer.decode([0])
