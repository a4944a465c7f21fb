"""README.md of an exported model: what it is, how it was trained, and how to use it. It contains no path and no file
name: others read it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from common.lora import LoRA
from common.output import cell
from exchange.hf_model import FORMS, hf_kind
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_base import replace_surrogates
from training.state import Saved, read_state

CARD = """---
{{ card_data }}
---

# {{ name }}

{{ about }}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {{ path }}  # this folder, or its name on the hub
{{ load }}
tokenizer = AutoTokenizer.from_pretrained(path)
{{ ask }}
outputs = model.generate(**inputs)
print(tokenizer.decode(outputs[0]))
```

{{ note }}

| | |
|---|---|
{{ facts }}

The training code is under the MIT licence. The licence of these weights also depends on the text that they were trained
on: state it here before you publish them.
"""
ASK = 'inputs = tokenizer({prompt}, return_tensors="pt")'
ASK_CHAT = """messages = [{{"role": "user", "content": {prompt}}}]
form = {{"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}}
inputs = tokenizer.apply_chat_template(messages, **form)"""
LOAD = "model = AutoModelForCausalLM.from_pretrained(path)"
LOAD_ADAPTERS = """from peft import PeftModel

base = AutoModelForCausalLM.from_pretrained({base})  # its folder, or its name on the hub
model = PeftModel.from_pretrained(base, path)"""


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
    config, is_chat = model.config, checkpoint.chat_template() is not None
    from huggingface_hub import ModelCard, ModelCardData

    data = ModelCardData(library_name="peft" if lora else "transformers", pipeline_tag="text-generation")
    card = ModelCard.from_template(
        data,
        template_str=CARD,
        name=cell(name),
        about=f"LoRA adapters for {cell(base)}." if lora else f"A {FORMS[hf_kind(config)].model_class}.",
        path=json.dumps(name),
        load=LOAD_ADAPTERS.format(base=json.dumps(base)) if lora else LOAD,
        ask=(ASK_CHAT if is_chat else ASK).format(prompt=json.dumps(example_prompt(checkpoint, tokenizer))),
        note=note(config.tie_embeddings, tokenizer, is_chat, lora),
        facts="\n".join(
            f"| {key} | {cell(replace_surrogates(value))} |" for key, value in facts(checkpoint, model, lora)
        ),
    )
    return str(card) + "\n"


def note(is_tied: bool, tokenizer: Tokenizer, is_chat: bool, lora: LoRA | None) -> str:
    """What a user would stumble over."""
    if lora and is_tied and lora.end_modules:
        return "Do not use `merge_and_unload` of peft: it adds the adapters of the shared embedding twice."
    if tokenizer.kind == "character":
        return "Every token is a character. One that the model was not trained on becomes `<|unk|>`."
    if is_chat:
        return (
            "For text that others wrote, add `split_special_tokens=True`: it may contain the token that ends an answer."
        )
    return "The token that ends a text is `tokenizer.eos_token_id`; its name in a text is read as plain characters."


def facts(checkpoint: Checkpoint, model: TransformerLanguageModel, lora: LoRA | None) -> list[tuple[str, str]]:
    """What is known of the model and its training."""
    c, saved = model.config, known_state(checkpoint)
    rows = [
        ("parameters", f"{model.num_parameters():,}"),
        ("layers x width, heads", f"{c.num_layers} x {c.embed_dim}, {c.num_heads}"),
        ("context", f"{c.max_seq_len:,} tokens"),
        ("vocabulary", f"{c.vocab_size:,}"),
    ]
    if lora:
        rows = [
            ("rank, alpha", f"{lora.rank}, {lora.alpha:g}"),
            ("of", ", ".join(lora.end_modules + lora.block_modules)),
        ]
    if saved is None:
        return rows
    tokens: Any = saved.data.get("train_tokens")
    loss = saved.state.best_val_loss
    return [
        *rows,
        *([("started from", "the weights of another model")] if saved.state.initialized_from else []),
        *([("training text", f"{tokens:,} tokens")] if type(tokens) is int else []),
        ("trained on", f"{saved.state.tokens:,} tokens in {saved.state.step:,} steps"),
        *([("lowest validation loss", f"{loss:.4f}")] if loss is not None else []),
    ]


def known_state(checkpoint: Checkpoint) -> Saved | None:
    """The training state; None if there is none, or none that can be read."""
    with contextlib.suppress(CheckpointError):
        return read_state(checkpoint)
    return None


def example_prompt(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """A usual prompt, else a word or a character that its vocabulary has."""
    usual = "Once upon a time" if checkpoint.chat_template() is None else "What is the capital of France?"
    for prompt in (usual, "the"):
        with contextlib.suppress(ValueError):  # a character that the vocabulary lacks
            tokenizer.encode(prompt)
            return prompt
    return tokenizer.decode([0])
