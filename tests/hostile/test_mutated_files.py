"""Whatever has become of a file, it is refused with a message that names it, or used: no other exception, no hang, no
memory beyond what it holds. A failure names the kind of file and the mutation."""

from __future__ import annotations

import contextlib
import gzip
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest

from common.errors import CheckpointError, DataError, UserError
from tests.helpers import ROOT
from tests.hostile.mutations import Mutation, byte_mutations, header_mutations, json_mutations
from tests.hostile.readers import (
    Training,
    blogs_form,
    limited_memory,
    seal,
    tiny_config,
    use_config,
    use_metadata,
    use_model,
    use_prompts,
    use_resolved_config,
    use_tokenizer,
    use_tokens,
    write_bpe_tokenizer,
)
from tokenizer import load_tokenizer
from tokenizer_base import TokenizerError
from training.checkpoints.run_folder import write_config

KINDS = (
    "metadata", "config", "a run's config", "character tokenizer", "BPE tokenizer", "tokens", "packed tokens",
    "eval prompts", "config.json", "config.json, resumed", "model.safetensors", "header of model.safetensors",
    "optimizer.safetensors", "optimizer.safetensors of Muon", "training_state.json", "tokenizer.json", "manifest.json",
    "pytorch_model.bin", "config.json of adapters", "adapter.safetensors", "adapter.safetensors, resumed",
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
    """By kind. No hash stands before what is mutated: the metadata has none, the manifest is made to agree."""
    folder = tmp_path_factory.mktemp("hostile")
    adamw, muon = Training(folder / "adamw"), Training(folder / "muon", optimizer="muon")
    data, config, checkpoint = adamw.token_folder, adamw.config, adamw.checkpoint

    metadata = data / "tokens_metadata.json"
    described = json.loads(metadata.read_text())
    metadata.write_text(json.dumps({key: value for key, value in described.items() if "sha256" not in key}))
    write_config(adamw.start_or_resume().trainer)
    quickstart, bpe, prompts = (folder / name for name in ("quickstart.json", "bpe.json", "prompts.jsonl"))
    quickstart.write_bytes((ROOT / "configs" / "quickstart.json").read_bytes())
    write_bpe_tokenizer(bpe)
    prompts.write_text('{"prompt": "the cat", "answer": "sat"}\n{"prompt": "a mat"}\n')
    packed = folder / "packed" / "tokens.bin.gz"
    packed.parent.mkdir()
    for path in (metadata, data / "tokenizer.json"):
        (packed.parent / path.name).write_bytes(path.read_bytes())
    packed.write_bytes(gzip.compress((data / "tokens.bin").read_bytes(), mtime=0))
    packed_config = tiny_config(packed.parent, folder / "packed_run")
    blog = blogs_form(checkpoint, folder / "blog")
    base = Training(folder / "base").checkpoint  # which no case changes
    adapted = Training(folder / "lora", init_from=str(base), lora_rank=2)
    of_adapters, adapters = (adapted.checkpoint / name for name in ("config.json", "adapter.safetensors"))

    def unpack() -> None:
        unpacked = packed.parent / "tokens.bin"
        unpacked.unlink(missing_ok=True)
        try:
            use_tokens(packed_config)
        except UserError:
            assert not unpacked.exists(), f"{unpacked} is left over"
            raise

    def sealed(of: Training, use: Callable[[], object]) -> Callable[[], object]:
        def seal_and_use() -> None:
            seal(of.checkpoint)
            use()

        return seal_and_use

    def model() -> None:
        use_model(checkpoint)

    def changed(path: Path, count: int, seed: int) -> list[Mutation]:
        return list(byte_mutations(path.read_bytes(), count, seed))

    def as_json(path: Path, count: int, seed: int) -> list[Mutation]:
        return [*json_mutations(json.loads(path.read_bytes()), count, seed), *changed(path, count // 2, seed)]

    row = {"prompt": "the cat", "answer": "sat"}
    in_row = [Mutation(name, content + b"\n") for name, content in json_mutations(row, 120, 8)]
    run_config, state = config.run_dir / "config.json", "training_state.json"
    weights, tokenizer = checkpoint / "model.safetensors", checkpoint / "tokenizer.json"
    manifest = training.checkpoint / "manifest.json"  # of files that no other case changes
    optimizers = [each.checkpoint / "optimizer.safetensors" for each in (adamw, muon)]
    listed = [
        Case(metadata, as_json(metadata, 400, 1), lambda: use_metadata(data, config)),
        Case(quickstart, as_json(quickstart, 200, 2), lambda: use_config(quickstart)),
        Case(run_config, as_json(run_config, 200, 3), lambda: use_resolved_config(config.run_dir)),
        Case(data / "tokenizer.json", as_json(data / "tokenizer.json", 200, 4), lambda: use_metadata(data, config)),
        Case(bpe, as_json(bpe, 300, 5), lambda: use_tokenizer(load_tokenizer(bpe))),
        Case(data / "tokens.bin", changed(data / "tokens.bin", 200, 6), lambda: use_tokens(config)),
        Case(packed, changed(packed, 200, 7), unpack),
        Case(prompts, [*changed(prompts, 120, 8), *in_row], lambda: use_prompts(prompts, config)),
        Case(checkpoint / "config.json", as_json(checkpoint / "config.json", 300, 9), sealed(adamw, model)),
        Case(checkpoint / "config.json", as_json(checkpoint / "config.json", 100, 10), sealed(adamw, adamw.resume)),
        Case(weights, changed(weights, 250, 11), sealed(adamw, model)),
        Case(weights, list(header_mutations(weights.read_bytes(), 150, 12)), sealed(adamw, model)),
        Case(optimizers[0], changed(optimizers[0], 250, 13), sealed(adamw, adamw.resume)),
        Case(optimizers[1], changed(optimizers[1], 100, 14), sealed(muon, muon.resume)),
        Case(checkpoint / state, as_json(checkpoint / state, 350, 15), sealed(adamw, adamw.resume)),
        Case(tokenizer, as_json(tokenizer, 60, 16), sealed(adamw, model)),
        Case(manifest, as_json(manifest, 150, 17), lambda: use_model(training.checkpoint)),
        Case(blog / "pytorch_model.bin", changed(blog / "pytorch_model.bin", 250, 18), lambda: use_model(blog)),
        Case(of_adapters, as_json(of_adapters, 300, 22), sealed(adapted, lambda: use_model(adapted.checkpoint))),
        Case(adapters, changed(adapters, 150, 23), sealed(adapted, lambda: use_model(adapted.checkpoint))),
        Case(adapters, changed(adapters, 100, 24), sealed(adapted, adapted.resume)),
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
def test_whatever_changes_in_a_checkpoint_is_found_by_its_hash(name: str, training: Training) -> None:
    path = training.checkpoint / name
    original = path.read_bytes()
    mutations = [m for m in byte_mutations(original, 60, seed=19) if m.content != original]
    for mutation, problem in refusals(path, mutations, lambda: use_model(training.checkpoint)):
        assert isinstance(problem, CheckpointError) and name in str(problem), f"{mutation}: {problem!r}"


@pytest.mark.parametrize("name", HASHED)
def test_whatever_changes_in_a_token_folder_is_found_by_its_hash(name: str, training: Training) -> None:
    path = training.token_folder / name
    original = path.read_bytes()
    mutations = [m for m in byte_mutations(original, 60, seed=20) if m.content != original]
    for mutation, problem in refusals(path, mutations, lambda: use_tokens(training.config)):
        assert isinstance(problem, DataError | TokenizerError) and name in str(problem), f"{mutation}: {problem!r}"


def refusals(
    path: Path, mutations: list[Mutation], use: Callable[[], object]
) -> Iterator[tuple[str, BaseException | None]]:
    """For each mutation its name, and what was raised. The file is as it was at the end."""
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
    named = any(name in str(problem) for name in (path.name, str(path.parent), "--eval_prompts"))
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
