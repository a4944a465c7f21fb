"""Print text as it is generated, and prompt in a loop, as text or as a conversation."""

from __future__ import annotations

import contextlib
import dataclasses

from common.chat import Message, Template
from common.output import printable
from generation.completion import Completion, encode_prompt
from generation.request import Sampling
from generation.stream import forbid_unused_ids, stream
from model import TransformerLanguageModel
from tokenizer import Tokenizer
from tokenizer_bpe import TokenizerError


def print_stream(
    model: TransformerLanguageModel, tokenizer: Tokenizer, ids: list[int], sampling: Sampling, is_answer: bool
) -> Completion:
    """Print the continuation of a prompt's ids as it is generated; an answer without its first space."""
    completion = Completion(tokenizer, sampling.stop)
    for piece in completion.pieces(stream(model, [ids], sampling, forbid_unused_ids(model, tokenizer))):
        piece = piece.lstrip() if is_answer else piece
        is_answer = is_answer and not piece
        print(printable(piece), end="", flush=True)
    print(flush=True)
    return completion


def interact(
    model: TransformerLanguageModel, tokenizer: Tokenizer, sampling: Sampling, template: Template | None
) -> None:
    """Run a prompt loop. Each line is a prompt, or with a `template` the next turn of a conversation."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history; not on Windows)

    if template is None:
        print("Type the beginning of a text, and the model continues it. quit exits.")
    else:
        print("Type a message. /reset starts a new conversation, quit exits.")
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
            print("New conversation.")
        elif line.strip():
            try:
                if template is None:
                    print(printable(line), end="", flush=True)
                    print_stream(model, tokenizer, encode_prompt(tokenizer, line), sampling, is_answer=False)
                else:
                    conversation = [*turns, Message("user", line)]
                    ids = template.prompt_ids(tokenizer, conversation, max_prompt_tokens(model, sampling))
                    if not forgets and len(ids) < len(template.prompt_ids(tokenizer, conversation)):
                        print("(The conversation is longer than the context, so the oldest turns are forgotten.)")
                        forgets = True
                    answer = print_stream(model, tokenizer, ids, sampling, is_answer=True).text
                    turns = [*conversation, Message("assistant", answer)] if answer.strip() else turns
            except KeyboardInterrupt:  # stops only this text
                print()
            except TokenizerError as problem:  # unknown characters
                print(problem)
            sampling = dataclasses.replace(sampling, seed=sampling.seed + 1)  # so that the same line gives another text


def max_prompt_tokens(model: TransformerLanguageModel, sampling: Sampling) -> int:
    """Return the number of context tokens that a conversation may take. The answer gets at least half of the context,
    or max_new_tokens if that is less."""
    context = model.config.max_seq_len
    return context - min(sampling.max_new_tokens, context // 2)
