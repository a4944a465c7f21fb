"""The demo without its page: generates text for prompts and conversations, and yields events in batches.

Each event goes to the page once:

    {"cards": [{"title", "detail"}, ...]}   clear the page and show a card per checkpoint
    {"card": 0, "turn": "prompt", "text"}   begin a turn: "prompt", "user" or "model"
    {"card": 0, "token": [...]}             see `token_entry`
    {"card": 0, "note": "..."}              replace the note
    {"card": 0, "problem": "..."}
    {"card": 0, "running": true}
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
from generation.completion import Completion, encode_prompt
from generation.sampling import Sampling
from generation.scoring import Likelihood, compute_likelihoods
from generation.stream import forbid_unused_ids, stream
from generation.terminal import max_prompt_tokens
from serving.models import Library, ServedModel, describe_progress
from tokenizer import Tokenizer
from tokenizer_base import replace_surrogates

NUM_LIKELIEST = 8
MAX_TOKENS = 4_096  # limits how long other visitors wait
SHOW_INTERVAL_SECONDS = 0.05
END_LABEL = "end of text"

Event = dict[str, Any]


@dataclass
class Turn:
    """A prompt, a question, or a text of the model."""

    who: str  # "prompt", "user" or "model"
    text: str = ""
    tokens: list[list[Any]] = field(default_factory=list)  # "model" only

    def events(self) -> list[Event]:
        return [
            {"turn": self.who, "text": "" if self.tokens else self.text},
            *({"token": token} for token in self.tokens),
        ]


@dataclass
class Card:
    """A checkpoint and its text."""

    index: int
    turns: list[Turn] = field(default_factory=list)
    pending: list[Event] = field(default_factory=list)  # not sent to the page yet
    writing: Iterator[None] | None = None  # None when it is done
    note: str = ""  # note while writing
    remark: str = ""  # appended to the last note

    def add_event(self, **what: Any) -> None:
        self.pending.append({"card": self.index, **what})

    def drain(self) -> list[Event]:
        pending, self.pending = self.pending, []
        return pending

    def fail(self, problem: Exception) -> None:
        message = str(problem)
        if is_out_of_memory(problem):
            message = "The text does not fit in memory. Choose fewer checkpoints or a shorter text."
        elif getattr(problem, "exit_code", None) is None:  # a bug: print it for whoever runs the page
            traceback.print_exception(problem)
            message = f"The program failed: {type(problem).__name__}. See its terminal."
        self.end("")
        self.add_event(problem=message)

    def end(self, note: str) -> None:
        self.writing = None
        self.add_event(note=note + self.remark if note else "")
        self.add_event(running=False)

    def begin(self, turn: Turn, served: ServedModel, ids: list[int], sampling: Sampling) -> None:
        """Show the turn, and prepare to write the continuation of `ids`."""
        for added in (turn, Turn("model")):
            self.turns.append(added)
            self.pending += [{"card": self.index, **event} for event in added.events()]
        self.add_event(running=True)
        self.writing = self.write(served, ids, sampling)

    def write(self, served: ServedModel, ids: list[int], sampling: Sampling) -> Iterator[None]:
        turn, started = self.turns[-1], time.perf_counter()
        is_answer = self.turns[-2].who == "user"
        completion = Completion(served.tokenizer, sampling.stop)
        bias = forbid_unused_ids(served.model, served.tokenizer)
        for (token,), logits in stream(served.model, [ids], sampling, bias):
            (chosen,) = compute_likelihoods(logits, [token], NUM_LIKELIEST, bias)
            rank = 1 + int((logits[0] > logits[0, token]).sum())
            text = completion.push(token)
            if is_answer and not turn.text:  # the space after the label
                text = text.lstrip()
            entry = token_entry(text, chosen, rank, served.tokenizer)
            turn.tokens.append(entry)
            turn.text += text
            self.add_event(token=entry)
            count, seconds = completion.tokens, max(time.perf_counter() - started, 1e-9)
            self.note = f"{count:,} token{'s' * (count > 1)}, {count / seconds:,.0f} tokens/s, seed {sampling.seed}"
            yield
            if completion.ended:
                break
        self.end(f"{self.note}, {'stopped at the end of the text' if completion.ended else 'token limit reached'}")

    def advance(self) -> None:
        """Write one token, or end."""
        try:
            if self.writing is not None:
                next(self.writing, None)
        except Exception as problem:
            self.fail(problem)


def token_entry(text: str, chosen: Likelihood, rank: int, tokenizer: Tokenizer) -> list[Any]:
    """Return [text, label, probability, rank, [[label, probability], ...] of the likeliest], before temperature,
    penalties, top-k and top-p. The text is empty if the token ends inside a character."""
    likeliest = [
        [token_label(token, tokenizer), round(math.exp(logprob), 6)]
        for token, logprob in [(chosen.token, chosen.logprob), *chosen.likeliest]
    ]
    return [text, *likeliest[0], rank, likeliest[1:]]


def token_label(token: int, tokenizer: Tokenizer) -> str:
    """Return the text of a token or, for a part of a character, its bytes in hexadecimal."""
    data = tokenizer.token_bytes(token)
    try:
        return END_LABEL if token in tokenizer.end_ids else data.decode()
    except UnicodeDecodeError:
        return data.hex(" ").upper()


def complete(library: Library, names: Sequence[str], prompt: str, given: Mapping[str, Any]) -> Iterator[list[Event]]:
    """Continue a prompt with each checkpoint, a token of each in turn, and yield events.

    `given`: values of Sampling. A chat model gets the prompt as a question. Problems are shown in their card. Stop
    iterating to stop the models.
    """
    if not names:
        yield [{"cards": [{}]}, {"card": 0, "problem": "Choose a checkpoint."}]
        return
    yield [open_cards(library, names)]
    given = with_seed(given)
    cards = [Card(index) for index in range(len(names))]
    for name, card in zip(names, cards, strict=True):
        card.add_event(note="Reading the checkpoint")
        yield card.drain()
        try:
            served = library.open(name)
            sampling = build_sampling(given)
            if served.chat is None:
                card.remark = "" if prompt else ". Without a prompt, the model begins its own text."
                ids = encode_prompt(served.tokenizer, replace_surrogates(prompt))
                card.begin(Turn("prompt", prompt), served, ids, sampling)
            else:
                ids = encode_chat([Message("user", require_question(prompt))], sampling, served)
                card.begin(Turn("user", prompt), served, ids, sampling)
        except Exception as problem:
            card.fail(problem)
    yield from write_round_robin(cards)


def converse(
    library: Library, name: str | None, history: list[Turn], question: str, given: Mapping[str, Any]
) -> Iterator[tuple[list[Event], list[Turn]]]:
    """Answer a question after the `history`, and yield events and the next history.

    Unanswered questions are left out of the history. An invalid question does not change it.
    """
    pairs = zip(history[::2], history[1::2], strict=True)
    card = Card(0, [turn for pair in pairs if pair[1].text.strip() for turn in pair])
    begun = open_cards(library, [name]) if name else {"cards": [{}]}
    card.pending = [begun, *({"card": 0, **event} for turn in card.turns for event in turn.events())]
    card.add_event(note="Reading the checkpoint")
    yield card.drain(), card.turns
    try:
        if not name:
            raise ConfigError("Choose a checkpoint.")
        served = library.open(name)
        sampling = build_sampling(with_seed(given))
        messages = [Message("assistant" if turn.who == "model" else "user", turn.text) for turn in card.turns]
        messages.append(Message("user", require_question(question)))
        ids = encode_chat(messages, sampling, served)
        assert served.chat is not None
        if len(ids) < len(served.chat.prompt_ids(served.tokenizer, messages)):
            card.remark = ". The conversation is longer than the context, so the oldest turns were dropped."
        card.begin(Turn("user", question), served, ids, sampling)
    except Exception as problem:
        card.fail(problem)
    for events in write_round_robin([card]):
        yield events, card.turns


def write_round_robin(cards: list[Card]) -> Iterator[list[Event]]:
    """Yield events while the cards write in turn."""
    shown = time.monotonic()
    while any(card.writing for card in cards):
        for card in cards:
            card.advance()
        running = [card for card in cards if card.writing is not None]  # a finished card keeps its last note
        if time.monotonic() - shown >= SHOW_INTERVAL_SECONDS:
            for card in running:
                card.add_event(note=card.note)
            yield [event for card in cards for event in card.drain()]
            shown = time.monotonic()
    yield [event for card in cards for event in card.drain()]


def open_cards(library: Library, names: Sequence[str]) -> Event:
    found = {str(found.path): found for found in library.find()}
    cards = [
        {"title": found[name].name, "detail": describe_progress(found[name].path)} if name in found else {}
        for name in names
    ]
    return {"cards": cards}


def require_question(question: str) -> str:
    """Return the question as valid Unicode. Raises ConfigError if it is empty."""
    if not question.strip():
        raise ConfigError("This is a chat model. Type a question.")
    return replace_surrogates(question)


def encode_chat(messages: list[Message], sampling: Sampling, served: ServedModel) -> list[int]:
    """Return the ids of a conversation up to its answer, without the oldest turns if they leave no room. Raises
    ConfigError if the model is not a chat model, or if the last question is longer than the context."""
    if served.chat is None:
        raise ConfigError(f"{served.name} was not trained on conversations.")
    ids = served.chat.prompt_ids(served.tokenizer, messages, max_prompt_tokens(served.model, sampling))
    if len(ids) > (context := served.model.config.max_seq_len):
        raise ConfigError(
            f"The last question has {len(ids):,} tokens, but the context of {served.name} is {context:,}. Shorten it."
        )
    return ids


def with_seed(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with the typed seed, or a random one."""
    seed = str(given.get("seed") or "").strip()
    return {**given, "seed": int(seed) if seed.isdecimal() else seed or random.randrange(2**31)}


def build_sampling(given: Mapping[str, Any]) -> Sampling:
    """Build the sampling settings. Raises ConfigError for an invalid value."""
    try:
        return build(Sampling, dict(given))
    except ValueError as problem:
        raise ConfigError(f"{problem}.") from None
