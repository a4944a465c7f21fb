from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tokenize_local_bpe
import train_colab_mmap
from tests.helpers import Killed, answer_without_libraries, call_before, full_disk
from tokenization import metadata as metadata_module
from tokenization import token_folder
from tokenization.encoding import split_index
from tokenize_local_bpe import main, tokenize
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer

SEPARATOR = "<|endoftext|>"
SCRIPT = Path(tokenize_local_bpe.__file__)


def story(characters: int, seed: int = 0) -> str:
    generator = random.Random(seed)
    words = ["the", "cat", "sat", "café", "on", "日本", "12", "mat,", "it's", "a\n", "day.\n\n"]
    text = " ".join(generator.choices(words, k=characters // 3))
    return text[:characters]


def corpus(path: Path, documents: int = 20, characters: int = 3000) -> list[str]:
    """Write some documents to a file, and return them."""
    texts = [story(characters, seed) for seed in range(documents)]
    path.write_text(f"\n{SEPARATOR}\n".join(texts), encoding="utf-8", newline="")
    return texts


def run(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


def read(folder: Path, name: str = "tokens_bpe") -> tuple[dict[str, Any], np.ndarray, Any]:
    """(metadata, tokens, tokenizer), after checking that the folder is what its metadata says."""
    metadata = json.loads((folder / f"{name}_metadata.json").read_text("utf-8"))
    content = (folder / metadata["bin_file"]).read_bytes()
    assert hashlib.sha256(content).hexdigest() == metadata["tokens_sha256"]
    tokenizer_bytes = (folder / metadata["tokenizer_file"]).read_bytes()
    assert hashlib.sha256(tokenizer_bytes).hexdigest() == metadata["tokenizer_sha256"]
    tokens = np.frombuffer(content, np.dtype(metadata["dtype"]).newbyteorder("<"))
    assert len(tokens) == metadata["total_tokens"] == metadata["train_tokens"] + metadata["val_tokens"]
    assert metadata["train_split_index"] == metadata["train_tokens"] > 0 < metadata["val_tokens"]
    assert not list(folder.glob(".*"))
    tokenizer = load_tokenizer(folder / metadata["tokenizer_file"])
    of_text, split = tokenizer.byte_lengths[tokens], metadata["train_tokens"]
    assert (metadata["train_bytes"], metadata["val_bytes"]) == (of_text[:split].sum(), of_text[split:].sum())
    return metadata, tokens, tokenizer


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_bpe_gives_every_document_and_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = corpus(tmp_path / "text.txt")
    out = tmp_path / "out"
    assert run("--input", tmp_path / "text.txt", "--output_dir", out, "--vocab_size", 400) == 0
    metadata, tokens, tokenizer = read(out)
    ends = np.flatnonzero(tokens == 0)
    starts = [0, *(ends[:-1] + 1)]
    written = [tokenizer.decode(tokens[a:b]) for a, b in zip(starts, ends, strict=True)]
    assert sorted(written) == sorted(texts)

    split = metadata["train_split_index"]
    trained = written[: list(ends).index(split - 1) + 1]
    assert 0.75 < split / len(tokens) < 1 and trained == [text for text in texts if text in trained]
    assert metadata["train_bytes"] == len("".join(trained).encode())
    assert metadata["train_bytes"] + metadata["val_bytes"] == len("".join(texts).encode())
    assert set(metadata) == {
        *("format_version", "tokenizer_type", "vocab_size", "dtype", "bytes_per_token", "total_tokens", "train_split"),
        *(
            "train_split_index",
            "train_tokens",
            "val_tokens",
            "train_bytes",
            "val_bytes",
            "val_characters",
            "documents",
            "source_files",
        ),
        *("bin_file", "tokenizer_file", "tokens_sha256", "tokenizer_sha256", "created", "fingerprint"),
    }
    assert metadata["tokenizer_type"] == "bpe" and metadata["vocab_size"] == tokenizer.vocab_size <= 400
    assert (metadata["dtype"], metadata["bytes_per_token"], metadata["documents"]) == ("uint16", 2, 20)
    assert metadata["source_files"] == [{"name": "text.txt", "size": (tmp_path / "text.txt").stat().st_size}]

    printed = capsys.readouterr().out
    assert f"{len(tokens):,} tokens" in printed and "in 20 documents" in printed and "Longest tokens:" in printed
    assert f"python train_colab_mmap.py --data_dir {out} --minutes 60" in printed
    assert str(tmp_path) not in (out / "tokens_bpe_metadata.json").read_text()


def test_characters_are_the_text_without_separators(tmp_path: Path) -> None:
    texts = corpus(tmp_path / "text.txt", documents=3)
    assert run("--input", tmp_path / "text.txt", "--output_dir", tmp_path / "out", "--tokenizer", "char") == 0
    metadata, tokens, tokenizer = read(tmp_path / "out", "tokens")
    text = "\n".join(texts)
    assert tokenizer.decode(tokens) == text
    assert metadata["tokenizer_type"] == "character" and metadata["vocab_size"] == len(set(text))
    assert (metadata["bin_file"], metadata["tokenizer_file"]) == ("tokens.bin", "tokenizer.json")
    assert metadata["train_bytes"] + metadata["val_bytes"] == len(text.encode())


@pytest.mark.parametrize(
    ("total", "ends", "share", "expected"),
    [
        (1000, [500, 880, 1000], 0.9, 880),
        (1000, [849, 1000], 0.9, 900),
        (1000, [850, 940, 1000], 0.9, 940),
        (1000, [], 0.9, 900),
        (1000, [1000], 0.99, 990),
        (2, [1, 2], 0.9, 1),
        (2, [2], 0.01, 1),
    ],
)
def test_the_split_is_at_the_end_of_a_document_that_is_near(
    total: int, ends: list[int], share: float, expected: int
) -> None:
    assert split_index(total, np.array(ends, dtype=np.int64), share, cuts_documents=True) == expected


@given(seed=st.integers(0, 5), chunk=st.floats(0.0001, 0.1), workers=st.integers(1, 5))
@settings(max_examples=12)
def test_chunks_and_workers_change_nothing(
    tmp_path_factory: pytest.TempPathFactory, seed: int, chunk: float, workers: int
) -> None:
    folder = tmp_path_factory.mktemp("invariance")
    corpus(folder / "text.txt", documents=random.Random(seed).randint(1, 40), characters=5000)
    results = []
    for number, options in enumerate(({}, {"chunk_size_mb": chunk, "num_workers": workers})):
        out = folder / str(number)
        tokenize([str(folder / "text.txt")], out, vocab_size=300, quiet=True, **options)
        metadata = read(out)[0]
        metadata.pop("created")
        results.append((metadata, (out / "tokens_bpe.bin").read_bytes()))
    assert results[0] == results[1]


def test_packed_input_and_output(tmp_path: Path) -> None:
    corpus(tmp_path / "text.txt")
    (tmp_path / "text.txt.gz").write_bytes(gzip.compress((tmp_path / "text.txt").read_bytes()))
    for name in ("text.txt", "text.txt.gz"):
        arguments = ["--input", tmp_path / name, "--output_dir", tmp_path / f"out {name}", "--vocab_size", 300]
        assert run(*arguments, "--compress") == 0
        read(tmp_path / f"out {name}")
    one, other = tmp_path / "out text.txt", tmp_path / "out text.txt.gz"
    for name in ("tokens_bpe.bin", "tokens_bpe.bin.gz", "bpe_tokenizer.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes()
    assert gzip.decompress((one / "tokens_bpe.bin.gz").read_bytes()) == (one / "tokens_bpe.bin").read_bytes()


def test_a_finished_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(tmp_path / "text.txt")
    arguments = ["--input", tmp_path / "text.txt", "--output_dir", tmp_path / "out", "--vocab_size", 300]
    assert run(*arguments) == 0
    before = files_of(tmp_path / "out")
    assert run(*arguments, "--num_workers", 1, "--chunk_size_mb", 1) == 0
    assert files_of(tmp_path / "out") == before
    assert "already complete" in capsys.readouterr().out
    assert run(*arguments, "--compress") == 0
    assert set(files_of(tmp_path / "out")) == {*before, "tokens_bpe.bin.gz"}


@pytest.mark.parametrize("change", ["text", "setting", "damage"])
def test_changed_files_are_read_again(tmp_path: Path, change: str) -> None:
    corpus(tmp_path / "text.txt")
    options = {"vocab_size": 300, "compress": True, "quiet": True}
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", **options)
    before = read(tmp_path / "out")[1]
    options["compress"] = False
    if change == "text":
        corpus(tmp_path / "text.txt", documents=21)
    elif change == "setting":
        options["vocab_size"] = 290
    else:
        (tmp_path / "out" / "tokens_bpe.bin").write_bytes(bytes(len(before) * 2))
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", **options)
    after = read(tmp_path / "out")[1]
    assert (after.tolist() == before.tolist()) == (change == "damage")
    assert not (tmp_path / "out" / "tokens_bpe.bin.gz").exists(), "it packed the tokens that stood there before"


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_a_vocabulary_is_used_again(tmp_path: Path, kind: str) -> None:
    corpus(tmp_path / "text.txt")
    (tmp_path / "more.txt").write_text(story(5000, seed=77), encoding="utf-8")
    options = {"vocab_size": 300} if kind == "bpe" else {}
    first = tokenize([str(tmp_path / "text.txt")], tmp_path / "one", tokenizer=kind, quiet=True, **options)
    vocabulary = tmp_path / "one" / json.loads(first.read_text())["tokenizer_file"]
    assert run("--input", tmp_path / "more.txt", "--output_dir", tmp_path / "two", "--tokenizer_file", vocabulary) == 0
    name = "tokens_bpe" if kind == "bpe" else "tokens"
    metadata, tokens, tokenizer = read(tmp_path / "two", name)
    assert (tmp_path / "two" / metadata["tokenizer_file"]).read_bytes() == vocabulary.read_bytes()
    assert tokenizer.decode(tokens).removesuffix(SEPARATOR) == story(5000, seed=77)


def test_characters_that_the_vocabulary_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text("abcabc", encoding="utf-8")
    tokenize([str(tmp_path / "text.txt")], tmp_path / "one", tokenizer="char", quiet=True)
    (tmp_path / "more.txt").write_text(f"abc\n{SEPARATOR}\nab€c", encoding="utf-8")
    load_tokenizer(tmp_path / "one" / "tokenizer.json").train("abc\n").save(tmp_path / "vocabulary.json")
    arguments = ["--input", tmp_path / "more.txt", "--output_dir", tmp_path / "two"]
    arguments += ["--tokenizer_file", tmp_path / "vocabulary.json"]
    assert run(*arguments) == 3
    message = capsys.readouterr().err
    assert "more.txt" in message and "'€' (U+20AC)" in message and "line 3" in message and "--unknown drop" in message
    assert not (tmp_path / "two").exists()
    assert run(*arguments, "--unknown", "drop") == 0
    metadata, tokens, tokenizer = read(tmp_path / "two", "tokens")
    assert tokenizer.decode(tokens) == "abc\nabc"
    assert metadata["train_bytes"] + metadata["val_bytes"] == 7


def test_two_kinds_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(tmp_path / "text.txt")
    common = ["--input", tmp_path / "text.txt", "--output_dir", tmp_path / "out"]
    assert run(*common, "--vocab_size", 300) == 0
    assert run(*common, "--tokenizer", "char") == 0
    assert run(*common, "--vocab_size", 290, "--output_name", "small") == 0
    for name in ("tokens_bpe", "tokens", "small"):
        read(tmp_path / "out", name)
    printed = capsys.readouterr().out
    assert "--bin_file" in printed and "small_tokenizer.json" in printed and "small_metadata.json" in printed


def test_more_ids_than_16_bits_hold(tmp_path: Path) -> None:
    text = "".join(chr(code) for code in range(0x10000, 0x10000 + 65_537))
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", tokenizer="char", quiet=True)
    metadata, tokens, _ = read(tmp_path / "out", "tokens")
    assert (metadata["dtype"], metadata["bytes_per_token"], tokens.max()) == ("int32", 4, 65_536)
    (tmp_path / "text.txt").write_text(text[:-1], encoding="utf-8")
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", tokenizer="char", quiet=True)
    assert read(tmp_path / "out", "tokens")[0]["dtype"] == "uint16"


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--input", "nowhere.txt"], 3, "No such file or folder: nowhere.txt"),
        (["--input", "empty.txt"], 3, "it is empty"),
        (["--input", "separators.txt"], 3, "has only 0 tokens"),
        (["--input", "separators.txt", "--tokenizer", "char"], 3, "at least one character"),
        (["--input", "letter.txt", "--tokenizer", "char"], 3, "has only 1 tokens"),
        (["--input", "binary.txt"], 3, "NUL bytes"),
        (["--input", "text.txt", "--encoding", "utf-1"], 2, "--encoding is utf-1, which Python does not know"),
        (["--input", "text.txt", "--max_mb", "5"], 2, "--max_mb applies only to inputs that begin with hf://"),
        (["--input", "hf://datasets/one", "--max_mb", "5"], 3, "does not have the form hf://datasets/OWNER/NAME"),
        (["--input", "text.txt", "--tokenizer_file", "broken.json"], 3, "broken.json is not valid JSON"),
        (["--input", "text.txt", "--tokenizer_file", "none.json"], 3, "No tokenizer file none.json"),
        (["--input", "text.txt", "--vocab_size", "258"], 2, "allowed: at least 259"),
        (["--input", "text.txt", "--vocab_size", "320000000"], 2, "at most 10,000,000"),
        (["--input", "text.txt", "--min_frequency", "9" * 20], 2, "--min_frequency is 9"),
        (["--input", "text.txt", "--num_workers", "9" * 20], 2, "at most 1,000"),
        (["--input", "text.txt", "--output_name", "x" * 245], 2, "longer than 200 bytes"),
        (["--input", "text.txt", "--tokenizer_file", ""], 2, '--tokenizer_file is ""; a text is needed'),
        (["--input", "text.txt", "--output_dir", "letter.txt"], 3, "letter.txt, or a part of its path, is a file"),
        (
            ["--input", "text.txt", "--output_dir", "letter.txt/out"],
            3,
            "letter.txt/out, or a part of its path, is a file",
        ),
        (["--input", ""], 3, "has an empty name"),
        (["--input", "text.txt", "--vocabsize", "300"], 2, "Did you mean --vocab_size?"),
        (["--input", "text.txt", "--vocab", "300"], 2, "unknown flag --vocab"),
        (["--input", "text.txt", "--vocab_size", "many"], 2, '--vocab_size is "many"; a whole number is needed'),
        (["--vocab_size", "300"], 2, "--input is missing"),
        (["--input", "text.txt", "--tokenizer", "word"], 2, "allowed: bpe, char"),
        (["--input", "text.txt", "--tokenizer", "char", "--vocab_size", "300"], 2, "--vocab_size has no effect"),
        (["--input", "text.txt", "--unknown", "drop"], 2, "encodes any text"),
        (["--input", "text.txt", "--output_name", "a/b"], 2, "--output_name"),
    ],
)
def test_a_mistake_gives_one_message_and_changes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    complaint: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    corpus(tmp_path / "text.txt", documents=2)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "letter.txt").write_text("a")
    (tmp_path / "separators.txt").write_text(f"{SEPARATOR}\n{SEPARATOR}\n")
    (tmp_path / "binary.txt").write_bytes(b"text \0\xff\xfe" * 9)
    (tmp_path / "broken.json").write_text("{")
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == code
    error = capsys.readouterr().err
    assert complaint in error and "Traceback" not in error
    assert sorted(tmp_path.rglob("*")) == before


def test_an_error_leaves_an_earlier_tokenization_as_it_was(tmp_path: Path) -> None:
    corpus(tmp_path / "text.txt")
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", vocab_size=300, quiet=True)
    before = files_of(tmp_path / "out")
    (tmp_path / "text.txt").write_bytes(b"text \0\xff" * 1000)
    assert run("--input", tmp_path / "text.txt", "--output_dir", tmp_path / "out") == 3
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("stop_at", [0, 1, 3, "learning", "before moving", "while moving", "before metadata"])
def test_stopped_anywhere_it_continues_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], stop_at: int | str
) -> None:
    corpus(tmp_path / "text.txt", documents=40)
    options = {"vocab_size": 300, "chunk_size_mb": 0.02, "compress": True}
    tokenize([str(tmp_path / "text.txt")], tmp_path / "whole", quiet=True, **options)
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)

    def stop(*_: object, **__: object) -> None:
        raise Killed

    appended, moved = [], []

    def append(self: token_folder.TokenWriter, *_: Any) -> None:
        if len(appended) == stop_at:
            # The chunk's tokens have been written, its line in the journal only by half.
            self.files[0].write(b"junk")
            self.files[-1].write(b'{"tokens": ')
            raise Killed
        appended.append(1)

    def replace(source: Path, target: Path) -> None:
        if Path(target).parent == out and Path(source).parent != out:
            moved.append(1)
            if len(moved) == 2:
                raise Killed

    def write_json(path: Path, value: Any) -> None:
        if path.parent == out:
            raise Killed

    places = {
        "learning": (BPETokenizer, "train", stop),
        "before moving": (token_folder.TokenFolder, "publish", stop),
        "while moving": (os, "replace", replace),
        "before metadata": (metadata_module, "write_json", write_json),
    }
    with monkeypatch.context() as patch, pytest.raises(Killed):
        call_before(patch, *places.get(stop_at, (token_folder.TokenWriter, "append", append)))
        tokenize([str(tmp_path / "text.txt")], out, quiet=True, **options)
    assert not (out / "tokens_bpe_metadata.json").exists() and (out / ".tokens_bpe.partial").is_dir()

    encoded = []
    call_before(monkeypatch, BPETokenizer, "encode", lambda self, text: encoded.append(1))
    tokenize([str(tmp_path / "text.txt")], out, **options)
    assert "Continuing" in capsys.readouterr().out
    read(out)
    for name in ("tokens_bpe.bin", "tokens_bpe.bin.gz", "bpe_tokenizer.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    done = {"learning": 0, 0: 0, 1: 7, 3: 21}.get(stop_at, 40)
    assert len(encoded) == 40 - done, "what was encoded before is kept"


def test_other_settings_do_not_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus(tmp_path / "text.txt")

    def interrupt(self: token_folder.TokenFolder) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        call_before(patch, token_folder.TokenFolder, "publish", interrupt)
        tokenize([str(tmp_path / "text.txt")], tmp_path / "out", vocab_size=300, quiet=True)
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", vocab_size=290)
    assert "Starting over" in capsys.readouterr().out
    assert read(tmp_path / "out")[0]["vocab_size"] == 290


def test_a_full_disk_is_reported_and_the_work_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus(tmp_path / "text.txt")
    arguments = ["--input", tmp_path / "text.txt", "--output_dir", tmp_path / "out", "--vocab_size", 300]

    with full_disk("tokens_bpe.bin"):
        assert run(*arguments) == 3
    error = capsys.readouterr().err
    assert "disk is full" in error and "tokens_bpe.bin cannot be written" in error and "Traceback" not in error
    assert list(tmp_path.glob("out/*")) == [tmp_path / "out" / ".tokens_bpe.partial"]
    assert run(*arguments) == 0


def start(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_chunks(folder: Path, process: subprocess.Popen[str]) -> None:
    journal = folder / ".tokens_bpe.partial" / "chunks.jsonl"
    while process.poll() is None and not (journal.exists() and journal.stat().st_size > 200):
        time.sleep(0.005)
    assert process.poll() is None, "the script ended before it could be stopped"


@pytest.mark.parametrize("how", ["kill", "interrupt"])
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_a_process_that_is_stopped_continues(tmp_path: Path, how: str) -> None:
    corpus(tmp_path / "text.txt", documents=1000, characters=8000)
    vocabulary = tmp_path / "vocabulary.json"
    BPETokenizer.train([story(20_000)], vocab_size=300).save(vocabulary)
    arguments = ["--input", tmp_path / "text.txt", "--tokenizer_file", vocabulary, "--chunk_size_mb", 0.02]
    with start(*arguments, "--output_dir", tmp_path / "out") as process:
        wait_for_chunks(tmp_path / "out", process)
        process.send_signal(signal.SIGKILL if how == "kill" else signal.SIGINT)
        _, error = process.communicate(timeout=20)
        assert process.returncode == (-signal.SIGKILL if how == "kill" else 130)
        assert "Traceback" not in error
        assert how == "kill" or "Run the same command to continue" in error
    with start(*arguments, "--output_dir", tmp_path / "out") as process:
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "Continuing" in out
    assert run(*arguments, "--output_dir", tmp_path / "whole") == 0
    assert (tmp_path / "out" / "tokens_bpe.bin").read_bytes() == (tmp_path / "whole" / "tokens_bpe.bin").read_bytes()
    read(tmp_path / "out")


@pytest.mark.parametrize("end", ["goes on", "killed"])
@pytest.mark.skipif(os.name == "nt", reason="POSIX signals and locks")
def test_two_at_a_time_do_not_write_into_one_folder(tmp_path: Path, end: str) -> None:
    corpus(tmp_path / "text.txt", documents=300, characters=8000)
    vocabulary = tmp_path / "vocabulary.json"
    BPETokenizer.train([story(20_000)], vocab_size=300).save(vocabulary)
    arguments = ["--input", tmp_path / "text.txt", "--tokenizer_file", vocabulary, "--chunk_size_mb", 0.02]
    out = tmp_path / "out"
    with start(*arguments, "--output_dir", out) as first:
        try:
            wait_for_chunks(out, first)
            first.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WNOWAIT)  # it may be writing until then
            before = files_of(out)
            for others in (
                arguments,
                ["--input", tmp_path / "text.txt", "--vocab_size", 290],
                [*arguments[:2], "--tokenizer", "char"],
            ):
                with start(*others, "--output_dir", out) as second:
                    _, error = second.communicate(timeout=60)
                assert second.returncode == 3 and "Traceback" not in error
                assert f"Another tokenization ({first.pid} on {socket.gethostname()}, since 20" in error
                assert files_of(out) == before
            if end == "killed":
                first.kill()
            first.send_signal(signal.SIGCONT)
            first.communicate(timeout=60)
            assert first.returncode == (-signal.SIGKILL if end == "killed" else 0)
        finally:
            first.kill()  # a stopped process would never end
    assert run(*arguments, "--output_dir", out) == 0, "nobody holds the folder any more"
    read(out)
    assert run(*arguments, "--output_dir", tmp_path / "whole") == 0
    assert (out / "tokens_bpe.bin").read_bytes() == (tmp_path / "whole" / "tokens_bpe.bin").read_bytes()


def test_a_megabyte_without_a_space_takes_seconds(tmp_path: Path) -> None:
    generator = random.Random(0)
    text = "".join(generator.choices("ACGT", k=1_000_000))
    (tmp_path / "genome.txt").write_text(text)
    with start("--input", tmp_path / "genome.txt", "--output_dir", tmp_path / "out") as process:
        try:
            process.communicate(timeout=120)  # whole words would take hours
        finally:
            process.kill()
    assert process.returncode == 0
    metadata, tokens, tokenizer = read(tmp_path / "out")
    assert metadata["vocab_size"] > 15_000
    parts = tokenizer.decode(tokens).split(SEPARATOR)
    assert sum(map(len, parts)) == len(text) and all(part in text for part in parts)


@pytest.mark.skipif(sys.platform != "linux", reason="only there is a file name any bytes")
def test_names_that_are_not_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    corpus(tmp_path / f"{name}.txt")
    out = tmp_path / f"out {name}"
    assert run("--input", tmp_path, "--output_dir", out, "--output_name", name, "--vocab_size", 300) == 0
    metadata = read(out, name)[0]
    assert metadata["source_files"][0]["name"] == f"{name}.txt" and metadata["bin_file"] == f"{name}.bin"


def test_help_is_quick_and_names_every_flag() -> None:
    result = answer_without_libraries("tokenize_local_bpe.py", "--help")
    assert result.returncode == 0
    flags = "input output_dir output_name vocab_size min_frequency chunk_size_mb train_split compress tokenizer"
    flags += " tokenizer_file text_key document_separator vocab_sample_mb num_workers unknown debug"
    assert all(f"--{flag} " in result.stdout or f"--{flag}\n" in result.stdout for flag in flags.split())


def test_leftovers_of_a_kill_right_after_the_end_are_removed(tmp_path: Path) -> None:
    corpus(tmp_path / "text.txt")
    flags = ("--input", tmp_path / "text.txt", "--output_dir", tmp_path / "tokens", "--vocab_size", 300)
    assert run(*flags) == 0
    there = sorted(path.name for path in (tmp_path / "tokens").iterdir())
    left = tmp_path / "tokens" / ".tokens_bpe.partial"
    left.mkdir()
    (left / "chunks.jsonl").write_text("")
    assert run(*flags) == 0
    assert sorted(path.name for path in (tmp_path / "tokens").iterdir()) == there


@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json", "alpaca.json"])
def test_conversations_are_not_taken_for_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The trainer reads them with the right type."""
    records = [
        {"instruction": f"Say {i}.", "output": f"{i}, and then {i + 1}."}
        if name == "alpaca.json"
        else {"messages": [{"role": "user", "content": f"Say {i}."}, {"role": "assistant", "content": f"{i}, yes."}]}
        for i in range(60)
    ]
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, records)) if name.endswith("l") else json.dumps(records))
    assert tokenize_local_bpe.main(["--input", str(path), "--output_dir", str(tmp_path / "out")]) == 3
    assert f"{path} holds conversations. Add --format chat." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    shape = "--num_layers 1 --embed_dim 16 --num_heads 2 --max_seq_len 48 --max_steps 1 --vocab_size 300 --device cpu"
    words = ["--input", str(path), "--output_dir", str(tmp_path / "run"), "--data_dir", str(tmp_path / "tokens")]
    assert train_colab_mmap.main([*words, *shape.split()]) == 0
    assert " conversations in " in capsys.readouterr().out


def test_tokens_of_another_text_are_replaced_with_a_note(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("first.txt", "second.txt"):
        (tmp_path / name).write_text(f"{name} is a text of its own.\n" * 20)
        argv = ["--input", str(tmp_path / name), "--output_dir", str(tmp_path / "out"), "--vocab_size", "300"]
        assert tokenize_local_bpe.main(argv) == 0
        assert ("the tokens of first.txt, which are replaced" in capsys.readouterr().out) == (name == "second.txt")
