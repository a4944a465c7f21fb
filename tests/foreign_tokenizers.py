"""Small tokenizers in the form of GPT-2's, SmolLM2's, Llama 3's, Qwen's and Qwen3.5's, and text that tries them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tokenizer_bpe import PROBE_TEXT, byte_alphabet

# As in the files of those models; not taken from tokenizer_bpe.py, which has to know them.
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
SPECIAL = {
    "gpt2": ["<|endoftext|>"],
    "smollm2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>", "<empty_output>"],
    "llama3": ["<|begin_of_text|>", "<|end_of_text|>", *[f"<|reserved_special_token_{i}|>" for i in range(254)]],
    "qwen2": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"],
    "qwen35": ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"],
}
FOUND = {
    "qwen2": ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>"],
    "qwen3": ["<tool_call>", "</tool_call>", "<|fim_prefix|>", "<tool_response>", "<think>", "</think>"],
}
FORMS = tuple(SPECIAL)
# What AutoTokenizer is told in the folders of those models. SmolLM2's says "GPT2Tokenizer": see `write_folder`.
CLASSES = {"gpt2": "GPT2Tokenizer"} | dict.fromkeys(("llama3", "smollm2", "qwen35"), "PreTrainedTokenizerFast")

ALPHABETS = (
    "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789", " ", " \n\r\t", "\n", "\r\n", "  ", "'",
    ".,;:!?-_/\\()[]{}<>|@#$%^&*+=~`\"", "éèüñçøåßſİıŁ", "e\u0301u\u0308o\u0304\u0323c\u0327", "\u0301\u0323\u0327",
    "αβγδεςΩΆ", "абвгдЖЩёїў", "אבגדש\u05b0\u05bc", "ابتثج\u064b\u0651ء", "हिन्दीक्षत्र", "বাংলা", "தமிழ்", "ไทยที่นี่",
    "ខ្មែរ", "ქართულიႠᲐ", "ᏣᎳᎩꭰ", "አማርኛ", "中文字符測試漢", "ひらがなカタカナｶﾅ", "한국어", "\u1112\u1161\u11ab\u1100",
    "٠١٢٣٤۵۶۷०१२๓๔〇一", "½²³¹⅓ⅧⅣ①㊿", "€£¥©®™°±\u00d7÷…\u2014\u2013“”«»„", "😀🎉🔥👍",
    "👩\u200d👩\u200d👧🏽❤\ufe0f🇫🇷🇩🇪🏴\U000e0067\U000e007f", "".join(map(chr, range(32))),
    "\x7f\x80\x85\xa0\xad\u2028\u2029\u200b\u200c\u200d\u2003\u3000\ufeff\ufffd\ufffe",
    "\ue000\U000f0000\U0010ffff\U00040000", "𝒜𝔅𝟘𝟙🄰𐍈𐎠𝄞", "\u212b\u2126\ufb01\u0958\u1e9b\u0344\uf900",
)  # fmt: skip
WORDS = (
    "the", " The", "it's", "IT'S", "we'll", "We'Ll", "don't", "DON'T", "they'RE", "I'm", "'tis", "'\u017f", "o'clock",
    "1999", " 2026", "123456", "12,345.67", "3rd", "x1y2", "foo()", "!!\n", ".\n\n", "?\r\n", "  \n  ", " \t\t", "    ",
    "http://a.b/c?d=1", "a_b", "__init__", "\n    return x\n", "ἀρχή", "Москва", "東京", "서울", "नमस्ते", "مرحبا",
    "<|", "|>", "<|endof", "<think", "tool_call>",
)  # fmt: skip


def strings(count: int, seed: int, names: Sequence[str] = ()) -> list[str]:
    """Texts of many scripts, with controls, runs, and sometimes the `names` of added tokens."""
    draw, words = random.Random(seed), [*WORDS, *names]

    def part() -> str:
        kind = draw.random()
        if kind < 0.35:
            return draw.choice(words)
        if kind < 0.4:
            return draw.choice(draw.choice(ALPHABETS)) * draw.randrange(20, 200)
        if kind < 0.43:
            return "".join(chr(draw.choice([draw.randrange(0xD800), draw.randrange(0xE000, 0x110000)])) for _ in "12")
        return "".join(draw.choices(draw.choice(ALPHABETS), k=draw.randrange(1, 9)))

    return ["".join(part() for _ in range(draw.randrange(12))) for _ in range(count)]


def build(form: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    if form in ("gpt2", "smollm2"):
        cut: Any = pre_tokenizers.ByteLevel(add_prefix_space=False)
        if form == "smollm2":
            cut = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), cut])
    else:
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False, trim_offsets=form == "llama3")
        pattern = Regex({"llama3": LLAMA3, "qwen35": QWEN35}.get(form, QWEN))
        cut = pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, "isolated"), bytes_only])
    tokenizer.pre_tokenizer = cut
    tokenizer.decoder = decoders.ByteLevel()
    if form.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    alphabet = byte_alphabet()
    if form == "smollm2":  # it lacks the bytes that its training text lacked
        alphabet = {character: byte for character, byte in alphabet.items() if byte not in (0xC0, 0xC1)}
        alphabet = {character: byte for character, byte in alphabet.items() if byte < 0xF1}
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=SPECIAL[form] if form == "smollm2" else [],
        initial_alphabet=list(alphabet),
        show_progress=False,
    )
    texts = [
        PROBE_TEXT,
        *strings(1_500, seed=1),
        *["1234567890 2026 1999 12 123 the cat's it's we'll IT'S don't!!\n\n"] * 30,
    ]
    if form == "smollm2":
        texts = ["".join(character for character in text if character < "\U00040000") for text in texts]
    tokenizer.train_from_iterator(texts, trainer)
    if form == "llama3":
        tokenizer = with_every_merge(tokenizer)
        begin = ("<|begin_of_text|>", tokenizer.get_vocab_size())
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin[0]} $A", pair="$A $B", special_tokens=[begin]
        )
    if form != "smollm2":
        tokenizer.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in SPECIAL[form]])
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in FOUND.get(form, [])])
    return tokenizer


def with_every_merge(tokenizer: Tokenizer) -> Tokenizer:
    """As a vocabulary of tiktoken is converted: a token has a merge for each pair of tokens that makes it. Some have
    none: a word that is a token is taken as it is."""
    content = json.loads(tokenizer.to_str())
    vocab = content["model"]["vocab"]
    merges = []
    for token in sorted(vocab, key=vocab.__getitem__):
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        pairs = [pair for pair in pairs if pair[0] in vocab and pair[1] in vocab]
        merges += sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    whole = "ĠIndivisible"
    vocab[whole] = len(vocab)
    content["model"] |= {"merges": merges, "ignore_merges": True}
    return Tokenizer.from_str(json.dumps(content))


def write_folder(folder: Path, form: str, tokenizer_class: str = "") -> Path:
    """The files of a tokenizer as those models have them, with a config.json, which AutoTokenizer reads.

    SmolLM2's folder names the class GPT2Tokenizer, with which transformers 5 loses its splitting; by default, the class
    here is one that keeps it."""
    folder.mkdir(parents=True, exist_ok=True)
    build(form).save(str(folder / "tokenizer.json"))
    kind = {"gpt2": "gpt2", "smollm2": "llama", "llama3": "llama", "qwen35": "qwen3"}.get(form, form)
    end = SPECIAL[form][1] if form == "llama3" else SPECIAL[form][0]
    names = {"eos_token": end} | ({"bos_token": SPECIAL[form][0]} if form == "llama3" else {})
    config = {"tokenizer_class": tokenizer_class or CLASSES.get(form, "Qwen2Tokenizer"), **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder
