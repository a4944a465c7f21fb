"""generate.py as its users meet it: flags, output, settings, and one clear message for each mistake."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import generate as script
from generation import loading
from generation.stream import prefill
from model import TransformerLanguageModel
from model_config import ModelConfig
from tests.helpers import ROOT, answer_without_libraries, call_before, with_large_weights
from tests.models import save_checkpoint
from tokenizer import CharacterTokenizer
from tokenizer_bpe import BPETokenizer
from training.config import Config
from training.optimizer import build_optimizer

ALPHABET = "\n abcdefgh?"
SHORT = ("--max_new_tokens", "12")


@pytest.fixture(autouse=True)
def empty_folder_without_gpu(tmp_path, monkeypatch):
    """The script's defaults look at the current folder and at the machine: here, an empty one without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def random_model(vocab_size: int, seed: int = 0, **form: object) -> TransformerLanguageModel:
    torch.manual_seed(seed)
    model = TransformerLanguageModel(ModelConfig(vocab_size, 16, 2, 1, max_seq_len=32, **form))
    return with_large_weights(model)


@pytest.fixture(scope="module")
def make_checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """`make_checkpoint(folder, kind, seed=...)` saves a checkpoint of a tiny random model."""
    folder = tmp_path_factory.mktemp("tokenizers")
    tokenizers = {
        "character": CharacterTokenizer.train(ALPHABET),
        "bpe": BPETokenizer.train(["the cat and the dog"] * 4, vocab_size=265),
        "control": CharacterTokenizer.train("\x07\x1b\x9b\x7f[ab"),
    }
    for kind, tokenizer in tokenizers.items():
        tokenizer.save(folder / kind)

    def save(path: Path, kind: str = "character", seed: int = 0, state: dict | None = None, **form: object) -> Path:
        model = random_model(tokenizers[kind].vocab_size, seed, **form)
        optimizer = build_optimizer(model, Config())
        save_checkpoint(
            path, model, optimizer, (folder / kind).read_bytes(), tokenizers[kind].kind, state or {"step": 1}
        )
        return path

    return save


@pytest.fixture
def checkpoint(make_checkpoint, tmp_path) -> Path:
    return make_checkpoint(tmp_path / "elsewhere" / "step_00000001")


# Which checkpoint


def test_the_newest_run_is_the_default(make_checkpoint, rows, tmp_path):
    """The run saved to last, at its highest step; names and folder times do not matter."""
    saved = [make_checkpoint(tmp_path / "runs" / name) for name in (
        "zebra/checkpoints/step_00000900", "apple/checkpoints/step_00000010", "apple/checkpoints/step_00000020",
    )]  # fmt: skip
    for seconds, path in enumerate(saved):
        os.utime(path / "manifest.json", (1e9 + seconds, 1e9 + seconds))
    assert rows(*SHORT)[0]["checkpoint"] == "runs/apple/checkpoints/step_00000020"
    os.utime(saved[0] / "manifest.json", (2e9, 2e9))
    assert rows(*SHORT)[0]["checkpoint"] == "runs/zebra/checkpoints/step_00000900"


@pytest.mark.parametrize("kind", ["character", "bpe"])
def test_a_run_folder_and_a_checkpoint_folder_of_either_tokenizer(make_checkpoint, run, tmp_path, kind):
    make_checkpoint(tmp_path / "my_run/checkpoints/step_00000002", kind, seed=2)
    make_checkpoint(tmp_path / "my_run/checkpoints/step_00000001", kind, seed=1)
    make_checkpoint(tmp_path / "my_run/best", kind, seed=1)
    flags = ("--prompt", "bad", *SHORT)
    code, newest, err = run("--checkpoint", "my_run", *flags)
    assert code == 0 and "error" not in err, err
    assert newest.startswith("bad") and len(newest) > len("bad\n")
    older = run("--checkpoint", "my_run/checkpoints/step_00000001", *flags)[1]
    assert run("--checkpoint", "my_run/checkpoints/step_00000002", *flags)[1] == newest != older
    assert run("--checkpoint", tmp_path / "my_run/best/", *flags)[1] == older


