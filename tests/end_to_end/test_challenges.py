"""The eleven challenges that cost the blog's author 105 hours of an A100, each met again: it cannot happen, or one
sentence says what to do. docs/challenges.md tells of each, names its test, and quotes what is printed in it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

import common.machine
import generate
import tokenize_local_bpe
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import CPU, ROOT, generated_text, hardware_of, open_tokens, run_script, snapshot, write_tokens
from tests.training.helpers import final_weights, measured
from training.config import Config, parse_config

DOCUMENT = (ROOT / "docs" / "challenges.md").read_text(encoding="utf-8")
SHORT = ("--device", "cpu", "--max_new_tokens", "20", "--temperature", "0")
QUICK = {"max_steps": 4, "eval_interval": 0, "checkpoint_steps": 0}


def refusal(result: Any, code: int) -> str:
    """The one message that a command ended with, which has to be all there is on stderr."""
    assert result.code == code, (result.code, result.out, result.err)
    assert result.err.startswith("error: ") and result.err.count("error:") == 1
    assert "Traceback" not in result.out + result.err
    return result.err


def require_quoted(number: int, *printed: str) -> None:
    """What the document quotes of a challenge was printed just so; "..." stands there for anything."""
    chapter = re.split(r"^## ", DOCUMENT, flags=re.MULTILINE)[number]
    assert chapter.startswith(f"{number}. ")
    quotes = re.findall(r"^```text\n(.*?)\n```$", chapter, re.MULTILINE | re.DOTALL)
    assert quotes
    for quote in quotes:
        pattern = ".*?".join(re.escape(part) for part in quote.split("..."))
        assert any(re.search(pattern, text, re.DOTALL) for text in printed), (quote, printed)


@contextlib.contextmanager
def before_each_forward(action: Callable[..., None]) -> Iterator[None]:
    """Do `action` with the tensors that any model is about to be given."""

    def hook(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        if isinstance(module, TransformerLanguageModel):
            action(*given)

    handle = register_module_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")  # as a GPU says it


def pretend_memory(patch: pytest.MonkeyPatch, **told: int) -> None:
    """A machine that tells other numbers of bytes in /proc/meminfo."""
    real = common.machine.memory_info
    patch.setattr(common.machine, "memory_info", lambda name: told.get(name, real(name)))


def rewrite_tokens(folder: Path, dtype: str) -> None:
    """The same ids in a token folder of another dtype."""
    path = folder / "tokens_metadata.json"
    metadata = json.loads(path.read_text())
    tokens = np.fromfile(folder / "tokens.bin", metadata["dtype"]).astype(dtype)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    metadata |= {"dtype": dtype, "bytes_per_token": tokens.itemsize}
    path.write_text(json.dumps({**metadata, "tokens_sha256": hashlib.sha256(tokens.tobytes()).hexdigest()}))


def edit_metadata(folder: Path, **changes: object) -> None:
    path = folder / "tokens_metadata.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_challenge_1_a_checkpoint_of_another_context_length(train: Callable, tmp_path: Path) -> None:
    """A run with context 16 is not continued with 32; nor does anybody have to remember the 16."""
    run = tmp_path / "run"
    assert train(run, **QUICK).code == 0
    before = snapshot(run)
    refused = refusal(train(run, **{**QUICK, "max_steps": 8}, max_seq_len=32), 4)
    assert "max_seq_len: 16 in the checkpoint, 32 now" in refused and "--output_dir" in refused
    assert snapshot(run) == before

    said = refusal(train(tmp_path / "new", **QUICK, max_seq_len=32, init_from=run), 2)
    assert "max_seq_len is 32 from flag, 16 in" in said and not (tmp_path / "new").exists()
    require_quoted(1, refused, said)
    fine_tuned = train(tmp_path / "new", **QUICK, max_seq_len=None, init_from=run)
    assert fine_tuned.code == 0 and "context 16" in fine_tuned.out

    longer = run_script(generate.main, "--checkpoint", run, "--prompt", "the cat", "--json", *SHORT)
    assert longer.code == 0, longer.err
    assert json.loads(longer.out)["tokens"] == 20  # beyond the context it was trained with


def test_challenge_2_targets_of_another_integer_type(train: Callable, token_folder: Path, tmp_path: Path) -> None:
    """Cross-entropy wants 64-bit targets; whatever lies on disk, it gets them, and learns the same from them."""
    with pytest.raises(RuntimeError):  # what the author met
        torch.nn.functional.cross_entropy(torch.zeros(4, 5), torch.zeros(4, dtype=torch.int32))
    seen: set[torch.dtype] = set()
    for dtype in ("uint16", "int16", "int32"):
        data = tmp_path / f"data_{dtype}"
        shutil.copytree(token_folder, data)
        rewrite_tokens(data, dtype)
        with before_each_forward(lambda *given: seen.update(tensor.dtype for tensor in given)):
            assert train(tmp_path / dtype, data_dir=data, **QUICK).code == 0
    assert seen == {torch.int64}
    losses = [[row["train_loss"] for row in measured(tmp_path / dtype)] for dtype in ("uint16", "int16", "int32")]
    assert len(losses[0]) == 4 and np.isfinite(losses[0]).all()
    assert losses[0] == losses[1] == losses[2]


def test_challenge_3_a_checkpoint_under_another_file_name(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No name has to be known. The author's own folders work too, under the name that the author's trainer wrote."""
    monkeypatch.chdir(tmp_path)
    assert train(Path("runs/mine"), **QUICK).code == 0
    newest = run_script(generate.main, "--prompt", "the cat", *SHORT)
    assert newest.code == 0 and newest.out.startswith("the cat"), newest.err

    ours, blog = Path("runs/mine/checkpoints/step_00000004"), Path("blog_model")
    blog.mkdir()
    weights = safetensors.torch.load_file(ours / "model.safetensors")
    state = {f"_orig_mod.{name}": tensor for name, tensor in weights.items()}
    torch.save({**state, "_orig_mod.causal_mask": torch.ones(16, 16).triu(1).bool()}, blog / "pytorch_model.bin")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(ours / name, blog / name)
    from_blog = run_script(generate.main, "--checkpoint", blog, "--prompt", "the cat", *SHORT)
    assert (from_blog.code, from_blog.out) == (0, newest.out)
    compared = run_script(generate.main, "--compare", blog, ours, "--prompt", "the cat", *SHORT)
    assert compared.code == 0 and compared.out.count("\n") == 4, compared.err
    Path("text.txt").write_text("the cat sat on the mat")
    scores = [run_script(generate.main, "--checkpoint", path, "--score", "text.txt", "--json") for path in (blog, ours)]
    assert [json.loads(score.out)["loss"] for score in scores] == [json.loads(scores[0].out)["loss"]] * 2
    further = train(Path("runs/further"), **QUICK, init_from=blog)
    assert further.code == 0 and f"Starting from the weights of {blog}" in further.out, further.err

    refused = []
    for wrong in ("model.pth", "runs/mine/model.pth", ours / "model.safetensors", blog / "pytorch_model.bin"):
        said = refusal(run_script(generate.main, "--checkpoint", wrong, "--prompt", "the cat", *SHORT), 4)
        assert str(wrong) in said and str(ours) in said, "what was asked for, and what is there"
        refused.append(said)
    assert str(blog) in said.replace(str(wrong), ""), "the folder of a file is what to name"
    require_quoted(3, *refused)


