from __future__ import annotations

import gzip
import json
import os
import random
import tempfile
import tracemalloc
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import DataError
from tokenization import corpus
from tokenization.corpus import find_sources, read_blocks, require_existing
from tokenization.documents import PIECE_CHARACTERS, find_cut, read_pieces, split_documents
from tokenization.extract import make_readable
from tokenization.settings import Settings
from tokenizer_bpe import BPETokenizer

SEPARATOR = "<|endoftext|>"


def documents(*inputs: str | Path, **options: str) -> list[str]:
    """The whole documents, their pieces joined."""
    result, parts = [], []
    for piece in read_pieces(find_sources([str(path) for path in inputs]), **options):
        parts.append(piece.text)
        if piece.ends_document:
            result.append("".join(parts))
            parts = []
    assert not parts, "the last piece has to end its document"
    return result


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return path


def split_by_lines(text: str, separator: str) -> list[str]:
    """The definition, line by line: what stands between lines that are the separator."""
    parts: list[list[str]] = [[]]
    for line in text.split("\n"):
        if line == separator:
            parts.append([])
        else:
            parts[-1].append(line)
    return [text for part in parts if (text := "\n".join(part))]


text_with_separators = st.lists(st.sampled_from(["a", "bc d", "\n", " ", "|", "#", "##", "\n##\n", "é"])).map("".join)


@given(text_with_separators, st.integers(1, 5), st.sampled_from(["##", "", "#"]))
@settings(max_examples=500)
def test_documents_are_what_stands_between_separator_lines(text: str, block: int, separator: str) -> None:
    pieces = split_documents((text[i : i + block] for i in range(0, len(text), block)), separator)
    assert [piece for piece, *_ in pieces] == split_by_lines(text, separator)


