"""What the demo shows: prompts and conversations, and what models write, token by token.

It yields events in batches. Each event goes to the page once:

    {"cards": [{"title", "detail"}, ...]}   clear the page; a card for each checkpoint
    {"card": 0, "turn": "prompt", "text"}   a typed text, "prompt" or "user"; "model": a new text of the model
    {"card": 0, "token": [...]}             see `token_entry`
    {"card": 0, "note": "..."}              replaces the note before
    {"card": 0, "problem": "..."}
    {"card": 0, "running": true}

Everything here is plain Python; demo_page.py puts it on a page.
"""

from __future__ import annotations

import math
import random
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.chat import Message
from common.errors import ConfigError, is_out_of_memory
from common.validation import build
from generation.completion import Completion, prompt_ids
from generation.sampling import Sampling
from generation.scoring import Likelihood, likelihoods
from generation.stream import only_text, stream
from generation.terminal import room_for_prompt
from serving.models import Library, Served, progress_of
from tokenizer import Tokenizer
from tokenizer_base import replace_surrogates

CONSIDERED = 8  # likeliest tokens that are listed
MOST_TOKENS = 4_096  # of a text, while others wait
SHOW_EVERY = 0.05  # seconds between two batches of events
END = "end of text"

Event = dict[str, Any]


@dataclass
class Turn:
    who: str  # "prompt", "user" or "model"
    text: str = ""
    tokens: list[list[Any]] = field(default_factory=list)  # of a model

    def events(self) -> list[Event]:
        return [
            {"turn": self.who, "text": "" if self.tokens else self.text},
            *({"token": token} for token in self.tokens),
        ]


@dataclass
class Card:
    """One checkpoint and its text."""

    index: int
    turns: list[Turn] = field(default_factory=list)
    fresh: list[Event] = field(default_factory=list)  # not sent to the page yet
    writing: Iterator[None] | None = None  # while it writes
    note: str = ""  # while it writes
    remark: str = ""  # appended to the last note

    def tell(self, **what: Any) -> None:
        self.fresh.append({"card": self.index, **what})

    def take(self) -> list[Event]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def fail(self, problem: Exception) -> None:
        said = str(problem)
        if is_out_of_memory(problem):
            said = "The text does not fit in memory; choose fewer checkpoints or a shorter text."
        elif getattr(problem, "exit_code", None) is None:  # a bug of ours, for whoever runs the page
            traceback.print_exception(problem)
            said = f"The program failed: {type(problem).__name__}; its terminal says where."
        self.end("")
        self.tell(problem=said)

    def end(self, note: str) -> None:
        self.writing = None
        self.tell(note=note + self.remark if note else "")
        self.tell(running=False)

    def begin(self, turn: Turn, served: Served, ids: list[int], sampling: Sampling) -> None:
        """Show the turn, and prepare to write what follows the `ids`."""
        for added in (turn, Turn("model")):
            self.turns.append(added)
            self.fresh += [{"card": self.index, **event} for event in added.events()]
        self.tell(running=True)
        self.writing = self.write(served, ids, sampling)

    def write(self, served: Served, ids: list[int], sampling: Sampling) -> Iterator[None]:
        turn, started = self.turns[-1], time.perf_counter()
        is_answer = self.turns[-2].who == "user"
        completion, bias = Completion(served.tokenizer, sampling.stop), only_text(served.model, served.tokenizer)
        for (token,), logits in stream(served.model, [ids], sampling, bias):
            (chosen,) = likelihoods(logits, [token], CONSIDERED, bias)
            rank = 1 + int((logits[0] > logits[0, token]).sum())
            text = completion.push(token)
            if is_answer and not turn.text:  # the space between a label and an answer
                text = text.lstrip()
            entry = token_entry(text, chosen, rank, served.tokenizer)
            turn.tokens.append(entry)
            turn.text += text
            self.tell(token=entry)
            count, seconds = completion.tokens, max(time.perf_counter() - started, 1e-9)
            self.note = f"{count:,} token{'s' * (count > 1)}, {count / seconds:,.0f} tokens/s, seed {sampling.seed}"
            yield
            if completion.ended:
                break
        self.end(f"{self.note}, {'ended by itself' if completion.ended else 'length reached'}")

    def go_on(self) -> None:
        """Write one more token, or end."""
        try:
            if self.writing is not None:
                next(self.writing, None)
        except Exception as problem:
            self.fail(problem)


def token_entry(text: str, chosen: Likelihood, rank: int, tokenizer: Tokenizer) -> list[Any]:
    """[text, label, probability, rank, [[label, probability], ...] of the likeliest], before temperature, penalties,
    top-k and top-p. The text is what the token completes; empty if it ends inside a character."""
    likeliest = [
        [token_label(token, tokenizer), round(math.exp(logprob), 6)]
        for token, logprob in [(chosen.token, chosen.logprob), *chosen.likeliest]
    ]
    return [text, *likeliest[0], rank, likeliest[1:]]


