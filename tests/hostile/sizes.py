"""Files that claim to be larger than any memory, read in a process that has little: it ends with 1 and names those that
were neither refused with a message nor of no harm.

    python -m tests.hostile.sizes FOLDER
"""

from __future__ import annotations

import contextlib
import gzip
import json
import resource
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.lora import LARGEST_RANK
from tests.hostile.readers import (
    Training,
    blogs_form,
    limited_memory,
    seal,
    tiny_config,
    use_model,
    use_tokenizer,
    use_tokens,
    write_bpe_tokenizer,
)
from tokenizer import load_tokenizer
from tokenizer_base import TokenizerError
from training.prepare import prepare

SPARE_MEMORY = 1_000_000_000  # bytes
LARGEST_FILE = 50_000_000  # bytes that may be written
HUGE = 10**12
SHAPES: tuple[dict[str, Any], ...] = (
    {"embed_dim": 10**9, "num_heads": 1},
    {"embed_dim": 2**31 - 1, "num_heads": 2},  # a prime: nothing divides it
    {"embed_dim": 2**31 - 2, "num_heads": 1, "vocab_size": 2**31 - 1},  # more bytes than 64 bits can count
    {"num_layers": 10**7},
    {"num_layers": 2**31 - 1},
    {"ff_dim": 2**31 - 1},
    {"ff_dim": 10**18},
    {"max_seq_len": 2**31 - 1},
    {"max_seq_len": HUGE},
    {"vocab_size": 2**31 - 1},
    {"vocab_size": HUGE},
)


class Attempt:
    """One file in a folder that is another for as long as it is used; the manifest agrees with it."""

    def __init__(self, name: str, path: Path, content: bytes | dict[str, Any], use: Callable[[], object]):
        self.name = f"{path.name}: {name}"
        self.path = path
        self.content = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.use = use

    def problem(self) -> BaseException | None:
        """What it came to, other than a message to the user or success."""
        original = self.path.read_bytes()
        self.path.write_bytes(self.content)
        try:
            if (self.path.parent / "manifest.json").exists():
                seal(self.path.parent)
            with limited_memory(SPARE_MEMORY):
                self.use()
        except (UserError, TokenizerError) as refused:
            print(f"{self.name}: {refused!s:.150}")
        except BaseException as problem:
            return problem
        else:
            print(f"{self.name}: used")
        finally:
            self.path.write_bytes(original)
        return None


def attempts(folder: Path) -> Iterator[Attempt]:
    training = Training(folder / "training")
    checkpoint, data = training.checkpoint, training.token_folder
    blog = blogs_form(checkpoint, folder / "blog")
    adapted = Training(folder / "lora", init_from=str(checkpoint), lora_rank=2).checkpoint
    starting = tiny_config(data, folder / "new", init_from=checkpoint)
    described = json.loads((checkpoint / "config.json").read_text())
    for shape in SHAPES:
        changed = {**described, **shape}
        yield Attempt(f"{shape}", checkpoint / "config.json", changed, lambda: use_model(checkpoint))
        yield Attempt(f"{shape}, --init_from", checkpoint / "config.json", changed, lambda: prepare(starting))
        yield Attempt(f"{shape}, the blog's", blog / "config.json", changed, lambda: use_model(blog))

    of_adapters = json.loads((adapted / "config.json").read_text())
    changed = {**of_adapters, "lora": {**of_adapters["lora"], "rank": LARGEST_RANK}}
    yield Attempt("a rank", adapted / "config.json", changed, lambda: use_model(adapted))

    state = json.loads((checkpoint / "training_state.json").read_text())
    for key in ("step", "sequences_seen", "tokens", "elapsed_seconds", "best_windows"):
        for value in (2**32 - 1, 10**18, 10**400):
            changed = {**state, key: value}
            yield Attempt(f"{key} {value!s:.20}", checkpoint / "training_state.json", changed, training.resume)

    content = (checkpoint / "model.safetensors").read_bytes()
    claim = {"head.weight": {"dtype": "F32", "shape": [10**6, 10**6], "data_offsets": [0, 4 * HUGE]}}
    header = json.dumps(claim).encode()
    for name, start in (
        ("header", (2**62).to_bytes(8, "little")),
        ("tensor", len(header).to_bytes(8, "little") + header),
    ):
        changed = start + content[8:]
        yield Attempt(f"a huge {name}", checkpoint / "model.safetensors", changed, lambda: use_model(checkpoint))

    bpe = folder / "bpe.json"
    write_bpe_tokenizer(bpe)
    tokenizer = json.loads(bpe.read_text())
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    padding = {"strategy": {"Fixed": HUGE}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "<|pad|>"}
    for name, changed in {
        "an id": {**tokenizer, "model": {**tokenizer["model"], "vocab": {**vocab, "zz": 2**31}}},
        "a special id": {**tokenizer, "added_tokens": [*added, {**added[0], "content": "<x>", "id": 2**32 - 1}]},
        "padding": {**tokenizer, "padding": padding},
        "an array": {**tokenizer, "added_tokens": [0] * 1_000_000},
    }.items():
        yield Attempt(name, bpe, changed, lambda: use_tokenizer(load_tokenizer(bpe)))
    characters = json.loads((data / "tokenizer.json").read_text())
    for name, changed in {
        "ids": {**characters, "char_to_idx": {key: i * 2**31 for key, i in characters["char_to_idx"].items()}},
        "a size": {**characters, "vocab_size": HUGE},
    }.items():
        path = folder / "characters.json"
        path.touch()
        yield Attempt(name, path, changed, lambda: use_tokenizer(load_tokenizer(folder / "characters.json")))

    metadata = data / "tokens_metadata.json"
    described = {key: value for key, value in json.loads(metadata.read_text()).items() if "sha256" not in key}
    for key in ("total_tokens", "train_split_index", "vocab_size", "val_bytes"):
        for value in (2**31, 10**18, 10**400):
            changed = {**described, key: value}
            yield Attempt(f"{key} {value!s:.20}", metadata, changed, lambda: use_tokens(training.config))
    (data / "tokens.bin").unlink()
    packed = data / "tokens.bin.gz"
    packed.touch()
    zeros = gzip.compress(bytes(LARGEST_FILE), 1) * 100
    yield Attempt("five gigabytes of zeros", packed, zeros, lambda: use_tokens(training.config))


def main() -> int:
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    failures = 0
    for attempt in attempts(Path(sys.argv[1])):
        with contextlib.redirect_stderr(sys.stdout):
            problem = attempt.problem()
        if problem is not None:
            failures += 1
            print(f"FAILED {attempt.name}: {problem!r:.300}", file=sys.stderr, flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
