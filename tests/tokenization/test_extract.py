"""Files that are not plain text: what the pre-tokenizer makes of each kind, and what it says of the others."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from email.message import EmailMessage
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenize_local_bpe
from tests.helpers import without_packages
from tests.tokenization.documents import archive, docx, epub, pdf
from tests.tokenization.failures import crash, fail, fill_disk, fill_memory, sleep
from tokenization import corpus
from tokenization.corpus import UnreadableError, find_sources
from tokenization.extract import list_files, split_document
from tokenization.isolation import IsolatedReader
from tokenization.metadata import TokenMetadata
from tokenization.settings import Settings
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


@pytest.mark.extras("pypandoc")
def test_a_word_file_gives_its_paragraphs(folder: Path) -> None:
    (folder / "a.docx").write_bytes(docx(["First &lt;one&gt;.", "", "Second."]))
    assert tokenize() == 0
    assert documents() == ["First <one>.\n\nSecond."]


@pytest.mark.extras("pypandoc")
@pytest.mark.parametrize("suffix", ["docx", "odt", "rtf", "tex", "fb2", "org", "rst"])
def test_a_document_gives_its_text_without_notes_and_pictures(folder: Path, suffix: str) -> None:
    """Pandoc's own writer makes it."""
    import pypandoc

    source = "# The mill\n\nA well-known mill[^1] \u00e9.\n\n> Quoted.\n\n[^1]: A note.\n"
    form = {"tex": "latex"}.get(suffix, suffix)
    pypandoc.convert_text(source, form, "markdown", ["--standalone"], outputfile=folder / f"a.{suffix}")
    assert tokenize() == 0
    (text,) = documents()
    assert [line for line in text.split("\n") if line and line != "-"] == [
        "The mill",
        "A well-known mill \u00e9.",
        "Quoted.",
    ]


@pytest.mark.extras("pypandoc")
def test_a_notebook_gives_its_text_and_code_without_outputs(folder: Path) -> None:
    output = {"output_type": "stream", "name": "stdout", "text": ["no\n"]}
    code = {"execution_count": 1, "source": ["x = 1"], "outputs": [output]}
    cells = [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["Read *this*."]},
        {"cell_type": "code", "id": "b", "metadata": {}, **code},
    ]
    notebook = {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}
    (folder / "a.ipynb").write_text(json.dumps(notebook))
    assert tokenize() == 0
    assert documents() == ["Read this.\n\n    x = 1"]


def mail(subject: str, text: str, attachment: bytes = b"") -> bytes:
    message = EmailMessage()
    message["Subject"], message["From"] = subject, "a@example.org"
    message.set_content(text, cte="quoted-printable")
    if attachment:
        message.add_attachment(attachment, maintype="image", subtype="jpeg", filename="a.jpg")
    return message.as_bytes()


def test_mail_gives_its_texts_without_attachments(folder: Path) -> None:
    messages = [mail("H\u00e9llo", "How are you?\n\nFrom me\n", bytes(range(256)) * 9), mail("Re:", "Fine.\n")]
    (folder / "a.eml").write_bytes(messages[0])
    quoted = messages[0].replace(b"\nFrom me", b"\n>From me")  # as programs that write .mbox do
    mbox = b"".join(b"From a@example.org Mon Jan 1\n" + message + b"\n" for message in (quoted, messages[1]))
    (folder / "b.mbox").write_bytes(mbox)
    assert tokenize() == 0
    first = "H\u00e9llo\n\nHow are you?\n\nFrom me"
    assert documents() == [first, first, "Re:\n\nFine."]


def exported(path: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """A conversation in ChatGPT's form, with a branch that was given up."""
    nodes: dict[str, Any] = {"root": {"id": "root", "message": None, "parent": None}}
    for number, (role, text) in enumerate([*path, ("assistant", "given up")]):
        parent = "root" if number == 0 else str(min(number, len(path) - 1) - 1)
        message = {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}}
        nodes[str(number)] = {"id": str(number), "message": message, "parent": parent}
    return {"title": "Talk", "mapping": nodes, "current_node": str(len(path) - 1)}


def test_the_export_of_chatgpt_is_read_as_conversations(folder: Path) -> None:
    talk = [
        ("system", ""),
        ("user", "Hi?"),
        ("tool", "x"),
        ("assistant", "Hello."),
        ("assistant", "You?"),
        ("user", "Hm"),
    ]
    (folder / "conversations.json").write_text(json.dumps([exported(talk)] * 3))
    (folder / "a.txt").write_text("Some text.")
    assert tokenize() == 0
    assert documents() == ["Some text.", *["User: Hi?\nAssistant: Hello.\n\nYou?"] * 3]
    (folder / "a.txt").unlink()
    assert tokenize("--format", "chat") == 0
    assert set(filter(None, documents())) == {"User: Hi?\nAssistant: Hello.\n\nYou?"}


