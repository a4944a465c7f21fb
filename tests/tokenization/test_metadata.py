"""The trainer reads the metadata that the pre-tokenizer writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenization.metadata import TokenMetadata, find_metadata

names = st.text("abc.", min_size=1, max_size=8)
counts = st.integers(0, 2**40)


@st.composite
def metadata(draw: st.DrawFn) -> TokenMetadata:
    total = draw(st.integers(2, 2**40))
    return TokenMetadata(
        path=Path("unknown"),
        vocab_size=draw(st.integers(1, 2**31)),
        total_tokens=total,
        train_split_index=draw(st.integers(1, total - 1)),
        dtype=draw(st.sampled_from(["uint16", "int16", "int32"])),
        tokenizer_type=draw(st.sampled_from(["bpe", "character"])),
        bin_file=draw(st.none() | names),
        tokenizer_file=draw(st.none() | names),
        tokens_sha256=draw(st.none() | names),
        tokenizer_sha256=draw(st.none() | names),
        val_bytes=draw(st.none() | counts),
        train_bytes=draw(st.none() | counts),
        train_split=draw(st.floats(0, 1, exclude_min=True, exclude_max=True)),
        documents=draw(st.none() | counts),
        source_files=[{"name": name, "size": draw(counts)} for name in draw(st.lists(names, max_size=3))],
        created=draw(st.none() | names),
        fingerprint=draw(st.none() | names),
    )


@settings(max_examples=50)
@given(metadata())
def test_what_is_written_is_what_is_read(tmp_path_factory, written: TokenMetadata) -> None:
    path = tmp_path_factory.mktemp("tokens") / "tokens_metadata.json"
    written.write(path)
    assert TokenMetadata.read(path) == dataclasses.replace(written, path=path)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert None not in content.values(), "what was not counted is absent"
    assert content["train_tokens"] + content["val_tokens"] == content["total_tokens"]
    assert content["bytes_per_token"] == {"uint16": 2, "int16": 2, "int32": 4}[content["dtype"]]
    assert find_metadata(path.parent) == [path]
