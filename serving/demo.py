"""The demo page, of gradio's own components: checkpoints side by side on one prompt, and conversations."""

from __future__ import annotations

import functools
import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from common.chat import Message, Template
from common.checkpoint import Checkpoint, open_checkpoint, run_steps, step_folders
from common.errors import CheckpointError, UserError
from common.validation import build
from generation.completion import Completion, encode_prompt
from generation.loading import load_checkpoint
from generation.sampling import Sampling
from generation.scoring import compute_likelihoods
from generation.stream import forbid_unused_ids, stream
from generation.terminal import max_prompt_tokens
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_bpe import TokenizerError, replace_surrogates

MAX_COMPARED = 3  # also the number of models kept in memory
MAX_TOKENS = 1_000  # limits how long other visitors wait
MAX_WAITING = 32  # requests
SHOW_INTERVAL_SECONDS = 0.1
# Tokens that the model thought less likely than this, and their colour.
LIKELIHOODS = {0.01: ("below 1%", "#c2410c"), 0.05: ("below 5%", "#ea580c"), 0.2: ("below 20%", "#f59e0b")}
SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")

Loaded = tuple[TransformerLanguageModel, Tokenizer, "Template | None"]


def _find_checkpoints(places: Sequence[Path]) -> list[Path]:
    """Return the checkpoints of runs and folders of runs, the newest first. Raises CheckpointError if there is none."""
    found: dict[Path, None] = {}
    for place in places:
        steps = [*step_folders(place / "checkpoints", place), *run_steps(place)]
        inside = [*steps, *place.glob("best"), *place.glob("*/best")]
        found |= dict.fromkeys(path for path in inside or [place] if (path / "config.json").is_file())
    if not found:
        names = ", ".join(f"{place}/" for place in places)
        raise CheckpointError(
            f"No trained model in {names}. Train one first, for instance with python train_colab_mmap.py --config "
            "quickstart.json, or name a checkpoint or run folder."
        )
    return sorted(found, key=lambda path: (path / "config.json").stat().st_mtime_ns, reverse=True)


@functools.lru_cache(maxsize=MAX_COMPARED)
def load(path: Path, modified_ns: int, device: str) -> Loaded:
    checkpoint = open_checkpoint(path)
    return *load_checkpoint(checkpoint, device), checkpoint.chat_template()


def _read_sampling(values: Sequence[Any]) -> Sampling:
    settings = dict(zip(SETTINGS, values, strict=True))
    seed = settings["seed"].strip() or str(random.randrange(2**31))
    if not seed.isdecimal():
        raise gr.Error(f"The seed is a whole number, not {seed:.20}.", print_exception=False)
    return build(Sampling, settings | {"seed": int(seed)})


def generate(loaded: Loaded, prompt: str | list[Message], sampling: Sampling) -> Iterator[tuple[str, float]]:
    """Yield the text of each token, and how likely the model thought it. A chat model gets the prompt as a question."""
    model, tokenizer, chat = loaded
    messages = [Message("user", prompt)] if isinstance(prompt, str) else prompt
    if chat is not None:
        ids = chat.prompt_ids(tokenizer, messages, max_prompt_tokens(model, sampling))
    else:
        ids = encode_prompt(tokenizer, messages[-1].content)
    completion, bias = Completion(tokenizer), forbid_unused_ids(model, tokenizer)
    for (token,), logits in stream(model, [ids], sampling, bias):
        (chosen,) = compute_likelihoods(logits, [token], 1, bias)
        yield completion.push(token), math.exp(chosen.logprob)
        if completion.ended:
            return


def read_turns(history: Sequence[dict[str, Any]]) -> list[Message]:
    """Return a conversation's turns, without questions that were not answered."""
    texts = ["".join(part["text"] for part in turn["content"] if part["type"] == "text") for turn in history]
    turns = [Message(turn["role"], text) for turn, text in zip(history, texts, strict=True) if text.strip()]
    pairs = itertools.pairwise(turns)
    return [turn for pair in pairs if [turn.role for turn in pair] == ["user", "assistant"] for turn in pair]


