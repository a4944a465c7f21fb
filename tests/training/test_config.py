"""Configuration: which layer wins, what is refused and how that is said, and that no key is without effect."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch

from common.errors import ConfigError
from common.validation import choices_of, extras, kind_of
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import ROOT, answer_without_libraries
from tests.models import write_model
from training.config import MODEL_KEYS, SCHEMA, parse_config
from training.plan import choose_shape
from training.resume import find_previous

pytestmark = pytest.mark.quick

CONFIGS = sorted((ROOT / "configs").glob("*.json"))
BLOG_COMMAND = (
    "--bin_file a.bin --tokenizer_file b.json --metadata_file c.json --model_size gpt2_small --batch_size 64 "
    "--epochs 10 --use_gpu --checkpoint_dir d"
)


def write(folder: Path, values: object, name: str = "run.json") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return str(path)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(argv)
    assert caught.value.exit_code == 2
    return str(caught.value)


def example_value(key: str) -> str:
    """A value the key accepts, as it is typed, and not its default where there is another."""
    f = SCHEMA[key]
    if key == "model_size":
        return "tiny"
    if choices := choices_of(f):
        return next(choice for choice in choices if choice != f.default)
    kind = kind_of(f)
    if kind is bool:
        return str(not f.default).lower()
    if kind is float:
        return "0.0005"
    return {"vocab_size": "300"}.get(key, "2") if kind is int else "somewhere"


# Which layer wins


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, {"batch_size": 7, "epochs": 3})
    config = parse_config(["--config", path, "--batch_size", "9"])
    assert (config.batch_size, config.epochs) == (9, 3)
    assert config.log_interval == SCHEMA["log_interval"].default
    assert config.sources["batch_size"] == "flag"
    assert config.sources["epochs"] == path
    assert config.sources["log_interval"] == "default"
    assert set(config.sources) == set(SCHEMA)


def test_a_preset_named_by_a_flag_lies_above_the_file_and_below_the_flags(tmp_path: Path) -> None:
    preset = json.loads((ROOT / "configs" / "medium.json").read_text())
    path = write(tmp_path, {"num_layers": 5, "embed_dim": 64, "model_size": "tiny"})
    config = parse_config(["--config", path, "--max_seq_len", "16", "--model_size", "medium"])
    assert (config.num_layers, config.embed_dim) == (preset["num_layers"], preset["embed_dim"])
    assert config.max_seq_len == 16
    assert config.sources["num_layers"] == "model_size medium"


def test_a_preset_brings_the_shape_alone_and_not_how_to_train() -> None:
    config = parse_config(["--model_size", "gpt2_small"])
    assert {key for key in SCHEMA if config.sources[key].startswith("model_size")} <= set(MODEL_KEYS)
    assert config.batch_size == SCHEMA["batch_size"].default


def test_a_run_is_named_after_its_config_else_its_size(tmp_path: Path) -> None:
    path = write(tmp_path, {"model_size": "tiny"}, "mine.json")
    assert parse_config(["--config", path]).run_dir == Path("runs/mine")
    assert parse_config(["--config", path, "--model_size", "small"]).run_dir == Path("runs/mine")
    assert parse_config(["--model_size", "tiny"]).run_dir == Path("runs/tiny")
    assert parse_config(["--config", path, "--output_dir", "elsewhere"]).run_dir == Path("elsewhere")


# Where a config file is looked up


@pytest.mark.parametrize("typed", ["mine", "mine.json"])
def test_a_bare_name_is_found_here_then_in_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "configs", {"epochs": 3}, "mine.json")
    assert parse_config(["--config", typed]).epochs == 3
    write(tmp_path, {"epochs": 4}, "mine.json")
    assert parse_config(["--config", typed]).epochs == 4


def test_a_missing_config_names_the_nearest_and_lists_all() -> None:
    message = refusal("--config", "gpt2_smal.json")
    assert "gpt2_smal.json" in message and "Did you mean gpt2_small.json?" in message
    assert all(path.name in message for path in CONFIGS)


# What is refused, and how it is said


def test_all_problems_of_all_layers_are_reported_together(tmp_path: Path) -> None:
    path = write(tmp_path, {"batch_sise": 3, "epochs": "many", "dropout": 1.5, "precision": "bf61", "max_seq_len": 2.5})
    message = refusal("--config", path, "--learning_rate", "-1", "--warmup_stps", "5", "--bin_file", "a.bin")
    for said in (
        f"batch_sise in {path}. Did you mean batch_size?",
        f'epochs in {path} is "many"; a whole number is needed',
        f"dropout in {path} is 1.5; allowed: at least 0 and less than 1",
        f'precision in {path} is "bf61"; allowed: auto, bf16, fp16, fp32. Did you mean bf16?',
        f"max_seq_len in {path} is 2.5; a whole number is needed",
        "--learning_rate is -1; allowed: more than 0",
        "--warmup_stps. Did you mean --warmup_steps?",
        "--bin_file needs --tokenizer_file and --metadata_file",
    ):
        assert said in message


def test_heads_that_do_not_divide_the_width_are_refused_with_heads_that_do() -> None:
    message = refusal("--embed_dim", "770", "--num_heads", "12")
    assert "12" in message and "770" in message
    offered = [int(n) for n in re.search(r"the nearest that do: ([\d, ]+)", message)[1].split(",")]
    assert offered and all(770 % n == 0 for n in offered)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("--min_lr 0.1 --learning_rate 0.01", ("min_lr", "0.1", "learning_rate", "0.01")),
        ("--batch_size 2 --gradient_accumulation_steps 3 --micro_batch_size 7", ("micro_batch_size", "7", "6")),
        ("--device cuda --use_gpu false", ("--device cuda", "--use_gpu false")),
        ("--resume_from a --resume never", ("--resume_from", "--resume never")),
        ("--resume_from a --init_from b", ("--resume_from", "--init_from")),
        ("--vocab_size 5000", ("vocab_size", "--input")),
        ("--tokenizer char", ("tokenizer", "--input")),
        ("--input hf://datasets/o/d --epochs 1", ("--input hf://datasets/o/d", "--max_mb 500")),
        ("--input a --bin_file a --tokenizer_file b --metadata_file c", ("--input", "--bin_file")),
        ("--data_dir d --bin_file a --tokenizer_file b --metadata_file c", ("--data_dir", "--bin_file")),
        ("--tokenizer_file b --metadata_file c", ("--bin_file",)),
        ("--position rope --embed_dim 6 --num_heads 2", ("rope", "3")),
    ],
)
def test_values_that_contradict_each_other_are_both_named(argv: str, named: tuple[str, ...]) -> None:
    message = refusal(*argv.split())
    assert all(word in message for word in named)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  "epochs": 3,\n  "batch_size" 4\n}', "line 3, column 16"),
        ("", "line 1, column 1"),
        ("[1, 2]", "list"),
        ("3", "int"),
    ],
)
def test_a_file_that_is_no_json_object_is_refused_with_the_place(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    message = refusal("--config", path)
    assert path in message and said in message


# Flags


@pytest.mark.parametrize("key", SCHEMA)
def test_every_key_is_a_flag_and_a_file_key_with_the_same_effect(tmp_path: Path, key: str) -> None:
    typed = example_value(key)
    beside = {
        "input": {"minutes": 1},
        "tokenizer": {"input": "x", "minutes": 1},
        "vocab_size": {"input": "x", "minutes": 1},
        "text_key": {"input": "x", "minutes": 1},
        "max_mb": {"input": "hf://x"},
        "companion": {"input": "x", "max_steps": 1},
        "bin_file": {"tokenizer_file": "x", "metadata_file": "x"},
        "tokenizer_file": {"bin_file": "x", "metadata_file": "x"},
        "metadata_file": {"bin_file": "x", "tokenizer_file": "x"},
        "embed_dim": {"num_heads": 1},
        "muon_learning_rate": {"optimizer": "muon"},
        "muon_momentum": {"optimizer": "muon"},
        "lora_rank": {"init_from": "x"},
        "lora_alpha": {"init_from": "x", "lora_rank": 8},
        "lora_targets": {"init_from": "x", "lora_rank": 8},
    }.get(key, {})
    as_flag = parse_config(["--config", write(tmp_path, beside), f"--{key}", *typed.split()])
    kind = kind_of(SCHEMA[key])
    value = typed if kind is str else json.loads(typed) if " " not in typed else tuple(map(float, typed.split()))
    as_key = parse_config(["--config", write(tmp_path, {**beside, key: value})])
    assert getattr(as_flag, key) == getattr(as_key, key) == value
    assert getattr(as_flag, key) != SCHEMA[key].default
    assert as_flag.values() == as_key.values()


@pytest.mark.parametrize("key", SCHEMA)
def test_a_flag_without_a_value_is_refused_unless_it_is_a_switch(key: str) -> None:
    metadata = extras(SCHEMA[key])
    if kind_of(SCHEMA[key]) is bool:
        assert getattr(parse_config([f"--{key}"]), key) is True
    elif "switch" in metadata:
        assert getattr(parse_config([f"--{key}"]), key) == metadata["switch"][0]
    else:
        message = refusal(f"--{key}")
        assert f"--{key}" in message and "missing" in message


@pytest.mark.parametrize("word", ["false", "False"])
def test_switches_can_be_turned_off_in_a_file_and_by_a_flag(tmp_path: Path, word: str) -> None:
    off = {"use_gpu": False, "dry_run": False, "use_lr_scheduler": "constant", "compile": "off"}
    from_file = parse_config(["--config", write(tmp_path, dict.fromkeys(off, False))])
    from_flags = parse_config([part for key in off for part in (f"--{key}", word)])
    for config in (from_file, from_flags):
        assert {key: getattr(config, key) for key in off} == off


@pytest.mark.parametrize(
    ("typed", "near"),
    [
        (("--batchsize", "3"), "--batch_size"),
        (("--learning-rate=3",), "--learning_rate"),
        (("--warm", "3"), None),
        (("--epoch", "3"), "--epochs"),
    ],
)
def test_unknown_and_abbreviated_flags_are_refused(typed: tuple[str, ...], near: str | None) -> None:
    message = refusal(*typed)
    assert f"unknown flag {typed[0].split('=')[0]}" in message
    assert near is None or f"Did you mean {near}?" in message


def test_the_blogs_command_line_means_what_it_says() -> None:
    config = parse_config(BLOG_COMMAND.split())
    assert (config.bin_file, config.tokenizer_file, config.metadata_file) == ("a.bin", "b.json", "c.json")
    assert (config.batch_size, config.epochs, config.use_gpu, config.checkpoint_dir) == (64, 10, True, "d")
    assert config.shape(32_000).embed_dim == 768


def test_the_blogs_other_flags_work() -> None:
    argv = BLOG_COMMAND + (
        " --use_lr_scheduler --min_lr 1e-6 --warmup_steps 2000 --gradient_accumulation_steps 4 --eval_batches 100"
        " --max_steps_per_epoch 500 --checkpoint_interval 1 --output_dir out --learning_rate 3e-4 --resume_from old"
    )
    config = parse_config(argv.split())
    assert (config.use_lr_scheduler, config.min_lr, config.warmup_steps) == ("cosine", 1e-6, 2000)
    assert (config.gradient_accumulation_steps, config.eval_batches, config.max_steps_per_epoch) == (4, 100, 500)
    assert (config.checkpoint_interval, config.run_dir, config.resume_from) == (1, Path("out"), "old")
    assert config.sequences_per_step == 64 * 4


def test_help_names_every_key_without_importing_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    done = answer_without_libraries("train_colab_mmap.py", "--help")
    assert done.returncode == 0, done.stderr
    assert not [key for key in SCHEMA if not re.search(rf"^  --{key} ", done.stdout, re.MULTILINE)]


# The schema and the code it steers


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_that_comes_with_the_project_holds(path: Path) -> None:
    config = parse_config(["--config", str(path)])
    assert config.name == path.stem
    config.shape(32_000)


@pytest.mark.parametrize(
    ("size", "vocab_size", "parameters"),
    [("gpt2_small", 32_000, 134_601_216), ("small", 65, 3_258_368), ("small", 190, 3_322_368)],
)
def test_the_sizes_have_the_documented_parameter_counts(size: str, vocab_size: int, parameters: int) -> None:
    with torch.device("meta"):
        model = TransformerLanguageModel(parse_config(["--config", size]).shape(vocab_size))
    assert model.num_parameters() == parameters
    assert parse_config(["--model_size", size]).shape(vocab_size) == model.config


# Taking the shape of trained weights


def shape_after(words: list[str], trained: ModelConfig, folder: Path) -> ModelConfig:
    """The shape of a run that starts from the weights of a model."""
    write_model(folder / "weights", model=TransformerLanguageModel(trained))
    config = parse_config([*words, "--init_from", str(folder / "weights"), "--output_dir", str(folder / "run")])
    return choose_shape(config, find_previous(config, None))


def test_the_shape_is_that_of_trained_weights(tmp_path: Path) -> None:
    form = {"norm": "rmsnorm", "bias": False, "num_kv_heads": 1, "norm_gain": True}
    trained = ModelConfig(100, 48, 3, 2, ff_dim=80, max_seq_len=24, dropout=0.3, **form)
    taken = shape_after(["--batch_size", "5", "--dropout", "0.1", "--num_layers", "2"], trained, tmp_path)
    assert taken == dataclasses.replace(trained, dropout=0.1)


def test_the_context_may_be_shorter_where_positions_have_no_weights(tmp_path: Path) -> None:
    trained = ModelConfig(300, 64, 4, 2, max_seq_len=4096, position="rope")
    assert shape_after(["--max_seq_len", "512"], trained, tmp_path / "a").max_seq_len == 512
    assert shape_after([], trained, tmp_path / "b").max_seq_len == 4096
    learned = ModelConfig(300, 64, 4, 2, max_seq_len=16)
    for name, words, model in (("c", ["--max_seq_len", "8192"], trained), ("d", ["--max_seq_len", "8"], learned)):
        with pytest.raises(ConfigError, match="max_seq_len is"):
            shape_after(words, model, tmp_path / name)


def test_steps_count_sequences_and_tokens_of_the_whole_effective_batch() -> None:
    config = parse_config(["--batch_size", "6", "--gradient_accumulation_steps", "4", "--max_seq_len", "10"])
    assert (config.sequences_per_step, config.rows_at_once(6)) == (24, 6)
    assert (config.rows_at_once(5), config.rows_at_once(24)) == (5, 24)


def test_the_later_of_epochs_and_max_steps_counts(tmp_path: Path) -> None:
    """`--epochs` with a config that sets max_steps is not ignored."""
    path = write(tmp_path, {"max_steps": 10})
    assert parse_config(["--config", str(path)]).max_steps == 10
    config = parse_config(["--config", str(path), "--epochs", "3"])
    assert (config.max_steps, config.epochs) == (0, 3)
    with pytest.raises(ConfigError, match="epochs and max_steps"):
        parse_config(["--max_steps", "5", "--epochs", "3"])


def test_the_later_of_minutes_and_max_steps_counts(tmp_path: Path) -> None:
    path = str(write(tmp_path, {"max_steps": 10}))
    config = parse_config(["--config", path, "--minutes", "0.5", "--epochs", "3"])
    assert (config.max_steps, config.minutes, config.epochs) == (0, 0.5, 3)
    config = parse_config(["--config", str(write(tmp_path, {"minutes": 5, "epochs": 2})), "--max_steps", "7"])
    assert (config.max_steps, config.minutes) == (7, 0)
    assert "minutes and max_steps" in refusal("--max_steps", "5", "--minutes", "3")


def test_minutes_need_a_rate_that_can_wait_to_fall() -> None:
    assert "--max_hours" in refusal("--minutes", "5", "--use_lr_scheduler", "constant")
    assert "cooldown below 1" in refusal("--minutes", "5", "--cooldown", "1")
    assert "at most 100,000" in refusal("--minutes", "1e308")
    assert "--minutes" in refusal("--minutes", "-1")
    assert parse_config(["--minutes", "5"]).cooldown == 1.0


def test_flags_that_could_do_nothing_are_refused() -> None:
    assert "cooldown" in refusal("--cooldown", "0.5", "--use_lr_scheduler", "constant")


def test_a_flag_overrules_what_was_chosen_though_it_makes_that_useless() -> None:
    config = parse_config(["--input", "book", "--tokenizer", "char"], {"vocab_size": 512, "embed_dim": 64}, "the dial")
    assert (config.tokenizer, config.embed_dim) == ("char", 64)
    with pytest.raises(ConfigError, match="vocab_size has no effect"):
        parse_config(["--input", "book", "--tokenizer", "char", "--vocab_size", "512"])
