"""Text in a terminal as it is made, and a loop of prompts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from common.flags import suggest
from common.formatting import printable
from generation.decoding import Completion, generate
from generation.sampling import Sampling
from model import TransformerLanguageModel
from tokenizer import Tokenizer, TokenizerError


def stream_one(model: TransformerLanguageModel, tokenizer: Tokenizer, prompt: str, sampling: Sampling) -> Completion:
    """Print the prompt and its continuation as it is made."""
    print(printable(prompt), end="", flush=True)
    show: Callable[[int, str], None] = lambda _, piece: print(printable(piece), end="", flush=True)  # noqa: E731
    completion = generate(model, tokenizer, [prompt], sampling, on_text=show)[0]
    print(flush=True)
    return completion


def interact(model: TransformerLanguageModel, tokenizer: Tokenizer, sampling: Sampling) -> None:
    """A prompt loop: each line is continued on its own; /name value changes a setting."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history; not on Windows)

    settings = [field.name for field in dataclasses.fields(sampling)]
    help_text = f"Type a text to continue. Settings: {', '.join('/' + name for name in settings)} VALUE. /quit ends."
    print(help_text)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip() in ("/quit", "/exit"):
            return
        if line.startswith("/"):
            sampling = change_setting(line[1:], sampling, settings, help_text)
        elif line.strip():
            try:
                stream_one(model, tokenizer, line, sampling)
            except KeyboardInterrupt:  # stops this text, not the program
                print()
            except TokenizerError as problem:  # characters it does not know
                print(problem)
            sampling = dataclasses.replace(sampling, seed=sampling.seed + 1)  # the same line again: another text


def change_setting(command: str, sampling: Sampling, settings: list[str], help_text: str) -> Sampling:
    name, _, value = command.strip().partition(" ")
    if name not in settings:
        print(help_text + suggest(name, settings))
        return sampling
    if not value:
        print(f"{name} is {getattr(sampling, name)}")
        return sampling
    kind = type(getattr(sampling, name))
    converted: dict[str, Any]
    try:
        converted = {name: (unescape(value),) if name == "stop" else kind(value)}
    except ValueError:
        print(f"{name} is {value}; a {'whole ' if kind is int else ''}number is needed")
        return sampling
    try:
        changed = dataclasses.replace(sampling, **converted)
    except ValueError as problem:
        print(problem)
        return sampling
    print(f"{name} is now {getattr(changed, name)}")
    return changed


def unescape(word: str) -> str:
    """A stop string as typed: shells pass \\n on as two characters."""
    return word.replace("\\n", "\n").replace("\\t", "\t")
