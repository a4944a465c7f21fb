"""In a terminal: text as it is generated, a loop of prompts, and a conversation."""

from __future__ import annotations

import contextlib
import dataclasses

from common.chat import Message, Template
from common.output import printable
from generation.completion import Completion, prompt_ids
from generation.settings import Sampling
from generation.stream import only_text, stream
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_base import TokenizerError


def stream_one(
    model: TransformerLanguageModel, tokenizer: Tokenizer, ids: list[int], sampling: Sampling, is_answer: bool
) -> Completion:
    """Print the continuation of a prompt's ids as it is generated, an answer without its first space."""
    completion = Completion(tokenizer, sampling.stop)
    for piece in completion.pieces(stream(model, [ids], sampling, only_text(model, tokenizer))):
        piece = piece.lstrip() if is_answer else piece
        is_answer = is_answer and not piece
        print(printable(piece), end="", flush=True)
    print(flush=True)
    return completion


def interact(
    model: TransformerLanguageModel, tokenizer: Tokenizer, sampling: Sampling, template: Template | None
) -> None:
    """A prompt loop. Each line is a prompt, or with a `template` the next turn of a conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history; not on Windows)

    if template is None:
        print("Type a text to continue. quit ends.")
    else:
        print("Ask something. The model remembers the conversation; /reset forgets it, quit ends.")
    turns: list[Message] = []
    forgets = False
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip() in ("quit", "exit", "/quit"):
            return
        if template and line.strip() == "/reset":
            turns.clear()
            print("The conversation is forgotten.")
        elif line.strip():
            try:
                if template is None:
                    print(printable(line), end="", flush=True)
                    stream_one(model, tokenizer, prompt_ids(tokenizer, line), sampling, is_answer=False)
                else:
                    asked = [*turns, Message("user", line)]
                    ids = template.prompt_ids(tokenizer, asked, room_for_prompt(model, sampling))
                    if not forgets and len(ids) < len(template.prompt_ids(tokenizer, asked)):
                        print("(The conversation is longer than the context: the oldest turns are forgotten.)")
                        forgets = True
                    answer = stream_one(model, tokenizer, ids, sampling, is_answer=True).text
                    turns = [*asked, Message("assistant", answer)] if answer.strip() else turns
            except KeyboardInterrupt:  # stops this text, not the program
                print()
            except TokenizerError as problem:  # unknown characters
                print(problem)
            sampling = dataclasses.replace(sampling, seed=sampling.seed + 1)  # the same line again gives another text


def room_for_prompt(model: TransformerLanguageModel, sampling: Sampling) -> int:
    """How many tokens of the context a conversation may take; the oldest turns are left out of a longer one. At least
    half of the context stays for the answer, unless max_new_tokens is less."""
    context = model.config.max_seq_len
    return context - min(sampling.max_new_tokens, context // 2)