def test_challenge_4_a_slow_memory_map(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that fit lie in RAM; those that do not are mapped, with a sentence. The model learns the same."""
    in_ram = train(tmp_path / "ram", **QUICK)
    assert in_ram.code == 0 and "in RAM" in in_ram.out
    mapped = train(tmp_path / "mmap", placement="mmap", **QUICK)
    assert mapped.code == 0 and "in a memory map" in mapped.out
    pretend_memory(monkeypatch, MemAvailable=50_000)  # less than the 60,000 bytes of tokens
    too_large = train(tmp_path / "too_large", **QUICK)
    assert too_large.code == 0 and "in a memory map" in too_large.out
    assert "do not fit" in too_large.out and "keep the file on a local disk" in too_large.out
    require_quoted(4, too_large.out)
    weights = [final_weights(tmp_path / name, 4) for name in ("ram", "mmap", "too_large")]
    assert weights[0] == weights[1] == weights[2]


def instructions(action: Callable[[], object]) -> int:
    """How many of Python's instructions an action takes, which is the same each time."""
    count = 0

    def tracer(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return tracer

    before = sys.gettrace()
    gc.disable()  # what is collected meanwhile may run code of its own
    sys.settrace(tracer)
    try:
        action()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def test_challenge_5_a_loop_over_the_rows_of_a_batch(token_folder: Path) -> None:
    """512 rows take as many steps of Python as 8 do."""
    data = open_tokens(Config(data_dir=str(token_folder), max_seq_len=16, placement="ram"), CPU)

    def loop(rows: int) -> torch.Tensor:  # the author's way
        return torch.stack([data.tokens[16 * row : 16 * row + 17] for row in range(rows)])

    for take in (loop, lambda rows: data.batch(0, rows)):
        take(512)  # the order of the epoch is drawn once, and kept
    assert instructions(lambda: loop(512)) > 10 * instructions(lambda: loop(8))
    assert instructions(lambda: data.batch(0, 512)) == instructions(lambda: data.batch(0, 8)) > 0
    assert data.batch(0, 512)[0].shape == (512, 16)


def pretend_gpu(patch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    """A machine with this GPU, as far as PyTorch is asked about it."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda *_: name)
    patch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    patch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(total_memory=40 * 2**30))
    patch.setattr(importlib.util, "find_spec", lambda _: object())  # Triton, which comes with a build for a GPU


def test_challenge_6_training_neither_compiled_nor_in_half_precision(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No config has to ask for it: a GPU compiles, but for the runs of seconds whose configs say no, and computes in
    the type it is fast in. The first lines say so."""
    of_seconds = ("quickstart", "shakespeare_char", "shakespeare_char_fast")
    described = []
    configs = [parse_config(["--config", str(path)]) for path in sorted((ROOT / "configs").glob("*.json"))]
    for name, capability, precision in (("NVIDIA A100-SXM4-40GB", (8, 0), "bf16"), ("Tesla T4", (7, 5), "fp16")):
        with monkeypatch.context() as patch:
            pretend_gpu(patch, name, capability)
            for config in configs:
                hardware = hardware_of(config)
                compiles = config.name not in of_seconds
                assert hardware.compiles == compiles and hardware.precision == precision, config.run_dir
                assert hardware.grad_scaler().is_enabled() == (precision == "fp16")
                assert f"Precision  {precision}: " in hardware.describe()
                assert f"Compile    {'on: on a GPU' if compiles else 'off: as configured'}" in hardware.describe()
            described.append(hardware_of(parse_config(["--config", "gpt2_small.json"])).describe())
    require_quoted(6, *described)
    losses = {}
    for precision in ("fp32", "bf16"):
        result = train(tmp_path / precision, precision=precision, **QUICK)
        assert result.code == 0 and f"Precision  {precision}" in result.out
        losses[precision] = [row["train_loss"] for row in measured(tmp_path / precision)]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    assert losses["bf16"] != losses["fp32"], "it is what was computed in"


def test_challenge_7_out_of_memory(train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a run, the batch is taken in smaller parts, and foreseen, before the first step."""
    flags = {"dropout": 0.0}
    assert train(tmp_path / "straight", **flags).code == 0
    rows: list[int] = []

    def full_once(inputs: torch.Tensor, *_: torch.Tensor) -> None:
        rows.append(len(inputs))
        if len(rows) == 20:  # the second half of the tenth step
            out_of_memory()

    with before_each_forward(full_once):
        result = train(tmp_path / "run", **flags)
    assert result.code == 0, result.err
    assert set(rows[:20]) == {4} and rows[20:24] == [2, 2, 2, 2], "the same step again, in smaller parts"
    assert result.out.count("Out of memory with 4 sequences at once") == 1 and "--micro_batch_size 2" in result.out
    require_quoted(7, result.out)
    ours, theirs = ([row["train_loss"] for row in measured(tmp_path / name)] for name in ("run", "straight"))
    assert len(ours) == 24 and ours == pytest.approx(theirs, rel=1e-4)
    assert "micro_batch_size 2, which fitted" in train(tmp_path / "run", **{**flags, "max_steps": 25}).out

    pretend_memory(monkeypatch, MemTotal=8_000_000)
    rows.clear()
    large = {"batch_size": 512, "gradient_accumulation_steps": 1, "max_steps": 1, "eval_interval": 0}
    with before_each_forward(lambda inputs, *_: rows.append(len(inputs))):
        foreseen = train(tmp_path / "foreseen", **large)
    assert foreseen.code == 0 and "would not fit: micro_batch_size" in foreseen.out, foreseen.out
    assert max(rows) < 512 and sum(rows) == 512


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells how much is free")
def test_challenge_8_memory_held_by_another_process(
    train: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When nothing is left to halve, the message says how much memory others hold."""
    size, before = 10**9, CPU.peak_memory() or 0
    total = before + 4 * 10**9
    pretend_memory(monkeypatch, MemTotal=total, MemAvailable=total - before - size)
    with before_each_forward(out_of_memory):
        said = refusal(train(tmp_path / "run", micro_batch_size=1, **QUICK), 5)
    ((number, unit),) = re.findall(r"Other processes hold ([\d.]+) ([GM]B) of this memory", said)
    grown = (CPU.peak_memory() or 0) - before  # what this process has taken since is not held by others
    assert size - grown - 1e8 <= float(number) * {"GB": 1e9, "MB": 1e6}[unit] <= size + 1e8
    assert "End those you do not need" in said and "run the same command again" in said
    require_quoted(8, said)
    pretend_memory(monkeypatch, MemTotal=total, MemAvailable=total)
    with before_each_forward(out_of_memory):
        assert "Other processes" not in refusal(train(tmp_path / "run", micro_batch_size=1, **QUICK), 5)
    assert train(tmp_path / "run", micro_batch_size=1, **QUICK).code == 0, "once it is gone, the same command runs"


def test_challenge_9_another_tokenizer(train: Callable, tmp_path: Path) -> None:
    """A run does not go on with tokens of another vocabulary, and a model speaks with the one it was trained with."""
    data, run = tmp_path / "tokens", tmp_path / "run"
    hashes = []
    for name, text in (("first", generated_text(20_000)), ("second", "0123 45 678 9 01 " * 2_000)):
        (tmp_path / f"{name}.txt").write_text(text)
        flags = ("--input", tmp_path / f"{name}.txt", "--output_dir", data, "--vocab_size", 270)
        assert run_script(tokenize_local_bpe.main, *flags).code == 0
        hashes.append(json.loads((data / "tokens_bpe_metadata.json").read_text())["tokenizer_sha256"])
        if name == "first":
            shutil.copytree(data, tmp_path / "mixed")
            assert train(run, data_dir=data, **QUICK).code == 0
    refused = refusal(train(run, data_dir=data, **{**QUICK, "max_steps": 8}), 4)
    assert f"tokenizer_sha256 of the data: '{hashes[0][:16]}' in the checkpoint, '{hashes[1][:16]}' now" in refused
    assert "Give the old values" in refused and "--output_dir" in refused

    shutil.copy(data / "bpe_tokenizer.json", tmp_path / "mixed")  # the tokens of one, the tokenizer of the other
    said = refusal(train(tmp_path / "new", data_dir=tmp_path / "mixed", **QUICK), 3)
    assert hashes[0][:16] in said and hashes[1][:16] in said and "Use the one written beside them" in said
    require_quoted(9, refused, said)

    shutil.rmtree(data)
    answered = run_script(generate.main, "--checkpoint", run, "--prompt", "the cat", "--json", *SHORT)
    assert answered.code == 0, answered.err
    own = run / "checkpoints" / "step_00000004" / "tokenizer.json"
    assert hashlib.sha256(own.read_bytes()).hexdigest() == hashes[0]
    assert json.loads(answered.out)["tokens"] == 20


def test_challenge_10_the_type_of_the_tokens_is_assumed(train: Callable, tmp_path: Path) -> None:
    """It stands in the metadata; where that is wrong, size or range tell. Ids above 32,767 stay what they are."""
    alphabet = "".join(chr(code) for code in range(0x4E00, 0x4E00 + 20_000)) + "".join(
        chr(code) for code in range(0x10000, 0x10000 + 20_000)
    )
    text = "".join(np.random.RandomState(0).choice(list(alphabet[30_000:]), 4_000))
    data = write_tokens(tmp_path / "data", text, alphabet)
    result = train(tmp_path / "run", data_dir=data, **QUICK)
    assert result.code == 0, result.err
    tokens = open_tokens(Config(data_dir=str(data), max_seq_len=16), CPU)
    inputs, _ = tokens.batch(0, 40)
    assert int(inputs.max()) > 32_767 and all(tokens.tokenizer.decode(row.tolist()) in text for row in inputs)

    edit_metadata(data, dtype="int32")  # as the author read a file of 16-bit ids
    refused = refusal(train(tmp_path / "int32", data_dir=data, **QUICK), 3)
    assert "has 8,000 bytes" in refused and "4,000 tokens of 4 bytes (int32) = 16,000" in refused
    edit_metadata(data, dtype="int16")  # of the same size; half of the ids turn negative
    said = refusal(train(tmp_path / "int16", data_dir=data, **QUICK), 3)
    assert re.search(r"token id -\d+, outside the vocabulary of 40,000", said) and "another dtype than int16" in said
    assert "tokenize_local_bpe.py again" in said
    require_quoted(10, refused, said)
    assert not (tmp_path / "int32").exists() and not (tmp_path / "int16").exists()


def largest_kept(length: int) -> int:
    """Elements of the largest tensor that is kept for the backward pass of two sequences."""
    model = TransformerLanguageModel(ModelConfig(40, 32, 2, 2, max_seq_len=length))
    tokens = torch.randint(0, 40, (2, length))
    sizes: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(tokens, tokens).backward()
    return max(sizes)


def test_challenge_11_the_attention_matrix(train: Callable, tmp_path: Path) -> None:
    """No matrix of every position with every other: what is kept grows with the context, not with its square."""
    kept = largest_kept(512)
    assert kept < 2 * 2 * 512 * 512  # sequences, heads, positions, positions
    assert largest_kept(1024) == 2 * kept
    assert train(tmp_path / "run", **QUICK).code == 0
    weights = safetensors.torch.load_file(tmp_path / "run/checkpoints/step_00000004/model.safetensors")
    assert not any("mask" in name or tensor.shape == (16, 16) for name, tensor in weights.items())


def test_the_document_tells_of_every_challenge_and_names_its_test() -> None:
    named = re.findall(r"\btest_challenge_\w+", DOCUMENT)
    ours = [name for name in globals() if name.startswith("test_challenge_")]
    assert len(ours) == 11 and named == ours
    assert [int(name.split("_")[2]) for name in ours] == list(range(1, 12))
    assert re.findall(r"^## (\d+)\. ", DOCUMENT, re.MULTILINE) == [str(number) for number in range(1, 12)]
