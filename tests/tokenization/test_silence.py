"""Nothing is learned wrong in silence: content decides before names, guesses are checked, all text is examined."""

# ruff: noqa: RUF001 - punctuation of other writings

from __future__ import annotations

import base64
import json
import random
import zipfile
from pathlib import Path

import numpy as np
import pytest

import tokenize_local_bpe
from tests.tokenization.documents import archive, docx, epub, pdf
from tests.tokenization.test_extract import CHAT, documents, folder, mail, report, tokenize
from tokenization import corpus
from tokenization.encodings import count_errors
from tokenization.kinds import recognize
from tokenizer import load_tokenizer

__all__ = ["folder"]


def tokenize_only(path: str) -> int:
    return tokenize_local_bpe.main(["--input", path, "--output_dir", "out", "--vocab_size", "300"])


WORDS = ["river", "stone", "lantern", "garden", "winter", "copper", "letter", "harbour", "village", "thunder"]


def sentences(count: int, seed: int = 0) -> list[str]:
    draw = random.Random(seed)
    return [f"The {' '.join(draw.choices(WORDS, k=8))} {draw.randint(0, 10**6)}." for _ in range(count)]


PROSE = "\n\n".join(sentences(60))
MAILBOX = "From - Mon Mar 04 10:00:00 2024\nX-Mozilla-Status: 0001\nSubject: plan\n\nThe river is high.\n"


@pytest.mark.parametrize(
    ("content", "name", "kind"),
    [
        (b'{"text": "a"}\n{"text": "b"}\n', "RC_2015-01", ".jsonl"),
        (b'{"text": "a"}\n', "a.ndjson", ".jsonl"),
        (b'{"body": "' + b"long " * 2000, "lines.txt", ".jsonl"),
        (b'{\n "messages": [\n', "chat", ".json"),
        (b'[{"text": "a"}, {"text": "b"}]', "a.txt", ".json"),
        (MAILBOX.encode(), "Inbox", ".mbox"),
        (b"Received: by x\nFrom: a@b\nSubject: c\n\nHi", "letter", ".eml"),
        (b"<!-- saved -->\n<!DOCTYPE html>\n<p>", "page.txt", ".html"),
        (b'<?xml version="1.0"?>\n<html xmlns="x">', "page.xhtml", ".html"),
        (b'<?xml version="1.0"?><FictionBook xmlns="x">', "book", ".fb2"),
        (b"\xef\xbb\xbfWEBVTT\n\n00:01.000 --> 00:02.000\nHi", "talk.txt", ".vtt"),
        (b"1\r\n00:00:01,000 --> 00:00:02,000\r\nHi", "talk", ".srt"),
        (b"% thesis\n\\documentclass{book}\n", "thesis", ".tex"),
        (b"{\\rtf1\\ansi", "letter.doc", ".rtf"),
        (b"%PDF-1.7", "scan", ".pdf"),
        (b"PAR1", "train-00000", ".parquet"),
        (epub(["<p>a</p>"]), "book.zip", ".zip"),
        (docx(["a"]), "form.docm", ".docx"),
        (b"PK\x03\x04", "a.odt", ".odt"),
        (b"Once upon a time", "story.markdown", ".md"),
        (b"Once upon a time", "story", ""),
        (b"[[A link]] and more", "note.md", ".md"),
        (b"From the beginning\nof time: there was\n", "a.txt", ".txt"),
        (b'"name","text"\n', "a.csv", ".csv"),
    ],
)
def test_content_decides_what_a_file_is(content: bytes, name: str, kind: str) -> None:
    assert recognize(content[: corpus.SNIFFED_BYTES], name) == (kind, "")


@pytest.mark.parametrize(
    ("content", "name", "reason"),
    [
        (b'<mediawiki xmlns="x">', "enwiki.xml", "WikiExtractor"),
        (b'<?xml version="1.0"?><!DOCTYPE en-export SYSTEM "x"><en-export>', "notes.enex", "Evernote"),
        (b'<?xml version="1.0" encoding="utf-8"?>\n<posts>', "Posts.txt", "<posts>"),
        (b"window.YTD.tweets.part0 = [", "tweets.js", "Twitter"),
        (archive({"collection.anki2": "", "media": ""}), "deck.apkg", "Anki"),
        (b"// <!-- <mdb:mork:z v", "Inbox.msf", "index of a mailbox"),
        (b"BEGIN:VCARD\n", "me.vcf", "contacts"),
        (b"\xd0\xcf\x11\xe0", "old.doc", "save it again as .docx"),
        (b"SQLite format 3\0", "chat.db", "database"),
        (b"7z\xbc\xaf\x27\x1c", "a", "unpack"),
        (b"\0" * 60 + b"BOOKMOBI", "book.txt", ".epub"),
        (b"text", "old.mobi", ".epub"),
    ],
)
def test_what_has_no_reader_is_refused_with_the_way_out(content: bytes, name: str, reason: str, folder: Path) -> None:
    assert reason in recognize(content, name)[1]
    (folder / name).write_bytes(content)
    (folder / "z.md").write_text(PROSE)
    assert tokenize() == 0 and f"**Left out**: {name}: " in report() and reason in report()
    assert "--input" not in report()  # what the look refuses is not recommended
    assert tokenize_only(f"in/{name}") == 3


