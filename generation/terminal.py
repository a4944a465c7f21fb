"""In a terminal: text as it is generated, a loop of prompts, and a conversation."""

from __future__ import annotations

import contextlib
import dataclasses

from common.chat import AnyTemplate, Message
from common.flags import meant
from common.output import printable
from common.validation import check, fields_of, suggest
from generation.completion import Completion, prompt_ids
from generation.settings import Sampling, unescape
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
    model: TransformerLanguageModel, tokenizer: Tokenizer, sampling: Sampling, template: AnyTemplate | None
) -> None:
    """A prompt loop. Each line is a prompt, or with a `template` the next turn of a conversation. `/name value` changes
    a setting."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history; not on Windows)

    settings = [field.name for field in dataclasses.fields(sampling)]
    listed = f"Settings: {', '.join('/' + name for name in settings)} VALUE. /quit ends."
    conversation = None if template is None else Conversation(template, tokenizer, room_for_prompt(model, sampling))
    if conversation is None:
        help_text = f"Type a text to continue. {listed}"
    else:
        help_text = (
            f"Ask something. The model remembers the conversation; /reset forgets it, /system TEXT sets instructions. "
            f"{listed}"
        )
    print(help_text)
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        command, _, value = line[1:].strip().partition(" ") if line.startswith("/") else ("", "", "")
        if (command or line.strip()) in ("quit", "exit"):
            return
        if conversation and command in ("reset", "system"):
            print(conversation.reset() if command == "reset" else conversation.instruct(value))
        elif command or line.startswith("/"):
            sampling = change_setting(line[1:], sampling, settings, help_text)
            if conversation:
                conversation.room = room_for_prompt(model, sampling)
        elif line.strip():
            try:
                if conversation is None:
                    print(printable(line), end="", flush=True)
                    stream_one(model, tokenizer, prompt_ids(tokenizer, line), sampling, is_answer=False)
                else:
                    answer = stream_one(model, tokenizer, conversation.ask(line), sampling, is_answer=True)
                    conversation.answered(answer.text)
            except KeyboardInterrupt:  # stops this text, not the program
                print()
            except TokenizerError as problem:  # unknown characters
                print(problem)
            sampling = dataclasses.replace(sampling, seed=sampling.seed + 1)  # the same line again gives another text


def room_for_prompt(model: TransformerLanguageModel, sampling: Sampling) -> int:
    """How many tokens of the context a conversation may take. At least half of the context stays for the answer, unless
    max_new_tokens is less."""
    context = model.config.max_seq_len
    return context - min(sampling.max_new_tokens, context // 2)


class Conversation:
    """The turns so far, without questions whose answer was interrupted."""

    def __init__(self, template: AnyTemplate, tokenizer: Tokenizer, room: int):
        self.template, self.tokenizer, self.room = template, tokenizer, room
        self.system: list[Message] = []
        self.turns: list[Message] = []
        self.question = ""
        self.is_forgetting = False

    def ask(self, question: str) -> list[int]:
        """The ids of the prompt: the question, and before it as many turns as there is room for."""
        self.question = question
        messages = [*self.system, *self.turns, Message("user", question)]
        ids = self.template.prompt_ids(self.tokenizer, messages, self.room)
        if not self.is_forgetting and len(ids) < len(self.template.prompt_ids(self.tokenizer, messages)):
            print("(The conversation is longer than the context: from now on the oldest turns are forgotten.)")
            self.is_forgetting = True
        if len(ids) > self.room:
            print(f"(The question is longer than {self.room} tokens, the room for it: the model may see only its end.)")
        return ids

    def answered(self, answer: str) -> None:
        if answer.strip():
            self.turns += [Message("user", self.question), Message("assistant", answer)]

    def reset(self) -> str:
        self.turns.clear()
        self.is_forgetting = False
        return "The conversation is forgotten."

    def instruct(self, text: str) -> str:
        """Set the system's turn, or remove it if `text` is empty."""
        self.system = [Message("system", text)] if text.strip() else []
        return f"Instructions: {text}" if self.system else "Instructions: none."


def change_setting(command: str, sampling: Sampling, settings: list[str], help_text: str) -> Sampling:
    name, _, value = command.strip().partition(" ")
    if name not in settings:
        print(help_text + suggest(name, settings))
        return sampling
    if not value:
        print(f"{name} is {getattr(sampling, name)}")
        return sampling
    typed = (unescape(value),) if name == "stop" else meant(value, fields_of(Sampling)[name])
    problems: list[str] = []
    changed = check(Sampling, vars(sampling) | {name: typed}, problems)
    if changed is None or problems:
        print("; ".join(problems))
        return sampling
    print(f"{name} is now {getattr(changed, name)}")
    return changed
