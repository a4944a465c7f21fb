"""The commands of the documents: found, run as they are typed but small, or read by the script that they are for."""

from __future__ import annotations

import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest

import generate
import tokenize_local_bpe
import tools.compare
import tools.export_hf
import tools.import_hf
import train_colab_mmap
from common.flags import Parser
from tests.helpers import ROOT
from training.config import parse_config

SCRIPTS = {
    "tokenize_local_bpe.py": tokenize_local_bpe.main,
    "train_colab_mmap.py": train_colab_mmap.main,
    "generate.py": generate.main,
}
TOOLS = {
    "tools/compare.py": tools.compare.main,
    "tools/export_hf.py": tools.export_hf.main,
    "tools/import_hf.py": tools.import_hf.main,
}
# What makes the trainer small enough for a test; the continuous integration runs the quickstart as it is.
SMALL = (
    "--num_layers 1 --embed_dim 32 --num_heads 2 --max_seq_len 32 --max_steps 4 --warmup_steps 0 --batch_size 2 "
    "--eval_interval 4 --eval_batches 1 --device cpu --compile off"
)
# How the comment behind a command begins that no test runs; its flags are read all the same.
MARKS = (
    "needs a GPU", "needs several GPUs", "needs the network", "needs the extras", "takes minutes", "takes hours",
)  # fmt: skip


class Command(NamedTuple):
    """A line of a code block: what is typed, and the comment behind it."""

    text: str
    comment: str

    @property
    def is_marked(self) -> bool:
        return self.comment.startswith(MARKS)


class Understood(BaseException):  # which no script takes for an error of its own
    """A script has read its flags and is about to begin."""


def commands(language: str, text: str) -> list[Command]:
    """The command lines in code blocks of one language."""
    blocks = re.findall(rf"^ *```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    return [Command(typed.rstrip(), comment.strip()) for typed, _, comment in (line.partition(" # ") for line in lines)]


def mentioned(text: str) -> Iterator[str]:
    """Commands outside of code blocks: in running text, and in lines that are set in by four spaces."""
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from re.findall(r"^    ((?:python|torchrun) .*)", text, flags=re.MULTILINE)
    for code in re.findall(r"`([^`]+)`", text):
        if re.match(r"(python|torchrun) .*(\.py|-m)\b", code):
            yield " ".join(code.split())


def run(command: str) -> int:
    """Run one of SCRIPTS or TOOLS in this process; the trainer with SMALL. Returns its exit code."""
    words = shlex.split(command)
    if words[0] == "torchrun":  # with a port that is free
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", words[1], str(ROOT / words[2])]
        return subprocess.run([*launcher, *words[3:], *shlex.split(SMALL)], check=False, timeout=120).returncode
    assert words[0] == "python", command
    small = SMALL.replace("--max_steps", "--max_steps_per_epoch") if {"--epochs", "--minutes"} & {*words} else SMALL
    ending = {
        "train_colab_mmap.py": small,
        "generate.py": "--stride 16" if "--stride" in words else "",  # no model here reads more
    }
    extra = shlex.split(ending.get(words[1], ""))
    return (SCRIPTS | TOOLS)[words[1]]([*words[2:], *extra])


def no_more_input(prompt: str) -> str:
    """Stands for a user of `--interactive` who has nothing to ask."""
    raise EOFError


def require_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails where a script of ours would refuse its flags. What others run (pip, git) is not looked at."""
    for part in command.split("&&"):
        words = shlex.split(part)
        if words[0] == "torchrun":
            words = words[next(i for i, word in enumerate(words) if word.endswith(".py")) - 1 :]
        elif words[0] != "python":
            continue
        script, flags = words[1], words[2:]
        if script == "-m":  # a module of ours or of Python's own
            assert importlib.util.find_spec(flags[0]), command
        elif script == "train_colab_mmap.py":
            parse_config(flags)
        elif script == "tokenize_local_bpe.py":
            tokenize_local_bpe.parse_arguments(flags)
        else:
            with monkeypatch.context() as patched:
                patched.setattr(Parser, "parse_known_args", stopping(Parser.parse_known_args))
                with pytest.raises(Understood):
                    importlib.import_module(script.removesuffix(".py").replace("/", ".")).main(flags)


def stopping(parse):
    """Stop a script after it has read its flags."""

    def parse_known_args(self, args=None, namespace=None):
        known, unknown = parse(self, args, namespace)
        if not unknown:
            raise Understood
        return known, unknown

    return parse_known_args