def test_kinds_are_found_in_folders_archives_and_patterns(folder: Path) -> None:
    for name in ("Inbox", "Archive.2024"):
        (folder / name).write_text(MAILBOX)
    (folder / "posts.zip").write_bytes(archive({"posts": json.dumps({"text": "From a dump."})}))
    (folder / "readme").write_text("Prose of which nobody knows the kind.")
    assert tokenize() == 0
    assert sorted(documents()) == ["From a dump.", *["plan\n\nThe river is high."] * 2]
    assert "readme: it may be text; read such files with --input 'in/**/readme'" in report()
    assert tokenize_only("in/I*x") == 0 and documents() == ["plan\n\nThe river is high."]


def test_a_printed_pattern_works_for_every_folder_and_packages_are_left_out(folder: Path) -> None:
    odd = folder / "[2020] notes"
    for name in ("a.py", "node_modules/b.py", "c.md"):
        (odd / name).parent.mkdir(parents=True, exist_ok=True)
        (odd / name).write_text(f"text of {name}")
    assert tokenize_only(str(odd)) == 0 and documents() == ["text of c.md"]
    pattern = report().split("with --input ")[1].splitlines()[0].strip("'")
    assert tokenize_only(pattern) == 0 and documents() == ["text of a.py"]
    assert "node_modules/b.py: in a folder of programs; name it to read it" in report()
    assert tokenize_only(f"{odd}/node_modules") == 3  # as a folder: .py is not text, by its name


def test_apples_folder_of_a_book_is_a_book(folder: Path) -> None:
    (folder / "packed.epub").write_bytes(epub(["<p>second</p>", "<p>first</p>"], spine=[1, 0]))
    zipfile.ZipFile(folder / "packed.epub").extractall(folder / "book.epub")
    (folder / "packed.epub").unlink()
    assert tokenize() == 0 and documents() == ["first\n\nsecond"]
    assert tokenize_only("in/book.epub") == 0 and documents() == ["first\n\nsecond"]


@pytest.mark.skipif(corpus.zstd is None, reason="needs backports.zstd")
def test_packing_is_seen_in_the_content_and_large_windows_are_read(folder: Path) -> None:
    zstd = corpus.zstd
    options = {zstd.CompressionParameter.window_log: 28, zstd.CompressionParameter.enable_long_distance_matching: 1}
    (folder / "RC_2015-01").write_bytes(zstd.compress(b'{"text": "one"}\n', options=options))
    assert tokenize() == 0 and documents() == ["one"]


# Guesses


def test_a_row_with_more_fields_than_names_is_not_cut(folder: Path) -> None:
    (folder / "a.csv").write_text('id,text\n1,"fine, whole"\n2,cut, here\n3,fine\n4,"not closed" here\n5,fine\n')
    assert tokenize() == 0 and documents() == ["fine, whole", "fine", "fine"]
    assert "2 of its 5 records; line 3: it has 3 fields, not 2" in report()


def test_the_only_column_with_texts_must_hold_most_of_the_letters(folder: Path, capsys: pytest.CaptureFixture) -> None:
    rows = [{"source": f"label-{i % 3}-x", "list": [text]} for i, text in enumerate(sentences(30))]
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(rows), folder / "a.parquet")
    assert tokenize() == 3 and "Columns: source, list" in capsys.readouterr().err
    parquet.write_table(pa.Table.from_pylist([{"source": "x", **CHAT}] * 9), folder / "a.parquet")
    assert tokenize() == 3 and "holds conversations. Add --format chat" in capsys.readouterr().err
    (folder / "b.txt").write_text(PROSE)
    assert tokenize() == 0 and "User: Hi?\nAssistant: Hello." in documents()


