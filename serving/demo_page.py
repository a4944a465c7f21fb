"""The page of the demo, made with Gradio: its layout, and which function handles which event."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr
from fastapi import FastAPI
from starlette.middleware import Middleware

from common.errors import ConfigError
from generation.sampling import Sampling
from serving.demo_model import LONGEST_PROMPT, Event, Turn, complete, converse
from serving.models import MOST_COMPARED, Library

FILES = Path(__file__).resolve().parent
TEMPLATE = (FILES / "demo_tokens.html").read_text(encoding="utf-8")
HEIGHT = 900  # pixels, in a notebook
SETTINGS = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")


def theme() -> Any:
    """With the visitor's own fonts: none is downloaded."""
    text, code = ["system-ui", "sans-serif"], ["ui-monospace", "Consolas", "monospace"]
    ours = gr.themes.Default(primary_hue="indigo", secondary_hue="indigo", font=text, font_mono=code)
    # Gradio's own colours have too little contrast.
    return ours.set(
        color_accent="*primary_600",
        button_primary_background_fill="*primary_600",
        button_primary_background_fill_hover="*primary_700",
        body_text_color_subdued="*neutral_500",
        input_placeholder_color="*neutral_500",
        input_placeholder_color_dark="*neutral_400",
    )


def look() -> dict[str, Any]:
    """What it has in common mounted and launched."""
    return {
        "theme": theme(),
        "css": (FILES / "demo_page.css").read_text(encoding="utf-8"),
        "allowed_paths": [],
        "enable_monitoring": False,
        "run_history": False,
        "footer_links": [],
        "ssr_mode": False,
    }


def mount(app: FastAPI, page: Any, auth: tuple[str, str] | None) -> None:
    """Answer with the page where the app has no route of its own. `auth`: the name and password to ask for."""
    gr.mount_gradio_app(app, page, path="/", auth=auth, **look())


def launch(page: Any, listener: socket.socket, guard: Middleware, auth: tuple[str, str] | None, share: bool) -> None:
    """Start a server with the page alone, in the background: for a notebook, and to `share` it.

    Raises ConfigError if there is no address on the internet.
    """
    address, port = listener.getsockname()[:2]
    listener.close()  # Gradio opens its own
    page.launch(
        server_name=f"[{address}]" if ":" in address else address,
        server_port=port,
        share=share,
        auth=auth,
        app_kwargs={"middleware": [guard]},
        quiet=True,
        prevent_thread_lock=True,
        height=HEIGHT,
        **look(),
    )
    if share and not page.share_url:
        page.close(verbose=False)
        raise ConfigError("--share got no address: is this machine on the internet? Without --share it stays local.")


