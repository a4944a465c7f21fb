"""Models on the same passages, which none of them has learned: how much they differ, and how sure that is."""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from common.checkpoint import Checkpoint
from common.errors import ConfigError, DataError
from common.files import sha256_file
from common.output import cell, duration, log, si
from generation.completion import generate
from generation.loading import load_checkpoint
from generation.passages import (
    Passage,
    difference,
    found_in_training,
    held_out_passages,
    is_known,
    learned_text,
    next_sentences,
    score_passages,
    spread,
    total,
)
from generation.scoring import Score
from generation.settings import Sampling
from tokenization.metadata import TokenMetadata
from tokenizer import load_tokenizer

BEGINNINGS = 3
BEGINNING = 60  # characters, at most
CONTINUED = Sampling(max_new_tokens=40)


@dataclass
class Contender:
    """A model, the records of its training, and what was measured."""

    name: str
    checkpoint: Checkpoint
    metrics: list[dict[str, Any]]
    text: TokenMetadata | None  # that it learned; None: not known
    parameters: int = 0
    scores: list[Score] = field(default_factory=list)  # of each passage
    next_sentences: str = ""
    continuations: list[str] = field(default_factory=list)  # of each beginning

    @property
    def losses(self) -> list[tuple[float, float]]:
        """Seconds of training, and validation bits per byte then."""
        rows = [row for row in self.metrics if "val_bits_per_byte" in row and "elapsed_seconds" in row]
        return [(row["elapsed_seconds"], row["val_bits_per_byte"]) for row in rows]

    @property
    def speed(self) -> float | None:
        """Tokens a second in training."""
        speeds = [row["tokens_per_second"] for row in self.metrics if row.get("tokens_per_second")]
        return median(speeds) if speeds else None


@dataclass
class Comparison:
    contenders: list[Contender]
    passages: dict[str, list[Passage]]  # by who has held them out; in the order of `scores`
    beginnings: list[str]

    @classmethod
    def of(
        cls, checkpoints: Mapping[str, Checkpoint], metrics: Mapping[str, list[dict[str, Any]]], device: str
    ) -> Comparison:
        """Measure the models one after the other, in fp32. Raises CheckpointError, and what `passages_for` raises."""
        contenders = [Contender(name, each, metrics[name], learned_text(each)) for name, each in checkpoints.items()]
        groups = passages_for(contenders)
        passages = [passage for group in groups.values() for passage in group]
        texts = [passage.text for passage in passages if passage.ids is None]
        starts = [text[:BEGINNING].rpartition(" ")[0].strip() for text in texts[:: len(texts) // BEGINNINGS or 1]]
        beginnings = [start for start in starts if start][:BEGINNINGS]
        for contender in contenders:
            log.info(f"Comparing  {contender.name} on {len(passages)} passages ...")
            model, tokenizer = load_checkpoint(contender.checkpoint, device, torch.float32)
            contender.parameters = model.num_parameters()
            contender.scores = score_passages(model, tokenizer, passages)
            contender.next_sentences = str(next_sentences(model, tokenizer, texts))
            contender.continuations = [each.text for each in generate(model, tokenizer, beginnings, CONTINUED)]
        return cls(contenders, groups, beginnings)

    def verdict(self) -> list[str]:
        """Say which is best, by how much and how soon, and what is not known."""
        best, *others = sorted(self.contenders, key=lambda each: total(each.scores).bits_per_byte)
        said = []
        for other in others:
            gap = difference(other.scores, best.scores)
            size = f"{gap.mean:.3f} bits per byte, give or take {gap.error:.3f}"
            if gap.is_clear:
                said.append(f"{best.name} is better than {other.name}, by {size}.")
            else:
                said.append(f"{best.name} and {other.name}: no difference that this text can show ({size}).")
            if best.text and best.text == other.text and best.losses and other.losses:  # the losses are of one text
                time, loss = other.losses[-1]
                reached = next((seconds for seconds, ours in best.losses if ours <= loss), None)
                if reached is not None:
                    said.append(
                        f"It reaches the last loss of {other.name}, {loss:.3f}, in {reached / time:.2g} of its time "
                        f"({duration(reached)} of {duration(time)})."
                    )
        if unknown := [each.name for each in self.contenders if each.text is None]:
            said.append(f"What {', '.join(unknown)} learned from is not known: these passages may be among it.")
        return said

    def tables(self) -> list[list[list[str]]]:
        """The numbers, and the beginnings with what each model writes after them."""
        names = [cell(each.name) for each in self.contenders]
        rows, first = [["", *names]], 0
        for whose, passages in self.passages.items():
            part = slice(first, first := first + len(passages))
            bits = []
            for each in self.contenders:
                gap = difference(each.scores[part], self.contenders[0].scores[part])
                change = "" if each is self.contenders[0] else f" ({gap.mean:+.3f} ± {gap.error:.3f})"
                bits.append(f"{total(each.scores[part]).bits_per_byte:.3f}{change}")
            rows.append([f"bits per byte, passages held out by {whose}: {len(passages)}", *bits])
        rows.append(["prefers the true next sentence", *(each.next_sentences for each in self.contenders)])
        rows.append(["parameters", *(f"{each.parameters:,}" for each in self.contenders)])
        rows.append(["training", *(duration(each.losses[-1][0]) if each.losses else "" for each in self.contenders)])
        rows.append(["tokens/s in training", *(si(each.speed) if each.speed else "" for each in self.contenders)])
        written = [
            [cell(beginning), *(cell(each.continuations[i]) for each in self.contenders)]
            for i, beginning in enumerate(self.beginnings)
        ]
        return [rows, [["held-out beginning", *names], *written]] if written else [rows]


def passages_for(contenders: Sequence[Contender]) -> dict[str, list[Passage]]:
    """Find passages that all can read and none has learned, by who has held them out. Raises DataError if there are
    none, ConfigError for conversations and models of other vocabularies."""
    held_out = {each.name: {one.text: one for one in held_out_passages(each.text)} for each in contenders if each.text}
    groups = defaultdict[str, list[Passage]](list)
    for text, passage in ChainMap(*held_out.values()).items():
        names = [name for name, theirs in held_out.items() if text in theirs]
        groups["all" if len(names) == len(held_out) else " and ".join(names)].append(passage)
    paths = [each.checkpoint.tokenizer_path() for each in contenders]
    tokenizers = [load_tokenizer(path) for path in paths]
    if len(set(map(sha256_file, paths))) > 1 and any(group[0].ids is not None for group in groups.values()):
        raise ConfigError("Conversations can be compared only between models of one vocabulary.")
    found: dict[str, list[Passage]] = {}
    for whose in sorted(groups, key=lambda whose: whose != "all"):
        passages = [one for one in spread(groups[whose]) if all(is_known(each, one) for each in tokenizers)]
        for other in contenders:
            others = [one for one in passages if other.text and one.text not in held_out[other.name]]
            learned = found_in_training(other.text, others) if other.text and others else set()
            passages = [one for one in passages if one.text not in learned]
        if passages:
            found[whose] = passages
    if not found:
        why = "each has learned what the others hold out" if held_out else "the tokens of none are there any more"
        raise DataError(
            f"There is no passage to compare these models on: {why}. On a text that is new to all: python generate.py "
            "--score FILE --checkpoint RUN, for each."
        )
    return found