@given(text_with_separators, st.integers(1, 5), st.sampled_from(["##", ""]), st.integers(3, 9))
@settings(max_examples=500)
def test_long_documents_come_in_pieces(text: str, block: int, separator: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenization.documents.PIECE_CHARACTERS", size)
        pieces = list(split_documents((text[i : i + block] for i in range(0, len(text), block)), separator))
    joined = [""]
    for piece, ends_document, *_ in pieces:
        joined[-1] += piece
        joined += [""] if ends_document else []
    assert joined == [*split_by_lines(text, separator), ""]
    assert max((len(piece) for piece, *_ in pieces), default=0) <= size + 2 * block + len(separator) + 1


BPE = BPETokenizer.train(
    ["it's a test  of\n\nwords 12 345 -- don't, we'll; they're\t\tés  日本 \n x"] * 5, vocab_size=320
)


@given(st.text(st.sampled_from(" \n\t\r\u00a0\u3000\x1c'sdlt019.,aéл日") | st.characters(codec="utf-8")), st.data())
@settings(max_examples=500)
def test_a_cut_changes_no_token(text: str, data: st.DataObject) -> None:
    cut = find_cut(text, data.draw(st.integers(0, max(len(text) - 1, 0))))
    pieces = [text[:cut], text[cut:]]
    assert [i for piece in pieces for i in BPE.encode(piece).tolist()] == BPE.encode(text).tolist()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
@given(text=st.lists(st.sampled_from(["a", "é", " ", "\n", "\r", "\r\n"])).map("".join), block=st.integers(1, 5))
def test_every_line_break_is_the_same(name: str, text: str, block: int) -> None:
    """Those of Windows, too, wherever a file is read in blocks."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "BLOCK_BYTES", block)
        path = write(Path(folder) / name, json.dumps({"text": text}) if "json" in name else text)
        assert "".join(documents(path)) == text.replace("\r\n", "\n").replace("\r", "\n")


def test_blank_lines_can_separate(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\n\none\nline\n\n\ntwo\r\n\r\nthree\n\n")
    assert documents(path, separator="") == ["one\nline", "two", "three"]


def test_every_form_of_file_is_read(tmp_path: Path) -> None:
    for name in ("a.txt", "b.md", "c.txt.gz", "d.MD.GZ", "sub/e.txt"):
        write(tmp_path / name, name)
    for name in ("f.jsonl", "g.jsonl.gz"):
        write(tmp_path / name, json.dumps({"text": name}) + "\n\n" + json.dumps({"text": "é\n"}))
    for name in ("skipped.log", ".hidden.txt", ".git/h.txt"):
        write(tmp_path / name, "not me")
    expected = ["a.txt", "b.md", "c.txt.gz"]
    assert documents(tmp_path)[:3] == expected
    assert sorted(documents(tmp_path)) == sorted(
        [*expected, "d.MD.GZ", "sub/e.txt", "f.jsonl", "é\n", "g.jsonl.gz", "é\n"]
    )
    assert documents(f"{tmp_path}/*.txt*") == ["a.txt", "c.txt.gz"]
    assert documents(f"{tmp_path}/**/*.txt") == ["a.txt", "sub/e.txt"]
    assert documents(tmp_path / "skipped.log") == ["not me"]


def test_a_file_whose_name_looks_like_a_pattern(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a[1].txt", "one")) == ["one"]


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere.txt", "No such file or folder"),
        ("*.txt", "No file matches"),
        ("", r"no file with a name that ends in \.txt"),
    ],
)
def test_an_input_that_is_not_there_is_an_error(tmp_path: Path, name: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        find_sources([str(tmp_path / name)])


@pytest.mark.parametrize("position", [0, 3, corpus.BLOCK_BYTES - 1, corpus.BLOCK_BYTES, 3 * corpus.BLOCK_BYTES + 7])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_bytes_that_are_not_utf8_are_located(tmp_path: Path, name: str, position: int) -> None:
    content = b"x" * position + b"\xe9 caf\xe9"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    with pytest.raises(DataError, match=rf"{name} is not UTF-8 text: .* at byte {position}\b"):
        documents(tmp_path)


@pytest.mark.parametrize("position", [0, 5, corpus.BLOCK_BYTES - 2, corpus.BLOCK_BYTES - 1, corpus.BLOCK_BYTES])
def test_a_character_cut_off_by_the_end_is_located(tmp_path: Path, position: int) -> None:
    (tmp_path / "a.txt").write_bytes(b"x" * position + "€".encode()[:2])
    with pytest.raises(DataError, match=rf"at byte {position} "):
        documents(tmp_path)


@pytest.mark.parametrize("text", ["text\n", "кто там?\n" * 9, "你好 世界。\n" * 9], ids=["Latin", "Cyrillic", "Han"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.txt.gz"])
def test_utf16_is_recognised(tmp_path: Path, text: str, encoding: str, name: str) -> None:
    content = text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    named = encoding.upper().replace("-LE", "LE").replace("-BE", "BE")
    with pytest.raises(DataError, match=rf"is {named}, not UTF-8 text"):
        documents(tmp_path)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"name.txt".ljust(512, b"\0") + b"text", "is not text. It contains NUL bytes"),
        (b"\x89PNG\r\n\x1a\n\0\0", "is not text. It contains NUL bytes"),
        (b"JPEG \xff\0" + b"\x80" * 999, "is not UTF-8 text: .* at byte 5 .* It contains NUL bytes"),
    ],
    ids=["tar", "PNG", "JPEG"],
)
def test_other_kinds_of_file_are_not_to_be_converted(tmp_path: Path, content: bytes, complaint: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(DataError, match=complaint):
        documents(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_of_json_has_a_longest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lines = [json.dumps({"text": "x" * 700_000})] * 2
    path = write(tmp_path / name, "\n".join(lines))
    assert len(documents(path)) == 2
    monkeypatch.setattr("tokenization.documents.MAX_JSON_LINE_BYTES", 500_000)
    path = write(path, "\n".join(['{"text": "short"}', *lines]))
    with pytest.raises(DataError, match=rf"{name}, line 2 is longer than 500\.0 kB.*one per line"):
        documents(path)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": }', "not valid JSON"),
        (b"[1]", "a JSON list"),
        (b'{"content": "x"}', "no key \"text\", but 'content'; name"),
        (b'{"text": null}', '"text" is a JSON NoneType'),
        (b'{"text": ' + b"9" * 5000 + b"}", "not usable JSON"),
        (b"[" * 200_000, "not usable JSON"),
        (b'{"text": "\xff"}', "not UTF-8"),
    ],
)
def test_a_bad_line_of_jsonl_is_left_out_and_counted(tmp_path: Path, line: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "fine, too"}\n')
    assert documents(path) == ["fine", "fine, too"]
    (source,) = make_readable(find_sources([str(path)]), Settings()).sources
    assert source.left_out.startswith("1 of its 3 records; line 3: ") and reason in source.left_out
    path.write_bytes(b'{"text": "fine"}\n' + 2 * (line + b"\n"))
    with pytest.raises(DataError, match=r"2 of its 3 records; line 2: |it is not UTF-8"):
        make_readable(find_sources([str(path)]), Settings())


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="POSIX")
def test_a_pipe_in_a_folder_is_skipped(tmp_path: Path) -> None:
    write(tmp_path / "a.txt", "one")
    os.mkfifo(tmp_path / "b.txt")
    assert documents(tmp_path) == ["one"]


def test_a_long_text_of_jsonl_comes_in_pieces(tmp_path: Path) -> None:
    text = " ".join(random.Random(0).choices(["some", "words", "x" * 50], k=200_000))
    path = write(tmp_path / "a.jsonl", json.dumps({"text": text}) + "\n" + json.dumps({"text": "y" * 3_000_000}))
    assert documents(path) == [text, "y" * 3_000_000]
    assert max(len(piece.text) for piece in read_pieces(find_sources([str(path)]))) <= PIECE_CHARACTERS


def test_a_damaged_gzip_file_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt.gz", "text " * 1000)
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:30] + b"\0\0\0\0" + whole[34:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.txt\.gz is a damaged gzip file"):
            list(read_blocks(*find_sources([str(path)])))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "text")
    sources = find_sources([str(path)])
    write(path, "other text")
    with pytest.raises(DataError, match="changed while it was read"):
        list(read_pieces(sources))


@pytest.mark.parametrize("unit", ["words and lines\n", "x", " ", "\n"])
def test_memory_does_not_grow_with_the_document(unit: str) -> None:
    def blocks(count: int) -> Iterator[str]:
        return ((unit * corpus.BLOCK_BYTES)[: corpus.BLOCK_BYTES] for _ in range(count))

    def peak(pieces: Iterable[tuple[str, bool, int]]) -> int:
        tracemalloc.start()
        for _ in pieces:
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    small, large = (peak(split_documents(blocks(count), SEPARATOR)) for count in (8, 64))
    assert large < 1.2 * small + 1e6


def test_a_pipe_that_takes_the_place_of_a_file_is_not_waited_for(pipe: Path) -> None:
    (pipe.parent / "text.txt").write_text("abc")
    (source,) = find_sources([str(pipe.parent / "text.txt")])
    pipe.replace(source.path)
    with pytest.raises(DataError, match="is not a regular file"):
        list(read_blocks(source))


@pytest.mark.skipif(not os.path.exists("/proc/kmsg"), reason="Linux")
def test_a_file_of_the_kernel_is_not_waited_for(tmp_path: Path) -> None:
    """It is a regular file, and reading it blocks at its end."""
    (tmp_path / "link.txt").symlink_to("/proc/kmsg")
    (source,) = find_sources([str(tmp_path)])
    assert all(list(read_blocks(source)))


def test_a_missing_input_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[2020] notes").mkdir()
    require_existing(["[2020] notes", "*.txt", "hf://datasets/a/b"])
    with pytest.raises(DataError, match="No such file or folder: missing"):
        require_existing(["missing.txt"])
