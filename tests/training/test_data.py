"""Token data: what is refused and why, and batches that are a pure function of (seed, sequences seen)."""

from __future__ import annotations

import dataclasses
import gc
import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import training.data
from common.errors import ConfigError, DataError, UserError
from common.files import sha256_file
from tests.helpers import CPU, open_tokens, snapshot
from tokenization.metadata import TokenMetadata
from tokenizer import CharacterTokenizer
from training.config import Config
from training.data import ReadAhead, TokenData, choose_placement, layout_of_text

VOCAB_SIZE = 20
TOKENS = 400
TRAIN_TOKENS = 300


def make_folder(
    folder: Path, dtype: str = "uint16", tokens: np.ndarray | None = None, vocab_size: int = VOCAB_SIZE, **fields: Any
) -> Path:
    """A complete token folder; `fields` overrule the metadata's, and None leaves one out."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokens is None:
        tokens = np.arange(TOKENS) * 7 % vocab_size
    np.asarray(tokens).astype(dtype).tofile(folder / "tokens.bin")
    CharacterTokenizer([chr(0x100 + i) for i in range(vocab_size)]).save(folder / "tokenizer.json")
    metadata = {
        "format_version": 1,
        "tokenizer_type": "character",
        "vocab_size": vocab_size,
        "dtype": dtype,
        "total_tokens": len(tokens),
        "train_split": 0.75,
        "train_split_index": len(tokens) * 3 // 4,
        "val_bytes": 200,
        "bin_file": "tokens.bin",
        "tokenizer_file": "tokenizer.json",
        "tokens_sha256": sha256_file(folder / "tokens.bin"),
        "tokenizer_sha256": sha256_file(folder / "tokenizer.json"),
        **fields,
    }
    metadata = {key: value for key, value in metadata.items() if value is not None}
    (folder / "tokens_metadata.json").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


def config_of(folder: Path, **values: Any) -> Config:
    return Config(**{"data_dir": str(folder), "max_seq_len": 8, "placement": "ram", **values})


def open_data(folder: Path, **values: Any) -> TokenData:
    return open_tokens(config_of(folder, **values), CPU)


def refusal(folder: Path, kind: type[UserError] = DataError, **values: Any) -> str:
    with pytest.raises(Exception) as caught:
        open_data(folder, **values)
    assert caught.value.exit_code == kind.exit_code, caught.value
    return str(caught.value)


def counting_data(train_tokens: int, seq_len: int, seed: int, val_tokens: int = 0) -> TokenData:
    """Token i is the number i, so that a batch shows where in the file it was taken from."""
    val_tokens = val_tokens or seq_len + 1
    tokens = np.arange(train_tokens + val_tokens, dtype=np.int32)
    metadata = TokenMetadata(len(tokens), len(tokens), train_tokens, dtype="int32")
    config = Config(max_seq_len=seq_len, seed=seed)
    return TokenData(
        metadata, tokens, None, b"{}", layout_of_text(metadata, config.max_seq_len), config, torch.device("cpu"), "ram"
    )


@st.composite
def streams(draw: st.DrawFn) -> TokenData:
    seq_len = draw(st.integers(1, 20))
    train_tokens = draw(st.integers(seq_len + 1, 25 * seq_len + 2))
    return counting_data(train_tokens, seq_len, draw(st.integers(0, 2**32 - 1)))


# Batches


@settings(max_examples=60)
@given(data=streams(), epoch=st.integers(0, 5))
def test_every_window_comes_once_per_epoch_and_stays_in_the_training_split(data: TokenData, epoch: int) -> None:
    inputs, targets = data.batch(epoch * data.windows, data.windows)
    assert inputs.shape == targets.shape == (data.windows, data.seq_len)
    starts = inputs[:, 0]
    assert torch.equal(inputs, starts[:, None] + torch.arange(data.seq_len))
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(starts.sort().values.diff(), torch.full((data.windows - 1,), data.seq_len))
    assert targets.max() < data.metadata.train_tokens
    assert data.windows >= (data.metadata.train_tokens - 1) // data.seq_len - 1  # a phase costs one window at most


@settings(max_examples=60)
@given(data=streams(), first=st.integers(0, 200), sizes=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_any_slicing_of_the_stream_gives_the_same_sequences(data: TokenData, first: int, sizes: list[int]) -> None:
    whole = data.batch(first, sum(sizes))
    seen, parts = first, []
    for size in sizes:
        parts.append(data.batch(seen, size))
        seen += size
    assert torch.equal(whole[0], torch.cat([inputs for inputs, _ in parts]))
    assert torch.equal(whole[1], torch.cat([targets for _, targets in parts]))


def test_a_batch_that_spans_epochs_ends_one_and_begins_the_next() -> None:
    data = counting_data(1000, 10, seed=1)
    batch = data.batch(2 * data.windows - 3, 5)[0]
    assert torch.equal(batch[:3], data.batch(data.windows, data.windows)[0][-3:])
    assert torch.equal(batch[3:], data.batch(2 * data.windows, 2)[0])
    across_three = data.batch(data.windows - 1, data.windows + 2)[0]
    assert torch.equal(across_three[1:-1], data.batch(data.windows, data.windows)[0])


def test_epochs_differ_in_order_and_in_phase() -> None:
    data = counting_data(1005, 10, seed=1)
    starts = [data.batch(epoch * data.windows, data.windows)[0][:, 0] for epoch in range(20)]
    phases = {int(epoch.min()) for epoch in starts}
    assert phases <= set(range(10)) and len(phases) > 5
    orders = {tuple((epoch - epoch.min()).tolist()) for epoch in starts}
    assert len(orders) == len(starts)
    assert all(list(order) != sorted(order) for order in orders)


@settings(max_examples=60)
@given(data=st.data(), seq_len=st.integers(1, 12), val_tokens=st.integers(13, 200))
def test_validation_windows_are_fixed_evenly_spread_and_inside_the_split(
    data: st.DataObject, seq_len: int, val_tokens: int
) -> None:
    tokens = counting_data(50, seq_len, 1, val_tokens)
    assert tokens.val_windows == (val_tokens - 1) // seq_len
    of = data.draw(st.integers(1, tokens.val_windows))
    cut = data.draw(st.integers(0, of))
    inputs, targets = tokens.validation_batch(0, of, of)
    assert inputs.min() >= 50 and targets.max() < 50 + val_tokens
    assert torch.equal(targets, inputs + 1)
    offsets = inputs[:, 0] - 50
    assert torch.equal(offsets % seq_len, torch.zeros_like(offsets))
    gaps = torch.cat([offsets // seq_len, torch.tensor([tokens.val_windows])]).diff()  # the last one up to the end
    assert offsets[0] == 0 and gaps.min() >= 1 and gaps.max() - gaps.min() <= 1
    again = torch.cat([tokens.validation_batch(0, cut, of)[0], tokens.validation_batch(cut, of - cut, of)[0]])
    assert torch.equal(again, inputs)


# Files


@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32"])
@pytest.mark.parametrize("placement", ["ram", "mmap"])
def test_every_dtype_and_placement_gives_the_same_batches(tmp_path: Path, dtype: str, placement: str) -> None:
    tokens = np.arange(TOKENS) * 7 % VOCAB_SIZE
    folder = make_folder(tmp_path, dtype, tokens)
    before = (folder / "tokens.bin").read_bytes()
    data = open_data(folder, placement=placement)
    assert data.placement == placement
    inputs, targets = data.batch(3, 40)
    known = {tuple(tokens[i : i + 9].tolist()) for i in range(TRAIN_TOKENS - 8)}
    assert {(*i.tolist(), int(t[-1])) for i, t in zip(inputs, targets, strict=True)} <= known
    reference = open_data(make_folder(tmp_path / "reference", "int32", tokens))
    assert torch.equal(inputs, reference.batch(3, 40)[0])
    assert torch.equal(targets, reference.batch(3, 40)[1])
    assert torch.equal(data.validation_batch(0, 5, 5)[0], reference.validation_batch(0, 5, 5)[0])
    inputs.zero_()  # a batch is the caller's own
    data.tokens.zero_()  # nor does writing to the tokens reach the file
    assert (folder / "tokens.bin").read_bytes() == before


@pytest.mark.skipif(os.name == "nt", reason="Windows keeps a mapped file as it is")
@pytest.mark.parametrize("placement", ["ram", "mmap"])
def test_ids_above_32767_survive_in_uint16(tmp_path: Path, placement: str) -> None:
    tokens = np.linspace(0, 65_535, TOKENS).astype(np.int64)
    data = open_data(make_wide_folder(tmp_path, tokens), placement=placement)
    inputs, targets = data.validation_batch(0, data.val_windows, data.val_windows)
    end = TRAIN_TOKENS + data.val_windows * 8
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.flatten().tolist() == tokens[TRAIN_TOKENS:end].tolist()
    assert targets.flatten().tolist() == tokens[TRAIN_TOKENS + 1 : end + 1].tolist()
    assert inputs.min() > 32_767


def make_wide_folder(folder: Path, tokens: np.ndarray) -> Path:
    """A folder with a vocabulary of 65,536 characters."""
    make_folder(folder, "uint16", tokens)
    codes = [code for code in range(0x100, 0x12000) if not 0xD800 <= code < 0xE000][:65_536]
    CharacterTokenizer([chr(code) for code in codes]).save(folder / "tokenizer.json")
    return edit_metadata(folder, vocab_size=65_536, tokenizer_sha256=sha256_file(folder / "tokenizer.json"))


def edit_metadata(folder: Path, **fields: Any) -> Path:
    path = folder / "tokens_metadata.json"
    values = {**json.loads(path.read_text(encoding="utf-8")), **fields}
    path.write_text(json.dumps(values), encoding="utf-8")
    return folder


def test_the_blogs_metadata_is_enough(tmp_path: Path) -> None:
    """dtype, tokenizer type, hashes, bytes and file names may be missing: int16, characters, unchecked, unknown."""
    folder = make_folder(tmp_path, "int16")
    blog = {"vocab_size": VOCAB_SIZE, "total_tokens": TOKENS, "train_split": 0.75, "train_split_index": TRAIN_TOKENS}
    (folder / "tokens_metadata.json").write_text(json.dumps(blog), encoding="utf-8")
    named = {
        "data_dir": None,
        "bin_file": str(folder / "tokens.bin"),
        "tokenizer_file": str(folder / "tokenizer.json"),
        "metadata_file": str(folder / "tokens_metadata.json"),
    }
    data = open_data(folder, **named)
    assert (data.metadata.dtype, data.metadata.tokenizer_type, data.metadata.val_bytes) == ("int16", "character", None)
    assert data.metadata.train_tokens == TRAIN_TOKENS
    assert data.fingerprint["tokens_sha256"] == sha256_file(folder / "tokens.bin")
    assert data.fingerprint["tokenizer_sha256"] == sha256_file(folder / "tokenizer.json")
    del blog["train_split_index"]
    (folder / "tokens_metadata.json").write_text(json.dumps(blog), encoding="utf-8")
    assert open_data(folder, **named).metadata.train_tokens == TRAIN_TOKENS
    assert "--bin_file" in refusal(folder)  # data_dir alone: the metadata does not name the file


def test_packed_tokens_are_unpacked_where_the_bin_is_missing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    content = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin.gz").write_bytes(gzip.compress(content))
    (folder / "tokens.bin").unlink()
    before = snapshot(folder)
    data = open_data(folder)
    assert data.tokens.numpy().tobytes() == content
    assert snapshot(folder) == before  # which may lie on a Drive: nothing large is written there
    mapped = open_data(folder, placement="mmap")
    assert (folder / "tokens.bin").read_bytes() == content == mapped.tokens.numpy().tobytes()


def test_a_packed_file_that_cannot_hold_the_tokens_takes_no_memory(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokens.bin.gz").write_bytes(gzip.compress((folder / "tokens.bin").read_bytes()))
    (folder / "tokens.bin").unlink()
    edit_metadata(folder, total_tokens=10**13, train_tokens=10**12, train_split_index=10**12, val_tokens=9 * 10**12)
    with pytest.raises(DataError, match="too small for the 10,000,000,000,000 tokens"):
        open_data(folder, placement="ram")


@pytest.mark.parametrize("damage", ["truncated", "altered", "not gzip"])
def test_damaged_packed_tokens_are_refused_and_leave_no_bin(tmp_path: Path, damage: str) -> None:
    folder = make_folder(tmp_path, tokens=np.random.default_rng(0).integers(0, VOCAB_SIZE, 4000))
    packed = bytearray(gzip.compress((folder / "tokens.bin").read_bytes()))
    if damage == "truncated":
        packed = packed[: len(packed) // 2]
    elif damage == "altered":
        packed[len(packed) // 2 : len(packed) // 2 + 20] = b"\xff" * 20
    else:
        packed = bytearray(b"no gzip at all")
    (folder / "tokens.bin.gz").write_bytes(packed)
    (folder / "tokens.bin").unlink()
    before = sorted(path.name for path in folder.iterdir())
    assert "tokens.bin.gz" in refusal(folder)
    assert sorted(path.name for path in folder.iterdir()) == before


# What is refused


def test_a_missing_metadata_file_is_named(tmp_path: Path) -> None:
    named = {"bin_file": "a", "tokenizer_file": "b", "metadata_file": str(tmp_path / "no_metadata.json")}
    assert str(tmp_path / "no_metadata.json") in refusal(tmp_path, data_dir=None, **named)


@pytest.mark.parametrize("size", [0, 2 * TOKENS - 2, 2 * TOKENS - 1, 2 * TOKENS + 2])
def test_a_token_file_of_another_size_is_refused_with_both_sizes(tmp_path: Path, size: int) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes().ljust(size, b"\0")[:size])
    message = refusal(folder)
    assert str(folder / "tokens.bin") in message
    assert f"{size:,} bytes" in message and f"{2 * TOKENS:,}" in message and "uint16" in message


@pytest.mark.parametrize(
    ("text", "said"), [('{"vocab_size": 20,\n "dtype" 3}', "line 2, column 10"), ("[]", "list"), ("", "line 1")]
)
def test_metadata_that_is_no_json_object_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokens_metadata.json").write_text(text)
    message = refusal(folder)
    assert "tokens_metadata.json" in message and said in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", "20"),
        ("vocab_size", True),
        ("total_tokens", -5),
        ("total_tokens", 400.5),
        ("train_split_index", 0),
        ("train_split_index", TOKENS),
        ("train_split", 1.5),
        ("train_split", "most"),
        ("dtype", "float32"),
        ("dtype", 16),
        ("tokenizer_type", "word"),
        ("val_bytes", "many"),
        ("bin_file", 3),
        ("tokenizer_sha256", ["a"]),
    ],
)
def test_metadata_fields_that_cannot_be_are_refused_with_their_value(tmp_path: Path, field: str, value: object) -> None:
    message = refusal(edit_metadata(make_folder(tmp_path), **{field: value}))
    assert (
        "tokens_metadata.json" in message
        and field in message
        and (str(value) in message or json.dumps(value) in message)
    )


def test_a_dtype_of_another_width_is_refused(tmp_path: Path) -> None:
    message = refusal(edit_metadata(make_folder(tmp_path, "uint16"), dtype="int32"))
    assert "int32" in message and f"{4 * TOKENS:,}" in message


def test_a_dtype_of_the_same_width_is_found_by_its_ids(tmp_path: Path) -> None:
    """Ids above 32,767 read as int16 are negative."""
    folder = make_wide_folder(tmp_path, np.full(TOKENS, 65_535))
    message = refusal(edit_metadata(folder, dtype="int16"))
    assert "token id -1" in message and "int16" in message


def test_altered_tokens_are_found_by_their_hash(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    expected = sha256_file(folder / "tokens.bin")
    np.zeros(TOKENS, "uint16").tofile(folder / "tokens.bin")
    message = refusal(folder)
    assert expected[:16] in message and sha256_file(folder / "tokens.bin")[:16] in message


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    tokens = np.zeros(TOKENS, np.int64)
    tokens[123] = VOCAB_SIZE
    message = refusal(make_folder(tmp_path, tokens=tokens))
    assert f"token id {VOCAB_SIZE}" in message and "tokens.bin" in message and "tokens_metadata.json" in message


def test_a_tokenizer_with_other_bytes_is_refused(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    expected = sha256_file(folder / "tokenizer.json")
    CharacterTokenizer([chr(0x200 + i) for i in range(VOCAB_SIZE)]).save(folder / "tokenizer.json")
    message = refusal(folder)
    assert str(folder / "tokenizer.json") in message and expected[:16] in message


def test_without_a_hash_a_tokenizer_of_another_kind_is_refused(tmp_path: Path) -> None:
    message = refusal(make_folder(tmp_path, tokenizer_type="bpe", tokenizer_sha256=None))
    assert "character" in message and "bpe" in message


@pytest.mark.parametrize("field", ["bin_file", "tokenizer_file"])
@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "sub/x", "..", "."])
def test_metadata_cannot_point_outside_its_folder(tmp_path: Path, field: str, name: str) -> None:
    message = refusal(make_folder(tmp_path / "tokens", **{field: name}))
    assert field in message and repr(name) in message


def test_metadata_cannot_point_outside_through_a_link(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "tokens")
    (folder / "tokens.bin").rename(tmp_path / "tokens.bin")
    (folder / "tokens.bin").symlink_to(tmp_path / "tokens.bin")
    assert "bin_file" in refusal(folder)


def test_an_empty_folder_gets_the_command_to_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "python tokenize_local_bpe.py --input" in refusal(tmp_path / "mine")
    assert f"--output_dir {tmp_path / 'mine'}" in refusal(tmp_path / "mine")
    message = refusal(tmp_path, data_dir=None)
    assert "datasets_cache" in message and "--output_dir" not in message


def test_an_unfinished_folder_says_how_to_finish(tmp_path: Path) -> None:
    (tmp_path / ".tokens_bpe.partial").mkdir()
    message = refusal(tmp_path)
    assert "unfinished" in message and "tokenize_local_bpe.py" in message and str(tmp_path) in message


@pytest.mark.parametrize(("train_tokens", "split", "count"), [(392, "validation", 8), (8, "training", 8)])
def test_a_context_longer_than_a_split_is_a_config_error(
    tmp_path: Path, train_tokens: int, split: str, count: int
) -> None:
    folder = make_folder(tmp_path, train_split_index=train_tokens)
    message = refusal(folder, ConfigError)
    assert "max_seq_len 8" in message and split in message and f"{count}" in message and str(folder) in message
    assert open_data(folder, max_seq_len=7).val_windows >= 1


# Placement


@pytest.mark.parametrize(
    ("free", "size", "placement"), [(1000, 500, "ram"), (1000, 999, "mmap"), (None, 10**15, "ram")]
)
def test_placement_takes_ram_while_the_tokens_fit(
    free: int | None, size: int, placement: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(training.data, "available_ram", lambda: free)
    assert choose_placement(size, Config(), CPU) == placement
    assert ("(mmap)" in capsys.readouterr().out) == (placement == "mmap")


def test_placement_takes_the_gpu_while_the_tokens_leave_room_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.data, "available_ram", lambda: 10**6)
    gpu = dataclasses.replace(CPU, device=torch.device("cuda"), memory_bytes=1000)
    assert choose_placement(100, Config(), gpu) == "gpu"
    assert choose_placement(900, Config(), gpu) == "ram"
    assert choose_placement(100, Config(placement="mmap"), gpu) == "mmap"


def reading(read: Callable) -> Any:
    """Data whose windows `read` reads."""
    return SimpleNamespace(device=torch.device("cpu"), train_windows=read)


REQUESTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), min_size=1, max_size=8)


@given(requests=REQUESTS)
@settings(max_examples=30)
def test_reading_ahead_changes_nothing(requests: list[tuple[int, int]]) -> None:
    """Any order and size returns the windows of a direct read."""
    data = counting_data(500, 16, 0, 100)
    reader = ReadAhead(data)
    in_order = [(first + i * rows, rows) for first, rows in requests for i in range(3)]
    given = [reader.windows(first, rows) for first, rows in in_order]
    for (first, rows), windows in zip(in_order, given, strict=True):
        assert torch.equal(windows, data.train_windows(first, rows))


@pytest.mark.parametrize("stride", [None, 12])
def test_the_next_batch_is_read_before_it_is_asked_for(stride: int | None) -> None:
    """Each of three processes takes four sequences of twelve."""
    data = counting_data(500, 16, 0, 100)
    asked = []

    def read(first: int, rows: int, switch: int | None) -> torch.Tensor:
        asked.append((first, rows))
        return data.train_windows(first, rows, switch)

    reader = ReadAhead(reading(read))
    reader.stride = stride
    step = stride or 4
    for first in (0, step, 2 * step):
        reader.windows(first, 4)
    reader.thread.shutdown()
    assert asked == [(0, 4), (step, 4), (2 * step, 4), (3 * step, 4)]


def test_a_read_that_fails_is_reported_where_the_batch_is_asked_for() -> None:
    def read(first: int, rows: int, switch: int | None) -> torch.Tensor:
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        ReadAhead(reading(read)).windows(0, 4)


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


def test_a_batch_of_512_rows_takes_as_many_instructions_as_one_of_8(token_folder: Path) -> None:
    data = open_tokens(Config(data_dir=str(token_folder), max_seq_len=16, placement="ram"), CPU)
    data.batch(0, 512)  # the order of the epoch is drawn once, and kept
    assert instructions(lambda: data.batch(0, 512)) == instructions(lambda: data.batch(0, 8)) > 0