@pytest.mark.parametrize("language", ["La château où l’on a vu le noël. ", "川のほとりに小さな村がありました。"])
def test_a_stray_byte_leaves_a_file_in_utf8(language: str, folder: Path) -> None:
    content = (language * 300).encode()
    (folder / "a.txt").write_bytes(content[:2000] + b"\xe9 " + content[2000:])
    (folder / "b.txt").write_bytes(content[:-1])
    assert tokenize() == 0
    assert documents()[0].count("\ufffd") <= 3 and language in documents()[0]
    assert "a.txt: from utf-8, in which" in report() and "1 character cannot be decoded" in report()
    assert count_errors([language.encode("utf-16-le")]) == count_errors(["é à ".encode("cp1252") * 99]) == 0


def test_an_encoding_of_utf8_is_forced(folder: Path) -> None:
    (folder / "a.txt").write_bytes(b"plain words " * 300 + b"caf\xe9")
    assert tokenize("--encoding", "utf-8") == 0 and documents()[0].endswith("caf\ufffd")


def test_invisible_characters_leave_the_words_of_every_kind(folder: Path) -> None:
    word = "lan\u00adtern\u200b"
    (folder / "a.txt").write_text(word)
    (folder / "b.jsonl").write_text(json.dumps({"text": word}))
    (folder / "c.epub").write_bytes(epub([f"<p>{word}</p>"]))
    assert tokenize() == 0 and documents() == ["lantern"] * 3


# What comes out

HABITS = {
    "markup": [f"<p class='quotation' id='p' lang='en'>{text}</p>" for text in sentences(40)],
    "JSON": [f'  "caption": "{text}",' for text in sentences(40)],
    "base64": [base64.b64encode(text.encode() * 2).decode() for text in sentences(40)],
    "lines that begin with a date, a time or a name": [
        f"2024년 3월 {i}일, 김민수 : {text}" for i, text in enumerate(sentences(40))
    ],
    "quoted mail": [f"> {text}" for text in sentences(40)],
    "cells of a table": [f"{text}\t{text}\t{i}" for i, text in enumerate(sentences(40))],
    "licences": [f"All rights reserved. {text}" for text in sentences(40)],
}


def test_numbers_in_sentences_are_no_dates(folder: Path) -> None:
    lines = (f"Add {i} and {i + 1}. {i} plus {i + 1} is {2 * i + 1}. {text}" for i, text in enumerate(sentences(40)))
    (folder / "sums.txt").write_text("\n".join(lines))
    assert tokenize() == 0 and "begin with a date" not in report()


@pytest.mark.parametrize("sign", HABITS)
def test_a_sign_is_noted_and_leaves_a_file_out_of_a_folder(
    sign: str, folder: Path, capsys: pytest.CaptureFixture
) -> None:
    (folder / "a.txt").write_text("\n".join(HABITS[sign]))
    (folder / "b.txt").write_text(PROSE)
    assert tokenize() == 0 and documents() == [PROSE]
    assert f"of it is {sign}, such as" in report() and "name it with --input" in report()
    capsys.readouterr()
    assert tokenize_only("in/*.txt") == 0 and len(documents()) == 2
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Note"))
    assert "a.txt: " in said and sign in said and "b.txt" not in said
    (folder / "a.txt").write_text("\n\n".join([*sentences(3000, 5), HABITS[sign][0]]))
    assert tokenize() == 0 and "Note " not in capsys.readouterr().out


def test_lines_broken_inside_sentences_are_noted_but_kept(folder: Path, capsys: pytest.CaptureFixture) -> None:
    lines = [f"and the {' '.join(WORDS[:9])} {number}" for number in range(100)]
    (folder / "a.txt").write_text("\n".join(lines))
    assert tokenize() == 0 and "lines broken inside sentences" in capsys.readouterr().out


@pytest.mark.extras("ftfy")
def test_letters_that_were_decoded_wrong_are_repaired(folder: Path) -> None:
    (folder / "a.txt").write_text(("Der Müller öffnet die Tür. &amp; “".encode().decode("cp1252") + "ﬁne\n") * 9)
    assert tokenize() == 0 and documents()[0].startswith("Der Müller öffnet die Tür. &amp; “fine")


# Kinds


def test_captions_that_scroll_are_read_once(folder: Path) -> None:
    lines = sentences(4)
    cues = [
        lines[0],
        f"{lines[0]}\n{lines[1]}",
        f"{lines[1]}\n{lines[2]}",
        lines[2],
        f"{lines[2]}\n{lines[3]} &amp; on",
    ]
    times = "00:00:0{}.000 --> 00:00:0{}.000"
    (folder / "a.vtt").write_text(
        "WEBVTT\n\n" + "\n\n".join(f"{times.format(i, i + 1)}\n{cue}" for i, cue in enumerate(cues))
    )
    assert tokenize() == 0 and documents() == ["\n".join(lines) + " & on"]


