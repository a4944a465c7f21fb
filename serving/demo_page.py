"""The page of the demo, made with Gradio: its layout and event handlers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradio as gr

from generation.sampling import Sampling
from serving.demo_model import MAX_TOKENS, Event, Turn, complete, converse
from serving.models import MAX_COMPARED, Library

FOLDER = Path(__file__).resolve().parent
NOTEBOOK_HEIGHT = 900  # pixels
MAX_WAITING = 32  # requests
SETTING_NAMES = ("max_new_tokens", "temperature", "top_k", "top_p", "repetition_penalty", "seed")
# Gradio cancels the request without telling the cards.
MARK_STOPPED = (
    "() => document.querySelectorAll('.card.running').forEach(c => c.classList.replace('running', 'stopped'))"
)


def launch(page: gr.Blocks, host: str, port: int, auth: tuple[str, str] | None, share: bool) -> None:
    """Serve the page in the background, and show it below a notebook's cell. `auth`: (name, password) to ask for."""
    fonts = {
        "font": ["system-ui", "sans-serif"],
        "font_mono": ["ui-monospace", "monospace"],
    }  # system fonts, so that none is downloaded
    theme = gr.themes.Default(primary_hue="indigo", secondary_hue="indigo", **fonts)
    page.launch(
        server_name=f"[{host}]" if ":" in host else host,
        server_port=port,
        auth=auth,
        share=share,
        quiet=True,
        prevent_thread_lock=True,
        height=NOTEBOOK_HEIGHT,
        # Gradio's colours have too little contrast.
        theme=theme.set(
            color_accent="*primary_600",
            button_primary_background_fill="*primary_600",
            button_primary_background_fill_hover="*primary_700",
            body_text_color_subdued="*neutral_500",
            input_placeholder_color="*neutral_500",
            input_placeholder_color_dark="*neutral_400",
        ),
        css_paths=FOLDER / "demo_page.css",
        max_file_size="0b",  # there is nothing to upload
        enable_monitoring=False,
        run_history=False,
        footer_links=[],
        ssr_mode=False,
    )


def make_page(library: Library) -> gr.Blocks:
    """Build the page without launching it. It generates one text at a time; others wait."""

    def choices() -> list[tuple[str, str]]:
        return [(found.name, str(found.path)) for found in library.find()]

    def list_chat_models() -> list[tuple[str, str]]:
        return [(found.name, str(found.path)) for found in library.find() if found.answers]

    def find_again(chosen: list[str], answerer: str | None) -> tuple[Any, Any, Any]:
        """Refresh the checkpoints, and keep the current choice if it still exists."""
        there, answering = choices(), list_chat_models()
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
        log = ""
        for events in complete(library, chosen or [], prompt or "", dict(zip(SETTING_NAMES, settings, strict=True))):
            log += render_events(events)
            yield log

    def answer(name: str | None, history: list[Turn], question: str, *settings: Any) -> Iterator[tuple[Any, Any, Any]]:
        given = dict(zip(SETTING_NAMES, settings, strict=True))
        log = ""
        for i, (events, turns) in enumerate(converse(library, name, history, question or "", given)):
            log += render_events(events)
            # Empty the box at once, because the visitor may soon type the next question.
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
                        label=f"Checkpoints, up to {MAX_COMPARED} side by side",
                        multiselect=True,
                        max_choices=MAX_COMPARED,
                    )
                    prompt = gr.Textbox(
                        label="Prompt (Shift+Enter generates)",
                        lines=3,
                        placeholder="The beginning of a text, or a question for a chat model: Once upon a time",
                    )
                    with gr.Row():
                        go = gr.Button("Generate", variant="primary", scale=2, min_width=120)
                        stop = gr.Button("Stop", min_width=80)
                    texts = build_tokens_view()
                with gr.Tab("Conversation", visible=bool(list_chat_models())) as conversation:
                    answerer = gr.Dropdown(
                        list_chat_models(),
                        value=next((path for _, path in list_chat_models()), None),
                        label="Checkpoint",
                    )
                    dialogue = build_tokens_view()
                    question = gr.Textbox(label="Question", max_lines=8, placeholder="What is the capital of France?")
                    with gr.Row():
                        send = gr.Button("Ask", variant="primary", scale=2, min_width=100)
                        halt = gr.Button("Stop", min_width=80)
                        reset = gr.Button("Clear", min_width=80)
            with gr.Column(scale=1, min_width=260), gr.Accordion("Settings", elem_classes="settings"):
                settings = [
                    gr.Slider(1, MAX_TOKENS, Sampling.max_new_tokens, step=1, label="Length"),
                    gr.Slider(0, 2, Sampling.temperature, step=0.05, label="Temperature"),
                    gr.Slider(0, 200, Sampling.top_k, step=1, label="Top-k (0: off)"),
                    gr.Slider(0.01, 1, Sampling.top_p, step=0.01, label="Top-p (1: off)"),
                    gr.Slider(1, 2, Sampling.repetition_penalty, step=0.05, label="Repetition penalty"),
                    gr.Textbox(label="Seed", placeholder="another each time", max_length=20),
                ]
        history = gr.State([])
        own = {"api_visibility": "private"}
        turn = own | {"concurrency_id": "model", "concurrency_limit": 1, "show_progress": "minimal"}
        aside = own | {"queue": False}
        writing = gr.on([go.click, prompt.submit], continue_text, [models, prompt, *settings], texts, **turn)
        talking = gr.on(
            [send.click, question.submit],
            answer,
            [answerer, history, question, *settings],
            [dialogue, history, question],
            **turn,
        )
        stop.click(None, js=MARK_STOPPED, cancels=[writing], **aside)
        halt.click(None, js=MARK_STOPPED, cancels=[talking], **aside)
        reset.click(lambda: ("", []), None, [dialogue, history], cancels=[talking], **aside)
        gr.on([page.load, again.click], find_again, [models, answerer], [models, answerer, conversation], **aside)
    page.queue(max_size=MAX_WAITING, api_open=False)
    return page


def render_events(events: list[Event]) -> str:
    """Return events as lines of text. The text only grows, so Gradio sends only what is new. It has no `<`, so it holds
    no tags."""
    return "".join(json.dumps(event).replace("<", "\\u003c") + "\n" for event in events)


def build_tokens_view() -> gr.HTML:
    return gr.HTML(
        "",
        html_template=(FOLDER / "demo_tokens.html").read_text(encoding="utf-8"),
        js_on_load=(FOLDER / "demo_tokens.js").read_text(encoding="utf-8"),
        elem_classes=["tokens"],
        apply_default_css=False,
    )
