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
from generation.settings import Sampling
from model_config import ModelConfig
from tokenizer import CharacterTokenizer, Tokenizer, load_tokenizer
from tokenizer_base import TokenizerError, read_tokenizer_json
from tokenizer_bpe import PROBE_TEXT, SPECIAL_TOKENS, BPETokenizer

PARAGRAPH = (
    "It was early when the two of them left the village. The road went down to the river, over a bridge of grey stone, "
    'and up into the hills. "How far is it?" she asked. "Nine miles," he said, "or ten; nobody ever measured it."\n'
)
PADS = (SPECIAL_TOKENS[1], "<|finetune_right_pad_id|>")  # ours, Llama 3.1's; most models have none
CHARACTERS_HAVE = SPECIAL_TOKENS[1:]  # padding and unknown; there is no end of text
ONE_CHARACTER = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}


def hf_special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The special tokens of the exported tokenizer, with their ids. A character vocabulary gets two after its own ids:
    transformers needs one to pad batches, and without one for the unknown it fails with "Missing [UNK] token"."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.special_ids
    return {name: tokenizer.vocab_size + i for i, name in enumerate(CHARACTERS_HAVE)}


def chat_jinja(template: Template, tokenizer: Tokenizer, marks_answers: bool = True) -> str:
    """The template for `apply_chat_template` of Hugging Face, and for llama.cpp.

    It refuses what `require_order` refuses, and a turn that contains the name of a special token: the output is
    tokenized as one text, in which that name would become the token. The content of a turn is a text, or a list of
    OpenAI's text parts, one a line. `marks_answers` keeps the tags by which Hugging Face finds answers; other programs
    do not know them.
    """
    file = "chatml_template.jinja" if isinstance(template, ChatML) else "chat_template.jinja"
    jinja = Path(__file__).with_name(file).read_text(encoding="utf-8")
    if not marks_answers:
        jinja = jinja.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    given = {"template": template.to_dict(), "special": list(hf_special_tokens(tokenizer))}
    return (
        "".join(f"{{%- set {key} = {json.dumps(value, ensure_ascii=False)} -%}}\n" for key, value in given.items())
        + jinja
    )


def hf_vocab_size(tokenizer: Tokenizer) -> int:
    """The ids of the exported tokenizer are below this."""
    return tokenizer.vocab_size + (0 if isinstance(tokenizer, BPETokenizer) else len(CHARACTERS_HAVE))


def hf_tokenizer_json(tokenizer: Tokenizer) -> bytes:
    """A `tokenizers` file that gives the same ids. Characters become words of one letter; one that the vocabulary lacks
    becomes `<|unk|>`."""
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.to_json().encode()
    special = hf_special_tokens(tokenizer)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in special.items()],
        "normalizer": None,
        "pre_tokenizer": ONE_CHARACTER,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {chr(code): i for i, code in enumerate(tokenizer.codes.tolist())} | special,
            "unk_token": CHARACTERS_HAVE[1],
        },
    }
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()


