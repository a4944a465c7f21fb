"""Write the model card (README.md) of an exported model. It contains no local path or file name, as others read it."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import CheckpointError
from common.output import cell
from exchange.hf_model import CONVERSIONS, choose_hf_model_type
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_bpe import replace_surrogates
from training.records import read_samples
from training.state import Saved, read_state

CARD = """---
library_name: transformers
pipeline_tag: text-generation
---

# {name}

A {model_class}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

path = {path}  # this folder, or its name on the hub
model = AutoModelForCausalLM.from_pretrained(path)
tokenizer = AutoTokenizer.from_pretrained(path)
{ask}
outputs = model.generate(**inputs)
print(tokenizer.decode(outputs[0]))
```

{note}

| | |
|---|---|
{facts}

The training code is under the MIT licence. The licence of these weights also depends on the text that they were trained
on: state it here before you publish them.
"""
TOKENIZE_PROMPT = 'inputs = tokenizer({prompt}, return_tensors="pt")'
TOKENIZE_CHAT = """messages = [{{"role": "user", "content": {prompt}}}]
form = {{"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}}
inputs = tokenizer.apply_chat_template(messages, **form)"""


def build_model_card(checkpoint: Checkpoint, model: TransformerLanguageModel, tokenizer: Tokenizer, name: str) -> str:
    """Return the card of the model that is exported to the folder `name`."""
    is_chat = checkpoint.chat_template() is not None
    prompt = json.dumps(example_prompt(checkpoint, tokenizer))
    rows = [f"| {key} | {cell(replace_surrogates(value))} |" for key, value in _list_facts(checkpoint, model)]
    return CARD.format(
        name=cell(name),
        model_class=CONVERSIONS[choose_hf_model_type(model.config)].model_class,
        path=json.dumps(name),
        ask=(TOKENIZE_CHAT if is_chat else TOKENIZE_PROMPT).format(prompt=prompt),
        note=_usage_note(tokenizer, is_chat),
        facts="\n".join(rows),
    )


def _usage_note(tokenizer: Tokenizer, is_chat: bool) -> str:
    """Return the one thing that a user of this model is likely to get wrong."""
    if tokenizer.kind == "character":
        return "Every token is a character. Characters that the model was not trained on become `<|unk|>`."
    if is_chat:
        return "For text from others, pass `split_special_tokens=True`: it may contain the token that ends an answer."
    return "Texts end with `tokenizer.eos_token_id`. Its name in a prompt is read as plain characters."


def _list_facts(checkpoint: Checkpoint, model: TransformerLanguageModel) -> list[tuple[str, str]]:
    """Return rows (name, value) on the model and its training."""
    c, saved = model.config, _try_read_state(checkpoint)
    rows = [
        ("parameters", f"{model.num_parameters():,}"),
        ("layers x width, heads", f"{c.num_layers} x {c.embed_dim}, {c.num_heads}"),
        ("context", f"{c.max_seq_len:,} tokens"),
        ("vocabulary", f"{c.vocab_size:,}"),
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


def _try_read_state(checkpoint: Checkpoint) -> Saved | None:
    """Return the training state, or None if there is none that can be read."""
    with contextlib.suppress(CheckpointError):
        return read_state(checkpoint)
    return None


def example_prompt(checkpoint: Checkpoint, tokenizer: Tokenizer) -> str:
    """Return a prompt that the vocabulary can express: for a model of texts, a held-out line of its own, if known."""
    prompts = ["What is the capital of France?"]
    if checkpoint.chat_template() is None:
        written = [sample for run in checkpoint.path.parents[:2] for sample in read_samples(run)]
        prompts = [*(" ".join(sample.prompts[0].split()) for sample in written), "Once upon a time"]
    for prompt in (*prompts, "the"):
        with contextlib.suppress(ValueError):  # a character that the vocabulary lacks
            tokenizer.encode(prompt)
            return prompt
    return tokenizer.decode([0])
