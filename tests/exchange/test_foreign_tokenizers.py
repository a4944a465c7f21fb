"""Tokenizers of GPT-2, SmolLM2, Llama 3, Qwen and Qwen3.5: the ids and texts of transformers, and of llama.cpp."""

from __future__ import annotations

import functools
import json
import random
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers

import tokenize_local_bpe
from common.chat import ChatTemplate, Message
from common.errors import CheckpointError
from exchange import gguf_file
from exchange.hf_tokenizer import import_tokenizer
from generation.completion import encode_prompt
from tests import models
from tests.exchange import gguf_proof
from tests.foreign_tokenizers import FORMS, FOUND, SPECIAL, build, strings, write_folder
from tests.languages import COMPOSED, MARKED
from tests.models import random_model
from tokenization.documents import find_cut
from tokenizer import load_tokenizer
from tokenizer_bpe import BPETokenizer, TokenizerError
from tools import export_hf, import_hf

needs_transformers = pytest.mark.extras("transformers")
needs_llama_cpp = pytest.mark.extras("xllamacpp", "gguf")
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "bias": False, "norm_gain": True}


@functools.cache
def ours(form: str) -> BPETokenizer:
    return BPETokenizer(build(form))


def texts_with_names(form: str, count: int, seed: int) -> list[str]:
    return strings(count, seed, [*SPECIAL[form][:5], *FOUND.get(form, [])])


