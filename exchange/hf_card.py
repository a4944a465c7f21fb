"""README.md of an exported model: what it is, how it was trained, and how to use it.

The facts come from the checkpoint and its run folder. It contains no path and no file name: others read the card.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from common.lora import LoRA
from common.output import cell, table_row
from exchange.hf_model import FORMS, hf_kind
from model_config import ModelConfig
from tokenizer import Tokenizer
from tokenizer_base import valid_unicode
from training.reports.records import CONFIG, OF_RUN, read_metrics, read_samples

RECIPE = (
    "optimizer", "learning_rate", "muon_learning_rate", "min_lr", "use_lr_scheduler", "warmup_steps", "cooldown",
    "weight_decay", "grad_clip", "batch_size", "gradient_accumulation_steps", "dropout", "seed",
)  # fmt: skip


OF_CHARACTERS = (
    "Every token is a character. One that the model was not trained on becomes `<|unk|>`, which the model reads as the",
    "character that it expects least; `<|pad|>` fills batches. The model generates neither.",
)
OF_TEXT = (
    "The tokenizer reads `{end}` in a text as plain characters. For the token that ends a text, use its id,",
    "`tokenizer.eos_token_id`.",
)
OF_CONVERSATIONS = (
    "`apply_chat_template` refuses a turn that contains `{end}`: it would count as the end of an answer.",
    "`tokenizer(text)` does not: for text that others wrote, add `split_special_tokens=True`.",
)
MERGING_TIED = (
    "",
    "The head and the token embedding share one tensor, and so do their adapters: `merge_and_unload` of peft would add",
    "them twice. Use the model without merging, or merge it before you export it.",
)


def model_card(checkpoint: Checkpoint, config: ModelConfig, parameters: int, tokenizer: Tokenizer, name: str) -> str:
    kind = hf_kind(config)
    facts = {
        "layers x width, heads": f"{config.num_layers} x {config.embed_dim}, {config.num_heads}",
        "feed-forward": f"{config.ff_dim:,}, {config.activation}",
        "context": f"{config.max_seq_len:,} tokens",
        "vocabulary": f"{tokenizer.vocab_size:,} ({tokenizer.kind})",
        "norm, positions": f"{config.norm}, {config.position}",
    }
    header = ["library_name: transformers", f"tags: [{kind}{', trained-from-scratch' * is_from_scratch(checkpoint)}]"]
    about = f"A language model of {parameters:,} parameters ({FORMS[kind].model_class})."
    loading = ["model = AutoModelForCausalLM.from_pretrained(path)"]
    notes = reading(checkpoint, config, tokenizer)
    return card(checkpoint, tokenizer, name, header, about, loading, notes, facts)


def adapter_card(
    checkpoint: Checkpoint, lora: LoRA, config: ModelConfig, tokenizer: Tokenizer, name: str, base: str
) -> str:
    """The card of adapters that peft loads onto a model whose folder is named `base`."""
    loading = [
        "from peft import PeftModel",
        f"base = AutoModelForCausalLM.from_pretrained({json.dumps(base)})  # its folder, or its name on the hub",
        "model = PeftModel.from_pretrained(base, path)",
    ]
    notes = reading(checkpoint, config, tokenizer)
    if config.tie_embeddings and lora.end_modules:
        notes += MERGING_TIED
    facts = {"rank, alpha": f"{lora.rank}, {lora.alpha:g}", "of": ", ".join(lora.end_modules + lora.block_modules)}
    header = ["library_name: peft", "tags: [lora]"]
    return card(checkpoint, tokenizer, name, header, f"LoRA adapters for {cell(base)}.", loading, notes, facts)


def card(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    name: str,
    header: list[str],
    about: str,
    loading: list[str],
    notes: list[str],
    facts: dict[str, Any],
) -> str:
    """`loading`: lines of Python that set `model` from `path`."""
    lines = [
        "---",
        *header,
        "pipeline_tag: text-generation",
        "---",
        "",
        f"# {cell(name)}",
        "",
        about,
        "",
        "## How to use it",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f"path = {json.dumps(name)}  # this folder, or its name on the hub",
        *loading,
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        *inputs_code(checkpoint.chat_template() is not None, json.dumps(example_prompt(checkpoint, tokenizer))),
        "outputs = model.generate(**inputs)  # max_new_tokens=20 ends it earlier",
        "print(tokenizer.decode(outputs[0]))",
        "```",
        "",
        *notes,
        "",
        "## What it is",
        "",
        *table(facts),
        *training_sections(checkpoint),
    ]
    return "\n".join(lines) + "\n"


def reading(checkpoint: Checkpoint, config: ModelConfig, tokenizer: Tokenizer) -> list[str]:
    """How much text the model reads, and how the tokenizer reads special tokens."""
    lines = [f"It reads {config.max_seq_len:,} tokens at most, its answer included."]
    if tokenizer.kind == "character":
        return [*lines, *OF_CHARACTERS]
    if tokenizer.end_of_text_id is None:
        return lines
    about = OF_TEXT if checkpoint.chat_template() is None else OF_CONVERSATIONS
    end = tokenizer.decode([tokenizer.end_of_text_id])
    return [*lines, *(line.format(end=end) for line in about)]


def known_state(checkpoint: Checkpoint) -> dict[str, Any]:
    """The training state; {} if there is none."""
    if (checkpoint.path / "training_state.json").exists():
        with contextlib.suppress(CheckpointError):
            return checkpoint.training_state()
    return {}


def training_sections(checkpoint: Checkpoint) -> list[str]:
    """Training data, recipe and samples, where known, and the licence."""
    state, run_dir = known_state(checkpoint), run_of(checkpoint.path)
    step = state.get("step") if type(state.get("step")) is int else None
    lines = []
    if state:
        lines += ["", "## What it was trained on", "", *table(training_facts(state, step, run_dir))]
        given = state.get("config")
        given = given if isinstance(given, dict) else {}
        recipe = {key: given[key] for key in RECIPE if is_plain(given.get(key))}
        if recipe.get("optimizer") == "adamw":
            recipe.pop("muon_learning_rate", None)
        if recipe:
            lines += ["", "## Recipe", "", *table(recipe)]
    if samples := newest_sample(run_dir, step):
        lines += ["", "## Samples", "", f"At step {step:,}:" if step else "", ""]
        rows = [[cell(prompt), cell(answer)] for prompt, answer in samples]
        lines += map(table_row, [["prompt", "answer"], ["---"] * 2, *rows])
    lines += [
        "",
        "## Licence",
        "",
        "The training code is under the MIT licence. The licence of these weights also depends on the text that they "
        "were trained on: state it here before you publish them.",
    ]
    return lines


def inputs_code(is_chat: bool, prompt: str) -> list[str]:
    """Lines of Python that set `inputs` from a prompt, a JSON string."""
    if not is_chat:
        return [f'inputs = tokenizer({prompt}, return_tensors="pt")']
    return [
        f'messages = [{{"role": "user", "content": {prompt}}}]',
        'form = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}',
        "inputs = tokenizer.apply_chat_template(messages, **form)",
    ]


def table(facts: dict[str, Any]) -> list[str]:
    return ["| | |", "|---|---|", *(table_row([key, cell(str(value))]) for key, value in facts.items())]


def is_from_scratch(checkpoint: Checkpoint) -> bool:
    """False for weights without a training state, whose origin is unknown."""
    state = known_state(checkpoint)
    return "step" in state and not state.get("initialized_from")


def is_plain(value: Any) -> bool:
    return type(value) in (int, float, bool) or (isinstance(value, str) and len(value) < 40)


def run_of(checkpoint: Path) -> Path | None:
    """The folder with the records of its run: runs/x for runs/x/best and runs/x/checkpoints/step_00000100, run/ in a
    copy."""
    parent = checkpoint.resolve().parent
    run_dir = parent.parent if parent.name == "checkpoints" else parent
    if (checkpoint / OF_RUN).is_dir():
        run_dir = checkpoint / OF_RUN
    return run_dir if (run_dir / CONFIG).exists() else None


def training_facts(state: dict[str, Any], step: int | None, run_dir: Path | None) -> dict[str, str]:
    data = state.get("data")
    data = data if isinstance(data, dict) else {}
    facts = {}
    if state.get("initialized_from"):
        facts["started from"] = "the weights of another model"
    if type(data.get("train_tokens")) is int:
        facts["training text"] = f"{data['train_tokens']:,} tokens"
    if isinstance(data.get("tokens_sha256"), str):
        facts["SHA-256 of the tokens"] = data["tokens_sha256"][:64]
    if step is not None:
        facts["steps"] = f"{step:,}"
    if type(state.get("tokens")) is int:
        facts["tokens seen"] = f"{state['tokens']:,}"
    if run_dir is None or step is None:
        return facts
    rows = [row for row in read_metrics(run_dir) if row["step"] <= step]
    for key, name in (
        ("train_loss", "training loss"),
        ("val_loss", "validation loss"),
        ("val_bits_per_byte", "validation bits per byte"),
    ):
        measured = [row for row in rows if type(row.get(key)) in (int, float)]
        if measured:
            facts[name] = f"{measured[-1][key]:.4f} (at step {measured[-1]['step']:,})"
    return facts


def newest_sample(run_dir: Path | None, step: int | None) -> list[tuple[str, str]]:
    """(prompt, answer) of the last evaluation up to a step."""
    if run_dir is None or step is None:
        return []
    newest = [row for row in read_samples(run_dir) if row.step <= step][-1:]
    pairs = [pair for row in newest for pair in zip(row.prompts, row.answers, strict=True)]
    return [(valid_unicode(prompt), valid_unicode(answer)) for prompt, answer in pairs]


def example_prompt(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """A prompt of its run, else a word or a character that its vocabulary has."""
    prompts = [prompt for prompt, _ in newest_sample(run_of(checkpoint.path), 2**31)]
    usual = "Once upon a time" if checkpoint.chat_template() is None else "What is the capital of France?"
    for prompt in [*prompts, usual, "the"]:
        with contextlib.suppress(ValueError):  # a character that the vocabulary lacks
            tokenizer.encode(prompt)
            return prompt
    return tokenizer.decode([0])