def test_every_file_that_is_not_read_is_named_with_what_to_do(folder: Path) -> None:
    others = ("halpin.doc", "deck.pptx", "old.mobi", "app.js", "photo.jpg", "~$a.docx", "more.7z")
    for name in ("a.txt", *others):
        (folder / name).write_bytes(b"\xff\xd8\xff\xe0" if name in ("photo.jpg", "~$a.docx") else b"Some text.")
    (folder / "b.zip").write_bytes(archive({"c.txt": "Other text.", "d.doc": "", "e.png": "", "f.zip": b""}))
    assert tokenize() == 0
    lines = report().splitlines()
    for names, said in {
        "b.zip/d.doc, halpin.doc": "save it as .docx",
        "deck.pptx": "save it as .pdf",
        "old.mobi": "convert it to .epub",
        "b.zip/f.zip, more.7z": "unpack it",
        "b.zip/e.png, photo.jpg, ~$a.docx": "not text, by its name",
        "app.js": "it may be text; read such files with --input 'in/**/*.js'",
    }.items():
        assert any(f"- **Left out**: {names}: {said}" in line for line in lines), (names, lines)


@pytest.mark.extras("pypdfium2")
def test_a_pdf_gives_its_paragraphs_without_headers_and_footers(folder: Path) -> None:
    first = [
        "  The cat sat on the mat for a whole day long,",
        "and the ele-",
        "phant saw it.",
        '  "Who is it?" it said.',
    ]
    second = [
        "",
        "It went on over this page, to a line that ends",
        "early.",
        "Then the next one began here, where it ends.",
    ]
    third = ["  The End", "of it."]
    pages = [[f"The Journal, Vol. {n}", *lines, f"Page {n} of 3"] for n, lines in enumerate((first, second, third), 9)]
    (folder / "a.pdf").write_bytes(pdf(pages))
    assert tokenize() == 0
    assert documents() == [
        "The cat sat on the mat for a whole day long, and the elephant saw it.\n\n"
        '"Who is it?" it said.\nIt went on over this page, to a line that ends early.\n'
        "Then the next one began here, where it ends.\n\nThe End of it."
    ]


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
    (folder / "a.csv").write_text("id,title,body\n1,One,one\n")
    assert tokenize() == 3
    assert 'no column "text". Columns: id, title, body. Choose one with --text_key' in capsys.readouterr().err
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
    members = {
        "x/c.txt": "third",
        "d.epub": epub(["<p>fourth</p>"]),
        "e.jpg": b"no",
        ".f.txt": "fifth",
        "../g.md": "sixth",
    }
    (folder / "c.zip").write_bytes(archive(members))
    assert tokenize() == 0
    assert sorted(documents()) == ["first document", "fourth", "second", "sixth", "third"]
    assert "**Left out**: c.zip/.f.txt: hidden" in report()
    assert not list(Path("..").glob("g.md")) and "| c.zip/x/c.txt | text | 1 | 5 |" in report()
    (folder / "a.txt.zst").write_bytes(zstd.compress(b"first")[:-3])
    assert tokenize() == 0 and "**Left out**: a.txt.zst: is a damaged zstd file" in report()


def test_conversations_among_other_files_become_text(folder: Path) -> None:
    (folder / "a.jsonl").write_text(json.dumps(CHAT) + "\n")
    (folder / "b.json").write_text(json.dumps([CHAT, {"text": "A text."}]))
    (folder / "package.json").write_text('{\n "name": "x"\n}')
    (folder / "c.txt").write_text("Some text.")
    assert tokenize() == 0
    chat = "User: Hi?\nAssistant: Hello."
    assert sorted(documents()) == ["A text.", "Some text.", chat, chat]
    assert "**Left out**: package.json: most of its records are unusable: 1 of its 1 records; record 1" in report()


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
    assert "--encoding utf-16-le" in capsys.readouterr().err
    assert tokenize("--encoding", "utf-16-be") == 0
    assert documents() == ["Größe und Maß" * 9]
    assert tokenize("--encoding", "ascii") == 3
    assert "it is not ascii" in capsys.readouterr().err