@pytest.fixture
def blog_checkpoint(tmp_path) -> Path:
    """A folder as the blog's trainer left it: compiled names, a stored mask, its own config keys, no manifest."""
    folder = tmp_path / "blog_model"
    folder.mkdir()
    tokenizer = CharacterTokenizer.train(ALPHABET)
    model = random_model(tokenizer.vocab_size)
    state = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    state["_orig_mod.causal_mask"] = torch.ones(32, 32).triu(1).bool()
    torch.save(state, folder / "pytorch_model.bin")
    config = {
        "vocab_size": tokenizer.vocab_size,
        "embed_dim": 16,
        "num_heads": 2,
        "num_layers": 1,
        "ff_dim": 64,
        "max_seq_len": 32,
        "dropout": 0.1,
        "model_name": "gpt2_small",
        "description": "GPT-2 Small, trained in Google Colab",
        "model_type": "gpt2_small",
        "architecture": "TransformerLanguageModel",
        "total_parameters": model.num_parameters(),
        "tokenizer_type": "character",
    }
    (folder / "config.json").write_text(json.dumps(config))
    characters = sorted(ALPHABET)
    content = {
        "type": "character",
        "vocab_size": len(characters),
        "char_to_idx": {character: i for i, character in enumerate(characters)},
        "idx_to_char": {str(i): character for i, character in enumerate(characters)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_the_blogs_checkpoints_load(blog_checkpoint, checkpoint, run):
    flags = ("--prompt", "bad", *SHORT)
    code, out, err = run("--checkpoint", blog_checkpoint, *flags)
    assert code == 0 and "error" not in err, err
    assert "know" not in out and out == run("--checkpoint", checkpoint, *flags)[1]  # the same weights


def test_a_process_of_its_own_survives_an_encoding_and_waits_for_no_compiler(make_checkpoint, tmp_path):
    """A pipe on Windows, or a server without a locale: escapes in JSON are ASCII, whatever the text is. And torch's
    compiler, which takes as long to import as all the rest of torch, is left alone."""
    checkpoint = make_checkpoint(tmp_path / "checkpoint", "bpe", position="rope")
    (tmp_path / "prompts.txt").write_text("größer ☃\n", encoding="utf-8")
    command = [sys.executable, str(ROOT / "generate.py"), "--checkpoint", str(checkpoint), "--json"]
    command += ["--prompts_file", str(tmp_path / "prompts.txt"), *map(str, SHORT)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPROFILEIMPORTTIME": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert json.loads(result.stdout)["prompt"] == "größer ☃"
    imported = result.stderr.decode().split()
    assert "torch" in imported and "torch._dynamo" not in imported


# What is printed


def test_prompts_from_flags_and_a_file(checkpoint, rows, tmp_path):
    (tmp_path / "prompts.txt").write_text("\ufeffdad \n\n  \nfed?\n", encoding="utf-8")
    made = rows(
        "--checkpoint", checkpoint, "--prompt", "a", "--prompt", "bee", "--prompts_file", "prompts.txt",
        "--num_samples", 2, "--seed", 7, *SHORT,
    )  # fmt: skip
    assert [row["prompt"] for row in made] == ["a", "a", "bee", "bee", "dad ", "dad ", "fed?", "fed?"]
    assert [row["seed"] for row in made] == list(range(7, 15))
    assert len({row["completion"] for row in made}) == 8


def test_json_rows_hold_what_is_promised_and_each_can_be_made_again(checkpoint, rows):
    flags = ("--checkpoint", checkpoint, *SHORT)
    made = rows(*flags, "--prompt", "a", "--prompt", "bad cafe", "--num_samples", 3, "--seed", 100)
    assert len(made) == 6
    for row in made:
        assert set(row) == {"prompt", "completion", "tokens", "tokens_per_second", "checkpoint", "seed"}
        assert row["checkpoint"] == str(checkpoint)
        assert row["tokens"] == len(row["completion"]) == 12 and row["tokens_per_second"] > 0
        again = rows(*flags, "--prompt", row["prompt"], "--seed", row["seed"])[0]
        assert again["completion"] == row["completion"]


def test_streamed_and_whole_output_are_the_same(checkpoint, run, rows):
    flags = ("--checkpoint", checkpoint, "--prompt", "a", "--prompt", "bad", "--num_samples", 2, *SHORT)
    streamed, whole = (run(*flags, way)[1] for way in ("--stream", "--no_stream"))
    assert streamed == whole == run(*flags)[1]
    assert whole == "---\n".join(row["prompt"] + row["completion"] + "\n" for row in rows(*flags))


def test_one_prompt_is_streamed_unless_told_otherwise(checkpoint, run, monkeypatch):
    streamed = []
    call_before(monkeypatch, script, "print_stream", lambda *given, **more: streamed.append(given))
    one = ("--checkpoint", checkpoint, "--prompt", "a", *SHORT)
    for flags, expected in (((), 1), (("--no_stream",), 0), (("--json",), 0), (("--prompt", "b"), 0)):
        streamed.clear()
        run(*one, *flags)
        assert len(streamed) == expected, flags


def test_without_a_prompt_text_starts_from_nothing(checkpoint, rows):
    (row,) = rows("--checkpoint", checkpoint, *SHORT)
    assert row["prompt"] == "" and len(row["completion"]) == 12


def test_stop_strings_may_hold_a_newline(checkpoint, rows):
    flags = ("--checkpoint", checkpoint, "--prompt", "a", "--max_new_tokens", 60, "--temperature", 2, "--top_p", 1)
    free = rows(*flags, "--num_samples", 4)
    assert any("\n" in row["completion"] for row in free)
    for word, character in (("\\n", "\n"), ("e", "e")):
        stopped = rows(*flags, "--num_samples", 4, "--stop", word, "--stop", "zz")
        assert [row["completion"] for row in stopped] == [row["completion"].split(character)[0] for row in free]


def test_sampling_flags_have_their_effect(checkpoint, rows):
    flags = ("--checkpoint", checkpoint, "--prompt", "a", "--max_new_tokens", 20)

    def text(*more: object) -> str:
        return rows(*flags, *more)[0]["completion"]

    greedy = text("--temperature", 0)
    assert greedy == text("--top_k", 1) == text("--top_p", 1e-9) != text()
    assert text("--seed", 1) == text("--seed", 1) != text("--seed", 2)
    assert text("--temperature", 0, "--repetition_penalty", 5) != greedy


def test_copied_text_is_traced_to_its_line(make_checkpoint, checkpoint, run, rows, fails, tmp_path):
    asked = "--prompt", "a", "--max_new_tokens", "400", "--temperature", "0.8"
    (row,) = rows(*asked, "--checkpoint", checkpoint)
    (tmp_path / "my_text.txt").write_text("Not this line.\n" + row["completion"].replace(" ", "\n"))
    folder = make_checkpoint(tmp_path / "traced", state={"config": {"input": "my_text.txt"}})
    (traced,) = rows(*asked, "--checkpoint", folder, "--trace")
    assert sum(span["words"] for span in traced["copied"]) > 20 and traced["completion"] == row["completion"]
    for streams in ("--stream", "--no_stream"):
        code, out, _ = run(*asked, "--checkpoint", folder, "--trace", streams)
        assert code == 0 and "% of its words" in out and "my_text.txt, line 2" in out
    (tmp_path / "my_text.txt").write_text("something else\n")
    assert "no 8 words in a row" in run(*asked, "--checkpoint", folder, "--trace")[1]
    (tmp_path / "my_text.txt").unlink()
    assert "my_text.txt" in fails(3, *asked, "--checkpoint", folder, "--trace")
    assert "--input" in fails(3, *asked, "--checkpoint", checkpoint, "--trace")


def test_control_characters_do_not_reach_the_terminal(make_checkpoint, run, rows, tmp_path):
    path = make_checkpoint(tmp_path / "control", "control")
    flags = ("--checkpoint", path, "--prompt", "a", "--max_new_tokens", 60, "--temperature", 3, "--top_p", 1)
    controls = set("\x07\x1b\x9b\x7f")
    assert controls & set(rows(*flags)[0]["completion"])  # the model does make them
    for way in ("--stream", "--no_stream"):
        out = run(*flags, way)[1]
        assert out.startswith("a") and not controls & set(out)
    out = run("--compare", path, *flags[2:])[1]
    assert "[" in out and not controls & set(out)


def table(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines()]


def test_compare_answers_each_prompt_with_each_checkpoint(make_checkpoint, run, rows, tmp_path):
    paths = [make_checkpoint(tmp_path / f"runs/r/checkpoints/step_0000000{n}", seed=n) for n in (1, 2)]
    flags = ("--prompt", "bad", "--prompt", "cafe", *SHORT)
    code, out, err = run("--compare", *paths, *flags)
    assert code == 0 and "error" not in err, err
    for prompt, part in zip(("bad", "cafe"), out.split("---\n|"), strict=True):
        header, rule, *answers = table(part)
        assert header[-1] == prompt and set("".join(rule)) == {"-"}
        for path, (name, answer) in zip(paths, answers, strict=True):
            alone = rows("--checkpoint", path, *flags)[("bad", "cafe").index(prompt)]
            assert (name, answer) == (str(path), " ".join(alone["completion"].split()))
    made = rows("--compare", *paths, *flags)
    assert [(row["checkpoint"], row["prompt"]) for row in made] == [
        (str(path), prompt) for path in paths for prompt in ("bad", "cafe")
    ]


# Interactive


@pytest.fixture
def talk(run, checkpoint, monkeypatch) -> Callable[..., str]:
    """Return the prompt loop's answers to lines, without its greeting."""

    def call(*lines: str, flags: tuple = SHORT) -> list[str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))
        code, out, err = run("--interactive", "--checkpoint", checkpoint, *flags)
        assert code == 0 and "error" not in err, err
        greeting, *answers = out.split("> ")
        assert str(checkpoint) in greeting
        return [answer.rstrip("\n") for answer in answers]

    return call


def test_interactive_continues_each_line_and_another_way_each_time(talk, checkpoint):
    model, tokenizer = script.load_model(checkpoint)
    expected = [script.generate_text(model, tokenizer, "bad", 12, seed=seed).rstrip("\n") for seed in (1337, 1338)]
    assert (
        talk("bad", "", "bad", "quit", "never read") == [expected[0], "", expected[1], ""] and len(set(expected)) == 2
    )


def test_interactive_survives_mistakes(talk):
    answer, after, _ = talk("z9", "bad")
    assert "'9'" in answer and "'z'" in answer and after.startswith("bad")


# Importable


def test_load_model_and_generate_text(checkpoint, rows):
    model, tokenizer = script.load_model(str(checkpoint))
    assert not model.training and model.device.type == "cpu"
    assert next(model.parameters()).dtype == torch.float32
    text = script.generate_text(model, tokenizer, "bad", max_new_tokens=12, seed=9, stop=("zz",))
    assert text == "bad" + rows("--checkpoint", checkpoint, "--prompt", "bad", "--seed", 9, *SHORT)[0]["completion"]
    assert script.generate_text(model, tokenizer, "bad", max_new_tokens=0) == "bad"
    with pytest.raises(ValueError, match="top_p"):
        script.generate_text(model, tokenizer, "bad", top_p=3.0)


@pytest.mark.parametrize(
    ("width", "flag", "dtype"),
    [(768, "AMX", torch.bfloat16), (768, None, torch.float32), (128, "AMX", torch.float32)],
    ids=["wide", "no bf16 in the CPU", "narrow"],
)
def test_a_wide_model_is_bf16_on_a_cpu_that_has_it(make_checkpoint, tmp_path, monkeypatch, width, flag, dtype):
    from common import machine

    monkeypatch.setattr(machine, "cpu_bf16_flag", lambda: flag)
    assert loading.generation_dtype(ModelConfig(10, embed_dim=width, num_heads=4), torch.device("cpu")) == dtype
    monkeypatch.setattr(loading, "CPU_BF16_MIN_WIDTH", 16)
    model, tokenizer = script.load_model(make_checkpoint(tmp_path / "checkpoint", "character"))
    assert next(model.parameters()).dtype == (torch.bfloat16 if flag else torch.float32)
    assert len(script.generate_text(model, tokenizer, "bad", max_new_tokens=40, repetition_penalty=1.1)) == 43


@pytest.mark.parametrize("form", [{}, {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "norm_gain": True}])
def test_fp16_has_the_logits_of_fp32_where_the_residual_stream_exceeds_its_range(form):
    """As on a GPU without bf16: a T4."""
    torch.manual_seed(0)
    model = TransformerLanguageModel(ModelConfig(300, 64, 2, 4, max_seq_len=40, **form)).eval()
    for block in model.blocks:
        block.feed_forward.fc2.bias.data[::2] = 3e4
    tokens = torch.randint(300, (2, 40))
    with torch.inference_mode():
        expected = model(tokens)
        loading.convert(model, torch.device("cpu"), torch.float16)
        assert model.residual(tokens).abs().max() > torch.finfo(torch.float16).max
        torch.testing.assert_close(model(tokens).float(), expected, rtol=0, atol=0.01 * expected.std().item())
        cache, first = prefill(model, tokens[:, :-1].tolist(), 40)
        assert cache.entries.dtype == torch.float16
        torch.testing.assert_close(first, expected[:, -2], rtol=0, atol=0.01 * expected.std().item())


def test_help_does_not_wait_for_torch():
    done = answer_without_libraries("generate.py", "--help")
    assert done.returncode == 0
    for flag in ("--prompt ", "--checkpoint ", "--stop ", "--compare ", "--interactive", "--no_stream", "--json"):
        assert flag in done.stdout
    assert answer_without_libraries("generate.py", "--temprature", "1").returncode == 2


# Damaged and missing checkpoints


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


OURS = {
    "missing": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "cut": (lambda folder: truncate(folder / "model.safetensors"), "model.safetensors"),
    "altered": (lambda folder: rewrite(folder, dropout=0.5), "config.json"),
    "never completed": (lambda folder: (folder / "manifest.json").unlink(), "manifest.json"),
}
BLOGS = {
    "no weights": (lambda folder: (folder / "pytorch_model.bin").write_bytes(b"no weights"), "pytorch_model.bin"),
    "no tensors": (lambda folder: torch.save([torch.zeros(2)], folder / "pytorch_model.bin"), "pytorch_model.bin"),
    "another shape": (lambda folder: rewrite(folder, num_layers=2), "blocks.1."),
    "no model": (lambda folder: rewrite(folder, num_heads=3), "num_heads is 3"),
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "a larger vocabulary": (lambda f: CharacterTokenizer.train(ALPHABET + "xyz").save(f / "tokenizer.json"), "14"),
}


@pytest.mark.parametrize("case", [*OURS, *BLOGS])
def test_a_damaged_checkpoint_is_refused_by_name(checkpoint, blog_checkpoint, fails, case):
    folder, (spoil, said) = (checkpoint, OURS[case]) if case in OURS else (blog_checkpoint, BLOGS[case])
    spoil(folder)
    before = sorted(path.name for path in folder.iterdir())
    message = fails(4, "--checkpoint", folder, "--prompt", "a")
    assert str(folder) in message and said in message
    assert "weights_only" not in message  # PyTorch's advice is to run whatever code the file holds
    assert sorted(path.name for path in folder.iterdir()) == before


def test_no_run_at_all(fails, tmp_path):
    for _ in range(2):
        message = fails(4, "--prompt", "a")
        assert "train_colab_mmap.py" in message and "--checkpoint" in message
        (tmp_path / "runs/empty/checkpoints").mkdir(parents=True, exist_ok=True)
    assert not list(tmp_path.glob("runs/*/*/*"))


# Mistakes in what was typed


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tempature", "0.5"], ["--tempature", "--temperature"]),
        (["--promt=hello"], ["--promt", "--prompt"]),
        (["--temperatur", "0.5"], ["--temperatur.", "--temperature?"]),  # no guessing
        (["hello"], ["hello"]),
        (["--temperature", "warm"], ["--temperature", "warm"]),
        (["--top_k", "2.5"], ["--top_k", "2.5"]),
        (["--seed"], ["--seed"]),
        (["--device", "tpu"], ["--device", "tpu", "cuda"]),
        (["--temperature", "-1", "--top_p", "2", "--top_k", "-3"], ["temperature is -1", "top_p is 2", "top_k is -3"]),
        (["--max_new_tokens", "-1", "--repetition_penalty", "0"], ["max_new_tokens is -1", "repetition_penalty is 0"]),
        (["--max_new_tokens", str(10**12)], ["max_new_tokens is 1000000000000", "1,000,000"]),
        (["--num_samples", str(10**9)], ["--num_samples is 1000000000", "1,000,000"]),
        (["--stop", ""], ["stop"]),
        (["--num_samples", "0", "--json", "--stream"], ["--num_samples is 0", "--stream"]),
        (["--interactive", "--json"], ["--interactive", "--json"]),
        (["--interactive", "--prompt", "a"], ["--interactive", "--prompt"]),
        (["--compare", "a", "--checkpoint", "b"], ["--compare", "--checkpoint"]),
        (["--stream", "--no_stream"], ["--stream", "--no_stream"]),
    ],
    ids=" ".join,
)
def test_typing_mistakes_are_named(fails, argv, said):
    message = fails(2, *argv)
    assert all(word in message for word in said), message


def test_prompts_files_that_cannot_be_used(checkpoint, fails, tmp_path):
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "folder").mkdir()
    expected = {
        "absent.txt": "No such file",
        "latin1.txt": "byte 3",
        "empty.txt": "no prompts",
        "folder": "is a folder",
    }
    for name, said in expected.items():
        message = fails(3, "--checkpoint", checkpoint, "--prompts_file", name)
        assert name in message and said in message


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
@pytest.mark.parametrize("way", ["--stream", "--no_stream", "--json"])
def test_text_that_cannot_be_written_is_an_error(checkpoint, capsys, way):
    with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
        assert script.main(["--checkpoint", str(checkpoint), "--prompt", "bad", "--max_new_tokens", "2", way]) == 3
    assert "The disk is full: the output cannot be written" in capsys.readouterr().err


def test_a_checkpoint_folder_alone_is_enough(checkpoint, rows, tmp_path):
    """Copied to another place, without the run, the data or the tokenizer it came from."""
    moved = tmp_path / "copy of it"
    shutil.copytree(checkpoint, moved)
    shutil.rmtree(checkpoint.parent)
    assert len(rows("--checkpoint", moved, "--prompt", "a", *SHORT)[0]["completion"]) == 12
