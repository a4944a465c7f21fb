"""Files that are not plain text: what the pre-tokenizer makes of each kind, and what it says of the others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import tokenize_local_bpe
from tests.tokenization.documents import archive, docx, epub, pdf
from tokenization import corpus
from tokenization.metadata import TokenMetadata
from tokenizer import load_tokenizer

END = "<|endoftext|>"
PAGE = "<html><body><nav><a href='/'>Home</a></nav><article>{}</article><footer>Imprint</footer></body></html>"
CHAT = {"messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Hello."}]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def tokenize(*flags: str) -> int:
    return tokenize_local_bpe.main(["--input", "in", "--output_dir", "out", "--vocab_size", "300", *flags])


def documents(folder: Path = Path("out")) -> list[str]:
    """The text of the tokens."""
    metadata = TokenMetadata.read(folder / "tokens_bpe_metadata.json")
    ids = np.fromfile(folder / "tokens_bpe.bin", metadata.numpy_dtype)
    text = load_tokenizer(folder / "bpe_tokenizer.json").decode(ids)
    return text.removesuffix(END).split(END)


def report() -> str:
    return Path("out/data_report.md").read_text()


def test_an_epub_is_read_in_the_order_of_its_spine(folder: Path) -> None:
    chapters = ["<h1>One</h1><p>A &amp; B,<br/>\n   and C.</p><script>no()</script>", "<p>second</p><pre>a\n b</pre>"]
    (folder / "a.epub").write_bytes(epub(chapters, spine=[1, 0]))
    assert tokenize() == 0
    assert documents() == ["second\n\na\n b\n\nOne\n\nA & B,\nand C."]


def test_a_word_file_gives_its_paragraphs(folder: Path) -> None:
    (folder / "a.docx").write_bytes(docx(["First &lt;one&gt;.", "", "Second."]))
    assert tokenize() == 0
    assert documents() == ["First <one>.\n\nSecond."]


@pytest.mark.extras("pypdfium2")
def test_a_pdf_gives_its_lines_joined_to_sentences(folder: Path) -> None:
    (folder / "a.pdf").write_bytes(
        pdf([["The cat sat on", "the mat, and the ele-", "phant", "Then"], ["a page of text."]])
    )
    assert tokenize() == 0
    assert documents() == ["The cat sat on the mat, and the elephant\nThen a page of text."]


@pytest.mark.extras("trafilatura")
def test_a_saved_page_gives_its_main_text(folder: Path) -> None:
    paragraphs = "".join(f"<p>Paragraph {i} of the article is long enough to be its main text.</p>" for i in range(9))
    (folder / "a.html").write_text(PAGE.format(paragraphs))
    assert tokenize() == 0
    (text,) = documents()
    assert text.count("Paragraph") == 9 and "Home" not in text and "Imprint" not in text


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_gives_the_texts_of_a_column(folder: Path, separator: str) -> None:
    rows = [["id", "text"], ["1", '"a ""b"", c;\nd"'], ["2", ""], ["3"], ["4", "é"]]
    content = "".join(separator.join(row) + "\r\n" for row in rows)
    (folder / f"a.{'tsv' if separator == chr(9) else 'csv'}").write_text(content, encoding="utf-8-sig")
    assert tokenize() == 0
    assert documents() == ['a "b", c;\nd', "é"]
    assert tokenize("--text_key", "id") == 0
    assert documents() == ["1", "2", "3", "4"]


def test_a_table_without_the_column_names_those_that_it_has(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a.csv").write_text("id,body\n1,one\n")
    assert tokenize() == 3
    assert 'no column "text", but id, body: --text_key names' in capsys.readouterr().err
    (folder / "b.txt").write_text("Some text.\n" * 20)
    assert tokenize() == 0
    assert documents() == ["Some text.\n" * 20]
    assert "**Left out**: a.csv: it has no column" in report()


@pytest.mark.extras("pyarrow")
def test_parquet_and_arrow_give_the_same_as_json_lines(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    texts = [f"Document {i} says something, é." for i in range(300)]
    table = pa.table({"id": list(range(300)), "text": texts})
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert tokenize() == 0
    expected = Path("out/tokens_bpe.bin").read_bytes()
    for suffix in ("parquet", "stream.arrow", "file.arrow"):
        next(folder.iterdir()).unlink()
        path = folder / f"a.{suffix}"
        if suffix == "parquet":
            parquet.write_table(table, path, row_group_size=100)
        else:
            new = pa.ipc.new_stream if "stream" in suffix else pa.ipc.new_file
            with new(path, table.schema) as writer:
                writer.write_table(table)
        assert tokenize() == 0
        assert Path("out/tokens_bpe.bin").read_bytes() == expected
        assert tokenize("--text_key", "id") == 3  # numbers
    path.write_bytes(path.read_bytes()[:5000])
    assert tokenize() == 3


@pytest.mark.extras("pyarrow")
def test_a_table_of_conversations_is_learned_as_such(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"messages": [CHAT["messages"]] * 20}), folder / "a.parquet")
    assert tokenize("--format", "chat") == 0
    assert set(filter(None, documents())) == {"User: Hi?\nAssistant: Hello."}


@pytest.mark.skipif(corpus.zstd is None, reason="needs backports.zstd")
def test_zst_is_read_beside_gz_and_zip(folder: Path) -> None:
    zstd = corpus.zstd
    (folder / "a.txt.zst").write_bytes(zstd.compress(b"first ") + zstd.compress(b"document"))  # two frames
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"second"))
    members = {"x/c.txt": "third", "d.docx": docx(["fourth"]), "e.jpg": b"no", ".f.txt": "fifth", "../g.md": "sixth"}
    (folder / "c.zip").write_bytes(archive(members))
    assert tokenize() == 0
    assert sorted(documents()) == ["fifth", "first document", "fourth", "second", "sixth", "third"]
    assert not list(Path("..").glob("g.md")) and "| c.zip/x/c.txt | in an archive | 1 | 5 |" in report()
    (folder / "a.txt.zst").write_bytes(zstd.compress(b"first")[:-3])
    assert tokenize() == 3


def test_conversations_among_other_files_become_text(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps(CHAT) + "\n")
    (folder / "b.json").write_text(json.dumps([CHAT, {"text": "A text."}]))
    (folder / "package.json").write_text('{\n "name": "x"\n}')
    (folder / "c.txt").write_text("Some text.")
    assert tokenize() == 0
    chat = "User: Hi?\nAssistant: Hello."
    assert sorted(documents()) == ["A text.", "Some text.", chat, chat]
    assert "**Left out**: package.json: its records are neither" in report()


@pytest.mark.extras("chardet")
@pytest.mark.parametrize("encoding", ["cp1252", "utf-16", "cp1250", "cp1251", "shift_jis"])
def test_another_encoding_is_guessed_and_named(folder: Path, encoding: str) -> None:
    text = {
        "cp1250": "Wszyscy ludzie rodzą się wolni i równi pod względem swej godności i swych praw. ",
        "cp1251": "Все люди рождаются свободными и равными в своем достоинстве и правах. ",  # noqa: RUF001
        "shift_jis": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    }.get(encoding, "Le château était fermé depuis l'été. Où êtes-vous allé, demanda-t-il à la fenêtre. ")
    (folder / "a.txt").write_bytes((text * 9).encode(encoding))
    (folder / "b.txt").write_text("Plain text.")
    assert tokenize() == 0
    assert documents() == [text * 9, "Plain text."]
    assert "**Converted**: a.txt: from " in report()


def test_an_encoding_that_is_given_decides(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a.txt").write_bytes("Größe und Maß".encode("cp437") * 9)
    assert tokenize("--encoding", "cp437") == 0
    assert documents() == ["Größe und Maß" * 9]
    (folder / "a.txt").write_bytes("Größe und Maß".encode("utf-16-be") * 9)
    assert tokenize() == 3
    assert "only UTF-16 has" in capsys.readouterr().err
    assert tokenize("--encoding", "utf-16-be") == 0
    assert documents() == ["Größe und Maß" * 9]
    assert tokenize("--encoding", "ascii") == 3
    assert "it is not ascii" in capsys.readouterr().err


BAD: dict[str, tuple[bytes, str]] = {
    "a.epub": (archive({"mimetype": "application/epub+zip"}), "META-INF/container.xml is missing"),
    "b.epub": (epub(["<p>x</p>"], spine=[]), "it has no spine"),
    "c.epub": (epub(["<p>x</p>"], spine=[0])[:300], "it is damaged (File is not a zip file)"),
    "d.docx": (archive({"word/document.xml": "<w:document"}), "word/document.xml is not XML"),
    "e.docx": (docx(["", " "]), "it holds no text"),
    "f.zip": (archive({"a.txt": b"\0" * 30_000_000}), "as only a bomb does"),
    "g.zip": (archive({"a.jpg": b""}), "it holds no file that can be read"),
    "h.pdf": (pdf([[], []]), "pictures (a scan)"),
    "i.pdf": (b"%PDF-1.4 and then nothing", "it is damaged"),
    "j.html": (b"<html></html>", "it holds no text"),
    "k.parquet": (b"PAR1 and then nothing", "not a whole Parquet file"),
    "m.zip": (b"PK and then nothing", "it is damaged (File is not a zip file)"),
    "l.csv": (b"text\n" + b"x" * 51_000_000, "not a whole table"),
}


@pytest.mark.extras("pypdfium2")
@pytest.mark.extras("trafilatura")
@pytest.mark.extras("pyarrow")
def test_what_cannot_be_read_is_named_and_the_rest_is_read(folder: Path) -> None:
    (folder / "z.txt").write_text("Some text.")
    for name, (content, _) in BAD.items():
        (folder / name).write_bytes(content)
    assert tokenize() == 0
    assert documents() == ["Some text."]
    lines = report().splitlines()
    for name, (_, reason) in BAD.items():
        assert any("Left out" in line and name in line and reason in line for line in lines), (name, lines)


@pytest.mark.parametrize("name", ["a.pdf", "a.html", "a.parquet"])
def test_without_its_extra_a_file_is_skipped_with_the_command(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    extras = ("pypdfium2", "trafilatura", "pyarrow")
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None if package in extras else find(package))
    (folder / name).write_bytes(b"x")
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0
    assert documents() == ["Some text."] and f"**Left out**: {name}: it needs " in report()
    assert "pip install " in report()


def test_what_was_made_once_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "a.docx").write_bytes(docx(["Some text."]))
    assert tokenize() == 0
    (made,) = Path("datasets_cache/extracted").iterdir()
    made.write_text(json.dumps({"text": "Other text."}))
    assert tokenize("--vocab_size", "301") == 0
    assert documents() == ["Other text."]
    (folder / "a.docx").write_bytes(docx(["New text."]))
    assert tokenize() == 0
    assert documents() == ["New text."]


def test_the_report_tells_what_each_file_gave(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a.txt").write_text(f"One.\n{END}\n" + "abc " * 5000)
    (folder / "b.txt").write_bytes((folder / "a.txt").read_bytes())
    rng = np.random.default_rng(0)
    (folder / "c.txt").write_text("".join(map(chr, rng.integers(33, 127, 3000))))
    assert tokenize() == 0
    said = capsys.readouterr().out
    assert "Twice      b.txt has the same content as a.txt" in said
    lines = report().splitlines()
    assert "- **Read**: 3 files: 43.0 kB of text in 5 documents" in lines
    assert any(line.startswith("| a.txt | text | 2 | 20,004 | ") for line in lines)
    assert any(line.startswith("| c.txt | text | 1 | 3,000 | ") for line in lines)
    assert any("Longest document" in line and "20.0 kB, in a.txt" in line for line in lines)
    assert any("Hardest document" in line and "in c.txt" in line for line in lines)


def test_workers_do_not_change_the_bytes(folder: Path) -> None:
    (folder / "a.epub").write_bytes(epub([f"<p>{'word ' * 2000}{i}</p>" for i in range(20)]))
    (folder / "b.csv").write_text("text\n" + "".join(f"row {i}\n" for i in range(2000)))
    made: Sequence[bytes] = []
    for workers in ("1", "3"):
        assert tokenize("--num_workers", workers, "--chunk_size_mb", "0.01", "--output_dir", f"out{workers}") == 0
        made = [*made, Path(f"out{workers}/tokens_bpe.bin").read_bytes()]
    assert made[0] == made[1]


def test_a_password_is_named(folder: Path) -> None:
    content = bytearray(archive({"a.txt": "secret"}))
    for signature, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # the bit that says that it is encrypted
        content[content.index(signature) + at] |= 1
    (folder / "a.zip").write_bytes(content)
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0
    assert "**Left out**: a.zip: it has a password" in report()
