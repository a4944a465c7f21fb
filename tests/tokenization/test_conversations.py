"""Records of every form become conversations of tokens with their answers marked; what is none is named by its line."""

from __future__ import annotations

import gzip
import itertools
import json
import operator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.chat import ROLES, ChatTemplate, Message, require_order
from tests.helpers import Killed, call_before
from tokenization import token_folder
from tokenization.conversations import extract_messages
from tokenization.held_out import hash_passage
from tokenization.metadata import TokenMetadata
from tokenize_local_bpe import main, tokenize
from tokenizer import load_tokenizer

QUESTION, ANSWER = Message("user", "What is it?"), Message("assistant", "It is it.")
TURNS = [QUESTION, ANSWER, Message("user", "Why?"), Message("assistant", "So.")]


def chat(turns: list[Message], role: str = "role", content: str = "content") -> list[dict]:
    return [{role: turn.role, content: turn.content} for turn in turns]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": chat(TURNS)}, TURNS),
        ({"messages": chat([Message("developer", "Be brief."), *TURNS])}, [Message("system", "Be brief."), *TURNS]),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "it?"}],
                    },
                    {"role": "assistant", "content": "It is it."},
                ]
            },
            [QUESTION, ANSWER],
        ),
        ({"prompt": "What is it?", "completion": "It is it."}, [QUESTION, ANSWER]),
        ({"prompt": chat(TURNS[:3]), "completion": chat(TURNS[3:])}, TURNS),
        ({"instruction": "What is it?", "input": "", "output": "It is it."}, [QUESTION, ANSWER]),
        ({"instruction": "What is it?", "input": None, "output": "It is it."}, [QUESTION, ANSWER]),
        (
            {"instruction": "Sort.", "input": "b a", "output": "a b"},
            [Message("user", "Sort.\n\nb a"), Message("assistant", "a b")],
        ),
        (
            {"conversations": [{"from": "human", "value": "What is it?"}, {"from": "gpt", "value": "It is it."}]},
            [QUESTION, ANSWER],
        ),
        (
            {"system": "Be brief.", "conversations": chat(TURNS, "from", "value")},
            [Message("system", "Be brief."), *TURNS],
        ),
        ({"prompt": "a\ud800", "completion": "b"}, [Message("user", "a\ufffd"), Message("assistant", "b")]),
        ({"messages": chat([ANSWER, *TURNS, QUESTION])}, TURNS),  # nothing asked, and nothing answered
        (
            {"messages": chat([QUESTION, Message("user", "Well?"), ANSWER, Message("assistant", " "), ANSWER])},
            [Message("user", "What is it?\n\nWell?"), Message("assistant", "It is it.\n\nIt is it.")],
        ),
        (
            {
                "chat_messages": [
                    {"sender": "human", "text": "What is it?"},
                    {"sender": "assistant", "text": "It is it."},
                ]
            },
            [QUESTION, ANSWER],
        ),
    ],
)
def test_every_form_of_a_record(record: dict, messages: list[Message]) -> None:
    assert extract_messages(record) == messages


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ([], "a JSON list, but an object"),
        ({}, "not a known conversation format"),
        ({"text": "x"}, "its keys are 'text'"),
        ({"messages": {}}, "the turns are a JSON dict"),
        ({"messages": []}, "it has no answer"),
        ({"messages": ["x"]}, "turn 1 is a JSON str"),
        ({"messages": [{"content": "x"}]}, "turn 1 has no role"),
        (
            {"messages": [{"role": "user", "content": "x", "weight": 0}]},
            "turn 1 has the weight 0; only 1 is supported",
        ),
        ({"messages": [{"role": "user"}]}, "it has no answer"),
        ({"messages": [{"role": "user", "content": 5}]}, "turn 1 is a JSON int, but a text is needed"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "turn 1 is a JSON list"),
        ({"messages": chat([*TURNS[:3], Message("tool", "x")])}, "turn 4 has the role 'tool'"),
        ({"messages": chat([ANSWER, QUESTION])}, "it has no answer"),
        ({"prompt": "x", "completion": " \n"}, "it has no answer"),
        ({"mapping": {"a": {"message": {"author": None}}}, "current_node": "a"}, "not ChatGPT's format"),
        ({"instruction": 1, "output": "x"}, "instruction is a JSON int"),
        ({"conversations": [{"from": "human", "value": "x"}]}, "it has no answer"),
    ],
)
def test_records_that_are_no_conversations_are_reported(record: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        extract_messages(record)


def write_records(path: Path, count: int = 30) -> list[dict]:
    records = [{"prompt": f"What is {i}?", "completion": f"It is {i} and not {i + 1}."} for i in range(count)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return records


def template_text(record: dict) -> str:
    return "".join(text for text, _ in ChatTemplate().split_turns(extract_messages(record)))


def read_folder(folder: Path) -> tuple[TokenMetadata, np.ndarray, np.ndarray, Any]:
    metadata = TokenMetadata.read(folder / "tokens_bpe_metadata.json")
    assert metadata.mask_file
    tokens = np.fromfile(folder / "tokens_bpe.bin", metadata.numpy_dtype)
    mask = np.unpackbits(np.fromfile(folder / metadata.mask_file, np.uint8), count=len(tokens)).astype(bool)
    return metadata, tokens, mask, load_tokenizer(folder / "bpe_tokenizer.json")


def test_tokens_mask_and_metadata(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    records = write_records(tmp_path / "chats.jsonl")
    flags = ["--input", str(tmp_path / "chats.jsonl"), "--format", "chat", "--vocab_size", "300"]
    assert main([*flags, "--output_dir", str(tmp_path / "out")]) == 0
    assert "in 30 conversations" in capsys.readouterr().out
    metadata, tokens, mask, tokenizer = read_folder(tmp_path / "out")
    assert metadata.chat_template == ChatTemplate() and metadata.documents == 30
    held_out = [hash_passage(template_text(record)) < 0.1 for record in records]
    ordered = [*itertools.compress(records, map(operator.not_, held_out)), *itertools.compress(records, held_out)]
    expected = [ChatTemplate().encode(tokenizer, extract_messages(record)) for record in ordered]
    assert tokens.tolist() == np.concatenate([ids for ids, _ in expected]).tolist()
    assert mask.tolist() == np.concatenate([counted for _, counted in expected]).tolist()
    ends = np.cumsum([len(ids) for ids, _ in expected])
    assert metadata.train_tokens in ends[:-1], "a conversation is on one side of the split"
    assert list(ends).index(metadata.train_tokens) == 29 - sum(held_out) > 20


@pytest.mark.parametrize("form", ["array", "packed", "lines called .json", "array called .jsonl", "bom"])
def test_files_of_every_kind_give_the_same_tokens(tmp_path: Path, form: str) -> None:
    records = write_records(tmp_path / "chats.jsonl")
    lines, array = (tmp_path / "chats.jsonl").read_bytes(), json.dumps(records, indent=1).encode()
    (tmp_path / "in").mkdir()
    name, content = {
        "array": ("a.json", array),
        "packed": ("a.json.gz", gzip.compress(array)),
        "lines called .json": ("a.json", lines),
        "array called .jsonl": ("a.jsonl", array),
        "bom": ("a.jsonl", b"\xef\xbb\xbf" + lines),
    }[form]
    (tmp_path / "in" / name).write_bytes(content)
    for source, out in ((tmp_path / "chats.jsonl", "one"), (tmp_path / "in", "other")):
        tokenize([str(source)], tmp_path / out, format="chat", vocab_size=300, quiet=True, chunk_size_mb=0.0002)
    for name in ("tokens_bpe.bin", "tokens_bpe_mask.bin", "bpe_tokenizer.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


BAD_LINES = [
    ('{"prompt": "a", "compl', "not valid JSON"),
    ('{"prompt": "a", "completion": ""}', "it has no answer"),
    ('{"text": "x"}', "not a known conversation format"),
    ("17", "a JSON int"),
    ('{"messages": [{"role": "assistant", "content": "a"}]}', "it has no answer"),
    ("[" * 100_000, "not usable JSON"),
]


@pytest.mark.parametrize(("place", "line", "said"), [(2, *bad) for bad in BAD_LINES] + [(0, *BAD_LINES[0])])
def test_a_bad_record_is_left_out_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, place: int, line: str, said: str
) -> None:
    records = write_records(tmp_path / "good.jsonl")
    lines = (tmp_path / "good.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "bad.jsonl").write_text("".join([*lines[:place], line + "\n", *lines[place:]]))
    flags = ["--input", str(tmp_path / "bad.jsonl"), "--format", "chat", "--vocab_size", "300"]
    assert main([*flags, "--output_dir", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert f"bad.jsonl: 1 of its 31 records; line {place + 1}: {said}" in out
    assert read_folder(tmp_path / "out")[0].documents == len(records)
    (tmp_path / "bad.jsonl").write_text(lines[0] + f"{line}\n" * 31 + "".join(lines[1:]))
    assert main([*flags, "--output_dir", str(tmp_path / "new")]) == 3
    assert "31 of its 61 records; line 2: " in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('[{"prompt": "a", "completion": "b"},\n {"prompt": ', "1 of its 2 records; record 2: not valid JSON"),
        ('[{"prompt": "a", "completion": "b"}\n {}]', "a comma or the end of the array is missing"),
        ('[{"prompt": "a", "completion": "b"},', "the array has no end"),
        ('[{"prompt": "a", "completion": "b"}] x', "text follows the array"),
    ],
)
def test_an_array_is_read_as_far_as_it_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str, said: str
) -> None:
    more = ", ".join(['{"prompt": "a", "completion": "b"}'] * 9)
    (tmp_path / "a.json").write_text(f"[{more}, {content[1:]}")
    flags = ["--input", str(tmp_path / "a.json"), "--format", "chat", "--output_dir", str(tmp_path / "out")]
    assert main([*flags, "--vocab_size", "300"]) == 0
    assert said.replace("of its 2 records; record 2", "of its 11 records; record 11") in capsys.readouterr().out
    assert read_folder(tmp_path / "out")[0].documents == 10


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" + "[" * 100_000, "not usable JSON"),
        ("[]", "Found 0 conversations"),
        ('[{"prompt": "a", "completion": "b"}]', "Found 1 conversation,"),
        ("\n\n", "Found 0 conversations"),
        (b'{"prompt": "\xff"}', "it is not UTF-8"),
        ('{"prompt": "a", "completion": "b"}\n'.encode("utf-16"), "Found 1 conversation,"),
        (b'[{"prompt": "\xff"}]', "it is not UTF-8"),
    ],
)
def test_a_file_without_conversations(
    tmp_path: Path, capsys: pytest.CaptureFixture, content: str | bytes, said: str
) -> None:
    (tmp_path / "a.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    flags = ["--input", str(tmp_path / "a.json"), "--format", "chat", "--output_dir", str(tmp_path / "out")]
    assert main([*flags, "--vocab_size", "300"]) == 3
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error and not (tmp_path / "out").exists()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


KEYS = ("messages", "conversations", "prompt", "completion", "instruction", "input", "output", "system")
TURN = st.fixed_dictionaries(
    {},
    optional={
        key: st.sampled_from([*ROLES, "human", "gpt", "x", "", None]) | JSON
        for key in ("role", "from", "content", "value")
    },
)


@given(st.dictionaries(st.sampled_from(KEYS), st.lists(TURN, max_size=4) | st.text() | JSON))
def test_any_record_is_a_conversation_or_is_reported(record: dict) -> None:
    try:
        messages = extract_messages(record)
    except ValueError as problem:
        assert str(problem)
    else:
        require_order(messages, "assistant")


def test_stopped_in_the_middle_it_continues_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_records(tmp_path / "chats.jsonl")
    options: dict[str, Any] = {"format": "chat", "vocab_size": 300, "chunk_size_mb": 0.0002, "quiet": True}
    tokenize([str(tmp_path / "chats.jsonl")], tmp_path / "whole", **options)
    appended = []

    def append(self: token_folder.TokenWriter, *_: Any) -> None:
        if len(appended) == 2:
            for file in self.files[:-1]:  # written, and not yet in the journal
                file.write(b"junk")
            raise Killed
        appended.append(1)

    with monkeypatch.context() as patch, pytest.raises(Killed):
        call_before(patch, token_folder.TokenWriter, "append", append)
        tokenize([str(tmp_path / "chats.jsonl")], tmp_path / "out", **options)
    tokenize([str(tmp_path / "chats.jsonl")], tmp_path / "out", **options)
    for name in ("tokens_bpe.bin", "tokens_bpe_mask.bin", "bpe_tokenizer.json"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_text_in_the_place_of_conversations_leaves_no_mask_behind(tmp_path: Path) -> None:
    write_records(tmp_path / "chats.jsonl")
    (tmp_path / "text.txt").write_text("It is a text like any other.\n" * 50)
    tokenize([str(tmp_path / "chats.jsonl")], tmp_path / "out", format="chat", vocab_size=300, quiet=True)
    tokenize([str(tmp_path / "text.txt")], tmp_path / "out", vocab_size=300, quiet=True)
    assert not (tmp_path / "out" / "tokens_bpe_mask.bin").exists()
    assert TokenMetadata.read(tmp_path / "out" / "tokens_bpe_metadata.json").chat_template is None


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (["--format", "chats"], 2, "allowed: text, chat"),
        (["--format", "chat", "--text_key", "x"], 2, "--text_key applies only with --format text"),
        (["--format", "chat", "--document_separator", "x"], 2, "--document_separator applies only with --format text"),
        (["--format", "chat", "--tokenizer", "char"], 2, "no character would end an answer"),
    ],
)
def test_flags(tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], code: int, said: str) -> None:
    write_records(tmp_path / "chats.jsonl")
    assert main(["--input", str(tmp_path / "chats.jsonl"), *flags, "--output_dir", str(tmp_path / "out")]) == code
    assert said in capsys.readouterr().err


def test_a_vocabulary_of_characters_cannot_express_a_conversation(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    from tokenizer import CharacterTokenizer

    write_records(tmp_path / "chats.jsonl")
    CharacterTokenizer.train("abc").save(tmp_path / "characters.json")
    flags = ["--format", "chat", "--tokenizer_file", str(tmp_path / "characters.json")]
    assert main(["--input", str(tmp_path / "chats.jsonl"), *flags, "--output_dir", str(tmp_path / "out")]) == 3
    assert "nothing would end an answer. Use a BPE tokenizer." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