def special_tokens(tokenizer: Tokenizer, template: Template | None) -> dict[str, str]:
    """What transformers calls the special tokens. Without `tokenizer_config.json` it would add GPT-2's own, whose id
    lies beyond the vocabulary. A vocabulary without padding is padded with its end, as Qwen's is."""
    known = hf_special_tokens(tokenizer)
    names: dict[int | None, str] = {i: name for name, i in known.items()}
    end = CHATML_TOKENS[1] if isinstance(template, ChatML) else names.get(tokenizer.end_of_text_id, "")
    pad = next((name for name in PADS if name in known), names.get(tokenizer.end_of_text_id, end))
    start = names.get(tokenizer.start_id, "")
    roles = {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": SPECIAL_TOKENS[2]}
    return {role: name for role, name in roles.items() if name in known}


def hf_tokenizer_config(tokenizer: Tokenizer, max_seq_len: int, template: Template | None) -> dict[str, Any]:
    """A special token's name in a text is ordinary text, as it is here. Not so with a chat template, which writes
    special tokens by their names."""
    return {
        "split_special_tokens": template is None,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "clean_up_tokenization_spaces": False,
        **special_tokens(tokenizer, template),
    }


def hf_special_ids(tokenizer: Tokenizer, template: Template | None) -> dict[str, int | None]:
    """For config.json and generation_config.json. None is written too: the defaults are ids of other vocabularies."""
    known = hf_special_tokens(tokenizer)
    names = special_tokens(tokenizer, template)
    return {f"{role}_id": known.get(names.get(role, "")) for role in ("bos_token", "eos_token", "pad_token")}


def hf_generation_config(tokenizer: Tokenizer, config: ModelConfig, template: Template | None) -> dict[str, Any]:
    """A text has the length of generate.py's, and room in the context after a prompt of half of it: beyond the context,
    GPT-2 fails. Ids that generate.py never samples are suppressed. `config` is that of the exported model."""
    unused = [*tokenizer.unused_ids, *range(tokenizer.vocab_size, config.vocab_size)]
    suppressed = {"suppress_tokens": unused} if unused else {}
    ends = {"eos_token_id": sorted(tokenizer.end_ids)} if len(tokenizer.end_ids) > 1 else {}
    return {**hf_special_ids(tokenizer, template), **ends, "max_new_tokens": tokens_to_generate(config), **suppressed}


def tokens_to_generate(config: ModelConfig) -> int:
    """generate.py's default, but at most half of the context."""
    return min(Sampling().max_new_tokens, config.max_seq_len // 2)


def import_tokenizer(folder: Path) -> tuple[Tokenizer, bytes]:
    """The tokenizer of a Hugging Face folder, and the content of our tokenizer.json: a copy of theirs, if there is
    one.

    Raises DataError or TokenizerError for a folder without one, or with one of another kind than byte-level BPE and
    the characters of `hf_tokenizer_json`.
    """
    path = folder / "tokenizer.json"
    if path.exists():
        content = read_tokenizer_json(path)
        if (characters := characters_of(content)) is not None:
            tokenizer: Tokenizer = CharacterTokenizer(characters)
            return tokenizer, tokenizer.to_json().encode()
        tokenizer = load_tokenizer(path)
        if tokenizer.bos_id is None and (name := added_beginning(folder)) in tokenizer.special_ids:
            tokenizer = with_beginning(tokenizer, name)
            return tokenizer, tokenizer.to_json().encode()
        return tokenizer, path.read_bytes()
    if (folder / "vocab.json").exists() and (folder / "merges.txt").exists():
        tokenizer = from_vocab_and_merges(folder)
        return tokenizer, tokenizer.to_json().encode()
    if (folder / "tokenizer.model").exists():
        raise DataError(f"{folder} has only tokenizer.model, which is SentencePiece's: tokenizer.json is needed.")
    raise DataError(f"{folder} has no tokenizer: neither tokenizer.json, nor vocab.json and merges.txt.")


def added_beginning(folder: Path) -> str:
    """The name of the token that tokenizer_config.json puts before each text (DeepSeek's does); "" for none."""
    path = folder / "tokenizer_config.json"
    config = read_json(path, DataError) if path.exists() else {}
    name = config.get("bos_token")
    name = name.get("content") if isinstance(name, dict) else name
    return name if config.get("add_bos_token") is True and isinstance(name, str) else ""


def with_beginning(tokenizer: Tokenizer, name: str) -> BPETokenizer:
    """The tokenizer with the special token `name` before each text, as its own file then says."""
    from tokenizers.processors import TemplateProcessing

    assert isinstance(tokenizer, BPETokenizer)
    added = [(name, tokenizer.special_ids[name])]
    tokenizer.backend.post_processor = TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", "$B:1"], special_tokens=added
    )
    return BPETokenizer(tokenizer.backend)


def characters_of(content: dict[str, Any]) -> list[str] | None:
    """The characters in order of their ids, if `hf_tokenizer_json` wrote the file; None for any other."""
    model, added = content.get("model"), content.get("added_tokens") or []
    if not isinstance(model, dict) or model.get("type") != "WordLevel" or not isinstance(added, list):
        return None
    if not all(isinstance(token, dict) and token.get("content") in CHARACTERS_HAVE for token in added):
        return None
    vocab = model.get("vocab")
    if content.get("pre_tokenizer") != ONE_CHARACTER or content.get("normalizer") or not isinstance(vocab, dict):
        return None
    vocab = {word: i for word, i in vocab.items() if word not in CHARACTERS_HAVE}
    if sorted(vocab.values(), key=str) != sorted(range(len(vocab)), key=str) or any(len(word) != 1 for word in vocab):
        return None
    return sorted(vocab, key=vocab.__getitem__)


def from_vocab_and_merges(folder: Path) -> BPETokenizer:
    """The two files that OpenAI published, as transformers reads them. Raises DataError."""
    import tokenizers
    from transformers import AutoTokenizer

    try:
        theirs = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as problem:  # `tokenizers` raises a bare one
        raise DataError(f"transformers cannot open the tokenizer of {folder}: {str(problem).strip():.500}") from None
    return BPETokenizer(tokenizers.Tokenizer.from_str(theirs.backend_tokenizer.to_str()))


def probe_text(tokenizer: Tokenizer) -> str:
    """Text of many kinds that the tokenizer can express: for characters, all of them and what they can spell of it."""
    if isinstance(tokenizer, BPETokenizer):
        return PARAGRAPH + tokenizer.probe() + "!\n".join(["", *tokenizer.found_in_text])
    alphabet = tokenizer.decode(np.arange(tokenizer.vocab_size))
    return alphabet + tokenizer.decode(tokenizer.encode(PARAGRAPH + PROBE_TEXT, unknown="drop"))


def require_same_conversation(template: Template, tokenizer: Tokenizer, theirs: Any) -> None:
    """Raises TokenizerError if transformers gives other ids for a conversation, with or without the question at its
    end."""
    messages = [
        Message("system", "Be brief."),
        Message("user", " What is it?\n"),
        Message("assistant", 'It\'s a "test".'),
        Message("user", "Why\n\nso?"),
    ]
    asked = [message._asdict() for message in messages]
    found = theirs.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    whole = theirs.apply_chat_template(asked[:3], return_dict=True)["input_ids"]
    ids = template.encode(tokenizer, messages[:3])[0].tolist()
    if found != template.prompt_ids(tokenizer, messages) or whole != ids:
        raise TokenizerError("transformers reads the chat template differently: it gives other ids for a conversation.")


def chat_template_of(folder: Path, tokenizer: Tokenizer, theirs: Any) -> Template | None:
    """Our template, if the folder has that one; ChatML, if transformers, which runs a template in a sandbox, makes the
    same prompts of conversations (`theirs`: their tokenizer). None for no template, and for any other."""
    path, template = folder / "chat_template.jinja", ChatTemplate()
    if path.exists() and path.read_bytes() == chat_jinja(template, tokenizer).encode():
        return template
    if not tokenizer.special_ids.keys() >= set(CHATML_TOKENS):
        return None
    system = Message("system", "Be brief.")
    turns = [Message("user", "What is it?"), Message("assistant", 'It\'s a "test".'), Message("user", "Why\n\nso?")]

    def ask(messages: Sequence[Message], **how: Any) -> Any:
        asked = [message._asdict() for message in messages]
        return theirs.apply_chat_template(asked, add_generation_prompt=True, **how)

    try:
        # What stands before the question is the system's turn of a conversation that has none.
        before, _, _ = ask(turns[:1], tokenize=False).partition("<|im_start|>user\n")
        chatml = ChatML(before.removeprefix("<|im_start|>system\n").removesuffix("<|im_end|>\n"))
        for messages in (turns[:1], turns, [system, *turns[:1]], [system, *turns]):
            if ask(messages, return_dict=True)["input_ids"] != chatml.prompt_ids(tokenizer, messages):
                return None
    except Exception:  # a template may raise anything, or there is none
        return None
    return chatml


def require_same_ids(tokenizer: Tokenizer, theirs: Any, **how: Any) -> None:
    """Raises TokenizerError if a tokenizer of transformers gives other ids for the probe text, or other text for the
    ids. `how` are more arguments to call it with: names of special tokens are ordinary text in our tokenizers, and
    what begins a text belongs to its ids only with `add_special_tokens`."""
    text = probe_text(tokenizer)
    ids = tokenizer.encode(text).tolist()
    if how.setdefault("add_special_tokens", False) and tokenizer.bos_id is not None:
        ids = [tokenizer.bos_id, *ids]
    found = theirs(text, **how)["input_ids"]
    if found != ids:
        first = next((i for i, (a, b) in enumerate(zip(ids, found, strict=False)) if a != b), min(len(ids), len(found)))
        raise TokenizerError(
            f"transformers reads the tokenizer differently: {len(found)} ids instead of {len(ids)} for the probe text, "
            f"the first difference at {first}, after {tokenizer.decode(ids[max(0, first - 5) : first])!r}."
        )
    if (back := theirs.decode(ids, clean_up_tokenization_spaces=False)) != tokenizer.decode(ids):
        raise TokenizerError(f"transformers decodes the same ids to other text: {back[:100]!r} ...")
    if len(theirs) > (most := hf_vocab_size(tokenizer)):
        raise TokenizerError(f"transformers adds tokens: {len(theirs):,} instead of {most:,}.")
