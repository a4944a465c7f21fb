"""What is said about words that argparse could not take."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import generate
import tokenize_local_bpe
import train_colab_mmap


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
    assert f"A value that begins with a dash is written {written}." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (generate.main, ["--prompt", "--seed", "3"], "--prompt: expected one argument"),
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
