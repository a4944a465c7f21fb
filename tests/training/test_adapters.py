"""A run that trains adapters: its base stays to the bit, its checkpoints are small and open everywhere as the merged
model, and it resumes as any run does."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import generate
from common.checkpoint import open_checkpoint
from common.errors import CheckpointError
from common.lora import TARGETS, LoRA, add_adapters
from common.validation import build
from generation import completion
from generation.sampling import Sampling
from model import TransformerLanguageModel
from tests.helpers import CPU, estimated, snapshot, without_packages
from tests.hostile.readers import seal
from tests.models import MODERN, bpe, write_adapters, write_model
from tests.training.helpers import checkpoint_of, measured, steps_of
from tools.export_hf import main as export_hf
from training.config import Config
from training.records import CONFIG, read_metrics

pytestmark = pytest.mark.extras("peft")

FILES = {"adapter_model.safetensors", "adapter_config.json", "config.json", "tokenizer.json", "manifest.json"}
FILES |= {"optimizer.safetensors", "training_state.json"}
FORMS = {"gpt2": {}, "tied": {"tie_embeddings": True, "bias": False}, "modern": MODERN}
TOKENS = torch.arange(48).view(2, 24) * 5


@pytest.fixture(scope="module")
def finished(train: Callable, unbroken: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run of adapters, for the weights of `unbroken`. Not to be changed by a test."""
    folder = tmp_path_factory.mktemp("finished") / "lora"
    before = snapshot(unbroken)
    result = train(folder, init_from=unbroken, lora_rank=4)
    assert result.code == 0, result.err
    assert "LoRA       rank 4 on attention, feed_forward, embeddings: 2,552 parameters are trained" in result.out
    assert snapshot(unbroken) == before, "the base was changed"
    assert "17,816 parameters, 2,552 of them trained" in result.out
    return folder


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "lora")
    return tmp_path / "lora"


def loaded(path: Path) -> TransformerLanguageModel:
    return generate.load_checkpoint(open_checkpoint(path), "cpu", torch.float32)[0]


def adapters(run: Path, step: int = 24) -> bytes:
    return (run / "checkpoints" / f"step_{step:08d}" / "adapter_model.safetensors").read_bytes()


def test_the_base_stays_to_the_bit_and_what_is_kept_is_small(finished: Path, unbroken: Path) -> None:
    losses = [row["val_loss"] for row in read_metrics(finished) if "val_loss" in row]
    base = [row["val_loss"] for row in read_metrics(unbroken) if "val_loss" in row]
    assert losses[-1] < base[-1] - 0.01, "nothing was learned"
    for folder in (finished / "best", finished / "checkpoints" / "step_00000024"):
        files = {path.name for path in folder.iterdir()}
        assert files == (FILES - {"optimizer.safetensors"} if folder.name == "best" else FILES)
        held = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        assert sum(tensor.numel() for tensor in held.values()) == 2552
        for name in files & {"optimizer.safetensors"}:
            kept = safetensors.torch.load_file(folder / name)
            assert sum(tensor.numel() for name, tensor in kept.items() if name.endswith(".exp_avg")) == 2552
        described = json.loads((folder / "adapter_config.json").read_text())
        assert described["base_model_name_or_path"] == str(unbroken / "checkpoints" / "step_00000024")
        assert described["revision"] == snapshot(unbroken)["checkpoints/step_00000024/model.safetensors"]
        assert json.loads((folder / "config.json").read_text())["total_parameters"] == 15_264
    merged, base_weights = (loaded(path).state_dict() for path in (finished, unbroken))
    changed = {name for name in merged if not torch.equal(merged[name], base_weights[name])}
    modules = ("attention.qkv", "attention.out_proj", "feed_forward.fc1", "feed_forward.fc2")
    assert changed == {*(f"blocks.0.{module}.weight" for module in modules), "token_embedding.weight", "head.weight"}


@pytest.mark.parametrize("after", [3, 13])
def test_an_interrupted_run_ends_as_if_it_had_not_been(
    after: int, interrupt: Callable, train: Callable, unbroken: Path, finished: Path, tmp_path: Path
) -> None:
    flags = {"init_from": unbroken, "lora_rank": 4}
    interrupt(tmp_path / "run", after, **flags)
    assert train(tmp_path / "run", **flags).code == 0
    assert adapters(tmp_path / "run") == adapters(finished)
    assert measured(tmp_path / "run") == measured(finished)
    folders = [folder / "checkpoints" / "step_00000024" for folder in (tmp_path / "run", finished)]
    one, other = ((folder / "optimizer.safetensors").read_bytes() for folder in folders)
    assert one == other