def test_a_document_longer_than_a_line_may_be_is_cut(folder: Path) -> None:
    text = "".join(f"A line of {number} words, as books have them.\n" for number in range(125_000))
    (folder / "a.epub").write_bytes(epub([f"<pre>{text}</pre>"]))
    assert tokenize() == 0
    assert sum(part.count("A line of") for part in documents()) == 125_000

    parts = [record["text"] for record in split_document("\u00e9" * 6_000_000, Settings(input=("x.csv",)))]
    assert len(parts) == 2 and "".join(parts) == "\u00e9" * 6_000_000


def test_any_failure_to_read_a_file_is_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.bin").write_bytes(b"x")
    (source,) = find_sources(["a.bin"])
    settings, waited = Settings(input=("a.bin",)), list[int]()
    with IsolatedReader(seconds=60.0) as isolated:
        for work, reason in {
            crash: "crashed", fill_memory: "more than 2.0 GB of memory", fill_disk: "like a zip bomb",
            fail: "KeyError: 'nothing that anybody expected'", sleep: "took longer than 1 s",
        }.items():  # fmt: skip
            isolated.seconds = 1.0 if work is sleep else 60.0
            with pytest.raises(UnreadableError, match=reason):
                isolated.call(work, source, settings, lambda: waited.append(1))
            isolated.seconds = 60.0
            assert isolated.call(list_files, source, settings, lambda: None) == [source]
    assert waited


BAD: dict[str, tuple[bytes, str]] = {
    "a.epub": (archive({"mimetype": "application/epub+zip"}), "META-INF/container.xml is missing"),
    "b.epub": (epub(["<p>x</p>"], spine=[]), "it has no spine"),
    "c.epub": (epub(["<p>x</p>"], spine=[0])[:300], "it is damaged (File is not a zip file)"),
    "d.docx": (archive({"word/document.xml": "<w:document"}), "pandoc cannot read it"),
    "e.docx": (docx(["", " "]), "it has no text"),
    "f.zip": (archive({"a.txt": b"a " * 15_000_000}), "like a zip bomb"),
    "g.zip": (archive({}), "it has no files"),
    "h.pdf": (pdf([[], []]), "pictures (a scan)"),
    "i.pdf": (b"%PDF-1.4 and then nothing", "it is damaged"),
    "j.html": (b"<html></html>", "it has no text"),
    "k.parquet": (b"PAR1 and then nothing", "a damaged Parquet file"),
    "m.zip": (b"PK and then nothing", "it is damaged (File is not a zip file)"),
}


@pytest.mark.extras("pypandoc")
@pytest.mark.extras("pypdfium2")
@pytest.mark.extras("trafilatura")
@pytest.mark.extras("pyarrow")
def test_unreadable_files_are_named_and_the_rest_is_read(folder: Path) -> None:
    (folder / "z.txt").write_text("Some text.")
    for name, (content, _) in BAD.items():
        (folder / name).write_bytes(content)
    assert tokenize() == 0
    assert documents() == ["Some text."]
    lines = report().splitlines()
    for name, (_, reason) in BAD.items():
        assert any("Left out" in line and name in line and reason in line for line in lines), (name, lines)


@pytest.mark.parametrize("name", ["a.pdf", "a.html", "a.parquet"])
def test_without_its_extra_a_file_is_skipped_with_the_command(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"x")
    (folder / "z.txt").write_text("Some text.")
    with without_packages("pypdfium2", "trafilatura", "pyarrow"):
        assert tokenize() == 0
    assert documents() == ["Some text."] and f"**Left out**: {name}: it needs " in report()
    assert "pip install " in report()


def test_extracted_files_are_used_again(folder: Path) -> None:
    (folder / "a.epub").write_bytes(epub(["<p>Some text.</p>"]))
    assert tokenize() == 0
    (made,) = Path("datasets_cache/extracted").iterdir()
    made.write_text(json.dumps({"text": "Other text."}))
    assert tokenize("--vocab_size", "301") == 0
    assert documents() == ["Other text."]
    (folder / "a.epub").write_bytes(epub(["<p>New text.</p>"]))
    assert tokenize() == 0
    assert documents() == ["New text."]


def test_the_report_tells_what_each_file_gave(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a.txt").write_text(f"One.\n{END}\n" + "abc " * 5000)
    (folder / "b.txt").write_bytes((folder / "a.txt").read_bytes())
    assert tokenize() == 0
    said = capsys.readouterr().out
    assert "Twice      100% of b.txt also stands in a.txt" in said
    lines = report().splitlines()
    assert "- **Read**: 2 files: 40.0 kB of text in 4 documents" in lines
    assert any(line.startswith("| a.txt | text | 2 | 20,004 | ") for line in lines)


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
