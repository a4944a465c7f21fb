"""What is printed after a tokenization: its numbers, its files, and the command that trains on them."""

from __future__ import annotations

import shlex
from pathlib import Path

import numpy as np

from tokenization.metadata import TokenMetadata, metadata_files
from tokenization.token_folder import DEFAULT_FOLDER, TokenFolder
from tokenizer import load_tokenizer


def print_result(folder: TokenFolder, metadata: TokenMetadata, tokenizer_file: str | None) -> None:
    """`tokenizer_file`: the one of --tokenizer_file; training may start from its checkpoint."""
    tokenizer = load_tokenizer(folder.tokenizer)
    total = metadata.total_tokens
    documents = "documents" if metadata.chat_template is None else "conversations"
    print(
        f"\n{total:,} tokens from {metadata.text_bytes:,} bytes of text in {metadata.documents:,} {documents}: "
        f"{metadata.text_bytes / total:.2f} bytes per token\n"
        f"Vocabulary: {tokenizer.vocab_size:,} ({tokenizer.kind})\n"
        f"Training: {metadata.train_tokens:,} tokens; validation: {metadata.val_tokens:,} tokens"
    )
    if tokenizer.kind == "bpe":
        lengths = tokenizer.byte_lengths
        longest = np.argsort(-lengths, kind="stable")[:10]
        print("Longest tokens:", ", ".join(f'"{escaped(tokenizer.decode([i]))}"' for i in longest))
    sample = np.fromfile(folder.bin, metadata.numpy_dtype, count=60)
    print(f'The text begins: "{escaped(tokenizer.decode(sample))}"')
    print("Files:")
    for path in (folder.bin, folder.packed, folder.mask, folder.tokenizer, folder.metadata):
        if path.exists():
            print(f"  {path}  {path.stat().st_size:,} bytes")
    print(f"\nTrain on it:\n  {training_command(folder, metadata, tokenizer_file)}")


def escaped(text: str) -> str:
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def training_command(folder: TokenFolder, metadata: TokenMetadata, tokenizer_file: str | None) -> str:
    """The command that trains on these files. It names each of them if the folder has other tokens too."""
    data = ""
    if len(metadata_files(folder.folder)) > 1:
        named = (("bin_file", folder.bin), ("tokenizer_file", folder.tokenizer), ("metadata_file", folder.metadata))
        data = "".join(f" --{flag} {shlex.quote(str(path))}" for flag, path in named)
    elif folder.folder != Path(DEFAULT_FOLDER):
        data = f" --data_dir {shlex.quote(str(folder.folder))}"
    source = Path(tokenizer_file or "").parent
    if tokenizer_file and (metadata.chat_template or (source / "config.json").is_file()):  # a checkpoint's
        run = Path("runs") / ("chat" if metadata.chat_template else folder.folder.name)
        init, out = shlex.quote(str(source)), shlex.quote(str(run))
        return f"python train_colab_mmap.py{data} --init_from {init} --output_dir {out}"
    config = "gpt2_small.json" if metadata.tokenizer_type == "bpe" else "shakespeare_char.json"
    return f"python train_colab_mmap.py{data} --config {config}"
