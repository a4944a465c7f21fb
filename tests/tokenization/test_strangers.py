"""Files as strangers have them: other encodings, copy protection, bad records, exports of chats, a writer's notes."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.tokenization.documents import archive, docx, epub
from tests.tokenization.test_extract import CHAT, documents, folder, mail, report, tokenize

__all__ = ["folder"]  # a fixture

# Text that is no text


@pytest.mark.parametrize(
    ("head", "encoding"),
    [
        ('<?xml version="1.0" encoding="iso-8859-1"?>', "latin-1"),
        ("<?xml version='1.0' encoding='windows-1252'?>", "cp1252"),
        ('<html><head><meta charset="windows-1251"/></head>', "cp1251"),
        ('<meta http-equiv="Content-Type" content="text/html; charset=koi8-r">', "koi8-r"),
        ('<?xml version="1.0"?>', "utf-16"),
        ('<?xml version="1.0" encoding="iso-8859-1"?>', "utf-8"),  # it says so, and is not
        ("", "utf-8-sig"),
    ],
)
def test_a_chapter_is_decoded_as_it_says(folder: Path, head: str, encoding: str) -> None:
    text = "Старый мельник пел у реки." if encoding in ("cp1251", "koi8-r") else "Le café était fermé."  # noqa: RUF001
    page = f"{head}<body><p>{text}</p></body>".encode(encoding)
    (folder / "a.epub").write_bytes(epub([""], parts={"OEBPS/part 0.xhtml": page}))
    assert tokenize() == 0 and documents() == [text]


def encryption(algorithm: str, part: str) -> str:
    method = f'<EncryptionMethod Algorithm="{algorithm}"/>'
    data = f'<EncryptedData>{method}<CipherData><CipherReference URI="{part}"/></CipherData></EncryptedData>'
    return f'<encryption xmlns="http://www.w3.org/2001/04/xmlenc#">{data}</encryption>'


def test_a_book_with_copy_protection_is_named_and_one_with_protected_fonts_is_read(folder: Path) -> None:
    aes, fonts = "http://www.w3.org/2001/04/xmlenc#aes256-cbc", "http://www.idpf.org/2008/embedding"
    for name, algorithm, part in (("a", aes, "OEBPS/part%200.xhtml"), ("b", fonts, "OEBPS/a.otf")):
        of_shop = {"META-INF/encryption.xml": encryption(algorithm, part), "OEBPS/a.otf": b"\0"}
        (folder / f"{name}.epub").write_bytes(epub([f"<p>Text of {name}.</p>"], parts=of_shop))
    assert tokenize() == 0 and documents() == ["Text of b."]
    assert "**Left out**: a.epub: it is copy-protected (DRM)" in report()


def test_a_part_that_is_missing_is_skipped(folder: Path) -> None:
    (folder / "a.epub").write_bytes(epub(["<p>cover</p>", "<p>Text.</p>"], without=["OEBPS/part 0.xhtml"]))
    assert tokenize() == 0 and documents() == ["Text."]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", ("\x01\x02 abc" * 90).encode()),
        ("a.epub", epub(["<p>" + "\ufffd\ufffd abc" * 90 + "</p>"])),
        ("a.csv", ("text\n" + "\ufffdabc\n" * 90).encode()),
        ("a.json", json.dumps([{"text": "\x02\x03 abc"}] * 90).encode()),
        ("a.jsonl", 90 * (json.dumps({"text": "\x02\x03 abc"}) + "\n").encode()),
        ("a.mbox", b"From a\n" + mail("Hello", "\ufffd abc\n" * 90)),
    ],
)
def test_files_without_text_are_left_out_in_any_format(folder: Path, name: str, content: bytes) -> None:
    (folder / name).write_bytes(content)
    (folder / "z.txt").write_text("Some text. \x0c")
    assert tokenize() == 0 and documents() == ["Some text. \x0c"]
    assert f"**Left out**: {name}: " in report() and "of its characters are not text" in report()


@pytest.mark.extras("pypandoc")
def test_word_files_of_other_programs(folder: Path) -> None:
    word = docx(["One."])
    (folder / "a.docx").write_bytes(word)
    (folder / "b.docx").write_bytes(b"\xd0\xcf\x11\xe0" + bytes(600))
    assert tokenize() == 0 and documents() == ["One."]
    assert "**Left out**: b.docx: it has a password" in report()


@pytest.mark.extras("pypandoc")
def test_documents_in_other_encodings(folder: Path) -> None:
    """Pandoc takes the bytes of text for UTF-8, and those of RTF for windows-1252."""
    text = "Старый мельник пел у реки."  # noqa: RUF001
    title = "<description><title-info><book-title>x</book-title></title-info></description>"
    book = f"{title}<body><section><p>{text}</p></section></body>"
    space = "http://www.gribuser.ru/xml/fictionbook/2.0"
    (folder / "a.fb2").write_bytes(
        f'<?xml version="1.0" encoding="windows-1251"?><FictionBook xmlns="{space}">{book}</FictionBook>'.encode(
            "cp1251"
        )
    )
    (folder / "b.org").write_bytes(text.encode("utf-16"))
    escaped = "".join(f"\\'{byte:02x}" for byte in text.encode("cp1251"))
    fonts = r"{\fonttbl{\f0\fswiss\fcharset0 Arial;}{\f1\fswiss\fcharset204 Arial Cyr;}}"
    (folder / "c.rtf").write_text(rf"{{\rtf1\ansi\ansicpg1251 {escaped}\par}}")
    (folder / "d.rtf").write_text(rf"{{\rtf1\ansi\ansicpg1252{fonts}\f0 \'e9 \f1 {escaped}\par}}")
    (folder / "e.rtf").write_text(rf"{{\rtf1\ansi\ansicpg1252{fonts}\f0 caf\'e9 \u1057\'d1\u1058?.\par}}")
    assert tokenize() == 0
    assert [document.split("\n")[-1 if "x" in document else 0] for document in documents()[:2]] == [text] * 2
    assert documents()[2] == "café СТ."  # noqa: RUF001
    assert "c.rtf, d.rtf: its letters are in an old code page; save it again as .docx" in report()
    (folder / "d.rtf").write_text(r"{\rtf1\ansi\uc0 x\u233 y \'e9z}")
    assert tokenize() == 0 and documents()[2] == "xéy éz"


# One bad record, mail or file


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="Linux")
def test_a_file_that_the_disk_does_not_give_is_left_out_by_its_name(folder: Path) -> None:
    (folder / "bad.txt").symlink_to("/proc/self/mem")
    (folder / "worse.epub").symlink_to("/proc/self/mem")
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0 and documents() == ["Some text."]
    assert "bad.txt" in report() and "it cannot be read: Input/output error" in report()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_files_without_read_permission_are_named(folder: Path) -> None:
    (folder / "closed").mkdir()
    (folder / "b.txt").write_text("no")
    (folder / "z.txt").write_text("Some text.")
    for path in (folder / "closed", folder / "b.txt"):
        path.chmod(0)
    try:
        assert tokenize() == 0 and documents() == ["Some text."]
        assert "closed: cannot be opened: Permission denied" in report()
        assert "b.txt: it cannot be read: Permission denied" in report()
    finally:
        (folder / "closed").chmod(0o700)


def test_an_archive_is_judged_as_a_whole(folder: Path) -> None:
    bomb = archive({f"{number}.txt": bytes(9_900_000) for number in range(5)})
    (folder / "a.zip").write_bytes(bomb)
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0 and documents() == ["Some text."]
    assert "**Left out**: a.zip: it unpacks to more than 200 times its size" in report()


ODD_CHARSETS = ["unknown", "unknown-8bit", "uft-8", "_iso-2022-jp$ESC", "1", "", "idna", "rot13", "zip", 'a"b']


@pytest.mark.parametrize("charset", ODD_CHARSETS)
def test_a_mail_in_an_encoding_that_nobody_knows_is_read_and_loses_no_other(folder: Path, charset: str) -> None:
    head = f"Subject: Two\nMIME-Version: 1.0\nContent-Type: text/plain; charset={charset}\n\n"
    odd = head.encode() + "Grüße aus Köln.\n".encode()
    messages = [mail("One", "First.\n"), odd, mail("Three", "Third.\n")]
    (folder / "a.mbox").write_bytes(b"".join(b"From a@example.org Mon Jan 1\n" + each + b"\n" for each in messages))
    assert tokenize() == 0
    assert documents() == ["One\n\nFirst.", "Two\n\nGrüße aus Köln.", "Three\n\nThird."]


def test_what_a_reply_quotes_is_learned_once(folder: Path) -> None:
    first = "The mill stands still.\nWho will mend it?\n"
    quoted = "".join(f"> {line}\n" for line in [*first.splitlines(), "", "Never sent here."])
    reply = f"I will.\n\nOn Monday, Anna wrote:\n{quoted}"
    messages = [mail("The mill", first), mail("Re: The mill", reply)]
    (folder / "a.mbox").write_bytes(b"".join(b"From a@example.org Mon Jan 1\n" + each + b"\n" for each in messages))
    assert tokenize() == 0
    assert documents() == [f"The mill\n\n{first.strip()}", "I will.\n\n> Never sent here."]


# Exports of chats

FIRST, SECOND = "User: Hi?\nAssistant: Hello.", "User: Bye\nAssistant: See you."
TURNS = [*CHAT["messages"], {"role": "user", "content": "Bye"}, {"role": "assistant", "content": "See you."}]


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
def test_each_answer_of_a_conversation_beside_other_text_ends(folder: Path, name: str) -> None:
    (folder / name).write_text(json.dumps({"messages": TURNS}, indent=1 if name == "a.json" else None))
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0 and documents() == [FIRST, SECOND, "Some text."]


def node(role: str, text: str, parent: str | None, **more: Any) -> dict[str, Any]:
    return {"parent": parent, "message": {"author": {"role": role}, "content": {"parts": [text]}, **more}}


def test_only_visible_messages_of_chatgpts_export_are_read(folder: Path) -> None:
    mapping = {
        "a": node("user", "Hi?", None, recipient="all"),
        "b": node("assistant", "import os", "a", recipient="python"),
        "c": node("user", "about me", "b", metadata={"is_visually_hidden_from_conversation": True}),
        "d": node("assistant", "Hello.", "c", recipient="all"),
        "e": node("user", "Is anybody there?", "d"),
    }
    unanswered = {"mapping": {"a": node("user", "Hm?", None)}, "current_node": "a"}
    talks = [unanswered, *[{"mapping": mapping, "current_node": "e"}] * 4]
    (folder / "conversations.json").write_text(json.dumps(talks))
    assert tokenize("--format", "chat") == 0
    assert {text for text in documents() if text} == {FIRST}
    assert "conversations.json: 1 of its 5 records; record 1: it has no answer" in report()


PARTS = [{"type": "text", "text": "Hello."}, {"type": "tool_use", "name": "search"}]
EXPORTS: dict[str, tuple[Any, str]] = {
    "Claude, in parts": (
        [
            {
                "chat_messages": [
                    {"sender": "human", "text": "Hi?"},
                    {"sender": "assistant", "text": "", "content": PARTS},
                ]
            }
        ],
        FIRST,
    ),
    "Claude": (
        [
            {
                "name": "x",
                "chat_messages": [{"sender": "human", "text": "Hi?"}, {"sender": "assistant", "text": "Hello."}],
            }
        ],
        FIRST,
    ),
    "Telegram": (
        {
            "name": "Ben",
            "messages": [
                {"type": "service", "actor": "Anna", "text": ""},
                {"type": "message", "from": "Anna", "text": ["See ", {"type": "link", "text": "http://a.b"}]},
                {"type": "message", "from": "Ben", "text": "Yes."},
            ],
        },
        "Anna: See http://a.b\nBen: Yes.",
    ),
    "Telegram, all chats": (
        {"chats": {"list": [{"messages": [{"from": "Anna", "text": "Hm."}, {"from": "Ben", "text": "Well."}]}]}},
        "Anna: Hm.\nBen: Well.",
    ),
    "Messenger": (
        {
            "messages": [
                {"sender_name": "Ben", "timestamp_ms": 2, "content": "Yes."},
                {"sender_name": "Zo\u00c3\u00ab", "timestamp_ms": 1, "content": "Caf\u00c3\u00a9?"},
            ]
        },
        "Zoë: Café?\nBen: Yes.",
    ),
    "Discord": (
        {"messages": [{"author": {"name": "anna", "nickname": "Anna"}, "content": "Hi"}, {"author": {"name": "Ben"}}]},
        "Anna: Hi",
    ),
}


@pytest.mark.parametrize("program", EXPORTS)
@pytest.mark.parametrize("indent", [None, 2])
def test_the_exports_of_chat_programs_are_read(folder: Path, program: str, indent: int | None) -> None:
    content, text = EXPORTS[program]
    (folder / "export.json").write_text(json.dumps(content, indent=indent))
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0 and documents() == [text, "Some text."]


WHATSAPP = {
    "Android": "1/22/23, 01:02 - {}",
    "Android, 12 hours": "1/22/23, 1:02\u202fPM - {}",
    "iOS": "[22.01.23, 01:02:03] {}",
    "iOS, marked": "\u200e[2023-01-22, 1:02:03 PM] {}",
}


@pytest.mark.parametrize("form", WHATSAPP)
def test_a_chat_of_whatsapp_is_read_without_dates(folder: Path, form: str) -> None:
    said = [
        "Messages are end-to-end encrypted.",
        "Anna Müller: Hi",
        "Ben: <Media omitted>",
        "Ben: Well:\nyes",
        "Anna Müller: \u200eimage omitted",
        "Ben: \u200eáudio ocultado",
        "Ben: Esta mensagem foi apagada.",
        "Ben: IMG-20230122.jpg (arquivo anexado)",
        "Anna Müller: ok \u200e<Mensagem editada>",
    ]
    (folder / "chat.txt").write_text("".join(WHATSAPP[form].format(each) + "\n" for each in said))
    assert tokenize() == 0
    assert documents() == ["Anna Müller: Hi\nBen: Well:\nyes\nAnna Müller: ok\n"]


# A writer's files


@pytest.mark.parametrize("suffix", ["srt", "vtt"])
def test_subtitles_give_the_text_of_their_cues(folder: Path, suffix: str) -> None:
    point = "," if suffix == "srt" else "."
    cues = ["<i>Who is</i> there?", "{\\an8}Nobody.\n- Really?", "Nobody.\n- Really?"]
    blocks = [f"{i}\n00:00:0{i}{point}000 --> 00:00:0{i}{point}900\n{cue}\n" for i, cue in enumerate(cues)]
    head = "WEBVTT\n\nNOTE no\n\n" if suffix == "vtt" else "\ufeff"
    (folder / f"a.{suffix}").write_text(head + "\n".join(blocks))
    assert tokenize() == 0 and documents() == ["Who is there?\nNobody.\n- Really?"]


def test_notes_of_obsidian_give_their_text(folder: Path) -> None:
    note = (
        "---\ntags: [a]\n---\n# Tanya\nShe met [[Boris]] and [[people/Vera|his sister]]. %%private%% ^block-6\n"
        "![[map.png]]\n%%\nnot\nthis\n%%\n```dataview\nlist\n```\n---\nif [[ -f x ]]; 5 %% 2\n"
    )
    (folder / "a.md").write_text(note)
    assert tokenize() == 0
    text = documents()[0]
    (folder / "b.md").write_text("---\nA rule, and no front matter.\n\n---\nIt is x ^2\n")
    assert tokenize() == 0 and (folder / "b.md").read_text() in documents()
    assert "She met Boris and his sister." in text and "if [[ -f x ]]; 5 %% 2" in text and "---\n" in text
    assert not any(word in text for word in ("tags", "private", "block-6", "map", "not", "dataview"))


def test_a_book_of_project_gutenberg_loses_its_licence_and_the_breaks_inside_paragraphs(folder: Path) -> None:
    prose = (
        "The old miller carried the silver lamp over the narrow bridge, and\nnobody in the village remembered why.\n"
    )
    verse = "The mill goes round and round all day\nThe water never stays\nAnd so the miller sings.\n"
    start, end = (f"*** {word} OF THE PROJECT GUTENBERG EBOOK THE MILL ***" for word in ("START", "END"))
    book = f"License text\n{start}\n\n\n{prose}\n{verse}\n\n{end}\nmore"
    (folder / "a.txt").write_text(book)
    assert tokenize() == 0
    assert documents() == [f"{prose.strip().replace(chr(10), ' ')}\n\n{verse}"]
    assert "without Project Gutenberg's licence" in report()
    (folder / "a.txt").write_text(f"{book}\n{book}\n<|endoftext|>\nMy own text.\n")
    assert tokenize() == 0
    text = f"{prose.strip().replace(chr(10), ' ')}\n\n{verse}"
    assert sorted(documents()) == sorted([text, text, "My own text.\n"]), "each book of a file, and what is no book"
    (folder / "a.txt").unlink()
    with open(folder / "books.csv", "w", newline="") as file:
        csv.writer(file).writerows([["text"], [book], ["My own text."]])
    assert tokenize() == 0 and sorted(documents()) == sorted([text, "My own text."]), "and of a row"


def test_marks_inside_lines_are_mentioned(folder: Path) -> None:
    (folder / "a.txt").write_text(
        "<|endoftext|>\none<|endoftext|>\n<|endoftext|>\n<|startoftext|>two<|endoftext|>x\n" + "word\n" * 300
    )
    assert tokenize() == 0
    assert "separators inside lines" in report()


def test_marks_of_byte_order_inside_a_text_are_left_out(folder: Path) -> None:
    (folder / "a.txt").write_text("\ufeffOne.\n\ufeffTwo.")
    (folder / "b.jsonl").write_text('{"text": "\\ufeffThree."}\n')
    assert tokenize() == 0 and documents() == ["One.\nTwo.", "Three."]


def test_a_file_that_may_be_text_is_told_apart_from_a_picture(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "tune.abc").write_text("X:1\nT:Tune\n")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8\xff\xe0")
    assert tokenize() == 3
    assert "1 files: it may be text; read such files with --input 'in/**/*.abc'" in capsys.readouterr().err
    (folder / "z.txt").write_text("Some text.")
    assert tokenize() == 0
    assert "tune.abc: it may be text" in report() and "photo.jpg: not text" in report()
