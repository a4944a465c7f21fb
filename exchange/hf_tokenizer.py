"""Our tokenizers as files of Hugging Face `transformers`, and theirs as ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.chat import CHATML_TOKENS, ChatML, ChatTemplate, Message, Template
from common.errors import DataError
from common.files import read_json
from generation.request import Sampling
from model_config import ModelConfig
from tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from tokenizer_bpe import PROBE_TEXT, SPECIAL_TOKENS, BPETokenizer, TokenizerError, read_tokenizer_json

PROBE_PARAGRAPH = (
    "It was early when the two of them left the village. The road went down to the river, over a bridge of grey stone, "
    'and up into the hills. "How far is it?" she asked. "Nine miles," he said, "or ten; nobody ever measured it."\n'
)
PAD_NAMES = (SPECIAL_TOKENS[1], "<|finetune_right_pad_id|>")  # ours and Llama 3.1's; most models have none
CHARACTER_SPECIAL_TOKENS = SPECIAL_TOKENS[1:]  # padding and unknown; a character vocabulary has no end of text
SPLIT_CHARACTERS = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}


def _hf_special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens of the exported tokenizer and their ids.

    A character vocabulary gets two more ids: transformers needs one to pad batches and fails with "Missing [UNK] token"
    without the other.
    """
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.special_ids
    return {name: tokenizer.vocab_size + i for i, name in enumerate(CHARACTER_SPECIAL_TOKENS)}


def build_chat_jinja(template: Template, tokenizer: Tokenizer, marks_answers: bool = True) -> str:
    """Return the chat template in Jinja, for `apply_chat_template` of Hugging Face and for llama.cpp.

    It refuses what `require_order` refuses, and turns that contain the name of a special token: the output is tokenized
    as one text, in which the name would become the token. A turn's content is a string or a list of OpenAI's text
    parts, which become lines. `marks_answers` keeps Hugging Face's {% generation %} tags, which other programs lack.
    """
    file = "chatml_template.jinja" if isinstance(template, ChatML) else "chat_template.jinja"
    jinja = Path(__file__).with_name(file).read_text(encoding="utf-8")
    if not marks_answers:
        jinja = jinja.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    values = {"template": template.to_dict(), "special": list(_hf_special_tokens(tokenizer))}
    return (
        "".join(f"{{%- set {key} = {json.dumps(value, ensure_ascii=False)} -%}}\n" for key, value in values.items())
        + jinja
    )


