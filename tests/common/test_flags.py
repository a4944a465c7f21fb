"""Flags that are declared as fields of a dataclass; what is said about words that argparse could not take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
from pydantic.dataclasses import dataclass

import generate
import tokenize_local_bpe
import train_colab_mmap
from common.errors import ConfigError
from common.flags import Parser
from common.validation import STRICT, NonEmptyText, check, option, options_of


@dataclass(frozen=True, config=STRICT)
class Settings:
    names: tuple[NonEmptyText, ...] = option((), "what", "files", many=True, min_length=1, metavar="FILE")
    word: tuple[str, ...] = option((), "what", "texts; repeatable")
    share: float = option(0.5, "how", "100% of it", gt=0, le=1)
    count: int | None = option(None, "how", "a number", ge=1)
    kind: Literal["red", "blue"] = option("red", "how", "a colour", switch=("blue", "red"))
    loud: bool = option(False, "how", "say more")
    inner: float = option(0.0, "", "no flag")


def parsed(*words: str) -> dict[str, Any]:
    parser, problems = Parser(prog="script.py"), list[str]()
    parser.add_options(options_of(Settings))
    typed = parser.read(words, problems)
    settings = check(Settings, typed, problems, {key: f"--{key}" for key in typed})
    parser.require_none(problems)
    return {key: getattr(settings, key) for key in typed}


def test_flags_are_what_a_dataclass_declares() -> None:
    assert parsed() == {}, "defaults are those of the dataclass"
    typed = ["--names", "a", "b", "--word", "", "--word", "c d", "--share", "1", "--count", "1e3", "--kind", "--loud"]
    assert parsed(*typed) == {
        "names": ("a", "b"), "word": ("", "c d"), "share": 1.0, "count": 1000, "kind": "blue", "loud": True,
    }  # fmt: skip
    assert parsed("--count", "3", "--kind", "red", "--loud", "false") == {"count": 3, "kind": "red", "loud": False}


def test_all_that_is_wrong_is_reported_together() -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("--names", "--word", "--share", "0", "--count", "many", "--kind", "blu", "--loudd", "--inner", "1")
    said = str(refused.value).splitlines()
    assert sorted(said) == sorted(
        [
            "unknown flag --loudd. Did you mean --loud?",
            "unknown flag --inner.",
            "--names is missing; at least one FILE is needed",
            "--word is missing; a text is needed",
            "--share is 0; allowed: more than 0 and at most 1",
            '--count is "many"; a whole number is needed',
            '--kind is "blu"; allowed: red, blue. Did you mean blue?',
            "`python script.py --help` lists all flags.",
        ]
    )


@pytest.mark.parametrize(
    ("main", "words", "written"),
    [
        (tokenize_local_bpe.main, ["--input", "x", "--document_separator", "---"], "--document_separator=---"),
        (tokenize_local_bpe.main, ["--input", "-x.txt"], "--input=-x.txt"),
        (tokenize_local_bpe.main, ["--input", "x", "--document_separator", "-;"], "--document_separator='-;'"),
        (generate.main, ["--prompt", "-x"], "--prompt=-x"),
        (generate.main, ["--temperature", "-1e-3", "--prompt", "x"], "--temperature=-1e-3"),
        (train_colab_mmap.main, ["--input", "-x.txt"], "--input=-x.txt"),
        (train_colab_mmap.main, ["--input", "---"], "--input=---"),
    ],
)
def test_how_a_value_that_begins_with_a_dash_is_written(
    main: Callable, words: list[str], written: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert f"Write a value that begins with a dash as {written}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (generate.main, ["--prompt", "--seed", "3"], "--prompt is missing; a text is needed"),
        (tokenize_local_bpe.main, ["--input", "x", "--compress", "--vocabsize"], "Did you mean --vocab_size?"),
        (train_colab_mmap.main, ["--data_dir", "--batchsize", "3"], "Did you mean --batch_size?"),
    ],
)
def test_a_flag_is_not_taken_for_a_value(
    main: Callable, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and "begins with a dash" not in error