def make_page(library: Library, queue: int, seconds: float) -> Any:
    """The page, a `gradio.Blocks` that is not launched yet. It generates one text at a time, up to `queue` requests
    wait, and a text ends after `seconds`."""

    def choices() -> list[tuple[str, str]]:
        return [(found.name, str(found.path)) for found in library.find()]

    def answerers() -> list[tuple[str, str]]:
        return [(found.name, str(found.path)) for found in library.find() if found.answers]

    def look_again(chosen: list[str], answerer: str | None) -> tuple[Any, Any, Any]:
        """Keep the current choice, unless that checkpoint is gone."""
        there, answering = choices(), answerers()
        paths, answering_paths = [path for _, path in there], [path for _, path in answering]
        kept = [path for path in chosen or [] if path in paths]
        chooses = {} if kept and kept == chosen else {"value": kept or paths[:1]}
        asks = {} if answerer in answering_paths else {"value": next(iter(answering_paths), None)}
        return (
            gr.update(choices=there, **chooses),
            gr.update(choices=answering, **asks),
            gr.update(visible=bool(answering)),
        )

    def continue_text(chosen: list[str], prompt: str, *settings: Any) -> Iterator[str]:
        given = dict(zip(SETTINGS, settings, strict=True))
        log = ""
        for events in complete(library, chosen or [], prompt or "", given, seconds):
            log += lines(events)
            yield log

    def answer(name: str | None, history: list[Turn], question: str, *settings: Any) -> Iterator[tuple[Any, Any, Any]]:
        given = dict(zip(SETTINGS, settings, strict=True))
        log = ""
        for i, (events, turns) in enumerate(converse(library, name, history, question or "", given, seconds)):
            log += lines(events)
            # Empty its box at once: later, the visitor may already be typing the next one.
            was_asked = i == 1 and not any("problem" in event for event in events)
            yield log, turns, "" if was_asked else gr.skip()

    with gr.Blocks(title="Try the model", analytics_enabled=False) as page:
        with gr.Row(elem_classes="demo-title"):
            gr.Markdown("## Try the model")
            again = gr.Button("Refresh checkpoints", size="sm", scale=0, min_width=160)
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                with gr.Tab("Text"):
                    models = gr.Dropdown(
                        choices(),
                        value=[path for _, path in choices()[:1]],
                        label=f"Checkpoints, up to {MOST_COMPARED} side by side",
                        multiselect=True,
                        max_choices=MOST_COMPARED,
                    )
                    prompt = gr.Textbox(
                        label="Prompt (Shift+Enter generates)",
                        lines=3,
                        max_length=LONGEST_PROMPT,
                        placeholder="The beginning of a text, or a question for a chat model: Once upon a time",
                    )
                    with gr.Row():
                        go = gr.Button("Generate", variant="primary", scale=2, min_width=120)
                        stop = gr.Button("Stop", min_width=80, elem_classes="halt")
                    texts = tokens_view()
                with gr.Tab("Conversation", visible=bool(answerers())) as conversation:
                    answerer = gr.Dropdown(
                        answerers(), value=next((path for _, path in answerers()), None), label="Checkpoint"
                    )
                    dialogue = tokens_view()
                    question = gr.Textbox(
                        label="Question",
                        lines=1,
                        max_lines=8,
                        max_length=LONGEST_PROMPT,
                        placeholder="What is the capital of France?",
                    )
                    with gr.Row():
                        send = gr.Button("Ask", variant="primary", scale=2, min_width=100)
                        halt = gr.Button("Stop", min_width=80, elem_classes="halt")
                        reset = gr.Button("Clear", min_width=80)
            with gr.Column(scale=1, min_width=260), gr.Accordion("Settings", elem_classes="settings"):
                most = library.max_tokens
                settings = [
                    gr.Slider(1, most, min(Sampling.max_new_tokens, most), step=1, label="Length"),
                    gr.Slider(0, 2, Sampling.temperature, step=0.05, label="Temperature"),
                    gr.Slider(0, 200, Sampling.top_k, step=1, label="Top-k (0: off)"),
                    gr.Slider(0.01, 1, Sampling.top_p, step=0.01, label="Top-p (1: off)"),
                    gr.Slider(1, 2, Sampling.repetition_penalty, step=0.05, label="Repetition penalty"),
                    gr.Textbox(label="Seed", placeholder="another each time", max_length=20),
                ]
        history = gr.State([])
        own = {"api_visibility": "private", "show_progress": "hidden"}  # Gradio's own would cover the text
        turn = own | {"concurrency_id": "model", "concurrency_limit": 1, "js": told("waiting")}
        aside = own | {"queue": False}
        writing = gr.on([go.click, prompt.submit], continue_text, [models, prompt, *settings], texts, **turn)
        talking = gr.on(
            [send.click, question.submit],
            answer,
            [answerer, history, question, *settings],
            [dialogue, history, question],
            **turn,
        )
        for event, button in ((writing, stop), (talking, halt)):
            button.click(None, js=told("stopped"), cancels=[event], **aside)
            event.failure(None, js=told("refused"), **aside)
        reset.click(lambda: ("", []), None, [dialogue, history], cancels=[talking], **aside)
        gr.on([page.load, again.click], look_again, [models, answerer], [models, answerer, conversation], **aside)
        gr.on([models.change, answerer.change], None, js=told("chosen"), **aside)
    page.queue(max_size=queue, default_concurrency_limit=1, api_open=False)
    # How often it looks for requests. Its default, 1,000 times a second, takes 5 % of a core from a training.
    page._queue.sleep_when_free = page._queue.progress_update_sleep_when_free = 0.02
    return page


def lines(events: list[Event]) -> str:
    """Events as lines of text. The text only grows, so Gradio sends only what is new, and has no `<`, so nothing in it
    is a tag."""
    return "".join(json.dumps(event).replace("<", "\\u003c") + "\n" for event in events)


def told(what: str) -> str:
    """JavaScript that tells the visible texts the state of a request, before its first event or instead of its last."""
    tell = f"view.dispatchEvent(new CustomEvent('request', {{detail: '{what}'}}))"
    return (
        f"(...inputs) => {{ document.querySelectorAll('.tokens .tokens').forEach((view) => {tell}); return inputs; }}"
    )


def tokens_view() -> Any:
    script = (FILES / "demo_tokens.js").read_text(encoding="utf-8")
    return gr.HTML(
        "",
        html_template=TEMPLATE,
        js_on_load=script,
        elem_classes=["tokens"],
        apply_default_css=False,
    )