@needs_transformers
@pytest.mark.parametrize("form", FORMS)
def test_ids_and_texts_are_those_of_autotokenizer(form: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = write_folder(tmp_path / form, form)
    tokenizer, content = import_tokenizer(folder)
    assert isinstance(tokenizer, BPETokenizer) and content == (folder / "tokenizer.json").read_bytes()
    theirs = AutoTokenizer.from_pretrained(folder)
    assert len(theirs) == tokenizer.vocab_size
    texts = texts_with_names(form, 10_000, seed=2)
    expected = theirs(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    for text, ids, decoded in zip(texts, expected, theirs.batch_decode(expected), strict=True):
        assert tokenizer.encode(text).tolist() == ids, repr(text)
        assert tokenizer.decode(ids) == decoded, repr(text)
        assert not set(tokenizer.special_ids.values()) & set(ids), repr(text)


@pytest.mark.parametrize("form", FORMS)
def test_a_text_comes_back_piece_by_piece(form: str) -> None:
    """Except for what the file itself changes: Qwen's brings text into NFC, SmolLM2's lacks some bytes."""
    tokenizer, draw = ours(form), random.Random(3)
    for text in texts_with_names(form, 2_000, seed=3):
        ids, decoder = tokenizer.encode(text).tolist(), tokenizer.decoder()
        half = draw.randrange(len(ids) + 1)
        steps = [ids[:half], *([i] for i in ids[half:])]
        assert tokenizer.decode(ids).startswith("".join(map(decoder.push, steps)))
        if form.startswith("qwen"):
            text = normalizers.NFC().normalize_str(text)
        if form != "smollm2" or max(text, default="") < "\U00040000":
            assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("form", FORMS)
def test_ids_do_not_depend_on_where_a_long_text_is_cut(form: str) -> None:
    tokenizer, draw = ours(form), random.Random(4)
    cut_inside = 0
    for text in strings(2_000, seed=4):  # without added tokens: none of them has whitespace
        cut = find_cut(text, draw.randrange(len(text))) if text else 0
        parts = [tokenizer.encode(part).tolist() for part in (text[:cut], text[cut:])]
        assert parts[0] + parts[1] == tokenizer.encode(text).tolist(), (text[:cut], text[cut:])
        cut_inside += cut > 0
    assert cut_inside > 300


def test_an_added_token_that_is_not_special_is_found_in_text_and_counts_its_letters() -> None:
    tokenizer = ours("qwen3")
    ids = tokenizer.encode("a<think>b</think><|im_end|>").tolist()
    assert [tokenizer.token_bytes(i) for i in ids[:4]] == [b"a", b"<think>", b"b", b"</think>"]
    assert tokenizer.special_ids["<|im_end|>"] not in ids
    assert int(tokenizer.byte_lengths[ids].sum()) == len("a<think>b</think><|im_end|>")
    assert ids[1] not in tokenizer.unused_ids


# Files that are refused


def added(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["added_tokens"][-1].update(changes)


def same_id_twice(content: dict[str, Any]) -> None:
    vocab = content["model"]["vocab"]
    vocab["Ġthe"] = vocab["a"]


def bad_pattern(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"] = {"Regex": r"(?i:'s|\p{N"}


def sentencepiece(content: dict[str, Any]) -> None:
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    content["pre_tokenizer"] = None
    content["model"] |= {"byte_fallback": True, "merges": [], "vocab": {"▁": 0, "<0x41>": 1}}
    content["added_tokens"] = []


def model(**keys: Any) -> Callable[[dict[str, Any]], None]:
    def act(content: dict[str, Any]) -> None:
        content["model"], content["added_tokens"], content["pre_tokenizer"] = keys, [], {"type": "Whitespace"}

    return act


REFUSED = {
    "an added token over one of the vocabulary": (added(id=5), "added token '</think>' has the id 5, which is taken"),
    "two added tokens with one id": (added(id=1504), "has the id 1504, .* a gap, so `tokenizers` uses 1509"),
    "a gap before an added token": (added(id=2000), "has the id 2000, which is taken or leaves a gap"),
    "a negative id": (added(id=-3), "`tokenizers` cannot read"),
    "an id twice": (same_id_twice, "two of its tokens have the id"),
    "a pattern that is not one": (bad_pattern, "`tokenizers` cannot read .*: "),
    "Llama 2": (sentencepiece, r"SentencePiece's BPE \(as in Llama 2, TinyLlama and Mistral\); only"),
    "Unigram": (model(type="Unigram", unk_id=0, vocab=[["<unk>", 0.0], ["▁a", -1.0]]), "SentencePiece's Unigram"),
    "BERT": (
        model(type="WordPiece", unk_token="a", continuing_subword_prefix="##", max_input_chars_per_word=9, vocab={}),
        r"WordPiece \(as in BERT\)",
    ),
    "words": (model(type="WordLevel", vocab={"a": 0, "b": 1}, unk_token="a"), "a list of words; only"),
    "characters": (model(type="BPE", vocab={"a": 0, "b": 1}, merges=[]), "BPE of characters; only"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_used_is_refused_in_a_sentence(name: str, tmp_path: Path) -> None:
    content = json.loads(build("qwen3").to_str())
    change, words = REFUSED[name]
    change(content)
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=words) as caught:
        import_tokenizer(tmp_path)
    assert caught.value.exit_code == 3 and "\n" not in str(caught.value)


# Through the tools


def write_model(folder: Path, form: str, vocab_size: int, **how: str) -> Path:
    import transformers

    name = {"smollm2": "Llama", "llama3": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[form]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": vocab_size}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = getattr(transformers, f"{name}Config")(**shape, **ends)
    write_folder(folder, form, **how)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder)
    return folder


@needs_transformers
@pytest.mark.parametrize("form", ["smollm2", "llama3", "qwen2", "qwen3"])
def test_the_tools_keep_a_tokenizer(form: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Imported, with the class that SmolLM2's folder names and with more rows than ids, and exported again."""
    from transformers import AutoTokenizer

    how = {"tokenizer_class": "GPT2Tokenizer"} if form == "smollm2" else {}
    theirs = write_model(tmp_path / "theirs", form, 2_048, **how)
    assert import_hf.main([str(theirs), str(tmp_path / "ours")]) == 0
    assert export_hf.main([str(tmp_path / "ours"), str(tmp_path / "again")]) == 0, capsys.readouterr()
    again, texts = AutoTokenizer.from_pretrained(tmp_path / "again"), texts_with_names(form, 500, seed=5)
    found = again(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert found == [ours(form).encode(text).tolist() for text in texts]


@needs_transformers
def test_refused_folders_leave_no_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = write_model(tmp_path / "theirs", "qwen2", 1_400)  # the tokenizer has more
    assert import_hf.main([str(folder), str(tmp_path / "ours")]) == 3
    assert "has 1,508 ids, the model 1,400" in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n")
    assert import_hf.main([str(folder), str(tmp_path / "ours")]) == 3
    assert "only a SentencePiece tokenizer.model" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]


# llama.cpp


@needs_llama_cpp
@pytest.mark.parametrize("form", FORMS)
def test_llama_cpp_cuts_in_the_same_way_and_another_name_is_noticed(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = BPETokenizer(build(form))
    small = random_model(tokenizer.vocab_size + 7, **LLAMA, num_layers=1, max_seq_len=40)
    gguf_file.write_gguf(tmp_path / "a.gguf", small, tokenizer, "a")
    agreement = gguf_proof.verify_gguf(tmp_path / "a.gguf", small, tokenizer, texts_with_names(form, 30, seed=6))
    assert agreement.texts > 20
    for other in {"gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35"} - {tokenizer.splitting}:
        if (form, other) in {("qwen2", "llama-bpe"), ("qwen3", "llama-bpe")}:
            continue  # no vocabulary of Qwen's has a number of several digits: both names give the same ids
        monkeypatch.setattr(tokenizer, "splitting", other)
        monkeypatch.setattr(gguf_file, "find_bpe_obstacle", lambda tokenizer: "")
        gguf_file.write_gguf(tmp_path / "b.gguf", small, tokenizer, "b")
        with pytest.raises(CheckpointError, match="gives other ids"):
            gguf_proof.verify_gguf(tmp_path / "b.gguf", small, tokenizer)


@needs_transformers
@needs_llama_cpp
def test_a_vocabulary_of_marked_letters_is_the_same_everywhere(tmp_path: Path) -> None:
    """Learned here, with combining marks in its words and composed letters: in an export, and in llama.cpp, which
    composes nothing."""
    from transformers import AutoTokenizer

    sentences = [*MARKED.values(), unicodedata.normalize("NFD", COMPOSED["French"])]
    tokenizer = BPETokenizer.train(sentences * 3, 700, 2, "qwen35", True)
    texts = [*sentences, *strings(300, seed=8)]
    model = models.write_model(tmp_path / "mine", tokenizer, **LLAMA)
    assert export_hf.main([str(tmp_path / "mine"), str(tmp_path / "theirs")]) == 0
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ids = [tokenizer.encode(text).tolist() for text in texts]
    assert theirs(texts, add_special_tokens=False)["input_ids"] == ids
    assert theirs.batch_decode(ids) == [tokenizer.decode(each) for each in ids]
    gguf_file.write_gguf(tmp_path / "a.gguf", model, tokenizer, "a")
    composed = [unicodedata.normalize("NFC", text) for text in sentences]
    assert gguf_proof.verify_gguf(tmp_path / "a.gguf", model, tokenizer, composed).texts > 10


# A beginning of its own


def test_a_file_says_what_begins_a_text() -> None:
    llama = ours("llama3")
    assert llama.bos_id == llama.start_id == llama.special_ids["<|begin_of_text|>"]
    assert encode_prompt(llama, "") == [llama.bos_id] and encode_prompt(llama, "a")[1:] == llama.encode("a").tolist()
    qwen = ours("qwen2")
    assert (
        qwen.bos_id is None and qwen.start_id == qwen.end_of_text_id and encode_prompt(qwen, "a") == [*qwen.encode("a")]
    )


@needs_transformers
def test_a_model_keeps_its_own_beginning_everywhere(tmp_path: Path) -> None:
    """It is kept in documents, scores, conversations and exports."""
    from transformers import AutoTokenizer

    theirs = write_model(tmp_path / "theirs", "llama3", 2_048)
    assert import_hf.main([str(theirs), str(tmp_path / "ours")]) == 0
    (tmp_path / "a.txt").write_text("one\n<|endoftext|>\ntwo\n<|endoftext|>\n" + "three " * 50)
    tokenizer_file = tmp_path / "ours" / "tokenizer.json"
    command = ["--input", str(tmp_path / "a.txt"), "--tokenizer_file", str(tokenizer_file)]
    assert tokenize_local_bpe.main([*command, "--output_dir", str(tmp_path / "data")]) == 0
    tokens = np.fromfile(tmp_path / "data" / "tokens_bpe.bin", np.uint16).tolist()
    begin, end = (ours("llama3").special_ids[name] for name in ("<|begin_of_text|>", "<|end_of_text|>"))
    words = [ours("llama3").encode(text).tolist() for text in ("one", "two", "three " * 50)]
    documents = [part.tolist() for part in np.split(tokens, np.flatnonzero(np.array(tokens) == begin)[1:])]
    assert sorted(documents) == sorted([begin, *ids, end] for ids in words)
    assert export_hf.main([str(tmp_path / "ours"), str(tmp_path / "again")]) == 0
    again = AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again("two")["input_ids"] == [begin, *words[1]]
    assert (again.bos_token_id, again.eos_token_id, again.pad_token_id) == (begin, end, end)
    conversation = ChatTemplate().encode(ours("llama3"), [Message("user", "a"), Message("assistant", "b")])[0]
    assert conversation[0] == begin and conversation[-1] == end


def test_a_beginning_that_only_tokenizer_config_names_is_kept(tmp_path: Path) -> None:
    """As in DeepSeek's folders, which `transformers` 4 read so."""
    folder = write_folder(tmp_path / "theirs", "gpt2")
    end = {"add_bos_token": True, "bos_token": {"content": "<|endoftext|>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(end))
    tokenizer, content = import_tokenizer(folder)
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert tokenizer.bos_id == load_tokenizer(tmp_path / "tokenizer.json").bos_id == tokenizer.end_of_text_id


@pytest.mark.parametrize(
    ("name", "is_known"), [("</s>", True), ("<\uff5cend\u2581of\u2581sentence\uff5c>", True), ("<|other|>", False)]
)
def test_ends_of_text_of_other_models(name: str, is_known: bool) -> None:
    content = build("gpt2").to_str().replace("<|endoftext|>", name)
    tokenizer = BPETokenizer(Tokenizer.from_str(content))
    expected = tokenizer.special_ids[name] if is_known else None
    assert tokenizer.end_of_text_id == expected and tokenizer.end_ids == ({expected} if is_known else set())