def hf_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the vocabulary size of the exported tokenizer."""
    return tokenizer.vocab_size + (0 if isinstance(tokenizer, BPETokenizer) else len(CHARACTER_SPECIAL_TOKENS))


def hf_tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """Return a `tokenizers` file that gives the same ids.

    Characters become words of one letter; a character that the vocabulary lacks becomes `<|unk|>`.
    """
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.to_json().encode()
    special = _hf_special_tokens(tokenizer)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": SPLIT_CHARACTERS,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {chr(code): i for i, code in enumerate(tokenizer.codes.tolist())} | special,
            "unk_token": CHARACTER_SPECIAL_TOKENS[1],
        },
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def _special_token_roles(tokenizer: Tokenizer, template: Template | None) -> dict[str, str]:
    """Return which special token has which role in transformers.

    Without `tokenizer_config.json`, transformers would add GPT-2's own, with an id beyond the vocabulary. If there is
    no padding token, the end of text pads, as in Qwen.
    """
    known = _hf_special_tokens(tokenizer)
    names: dict[int | None, str] = {i: name for name, i in known.items()}
    end = CHATML_TOKENS[1] if isinstance(template, ChatML) else names.get(tokenizer.end_of_text_id, "")
    pad = next((name for name in PAD_NAMES if name in known), names.get(tokenizer.end_of_text_id, end))
    start = names.get(tokenizer.start_id, "")
    roles = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": SPECIAL_TOKENS[2]}
    return {role: name for role, name in roles.items() if name in known}


def hf_tokenizer_config(tokenizer: Tokenizer, max_seq_len: int, template: Template | None) -> dict[str, Any]:
    """Return the content of tokenizer_config.json.

    A special token's name in a text is ordinary text, as it is here, unless there is a chat template: it writes special
    tokens by their names.
    """
    return {
        "split_special_tokens": template is None,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",  # so that prompts of a batch end where their texts begin
        **_special_token_roles(tokenizer, template),
    }


def hf_special_ids(tokenizer: Tokenizer, template: Template | None) -> dict[str, int | None]:
    """Return the special ids for config.json and generation_config.json.

    None is written, too, because the defaults are ids of other vocabularies.
    """
    known = _hf_special_tokens(tokenizer)
    names = _special_token_roles(tokenizer, template)
    return {f"{role}_id": known.get(names.get(role, "")) for role in ("bos_token", "eos_token", "pad_token")}


def build_generation_config(tokenizer: Tokenizer, config: ModelConfig, template: Template | None) -> dict[str, Any]:
    """Return the content of generation_config.json, with generate.py's length and suppressed ids.

    `config` belongs to the exported model. The length is at most half of the context: beyond the context, GPT-2 fails.
    """
    unused = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, config.vocab_size)]
    suppressed = {"suppress_tokens": unused} if unused else {}
    ends = {"eos_token_id": sorted(tokenizer.end_ids)} if len(tokenizer.end_ids) > 1 else {}
    return {**hf_special_ids(tokenizer, template), **ends, "max_new_tokens": default_new_tokens(config), **suppressed}


def default_new_tokens(config: ModelConfig) -> int:
    """Return the default of max_new_tokens, at most half of the context."""
    return min(Sampling().max_new_tokens, config.max_seq_len // 2)


def import_tokenizer(folder: Path) -> tuple[Tokenizer, bytes]:
    """Return the tokenizer of a Hugging Face folder and the content of our tokenizer.json: a copy of the folder's, if
    it has one.

    Raises DataError or TokenizerError if there is none, or if it is neither byte-level BPE nor a character vocabulary
    written by `hf_tokenizer_json`.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        content = read_tokenizer_json(path)
        if (characters := _read_characters(content)) is not None:
            tokenizer: Tokenizer = CharacterTokenizer(characters)
            return tokenizer, tokenizer.to_json().encode()
        tokenizer = load_tokenizer(path)
        if tokenizer.bos_id is None and (name := _read_added_bos(folder)) in tokenizer.special_ids:
            tokenizer = _add_bos(tokenizer, name)
            return tokenizer, tokenizer.to_json().encode()
        return tokenizer, path.read_bytes()
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = _load_vocab_and_merges(folder)
        return tokenizer, tokenizer.to_json().encode()
    if (folder / "tokenizer.model").exists():
        raise DataError(f"{folder} has only a SentencePiece tokenizer.model; tokenizer.json is needed.")
    raise DataError(f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt.")


def _read_added_bos(folder: Path) -> str:
    """Return the token that tokenizer_config.json puts before each text, as DeepSeek's does, or ""."""
    path = folder / "tokenizer_config.json"
    config = read_json(path, DataError) if path.exists() else {}
    name = config.get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    return name if config.get("add_bos_token") is True and isinstance(name, str) else ""


def _add_bos(tokenizer: Tokenizer, name: str) -> BPETokenizer:
    """Return the tokenizer with the special token `name` before each text, as a post-processor."""
    from tokenizers.processors import TemplateProcessing

    assert isinstance(tokenizer, BPETokenizer)
    added = [(name, tokenizer.special_ids[name])]
    tokenizer.backend.post_processor = TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=added
    )
    return BPETokenizer(tokenizer.backend)


def _read_characters(content: dict[str, Any]) -> list[str] | None:
    """Return the characters in order of their ids if `hf_tokenizer_json` wrote the file, else None."""
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, dict) or model.get("type") != "WordLevel" or not isinstance(added, list):
        return None
    if not all(isinstance(token, dict) and token.get("content") in CHARACTER_SPECIAL_TOKENS for token in added):
        return None
    vocab = model.get("vocab")
    if content.get("pre_tokenizer") != SPLIT_CHARACTERS or content.get("normalizer") or not isinstance(vocab, dict):
        return None
    vocab = {word: i for word, i in vocab.items() if word not in CHARACTER_SPECIAL_TOKENS}
    if sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str) or any(len(word) != 1 for word in vocab):
        return None
    return sorted(vocab, key=vocab.__getitem__)


def _load_vocab_and_merges(folder: Path) -> BPETokenizer:
    """Load vocab.json and merges.txt, as OpenAI published them, with transformers. Raises DataError."""
    import tokenizers
    from transformers import AutoTokenizer

    try:
        hf_tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # `tokenizers` raises a plain Exception
        raise DataError(f"transformers cannot open the tokenizer of {folder}: {str(problem).strip():.500}") from None
    return BPETokenizer(tokenizers.Tokenizer.from_str(hf_tokenizer.backend_tokenizer.to_str()))


