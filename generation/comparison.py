"""Compare models on the same passages, which none of them was trained on, with the error of each difference."""

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
    add_scores,
    can_encode,
    compare_scores,
    find_in_training,
    find_training_tokens,
    pick_evenly,
    read_held_out,
    score_next_sentences,
    score_passages,
)
from generation.request import Sampling
from generation.scoring import Score
from tokenization.metadata import TokenMetadata
from tokenizer import load_tokenizer

COMMON = "all"  # the group of passages that all models hold out
NUM_PROMPTS = 3
PROMPT_CHARACTERS = 60
CONTINUATION = Sampling(max_new_tokens=40)


@dataclass
class Contender:
    """A model, its training records, and its measurements."""

    name: str
    checkpoint: Checkpoint
    metrics: list[dict[str, Any]]
    training_tokens: TokenMetadata | None  # None if unknown
    parameters: int = 0
    scores: list[Score] = field(default_factory=list)  # one per passage
    next_sentences: str = ""
    continuations: list[str] = field(default_factory=list)  # one per prompt

    @property
    def losses(self) -> list[tuple[float, float]]:
        """(seconds of training, validation bits per byte) of each evaluation."""
        rows = [row for row in self.metrics if "val_bits_per_byte" in row and "elapsed_seconds" in row]
        return [(row["elapsed_seconds"], row["val_bits_per_byte"]) for row in rows]

    @property
    def speed(self) -> float | None:
        """Median tokens per second in training."""
        speeds = [row["tokens_per_second"] for row in self.metrics if row.get("tokens_per_second")]
        return median(speeds) if speeds else None