def test_in_bf16_and_with_activation_checkpointing(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    flags = {"init_from": unbroken, "lora_rank": 4, "max_steps": 6, "eval_interval": 0}
    plain = train(tmp_path / "plain", **flags)
    less = train(tmp_path / "less", **flags, extra=("--activation_checkpointing",))
    half = train(tmp_path / "half", **flags, precision="bf16")
    assert plain.code == less.code == half.code == 0
    assert adapters(tmp_path / "plain", 6) == adapters(tmp_path / "less", 6)
    losses = [[row["train_loss"] for row in read_metrics(tmp_path / name)] for name in ("plain", "half")]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)


# What contradicts it


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"lora_rank": 4}, "name it with --init_from CHECKPOINT"),
        ({"lora_alpha": 8}, "lora_alpha (flag) applies only with --lora_rank N"),
        ({"lora_targets": "attention"}, "lora_targets (flag) applies only with --lora_rank N"),
        ({"lora_rank": 4, "init_from": "a", "optimizer": "muon"}, "add --optimizer adamw"),
        ({"lora_rank": -1}, "--lora_rank is"),
        ({"lora_rank": 4, "init_from": "a", "lora_alpha": 0}, "--lora_alpha is"),
        ({"lora_rank": 4, "init_from": "a", "lora_targets": "head"}, "attention, feed_forward"),
    ],
    ids=str,
)
def test_flags_that_would_do_nothing_are_refused(
    flags: dict[str, Any], said: str, train: Callable, tmp_path: Path
) -> None:
    result = train(tmp_path / "run", **flags)
    assert result.code == 2 and said in result.err and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_rank": 8}, "lora_rank: 4 in the checkpoint, 8 now"),
        ({"lora_alpha": 8}, "lora_alpha: 16.0 in the checkpoint, 8.0 now"),
        ({"lora_targets": "attention"}, "lora_targets: ('fc1', "),
        ({"lora_rank": None}, "lora_rank: 4 in the checkpoint, 0 now"),
    ],
    ids=str,
)
def test_other_adapters_cannot_take_over_a_run(
    changes: dict[str, Any], said: str, train: Callable, copy: Path, unbroken: Path
) -> None:
    before = snapshot(copy)
    result = train(copy, **{"init_from": unbroken, "lora_rank": 4, "max_steps": 30, **changes})
    assert result.code == 4 and said in result.err and "Traceback" not in result.err
    assert snapshot(copy) == before