def make_page(places: Sequence[Path], device: str) -> gr.Blocks:
    """Build the page without launching it. It generates one text at a time; others wait."""

    def choices() -> list[str]:
        return [str(path) for path in _find_checkpoints(places)]

    def open_chosen(name: str) -> Loaded:
        if name not in choices():
            raise CheckpointError(f"The checkpoint {name:.200} is gone. Choose another.")
        return load(Path(name), (Path(name) / "config.json").stat().st_mtime_ns, device)

    def write(name: str, prompt: str, sampling: Sampling) -> Iterator[dict[str, Any]]:
        spans: list[tuple[str, str | None]] = [(prompt, None)]
        started = time.perf_counter()
        try:
            for count, (piece, probability) in enumerate(generate(open_chosen(name), prompt, sampling), 1):
                label = next((label for limit, (label, _) in LIKELIHOODS.items() if probability < limit), None)
                spans.append((piece, label))
                speed = count / (time.perf_counter() - started)
                note = f"{name}: {count:,} tokens, {speed:,.0f} tokens/s, seed {sampling.seed}"
                yield gr.update(value=spans, label=note, visible=True)
        except (UserError, TokenizerError) as problem:
            yield gr.update(value=spans, label=f"{name}: {problem}", visible=True)

    def compare(names: list[str], prompt: str, *values: Any) -> Iterator[list[Any]]:
        """Yield the texts of the checkpoints, which write a token each in turn."""
        sampling = _read_sampling(values)
        shown = [gr.update(visible=False)] * MAX_COMPARED
        shown_at = 0.0
        for written in itertools.zip_longest(*(write(name, replace_surrogates(prompt), sampling) for name in names)):
            shown[: len(names)] = [new or old for new, old in zip(written, shown, strict=False)]
            if time.monotonic() - shown_at >= SHOW_INTERVAL_SECONDS:
                yield shown
                shown_at = time.monotonic()
        yield shown

    def converse(question: str, history: list[dict[str, Any]], name: str, *values: Any) -> Iterator[str]:
        turns = [*read_turns(history), Message("user", replace_surrogates(question))]
        text = ""
        try:
            for piece, _ in generate(open_chosen(name), turns, _read_sampling(values)):
                text += piece
                yield text.lstrip()
        except (UserError, TokenizerError) as problem:
            raise gr.Error(str(problem), print_exception=False) from None

    def talkers() -> list[str]:
        return [name for name in choices() if Checkpoint(Path(name)).chat_template() is not None]

    def refresh() -> list[Any]:
        return [gr.update(choices=choices()), gr.update(choices=talkers())]

    found = choices()
    hidden = {"api_visibility": "private"}
    with gr.Blocks(title="Try the model", analytics_enabled=False) as page:
        with gr.Accordion("Settings", open=False):
            settings = [
                gr.Slider(1, MAX_TOKENS, Sampling.max_new_tokens, step=1, label="Length in tokens"),
                gr.Slider(0, 2, Sampling.temperature, step=0.05, label="Temperature"),
                gr.Slider(0, 200, Sampling.top_k, step=1, label="Top-k (0: off)"),
                gr.Slider(0.01, 1, Sampling.top_p, step=0.01, label="Top-p (1: off)"),
                gr.Slider(1, 2, Sampling.repetition_penalty, step=0.05, label="Repetition penalty"),
                # As text, because gr.Number shows, and sends, a 0 where nothing was typed.
                gr.Textbox("", label="Seed", placeholder="another each time"),
            ]
        with gr.Tab("Text"):
            compared = gr.Dropdown(
                found, value=found[:1], multiselect=True, max_choices=MAX_COMPARED, label="Checkpoints"
            )
            prompt = gr.Textbox(label="Prompt (Shift+Enter generates)", lines=3, placeholder="Once upon a time")
            with gr.Row():
                go, stop = gr.Button("Generate", variant="primary"), gr.Button("Stop")
            with gr.Row():
                texts = [
                    gr.HighlightedText(
                        label=f"Text {number + 1}",
                        color_map=dict(LIKELIHOODS.values()),
                        show_legend=True,
                        visible=number == 0,
                        min_width=300,
                    )
                    for number in range(MAX_COMPARED)
                ]
        with gr.Tab("Conversation", visible=bool(talkers())):
            talker = gr.Dropdown(talkers(), label="Checkpoint")
            gr.ChatInterface(
                converse,
                chatbot=gr.Chatbot(render_markdown=False),
                additional_inputs=[talker, *settings],
                concurrency_limit=1,
                **hidden,
            )
        writing = gr.on(
            [go.click, prompt.submit], compare, [compared, prompt, *settings], texts, concurrency_limit=1, **hidden
        )
        stop.click(None, cancels=[writing], **hidden)
        page.load(refresh, None, [compared, talker], **hidden)
    page.queue(max_size=MAX_WAITING, api_open=False)
    return page
