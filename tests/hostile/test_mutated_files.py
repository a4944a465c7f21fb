"""A mutated file is refused with a message that names it, or used: no other exception, no hang, no excess memory. A
failure names the kind of file and the mutation."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from common.errors import CheckpointError, DataError, UserError
from tests.hostile.mutations import Mutation, byte_mutations, header_mutations, json_mutations
from tests.hostile.readers import (
    Training,
    blogs_form,
    limited_memory,
    seal,
    use_metadata,
    use_model,
    use_tokenizer,
    use_tokens,
    write_bpe_tokenizer,
)
from tokenizer import load_tokenizer
from tokenizer_bpe import TokenizerError

KINDS = (
    "metadata", "BPE tokenizer", "config.json", "header of model.safetensors", "optimizer.safetensors",
    "training_state.json", "manifest.json", "pytorch_model.bin",
)  # fmt: skip
HASHED = ("tokens.bin", "tokenizer.json")
CHECKPOINT = ("model.safetensors", "config.json", "tokenizer.json", "optimizer.safetensors", "training_state.json")
SPARE_MEMORY = 1_500_000_000  # bytes, for files of some kilobytes
SECONDS = 20  # that reading one may take, on a machine that is busy with other things


class Case(NamedTuple):
    path: Path  # of the file that is mutated
    mutations: list[Mutation]
    use: Callable[[], object]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    return Training(tmp_path_factory.mktemp("hashed"))


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, training: Training) -> dict[str, Case]:
    """Return the cases by kind. No hash protects the mutated part: the metadata has none, the manifest is updated."""
    folder = tmp_path_factory.mktemp("hostile")
    open_to_all = Training(folder / "run")
    data, config, checkpoint = open_to_all.token_folder, open_to_all.config, open_to_all.checkpoint
    metadata, bpe = data / "tokens_metadata.json", folder / "bpe.json"
    described = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({key: value for key, value in described.items() if "sha256" not in key}))
    write_bpe_tokenizer(bpe)
    blog = blogs_form(checkpoint, folder / "blog")

    def sealed(use: Callable[[], object]) -> Callable[[], object]:
        def seal_and_use() -> None:
            seal(checkpoint)
            use()

        return seal_and_use

    def model() -> None:
        use_model(checkpoint)

    def changed(path: Path, count: int, seed: int) -> list[Mutation]:
        return list(byte_mutations(path.read_bytes(), count, seed))

    def as_json(path: Path, count: int, seed: int) -> list[Mutation]:
        return [*json_mutations(json.loads(path.read_bytes()), count, seed), *changed(path, count // 2, seed)]

    weights, optimizer, state, shape = (
        checkpoint / name
        for name in ("model.safetensors", "optimizer.safetensors", "training_state.json", "config.json")
    )
    manifest = training.checkpoint / "manifest.json"  # of files that no other case changes
    listed = [
        Case(metadata, as_json(metadata, 400, 1), lambda: use_metadata(data, config)),
        Case(bpe, as_json(bpe, 300, 5), lambda: use_tokenizer(load_tokenizer(bpe))),
        Case(shape, as_json(shape, 300, 9), sealed(model)),
        Case(weights, list(header_mutations(weights.read_bytes(), 150, 12)), sealed(model)),
        Case(optimizer, changed(optimizer, 150, 13), sealed(open_to_all.resume)),
        Case(state, as_json(state, 350, 15), sealed(open_to_all.resume)),
        Case(manifest, as_json(manifest, 150, 17), lambda: use_model(training.checkpoint)),
        Case(blog / "pytorch_model.bin", changed(blog / "pytorch_model.bin", 250, 18), lambda: use_model(blog)),
    ]
    return dict(zip(KINDS, listed, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutated_file_is_refused_by_name_or_used(kind: str, cases: dict[str, Case]) -> None:
    path, mutations, use = cases[kind]
    use()  # as it was written
    refused = {name: problem for name, problem in refusals(path, mutations, use) if problem is not None}
    failures = [f"{name}: {problem!r:.300}" for name, problem in refused.items() if not is_told(problem, path)]
    assert not failures, f"{kind}, {len(failures)} of {len(mutations)} mutations:\n" + "\n".join(failures[:20])
    assert refused


@pytest.mark.parametrize("name", CHECKPOINT)
def test_any_change_in_a_checkpoint_is_found_by_its_hash(name: str, training: Training) -> None:
    path = training.checkpoint / name
    original = path.read_bytes()
    mutations = [m for m in byte_mutations(original, 60, seed=19) if m.content != original]
    for mutation, problem in refusals(path, mutations, lambda: use_model(training.checkpoint)):
        assert isinstance(problem, CheckpointError) and name in str(problem), f"{mutation}: {problem!r}"


@pytest.mark.parametrize("name", HASHED)
def test_any_change_in_a_token_folder_is_found_by_its_hash(name: str, training: Training) -> None:
    path = training.token_folder / name
    original = path.read_bytes()
    mutations = [m for m in byte_mutations(original, 60, seed=20) if m.content != original]
    for mutation, problem in refusals(path, mutations, lambda: use_tokens(training.config)):
        assert isinstance(problem, DataError | TokenizerError) and name in str(problem), f"{mutation}: {problem!r}"


def refusals(
    path: Path, mutations: list[Mutation], use: Callable[[], object]
) -> Iterator[tuple[str, BaseException | None]]:
    """Yield the name of each mutation and the exception. Restores the file at the end."""
    original = path.read_bytes()
    try:
        for mutation in mutations:
            path.write_bytes(mutation.content)
            try:
                with limited_memory(SPARE_MEMORY), limited_time():
                    use()
            except KeyboardInterrupt:
                raise
            except BaseException as problem:  # what Rust's panics are derived from
                yield mutation.name, problem
            else:
                yield mutation.name, None
    finally:
        path.write_bytes(original)


def is_told(problem: BaseException, path: Path) -> bool:
    """Whether a user can act on it: an error of ours that names the file, its folder or its flag."""
    named = any(name in str(problem) for name in (path.name, str(path.parent)))
    return isinstance(problem, UserError | TokenizerError) and named


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raises TimeoutError inside after SECONDS, where the system can."""

    def stop(*_: object) -> NoReturn:
        raise TimeoutError(f"{SECONDS} seconds have passed")

    if not hasattr(signal, "setitimer"):
        yield
        return
    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
