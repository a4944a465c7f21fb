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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from common.chat import Message
from common.validation import build
from generation.completion import Completion
from generation.sampling import Sampling
from generation.scoring import Likelihood, likelihoods
from generation.stream import only_text, stream
from serving.models import MOST_COMPARED, Library, Served, progress_of
from serving.openai_request import RequestError, chat_ids, explain, text_ids
from tokenizer import Tokenizer
from tokenizer_base import valid_unicode

CONSIDERED = 8  # likeliest tokens that are listed
LONGEST_PROMPT = 20_000  # characters; several times what these models read
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
        is_users = getattr(problem, "exit_code", None) is not None
        self.end("")
        self.tell(problem=str(problem if is_users else explain(problem)))

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
    assert chosen.logprob is not None
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


def complete(
    library: Library, names: Sequence[str], prompt: str, given: Mapping[str, Any], seconds: float
) -> Iterator[list[Event]]:
    """Each checkpoint continues one prompt, one token of each in turn.

    `given` are the values of a Sampling. A model of conversations gets the prompt as a question. A
    problem is shown in its card. To stop the models, stop iterating.
    """
    if why := refusal(names, prompt):
        yield [{"cards": [{}]}, {"card": 0, "problem": why}]
        return
    yield [opening(library, names)]
    given = with_seed(given)
    cards = [Card(index) for index in range(len(names))]
    for name, card in zip(names, cards, strict=True):
        card.tell(note="Reading the checkpoint")
        yield card.take()
        try:
            served = library.open(name)
            sampling = sampling_of(given, served)
            if served.chat is None:
                card.remark = "" if prompt else ". Without a prompt, the model begins a text of its own."
                card.begin(Turn("prompt", prompt), served, text_ids(valid_unicode(prompt), served), sampling)
            else:
                ids = chat_ids([Message("user", asked(prompt))], sampling, served)
                card.begin(Turn("user", prompt), served, ids, sampling)
        except Exception as problem:
            card.fail(problem)
    yield from write_in_turn(cards, seconds)


def converse(
    library: Library, name: str | None, history: list[Turn], question: str, given: Mapping[str, Any], seconds: float
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
        if why := refusal([name] if name else [], question):
            raise RequestError(why)
        served = library.open(str(name))
        sampling = sampling_of(with_seed(given), served)
        messages = [Message("assistant" if turn.who == "model" else "user", turn.text) for turn in card.turns]
        messages.append(Message("user", asked(question)))
        ids = chat_ids(messages, sampling, served)
        assert served.chat is not None
        if len(ids) < len(served.chat.prompt_ids(served.tokenizer, messages)):
            card.remark = ". The conversation is longer than the context: the oldest turns were dropped."
        card.begin(Turn("user", question), served, ids, sampling)
    except Exception as problem:
        card.fail(problem)
    for events in write_in_turn([card], seconds):
        yield events, card.turns


def write_in_turn(cards: list[Card], seconds: float) -> Iterator[list[Event]]:
    """Events while the cards write in turn, for at most `seconds`."""
    started = shown = time.monotonic()
    while any(card.writing for card in cards):
        for card in cards:
            card.go_on()
        running = [card for card in cards if card.writing is not None]  # a finished card keeps its last note
        now = time.monotonic()
        if now - started >= seconds:
            for card in running:
                card.end(f"{card.note}, ended after {seconds:g} s")
        elif now - shown >= SHOW_EVERY:
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


def refusal(names: Sequence[str], prompt: str) -> str:
    """Why the request is refused; "" if it is not."""
    if not names:
        return "Choose a checkpoint."
    if len(names) > MOST_COMPARED:
        return f"{len(names)} checkpoints are chosen; {MOST_COMPARED} at most."
    if len(prompt) > LONGEST_PROMPT:
        return f"The text has {len(prompt):,} characters; {LONGEST_PROMPT:,} at most."
    return ""


def asked(question: str) -> str:
    """Raises RequestError for an empty question."""
    if not question.strip():
        raise RequestError("This model answers: type a question.")
    return valid_unicode(question)


def with_seed(given: Mapping[str, Any]) -> dict[str, Any]:
    """The typed seed, or a random one, the same for all checkpoints."""
    seed = str(given.get("seed") or "").strip()
    return {**given, "seed": int(seed) if seed.isdecimal() else seed or random.randrange(2**31)}


def sampling_of(given: Mapping[str, Any], served: Served) -> Sampling:
    """Raises RequestError for a value that the page's own sliders do not allow."""
    try:
        sampling = build(Sampling, dict(given))
    except ValueError as problem:
        raise RequestError(f"{problem}.") from None
    if sampling.max_new_tokens > served.max_tokens:
        raise RequestError(f"max_new_tokens is {sampling.max_new_tokens:,}; {served.max_tokens:,} at most.")
    return sampling