def token_label(token: int, tokenizer: Tokenizer) -> str:
    """How to show a token alone: its text, or the hexadecimal bytes of a part of a character."""
    data = tokenizer.token_bytes(token)
    try:
        return END if token in tokenizer.end_ids else data.decode()
    except UnicodeDecodeError:
        return data.hex(" ").upper()


def complete(library: Library, names: Sequence[str], prompt: str, given: Mapping[str, Any]) -> Iterator[list[Event]]:
    """Each checkpoint continues one prompt, one token of each in turn.

    `given` are the values of a Sampling. A model of conversations gets the prompt as a question. A
    problem is shown in its card. To stop the models, stop iterating.
    """
    if not names:
        yield [{"cards": [{}]}, {"card": 0, "problem": "Choose a checkpoint."}]
        return
    yield [opening(library, names)]
    given = with_seed(given)
    cards = [Card(index) for index in range(len(names))]
    for name, card in zip(names, cards, strict=True):
        card.tell(note="Reading the checkpoint")
        yield card.take()
        try:
            served = library.open(name)
            sampling = sampling_of(given)
            if served.chat is None:
                card.remark = "" if prompt else ". Without a prompt, the model begins a text of its own."
                ids = prompt_ids(served.tokenizer, replace_surrogates(prompt))
                card.begin(Turn("prompt", prompt), served, ids, sampling)
            else:
                ids = chat_ids([Message("user", asked(prompt))], sampling, served)
                card.begin(Turn("user", prompt), served, ids, sampling)
        except Exception as problem:
            card.fail(problem)
    yield from write_in_turn(cards)


def converse(
    library: Library, name: str | None, history: list[Turn], question: str, given: Mapping[str, Any]
) -> Iterator[tuple[list[Event], list[Turn]]]:
    """The answer to a question after the `history`, streamed: events, and the turns that are the next history.

    Unanswered questions are left out of it. A question that cannot be asked does not change the turns.
    """
    pairs = zip(history[::2], history[1::2], strict=True)
    card = Card(0, [turn for pair in pairs if pair[1].text.strip() for turn in pair])
    begun = opening(library, [name]) if name else {"cards": [{}]}
    card.fresh = [begun, *({"card": 0, **event} for turn in card.turns for event in turn.events())]
    card.tell(note="Reading the checkpoint")
    yield card.take(), card.turns
    try:
        if not name:
            raise ConfigError("Choose a checkpoint.")
        served = library.open(name)
        sampling = sampling_of(with_seed(given))
        messages = [Message("assistant" if turn.who == "model" else "user", turn.text) for turn in card.turns]
        messages.append(Message("user", asked(question)))
        ids = chat_ids(messages, sampling, served)
        assert served.chat is not None
        if len(ids) < len(served.chat.prompt_ids(served.tokenizer, messages)):
            card.remark = ". The conversation is longer than the context: the oldest turns were dropped."
        card.begin(Turn("user", question), served, ids, sampling)
    except Exception as problem:
        card.fail(problem)
    for events in write_in_turn([card]):
        yield events, card.turns


def write_in_turn(cards: list[Card]) -> Iterator[list[Event]]:
    """Events while the cards write in turn."""
    shown = time.monotonic()
    while any(card.writing for card in cards):
        for card in cards:
            card.go_on()
        running = [card for card in cards if card.writing is not None]  # a finished card keeps its last note
        if time.monotonic() - shown >= SHOW_EVERY:
            for card in running:
                card.tell(note=card.note)
            yield [event for card in cards for event in card.take()]
            shown = time.monotonic()
    yield [event for card in cards for event in card.take()]


def opening(library: Library, names: Sequence[str]) -> Event:
    found = {str(found.path): found for found in library.find()}
    cards = [
        {"title": found[name].name, "detail": progress_of(found[name].path)} if name in found else {} for name in names
    ]
    return {"cards": cards}


def asked(question: str) -> str:
    """Raises ConfigError for an empty question."""
    if not question.strip():
        raise ConfigError("This model answers: type a question.")
    return replace_surrogates(question)


def chat_ids(messages: list[Message], sampling: Sampling, served: Served) -> list[int]:
    """The ids of a conversation up to its answer, without the oldest turns if they leave no room for it. Raises
    ConfigError for a model without conversations, or a last question that is longer than the context."""
    if served.chat is None:
        raise ConfigError(f"{served.name} was not trained on conversations.")
    ids = served.chat.prompt_ids(served.tokenizer, messages, room_for_prompt(served.model, sampling))
    if len(ids) > (context := served.model.config.max_seq_len):
        raise ConfigError(f"The last question makes {len(ids):,} tokens, and {served.name} reads {context:,}.")
    return ids


def with_seed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The typed seed, or a random one, the same for all checkpoints."""
    seed = str(given.get("seed") or "").strip()
    return {**given, "seed": int(seed) if seed.isdecimal() else seed or random.randrange(2**31)}


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """Raises ConfigError for a value that no text can have."""
    try:
        return build(Sampling, dict(given))
    except ValueError as problem:
        raise ConfigError(f"{problem}.") from None