def test_readings_and_frames_are_left_out(folder: Path) -> None:
    ruby = "<ruby>親譲<rp>（</rp><rt>おやゆず</rt><rp>）</rp></ruby>りの<ruby>子<rt>こ</ruby>供"
    (folder / "a.epub").write_bytes(epub([f"<dl><dt>{ruby}</dt><dd>の時</dd></dl>"]))
    key = f"{'-' * 55}\n【テキスト中に現れる記号について】\n《》：ルビ\n{'-' * 55}\n"
    (folder / "b.txt").write_text(f"{key}十六｜歳《さい》の［＃「の」に傍点］春\n\n底本：「全集」\n入力：誰か\n")
    start, end = (f"*** {word} OF THE PROJECT GUTENBERG EBOOK A BOOK ***" for word in ("START", "END"))
    (folder / "c.epub").write_bytes(epub(["<p>Licence</p>", f"<p>{start}</p><p>The book.</p><p>{end}</p><p>More</p>"]))
    article = '<doc id="1" url="x" title="River">\nRiver\n\nA &amp; B.\n</doc>\n'
    (folder / "wiki_00").write_text(article + article.replace("River", "Stone"))
    assert tokenize() == 0
    assert [text.strip() for text in documents()] == [
        "親譲りの子供\n\nの時",
        "十六歳の春",
        "The book.",
        "River\n\nA & B.",
        "Stone\n\nA & B.",
    ]


@pytest.mark.extras("trafilatura")
def test_the_posts_of_a_saved_forum_are_read(folder: Path) -> None:
    posts = sentences(20)
    page = "".join(f'<div class="comment-body"><p>{post} It goes on for a while.</p></div>' for post in posts)
    (folder / "a.html").write_text(f"<html><body><article><p>One question?</p></article>{page}</body></html>")
    assert tokenize() == 0 and all(post in documents()[0] for post in posts)


@pytest.mark.extras("pypdfium2")
def test_columns_of_a_pdf_are_read_one_after_the_other(folder: Path) -> None:
    lines = [sentences(1, seed)[0][:30].strip() for seed in range(24)]
    rows = [f"{left}\t{right}" for left, right in zip(lines[:12], lines[12:], strict=True)]
    (folder / "a.pdf").write_bytes(pdf([rows]))
    (folder / "b.pdf").write_bytes(pdf([["A heading over both of the columns", *rows[:10]]]))
    assert tokenize() == 0
    columns, headed = (" ".join(document.split()) for document in documents())
    assert columns == " ".join(lines) and headed.endswith(" ".join([*lines[:10], *lines[12:22]]))


def test_messages_that_outlook_quotes_are_learned_once(folder: Path) -> None:
    header = "From: Anna <a@example.org>\nSent: Monday\nTo: Ben\nSubject: plan"
    first, second = (
        "The mill stands still.",
        f"I will.\n\n-----Original Message-----\n{header}\n\nThe mill stands still.",
    )
    third = f"Good.\n\n{header.replace('From', 'Von')}\n\nI will.\n\nNew words below."
    messages = [mail(f"plan {number}", text) for number, text in enumerate((first, second, third))]
    (folder / "a.mbox").write_bytes(b"".join(b"From a@example.org Mon Jan 1\n" + each + b"\n" for each in messages))
    assert tokenize() == 0
    assert [text.split("\n\n", 1)[1] for text in documents()] == [first, "I will.", "Good.\n\nNew words below."]


@pytest.mark.parametrize(
    "head",
    [
        "4/3/24, 10:00\u202fa.\u00a0m. - ",
        "04/03/2024 à 10:00 - ",
        "2024. 03. 04. 10:00 - ",
        "4.3.2024 klo 10.00 - ",
        "[٠٤/٠٣/٢٠٢٤، ١٠:٠٠:٠١] ",
        "2024/3/4 上午10:00 - ",
    ],
)
def test_the_dates_of_whatsapp_go_in_every_language(head: str, folder: Path) -> None:
    said = [f"{'AB'[number % 2]}: {text}" for number, text in enumerate(sentences(18))]
    (folder / "a.txt").write_text("".join(f"{head}{line}\n" for line in said))
    assert tokenize() == 0
    assert documents()[0].splitlines() == said