def probe_text(tokenizer: Tokenizer) -> str:
    """Return varied text that the tokenizer can express. For a character vocabulary it includes every character."""
    if isinstance(tokenizer, BPETokenizer):
        return PROBE_PARAGRAPH + tokenizer.probe() + "!\n".join(["", *tokenizer.found_in_text])
    alphabet = tokenizer.decode(np.arange(tokenizer.vocab_size))
    return alphabet + tokenizer.decode(tokenizer.encode(PROBE_PARAGRAPH + PROBE_TEXT, unknown="drop"))


def require_same_conversation(template: Template, tokenizer: Tokenizer, hf_tokenizer: Any) -> None:
    """Raise TokenizerError if transformers gives other ids for a conversation, with or without a last question."""
    messages = [
        Message("system", "Be brief."),
        Message("user", " What is it?\n"),
        Message("assistant", 'It\'s a "test".'),
        Message("user", "Why\n\nso?"),
    ]
    turns = [message._asdict() for message in messages]
    found = hf_tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = hf_tokenizer.apply_chat_template(turns[:3], return_dict=True)["input_ids"]
    ids = template.encode(tokenizer, messages[:3])[0].tolist()
    if found != template.prompt_ids(tokenizer, messages) or whole != ids:
        raise TokenizerError("transformers gives other ids for a conversation: it reads the chat template differently.")


def recognize_chat_template(folder: Path, tokenizer: Tokenizer, hf_tokenizer: Any) -> Template | None:
    """Return the folder's chat template if it is one that we support, else None.

    It is ours if the file is the same, and ChatML if transformers, which runs templates in a sandbox, builds the same
    prompts. `hf_tokenizer` is the tokenizer of transformers.
    """
    path, template = folder / "chat_template.jinja", ChatTemplate()
    if path.exists() and path.read_bytes() == build_chat_jinja(template, tokenizer).encode():
        return template
    if not tokenizer.special_ids.keys() >= set(CHATML_TOKENS):
        return None
    system = Message("system", "Be brief.")
    turns = [Message("user", "What is it?"), Message("assistant", 'It\'s a "test".'), Message("user", "Why\n\nso?")]

    def ask(messages: Sequence[Message], **how: Any) -> Any:
        turns = [message._asdict() for message in messages]
        return hf_tokenizer.apply_chat_template(turns, add_generation_prompt=True, **how)

    try:
        # The text before the question is the default system turn.
        before, _, _ = ask(turns[:1], tokenize=False).partition("<|im_start|>user\n")
        chatml = ChatML(before.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n"))
        for messages in (turns[:1], turns, [system, *turns[:1]], [system, *turns]):
            if ask(messages, return_dict=True)["input_ids"] != chatml.prompt_ids(tokenizer, messages):
                return None
    except Exception:  # a template may raise anything, and there may be none
        return None
    return chatml


def require_same_ids(tokenizer: Tokenizer, hf_tokenizer: Any, **how: Any) -> None:
    """Raise TokenizerError if a tokenizer of transformers encodes the probe text or decodes its ids differently.

    `how`: keyword arguments of the call. In our tokenizers, names of special tokens are ordinary text; the token at the
    beginning is part of the ids only with `add_special_tokens`.
    """
    text = probe_text(tokenizer)
    ids = tokenizer.encode(text).tolist()
    if how.setdefault("add_special_tokens", False) and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    found = hf_tokenizer(text, **how)["input_ids"]
    if found != ids:
        first = next((i for i, (a, b) in enumerate(zip(ids, found, strict=False)) if a != b), min(len(ids), len(found)))
        raise TokenizerError(
            f"transformers reads the tokenizer differently: {len(found)} ids instead of {len(ids)} for the probe text, "
            f"the first difference at {first}, after {tokenizer.decode(ids[max(0, first - 5) : first])!r}."
        )
    if (back := hf_tokenizer.decode(ids, clean_up_tokenization_spaces=False)) != tokenizer.decode(ids):
        raise TokenizerError(f"transformers decodes the same ids to other text: {back[:100]!r} ...")
    if len(hf_tokenizer) > (limit := hf_vocab_size(tokenizer)):
        raise TokenizerError(f"transformers adds tokens: {len(hf_tokenizer):,} instead of {limit:,}.")