@dataclass
class Comparison:
    """The measurements of several models."""

    contenders: list[Contender]
    passages: dict[str, list[Passage]]  # who has held them out -> passages, in the order of `scores`
    prompts: list[str]

    @classmethod
    def of(
        cls, checkpoints: Mapping[str, Checkpoint], metrics: Mapping[str, list[dict[str, Any]]], device: str
    ) -> Comparison:
        """Measure the models one after the other, in fp32. Raises CheckpointError, ConfigError or DataError."""
        contenders = [
            Contender(name, each, metrics[name], find_training_tokens(each)) for name, each in checkpoints.items()
        ]
        groups = _choose_passages(contenders)
        passages = [passage for group in groups.values() for passage in group]
        texts = [passage.text for passage in passages if passage.ids is None]
        candidates = [
            text[:PROMPT_CHARACTERS].rpartition(" ")[0].strip() for text in texts[:: len(texts) // NUM_PROMPTS or 1]
        ]
        prompts = [start for start in candidates if start][:NUM_PROMPTS]
        for contender in contenders:
            log.info(f"Comparing  {contender.name} on {len(passages)} passages ...")
            model, tokenizer = load_checkpoint(contender.checkpoint, device, torch.float32)
            contender.parameters = model.num_parameters()
            contender.scores = score_passages(model, tokenizer, passages)
            contender.next_sentences = str(score_next_sentences(model, tokenizer, texts))
            contender.continuations = [each.text for each in generate(model, tokenizer, prompts, CONTINUATION)]
        return cls(contenders, groups, prompts)

    def describe_verdict(self) -> list[str]:
        """Return sentences on which model is best, by how much and how soon, and what is unknown."""
        common = len(self.passages.get(COMMON, ()))  # these come first
        if not common:
            names = " and ".join(contender.name for contender in self.contenders)
            return [
                f"None is called better: {names} were trained on different texts, and each predicts its own kind best. "
                "The rows below are for each one's held-out passages."
            ]
        best, *others = sorted(
            self.contenders, key=lambda contender: add_scores(contender.scores[:common]).bits_per_byte
        )
        sentences = []
        for other in others:
            gap = compare_scores(other.scores[:common], best.scores[:common])
            size = f"{gap.mean:.3f} +- {gap.error:.3f} bits per byte"
            if gap.is_clear:
                sentences.append(f"{best.name} is better than {other.name} by {size}.")
            else:
                sentences.append(f"{best.name} and {other.name} do not differ measurably on this text ({size}).")
            # Losses on the same text
            if best.training_tokens and best.training_tokens == other.training_tokens and best.losses and other.losses:
                time, loss = other.losses[-1]
                reached = next((seconds for seconds, best_loss in best.losses if best_loss <= loss), None)
                if reached is not None:
                    sentences.append(
                        f"It reaches the last loss of {other.name}, {loss:.3f}, in {reached / time:.2g} of its time "
                        f"({duration(reached)} of {duration(time)})."
                    )
        if unknown := [contender.name for contender in self.contenders if contender.training_tokens is None]:
            sentences.append(f"The training text of {', '.join(unknown)} is unknown and may include these passages.")
        return sentences

    def build_tables(self) -> list[list[list[str]]]:
        """Return tables of the measurements, and of each model's continuations of held-out prompts."""
        names = [cell(contender.name) for contender in self.contenders]
        rows, first = [["", *names]], 0
        for holder, passages in self.passages.items():
            part = slice(first, first := first + len(passages))
            bits = []
            for contender in self.contenders:
                gap = compare_scores(contender.scores[part], self.contenders[0].scores[part])
                change = "" if contender is self.contenders[0] else f" ({gap.mean:+.3f} ± {gap.error:.3f})"
                bits.append(f"{add_scores(contender.scores[part]).bits_per_byte:.3f}{change}")
            rows.append([f"bits per byte, passages held out by {holder}: {len(passages)}", *bits])
        rows.append(["next sentences picked correctly", *(contender.next_sentences for contender in self.contenders)])
        rows.append(["parameters", *(f"{contender.parameters:,}" for contender in self.contenders)])
        rows.append(
            [
                "training",
                *(duration(contender.losses[-1][0]) if contender.losses else "" for contender in self.contenders),
            ]
        )
        rows.append(
            ["tokens/s in training", *(si(contender.speed) if contender.speed else "" for contender in self.contenders)]
        )
        written = [
            [cell(prompt), *(cell(contender.continuations[i]) for contender in self.contenders)]
            for i, prompt in enumerate(self.prompts)
        ]
        return [rows, [["held-out beginning", *names], *written]] if written else [rows]


def _choose_passages(contenders: Sequence[Contender]) -> dict[str, list[Passage]]:
    """Return {who holds them out: passages} that all models can encode and none was trained on. Raises DataError if
    there are none, ConfigError for conversations and models with different vocabularies."""
    held_out = {
        contender.name: {passage.text: passage for passage in read_held_out(contender.training_tokens)}
        for contender in contenders
        if contender.training_tokens
    }
    groups = defaultdict[str, list[Passage]](list)
    for text, passage in ChainMap(*held_out.values()).items():
        names = [name for name, texts in held_out.items() if text in texts]
        groups[COMMON if len(names) == len(held_out) else " and ".join(names)].append(passage)
    paths = [contender.checkpoint.tokenizer_path() for contender in contenders]
    tokenizers = [load_tokenizer(path) for path in paths]
    if len(set(map(sha256_file, paths))) > 1 and any(group[0].ids is not None for group in groups.values()):
        raise ConfigError("On conversations, only models with the same vocabulary can be compared.")
    found: dict[str, list[Passage]] = {}
    for holder in sorted(groups, key=lambda name: name != COMMON):
        passages = [
            passage
            for passage in pick_evenly(groups[holder])
            if all(can_encode(tokenizer, passage) for tokenizer in tokenizers)
        ]
        for contender in contenders:
            if contender.training_tokens is not None:
                own = held_out[contender.name]
                others = [passage for passage in passages if passage.text not in own]
                learned = find_in_training(contender.training_tokens, others) if others else set()
                passages = [passage for passage in passages if passage.text not in learned]
        if passages:
            found[holder] = passages
    if not found:
        why = "each was trained on what the others hold out" if held_out else "their tokens are gone"
        raise DataError(
            f"No passages to compare these models on: {why}. To compare on a new text, run python generate.py --score "
            "FILE --checkpoint RUN for each."
        )
    return found