def test_a_diary_with_times_is_no_chat(folder: Path) -> None:
    (folder / "a.txt").write_text("".join(f"04/03/2024, 10:00 - {text}\n" for text in sentences(9)))
    assert tokenize() == 0 and sentences(9)[3] in documents()[0]


def test_slack_is_a_chat_with_names_or_refused(folder: Path) -> None:
    (folder / "general").mkdir()
    said = (("U1", "Hi <@U2> &amp; all"), ("U2", "<https://x|link>"))
    day = [{"type": "message", "user": user, "ts": "1", "text": text} for user, text in said]
    joined = {"type": "message", "subtype": "channel_join", "user": "U1", "ts": "0", "text": "<@U1> has joined"}
    (folder / "general/2024-03-01.json").write_text(json.dumps([joined, *day]))
    (folder / "a.txt").write_text(PROSE)
    assert tokenize() == 0 and documents() == [PROSE] and "Slack" in report()
    users = [{"id": "U1", "name": "anna", "profile": {"real_name": "Anna K"}}, {"id": "U2", "name": "ben"}]
    (folder / "users.json").write_text(json.dumps(users))
    assert tokenize() == 0 and documents() == [PROSE, "Anna K: Hi ben & all\nben: link"]


@pytest.mark.extras("pypandoc")
def test_words_with_furigana_are_kept(folder: Path) -> None:
    run = "<w:r><w:t>{}</w:t></w:r>"
    ruby = f"<w:ruby><w:rt>{run.format('とこ')}</w:rt><w:rubyBase>{run.format('寝床')}</w:rubyBase></w:ruby>"
    (folder / "a.docx").write_bytes(docx([f"その</w:t></w:r><w:r>{ruby}</w:r><w:r><w:t>に"]))
    assert tokenize() == 0 and documents() == ["その寝床に"]


@pytest.mark.extras("pypandoc")
def test_a_part_of_a_latex_project_has_the_commands_of_its_main_file(folder: Path) -> None:
    (folder / "chapters").mkdir()
    (folder / "main.tex").write_text(
        "\\documentclass{book}\n\\newcommand{\\city}{Lanternhaven}\n\\begin{document}\\end{document}"
    )
    (folder / "chapters/one.tex").write_text("In \\city{} the river waits on the 21\\textsuperscript{st}.")
    assert tokenize() == 0 and documents() == ["In Lanternhaven the river waits on the 21st."]


def test_what_small_files_repeat_is_noted_for_the_whole_text(folder: Path, capsys: pytest.CaptureFixture) -> None:
    for number, text in enumerate(sentences(40)):
        note = f"Content-Type: text/x-zim-wiki\nCreation-Date: 2023-01-06T09:{number:02d}\n\n{text}\n"
        (folder / f"{number}.txt").write_text(note)
    assert tokenize() == 0 and len(documents()) == 40
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Note")]
    assert len(notes) == 2 and all("The whole text" in line for line in notes)


@pytest.mark.parametrize(
    "head", ["__label__2 ", "Genesis 1:1\t", "ham\t", "1|255|", "84-121123-0000 ", "[Kim] [10:21] "]
)
def test_labels_before_lines_are_noted(head: str, folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "a.txt").write_text("\n".join(head + text for text in sentences(40)))
    assert tokenize_only("in/a.txt") == 0
    assert "100% of it is lines that begin with" in capsys.readouterr().out


def test_a_copy_in_other_line_breaks_is_said_and_on_one_side(folder: Path, capsys: pytest.CaptureFixture) -> None:
    paragraphs = [" ".join(sentences(6, seed)) for seed in range(120)]
    (folder / "book.epub").write_bytes(epub(["".join(f"<p>{text}</p>" for text in paragraphs)]))
    wrapped = (text[:60] + text[60:].replace(" ", "\n", 3) for text in paragraphs)
    (folder / "book.txt").write_text("\n\n".join(wrapped))
    assert tokenize() == 0
    assert "of book.txt also stands in book.epub; --dedup exact" in capsys.readouterr().out
    metadata = json.loads(Path("out/tokens_bpe_metadata.json").read_text())
    tokens = np.fromfile("out/tokens_bpe.bin", metadata["dtype"])
    trained, held_out = (
        "".join(load_tokenizer("out/bpe_tokenizer.json").decode(part.tolist()).split())
        for part in np.split(tokens, [metadata["train_split_index"]])
    )
    words = ["".join(text.split()) for text in paragraphs]
    assert sum(text in held_out for text in words) > 5
    assert sum(text in held_out and text in trained for text in words) <= 2  # where passages are cut