def test_a_run_without_adapters_does_not_continue_with_some(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    result = train(copy_of, init_from=copy_of, lora_rank=4, max_steps=30)
    assert result.code == 4 and "did not start from" in result.err
    result = train(tmp_path / "new", resume_from=copy_of, lora_rank=4)
    assert result.code == 4 and "lora_rank: 0 in the checkpoint, 4 now" in result.err


def test_adapters_are_a_base_as_any_checkpoint_is(train: Callable, finished: Path, tmp_path: Path) -> None:
    second = train(tmp_path / "second", init_from=finished, lora_rank=4, max_steps=4)
    assert second.code == 0, second.err
    assert train(tmp_path / "second", init_from=finished, lora_rank=4, max_steps=6).code == 0
    assert loaded(tmp_path / "second").state_dict().keys() == loaded(finished).state_dict().keys()
    full = train(tmp_path / "full", init_from=finished, max_steps=2, dropout=0.0)
    assert full.code == 0 and (tmp_path / "full" / "checkpoints" / "step_00000002" / "model.safetensors").exists()


def test_without_peft_it_says_what_to_install(train: Callable, unbroken: Path, tmp_path: Path) -> None:
    with without_packages("peft"):
        result = train(tmp_path / "run", init_from=unbroken, lora_rank=4)
    assert result.code == 2 and "needs peft: pip install -r requirements-extras.txt" in result.err


def test_another_base_in_the_place_of_the_old_is_refused(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    flags = {"init_from": copy_of, "lora_rank": 4}
    assert train(tmp_path / "lora", **flags, max_steps=6).code == 0
    assert train(copy_of, seed=5, resume="never").code == 0
    result = train(tmp_path / "lora", **flags, max_steps=12)
    assert result.code == 4 and "holds adapters for other weights" in result.err and str(copy_of) in result.err
    code = generate.main(["--checkpoint", str(tmp_path / "lora"), "--prompt", "the", "--device", "cpu"])
    assert code == 4


# The rest of a run


def test_a_base_in_the_run_that_makes_way_is_refused(train: Callable, copy_of: Path, tmp_path: Path) -> None:
    """Its adapters would name a base that is no longer there."""
    shutil.copytree(copy_of, tmp_path / "own")
    result = train(tmp_path / "own", init_from=tmp_path / "own", lora_rank=4, resume="never")
    assert result.code == 4 and "--resume never would rename" in result.err
    assert (tmp_path / "own" / "checkpoints").exists()


def test_the_runs_own_config_continues_it(train: Callable, copy: Path) -> None:
    import train_colab_mmap

    own = copy / CONFIG
    content = json.loads(own.read_text())
    content["config"]["output_dir"] = str(copy)
    own.write_text(json.dumps(content))
    assert train_colab_mmap.main(["--config", str(own), "--max_steps", "30"]) == 0
    assert steps_of(copy) == [30, 24]


def test_a_lost_folder_comes_back_from_the_mirror(
    interrupt: Callable, train: Callable, unbroken: Path, finished: Path, tmp_path: Path
) -> None:
    (tmp_path / "drive").mkdir()
    flags = {"init_from": unbroken, "lora_rank": 4, "checkpoint_dir": tmp_path / "drive" / "copies"}
    assert train(tmp_path / "run", **flags, max_steps=12).code == 0
    copies = tmp_path / "drive" / "copies" / "run"
    assert {path.name for path in checkpoint_of(copies, 12).iterdir()} == FILES | {"run"}
    shutil.rmtree(tmp_path / "run")
    assert train(tmp_path / "run", **flags, max_steps=18).code == 0
    assert steps_of(tmp_path / "run") == [18, 12]


@pytest.mark.parametrize("look", ["--dry_run", "--profile"])
def test_dry_run_and_profile_write_no_run(look: str, train: Callable, unbroken: Path, tmp_path: Path) -> None:
    result = train(tmp_path / "run", init_from=unbroken, lora_rank=4, extra=(look,))
    assert result.code == 0 and "no run was written" in result.out and "Warning" not in result.out, result.err
    assert not (tmp_path / "run").exists()


# What it takes


@pytest.mark.parametrize(
    "targets", ["attention,feed_forward,embeddings", "attention,feed_forward", "attention", "feed_forward"]
)
def test_the_estimate_counts_what_autograd_keeps(targets: str) -> None:
    config = Config(
        embed_dim=128, num_layers=4, max_seq_len=64, batch_size=4, init_from="base", lora_rank=8, lora_targets=targets
    )
    model = TransformerLanguageModel(config.shape(512))
    add_adapters(model, config.lora())
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.zeros(4, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens)
    held = sum(size for address, size in kept.items() if address not in own)
    state = 4 * model.num_parameters() + 8 * model.num_parameters(trained_only=True)
    forecast = estimated(config, model, CPU) - state
    assert held < forecast < 1.35 * held


# What others open


@pytest.mark.parametrize("targets", [tuple(TARGETS), *((target,) for target in TARGETS)])
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_a_checkpoint_opens_as_the_merged_model(options: dict, targets: tuple[str, ...], tmp_path: Path) -> None:
    base = write_model(tmp_path / "base", **options)
    adapted = write_adapters(tmp_path / "lora", tmp_path / "base", targets)
    with torch.inference_mode():
        torch.testing.assert_close(loaded(tmp_path / "lora")(TOKENS), adapted(TOKENS), atol=1e-4, rtol=0)
        assert (adapted(TOKENS) - base(TOKENS)).abs().max() > 0.1


def test_peft_reads_the_files_itself(tmp_path: Path) -> None:
    from peft import PeftModel

    base = write_model(tmp_path / "base")
    adapted = write_adapters(tmp_path / "lora", tmp_path / "base")
    with torch.inference_mode():
        theirs = PeftModel.from_pretrained(base, tmp_path / "lora").eval()
        torch.testing.assert_close(theirs(TOKENS), adapted(TOKENS), atol=1e-5, rtol=0)


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("options", FORMS.values(), ids=FORMS)
def test_an_export_answers_as_the_adapted_model(options: dict, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_model(tmp_path / "base", **options)
    adapted = write_adapters(tmp_path / "lora", tmp_path / "base")
    assert export_hf([str(tmp_path / "lora"), str(tmp_path / "exported")]) == 0
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")(TOKENS).logits
        torch.testing.assert_close(logits, adapted(TOKENS), atol=2e-4, rtol=0)


def test_a_cache_holds_what_the_adapters_say(tmp_path: Path) -> None:
    """As needed for answers to prompts during training."""
    write_model(tmp_path / "base")
    adapted = write_adapters(tmp_path / "lora", tmp_path / "base")
    sampling = Sampling(10, 0.0)
    models = (adapted, loaded(tmp_path / "lora"))
    texts = [completion.generate(model, bpe(), ["the cat"], sampling)[0].text for model in models]
    assert texts[0] == texts[1]


# Files from elsewhere


def test_adapters_of_another_model_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    write_adapters(tmp_path / "lora", tmp_path / "base")
    file = tmp_path / "lora" / "adapter_model.safetensors"
    good, name = safetensors.torch.load_file(file), "base_model.model.blocks.1.attention.qkv.lora_A.weight"
    for bad, said in (
        ({key: tensor for key, tensor in good.items() if key != name}, f"{name} is missing"),
        (good | {"blocks.2.attention.qkv": good[name].clone()}, "blocks.2.attention.qkv is unknown"),
        (good | {name: good[name][:, :4].clone()}, r"\(4, 4\), not \(4, 32\)"),
        (good | {name: good[name][:2].clone()}, "do not have rank 4"),
        (good | {name: good[name].long()}, "torch.int64"),
        (good | {name: torch.full_like(good[name], torch.nan)}, "not finite"),
    ):
        safetensors.torch.save_file(bad, file)
        seal(tmp_path / "lora")
        with pytest.raises(CheckpointError, match=said):
            loaded(tmp_path / "lora")


@pytest.mark.parametrize(
    "change",
    [
        {"r": 0}, {"r": "4"}, {"r": 10**9}, {"lora_alpha": 0}, {"lora_alpha": None}, {"target_modules": []},
        {"target_modules": "all-linear"}, {"target_modules": [["qkv"]]}, {"base_model_name_or_path": ""},
        {"base_model_name_or_path": 3}, {"revision": "abc"}, {"revision": None},
    ],
    ids=str,
)  # fmt: skip
def test_an_invalid_description_is_refused(change: dict) -> None:
    good = {"r": 4, "lora_alpha": 8.0, "target_modules": ["qkv"], "base_model_name_or_path": "x", "revision": "0" * 64}
    assert build(LoRA, good).target_modules == ("qkv",)
    with pytest.raises(ValueError, match=next(iter(change))):
        build(LoRA, good | change)


def test_the_base_is_found_from_the_current_folder_and_after_a_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    write_model(Path("pretrained/base"))
    write_adapters(Path("runs/lora/best"), Path("pretrained/base"))
    assert loaded(Path("runs/lora/best"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "project").rename(tmp_path / "moved")
    assert loaded(Path("moved/runs/lora/best"))
    with torch.random.fork_rng():
        write_model(Path("pretrained/base"), std=0.1)  # another base of the same name does not hide the right one
    assert loaded(Path("moved/runs/lora/best"))


def test_a_missing_or_another_base_is_an_error_that_names_both(tmp_path: Path) -> None:
    write_model(tmp_path / "base")
    write_adapters(tmp_path / "lora", tmp_path / "base")
    (tmp_path / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="Restore them") as gone:
        loaded(tmp_path / "lora")
    with torch.random.fork_rng():
        write_model(tmp_path / "base", std=0.1)
    with pytest.raises(CheckpointError, match="holds adapters for other weights") as other:
        loaded(tmp_path / "lora")
    for raised in (gone, other):
        assert str(tmp_path / "lora") in str(raised.value) and str(tmp_path / "base") in str(raised.value)


def test_a_base_of_the_blog(tmp_path: Path) -> None:
    """Weights by torch.save, with torch.compile's prefix."""
    base = write_model(tmp_path / "ours")
    shutil.copytree(tmp_path / "ours", tmp_path / "base", ignore=shutil.ignore_patterns("m*", "opt*", "training*"))
    weights = {f"_orig_mod.{name}": tensor for name, tensor in base.state_dict().items()}
    torch.save(weights, tmp_path / "base" / "pytorch_model.bin")
    adapted = write_adapters(tmp_path / "lora", tmp_path / "base")
    with torch.inference_mode():
        torch.testing.assert_close(loaded(tmp_path / "lora")(TOKENS), adapted(TOKENS), atol=1e-4, rtol=0)
