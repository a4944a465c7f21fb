"""The model against its contract: names, counts, causality, the cache, GPT-2 itself, and what it refuses."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from common.validation import build
from model import ACTIVATIONS, IGNORE_INDEX, KVCache, Linear, TransformerLanguageModel, rms_norm, rotations
from model_config import ModelConfig

pytestmark = pytest.mark.quick

OPTIONS = {
    "activation": tuple(ACTIVATIONS),
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rope"),
    "qk_norm": (False, True),
    "bias": (True, False),
    "tie_embeddings": (False, True),
    "embed_norm": (False, True),
}


def pairwise_options() -> list[dict]:
    """Few combinations of OPTIONS that hold every pair of values of any two options (greedy set cover)."""
    combinations = [dict(zip(OPTIONS, values, strict=True)) for values in itertools.product(*OPTIONS.values())]
    pairs = {id(c): set(itertools.combinations(c.items(), 2)) for c in combinations}
    open_pairs = set().union(*pairs.values())
    chosen = []
    while open_pairs:
        best = max(combinations, key=lambda c: len(pairs[id(c)] & open_pairs))
        open_pairs -= pairs[id(best)]
        chosen.append(best)
    return chosen


every_pair_of_options = pytest.mark.parametrize(
    "options", pairwise_options(), ids=lambda options: "-".join(str(value) for value in options.values())
)


def tiny_config(**changes) -> ModelConfig:
    return ModelConfig(
        **{"vocab_size": 29, "embed_dim": 16, "num_heads": 2, "num_layers": 2, "max_seq_len": 12, **changes}
    )


def random_model(config: ModelConfig, dtype: torch.dtype = torch.float64) -> TransformerLanguageModel:
    """All weights random and large (a fresh model's are near zero), so that whatever matters shows in the logits."""
    torch.manual_seed(0)
    model = TransformerLanguageModel(config).to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale_of_norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(mean=1.0 if scale_of_norm else 0.0, std=0.4)
    return model


def random_tokens(config: ModelConfig, rows: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(config.vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))


# Names and counts


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ({"vocab_size": 32_000}, 134_601_216),
        ({"vocab_size": 65, "embed_dim": 256, "num_layers": 4, "num_heads": 4, "max_seq_len": 256}, 3_258_368),
        ({"vocab_size": 190, "embed_dim": 256, "num_layers": 4, "num_heads": 4, "max_seq_len": 256}, 3_322_368),
    ],
)
def test_published_parameter_counts(shape: dict, count: int) -> None:
    with torch.device("meta"):
        model = TransformerLanguageModel(ModelConfig(**shape))
    assert model.num_parameters() == count


def test_parameter_names_are_the_published_ones() -> None:
    names = set(TransformerLanguageModel(tiny_config(num_layers=1)).state_dict())
    assert names == {
        "token_embedding.weight",
        "positional_embedding.weight",
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.qkv.bias",
        "blocks.0.attention.out_proj.weight",
        "blocks.0.attention.out_proj.bias",
        "blocks.0.feed_forward.fc1.weight",
        "blocks.0.feed_forward.fc1.bias",
        "blocks.0.feed_forward.fc2.weight",
        "blocks.0.feed_forward.fc2.bias",
        "blocks.0.norm1.weight",
        "blocks.0.norm1.bias",
        "blocks.0.norm2.weight",
        "blocks.0.norm2.bias",
        "ln_f.weight",
        "ln_f.bias",
        "head.weight",
    }


def test_flops_per_token_by_hand() -> None:
    """A model of matrices only, without biases and norm weights: 6 per weight, and 12 * L * T * C for attention."""
    config = tiny_config(bias=False, norm="rmsnorm", position="rope")
    layer = 16 * 48 + 16 * 16 + 16 * 64 + 64 * 16  # qkv, out_proj, fc1, fc2
    by_hand = 6 * (2 * layer + 16 * 29) + 12 * 2 * 12 * 16
    assert TransformerLanguageModel(config).flops_per_token() == by_hand
    # Tying saves memory and no arithmetic; looking up a position costs none.
    for change in ({"tie_embeddings": True}, {"position": "learned"}):
        model = TransformerLanguageModel(tiny_config(bias=False, norm="rmsnorm", **{"position": "rope", **change}))
        assert model.flops_per_token() == by_hand, change


def test_initialisation_is_gpt2s() -> None:
    torch.manual_seed(0)
    model = TransformerLanguageModel(tiny_config(embed_dim=128, num_layers=3, vocab_size=300, max_seq_len=128))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name or "ln_f" in name:
            assert (parameter == 1).all(), name
        else:
            writes_to_residual = name.endswith(("out_proj.weight", "fc2.weight"))
            expected = 0.02 / math.sqrt(2 * 3) if writes_to_residual else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.1 * expected, name


def test_a_fresh_model_knows_nothing() -> None:
    """Its loss is that of a uniform guess."""
    torch.manual_seed(0)
    config = tiny_config(vocab_size=200, embed_dim=64, num_heads=4)
    tokens = random_tokens(config, 16, 12)
    loss = TransformerLanguageModel(config)(tokens, tokens.roll(-1, 1))
    assert loss.item() == pytest.approx(math.log(200), abs=0.05)


# Causality and the cache


@pytest.mark.parametrize("norm", OPTIONS["norm"])
@pytest.mark.parametrize("position", OPTIONS["position"])
@pytest.mark.parametrize("qk_norm", OPTIONS["qk_norm"])
def test_a_token_changes_no_logits_before_it(norm: str, position: str, qk_norm: bool) -> None:
    config = tiny_config(norm=norm, position=position, qk_norm=qk_norm)
    model = random_model(config)
    tokens = random_tokens(config, 2, 12)
    logits = model(tokens)
    for t in range(12):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % config.vocab_size
        difference = (model(changed) - logits).abs().amax(dim=(0, 2))  # (T,)
        assert not difference[:t].gt(1e-12).any()
        assert (difference[t:] > 1e-6).all()  # it is seen, by itself and by all that follow


def test_rope_sees_distances_only() -> None:
    """Shifting all positions by three changes nothing; moving one token away from the others does."""
    config = tiny_config(position="rope", num_layers=1)
    attention = random_model(config).blocks[0].attention
    x = torch.randn(2, 5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    here, there = (attention(x, rotations(torch.arange(5) + shift, config.head_dim)) for shift in (0, 3))
    torch.testing.assert_close(here, there, rtol=0, atol=1e-6)
    uneven = attention(x, rotations(torch.tensor([0, 1, 2, 3, 7]), config.head_dim))
    assert (uneven[:, 4] - here[:, 4]).abs().max() > 1e-6


@every_pair_of_options
@pytest.mark.parametrize("parts", [(11, 1), (5, *[1] * 7), (1,) * 12, (4, 5, 3), (12,)], ids=str)
def test_cached_logits_equal_uncached(options: dict, parts: tuple[int, ...]) -> None:
    config = tiny_config(**options)
    model = random_model(config)
    tokens = random_tokens(config, 3, 12)
    cache = KVCache(config, 3, tokens.device, torch.float64)
    cached = torch.cat([model(part, cache=cache) for part in tokens.split(parts, dim=1)], dim=1)
    assert cache.lengths == [12] * 3
    torch.testing.assert_close(cached, model(tokens), rtol=0, atol=1e-6)


@every_pair_of_options
def test_cached_logits_of_rows_of_different_lengths(options: dict) -> None:
    """Prompts padded on the right, cut back to their lengths, continued by a token and by a chunk."""
    config = tiny_config(**options)
    model = random_model(config)
    lengths, tokens = [2, 7, 4], random_tokens(config, 3, 12)
    cache = KVCache(config, 3, tokens.device, torch.float64)
    prompt = tokens[:, :7].clone()
    for row, length in enumerate(lengths):
        prompt[row, length:] = 0  # padding
    first = model(prompt, cache=cache)
    cache.truncate(lengths)

    def following(count: int) -> torch.Tensor:
        return torch.stack([tokens[row, n : n + count] for row, n in enumerate(cache.lengths)])

    steps = [model(following(count), cache=cache) for count in (1, 3, 1)]
    for row, length in enumerate(lengths):
        alone = model(tokens[row : row + 1, : length + 5])[0]
        together = torch.cat([first[row, :length], *(step[row] for step in steps)])
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


class AttentionCalls(TorchFunctionMode):
    """Records the queries' shape and `enable_gqa` of each attention with a mask or of a single query."""

    def __init__(self) -> None:
        super().__init__()
        self.slow: list[bool] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and (kwargs["attn_mask"] is not None or args[0].size(2) == 1):
            self.slow.append(kwargs["enable_gqa"])
        return func(*args, **kwargs)


def test_grouped_keys_need_no_slow_kernel_where_there_is_a_mask() -> None:
    """Only the flash kernel, which takes no mask, knows `enable_gqa`: others fall back to the math kernel."""
    config = tiny_config(num_heads=4, num_kv_heads=2, position="rope")
    model, tokens = random_model(config), random_tokens(config, 2, 12)
    cache = KVCache(config, 2, tokens.device, torch.float64)
    with AttentionCalls() as calls:
        model(tokens[:, :4], cache=cache)
        cache.truncate([2, 4])
        steps = torch.stack([tokens[0, 2:3], tokens[1, 4:5]])
        logits = model(steps, cache=cache)[:, -1]
        model(tokens, starts=torch.zeros_like(tokens))
    assert len(calls.slow) == 2 * config.num_layers and not any(calls.slow)
    for row, length in enumerate((3, 5)):
        torch.testing.assert_close(logits[row], model(tokens[row : row + 1, :length])[0, -1], rtol=0, atol=1e-6)
    torch.testing.assert_close(model(tokens, starts=torch.zeros_like(tokens)), model(tokens), rtol=0, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 1, 48), (48,), (2, 1, 48)])
def test_a_single_bf16_vector_is_multiplied_like_any_other(bias: bool, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    layer, x = Linear(48, 80, bias=bias), torch.randn(shape)
    y = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16 and y.shape == (*shape[:-1], 80)
    torch.testing.assert_close(y.float(), layer.float()(x), rtol=0.02, atol=0.02)


def test_a_truncated_cache_continues_from_there() -> None:
    config = tiny_config()
    model = random_model(config)
    tokens = random_tokens(config, 2, 9)
    cache = KVCache(config, 2, tokens.device, torch.float64)
    model(random_tokens(config, 2, 12, seed=5), cache=cache)
    cache.truncate([0, 0])
    torch.testing.assert_close(model(tokens, cache=cache), model(tokens), rtol=0, atol=1e-6)


def test_too_many_tokens_are_refused_with_both_numbers() -> None:
    config = tiny_config()
    model = random_model(config)
    assert model(random_tokens(config, 1, 12)).shape == (1, 12, 29)
    with pytest.raises(ValueError, match=r"13 tokens .* max_seq_len 12"):
        model(random_tokens(config, 1, 13))
    cache = KVCache(config, 1, torch.device("cpu"), torch.float64)
    model(random_tokens(config, 1, 10), cache=cache)
    with pytest.raises(ValueError, match=r"13 tokens .* max_seq_len 12"):
        model(random_tokens(config, 1, 3), cache=cache)


# GPT-2 itself


@pytest.mark.extras("transformers")
@pytest.mark.parametrize("tie", [True, False])
def test_logits_and_loss_are_those_of_hugging_face_gpt2(tie: bool) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 24}
    theirs = GPT2LMHeadModel(GPT2Config(**shape, activation_function="gelu_new", tie_word_embeddings=tie)).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(mean=1.0 if ".ln_" in name and name.endswith("weight") else 0.0, std=0.2)
    source = theirs.state_dict()
    renamed = {
        "wte": "token_embedding", "wpe": "positional_embedding", "h": "blocks", "attn.c_attn": "attention.qkv",
        "attn.c_proj": "attention.out_proj", "mlp.c_fc": "feed_forward.fc1", "mlp.c_proj": "feed_forward.fc2",
        "ln_1": "norm1", "ln_2": "norm2",
    }  # fmt: skip
    weights = {}
    for name, tensor in source.items():
        ours = f".{name.removeprefix('transformer.')}"
        for old, new in renamed.items():
            ours = ours.replace(f".{old}.", f".{new}.")
        conv1d = any(part in name for part in ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        weights[ours.removeprefix(".").replace("lm_head", "head")] = tensor.T if conv1d else tensor

    config = ModelConfig(61, 32, 4, 3, max_seq_len=24, activation="gelu_tanh", tie_embeddings=tie)
    model = TransformerLanguageModel(config).eval()
    model.load_weights(weights)
    assert model.num_parameters() == sum(p.numel() for p in theirs.parameters())
    tokens = random_tokens(config, 4, 24)
    with torch.no_grad():
        expected = theirs(tokens, labels=tokens)
        assert expected.logits.abs().max() > 1  # there is something to compare
        torch.testing.assert_close(model(tokens), expected.logits, rtol=1e-4, atol=1e-4)
        loss = model(tokens[:, :-1], tokens[:, 1:])  # Hugging Face shifts the labels itself
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=1e-4)


# Training


@every_pair_of_options
def test_options_run_forward_backward_and_a_cached_step(options: dict) -> None:
    config = tiny_config(dropout=0.1, **options)
    torch.manual_seed(0)
    model = TransformerLanguageModel(config)
    tokens = random_tokens(config, 2, 12)
    loss = model(tokens, tokens.roll(-1, 1))
    assert loss.shape == () and loss.isfinite()
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), f"{name} takes no part"
    model.eval()
    cache = KVCache(config, 2, torch.device("cpu"), torch.float32)
    model(tokens[:, :4], cache=cache)
    assert model(tokens[:, 4:5], cache=cache).shape == (2, 1, 29)
    assert cache.lengths == [5, 5]


def test_the_loss_is_the_mean_cross_entropy_of_the_logits() -> None:
    config = tiny_config()
    model = random_model(config)
    tokens, targets = random_tokens(config, 3, 12), random_tokens(config, 3, 12, seed=2)
    log_probabilities = model(tokens).log_softmax(-1)
    expected = -log_probabilities.gather(2, targets[..., None]).mean()
    torch.testing.assert_close(model(tokens, targets), expected.float(), rtol=1e-6, atol=1e-6)


def test_ignored_targets_do_not_count() -> None:
    config = tiny_config()
    model = random_model(config)
    tokens, targets = random_tokens(config, 2, 12), random_tokens(config, 2, 12, seed=2)
    targets[:, 5:] = IGNORE_INDEX
    torch.testing.assert_close(model(tokens, targets), model(tokens[:, :5], targets[:, :5]), rtol=1e-6, atol=1e-6)


def test_dropout_acts_in_training_only() -> None:
    config = tiny_config(dropout=0.5)
    model, without = random_model(config), random_model(tiny_config())
    tokens = random_tokens(config, 2, 12)
    torch.testing.assert_close(model(tokens), without(tokens))
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(model(tokens), model(tokens))


@pytest.mark.parametrize("form", [{}, {"position": "rope", "qk_norm": True, "norm": "rmsnorm", "embed_norm": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_residual_stream_is_in_bf16_where_autocast_is(form: dict, dtype: torch.dtype) -> None:
    model, streams = random_model(tiny_config(**form), torch.float32), []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: streams.append((args[0].dtype, out.dtype)))
    tokens = torch.arange(12)[None] % 29
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        model(tokens, tokens).backward()
    expected = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    assert {kind for pair in streams for kind in pair} == {expected}
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())


def test_rms_norm_is_the_same_whatever_autocast_makes_of_it() -> None:
    """It computes in fp32 itself, because autocast does so in some versions of PyTorch only."""
    x = torch.randn(3, 5, 16)
    for each in (x, x.bfloat16()):
        exact = each.float() / (each.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                normed = rms_norm(each)
            assert normed.dtype == each.dtype
            torch.testing.assert_close(normed, exact.to(each.dtype), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.2}, {"position": "rope", "qk_norm": True, "norm": "rmsnorm"}])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(options: dict, precision: torch.dtype) -> None:
    torch.manual_seed(0)
    model = TransformerLanguageModel(tiny_config(num_layers=4, **options)).train()
    tokens = torch.randint(29, (4, 12))
    results, kept = [], []
    for model.activation_checkpointing in (False, True):
        storages: dict[int, int] = {}

        def keep(tensor: torch.Tensor, storages: dict[int, int] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        torch.manual_seed(1)
        model.zero_grad()
        autocast = torch.autocast("cpu", precision, enabled=precision != torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
            loss = model(tokens, tokens)
        kept.append(sum(storages.values()))
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    assert all(torch.equal(plain, checkpointed) for plain, checkpointed in zip(*results, strict=True))
    assert kept[1] < 0.6 * kept[0]


# Loading weights


def test_published_checkpoints_load() -> None:
    """An `_orig_mod.` prefix and a stored mask, as the blog's compiled models left them."""
    config = tiny_config()
    source, target = random_model(config), TransformerLanguageModel(config).double().eval()
    state = {f"_orig_mod.{name}": tensor for name, tensor in source.state_dict().items()}
    state["_orig_mod.causal_mask"] = torch.ones(12, 12).triu(1).bool()
    before = dict(state)
    target.load_weights(state)
    tokens = random_tokens(config, 2, 12)
    assert torch.equal(source(tokens), target(tokens))
    assert state.keys() == before.keys()  # the caller's dict stays as it was
    target.load_weights({**source.state_dict(), "causal_mask": torch.ones(12, 12)})
    assert "causal_mask" not in target.state_dict()


@pytest.mark.parametrize("absent", ["head.weight", "token_embedding.weight", None])
def test_tied_weights_load_from_either_name(absent: str | None) -> None:
    config = tiny_config(tie_embeddings=True)
    source, target = random_model(config), TransformerLanguageModel(config).double().eval()
    target.load_weights({name: tensor for name, tensor in source.state_dict().items() if name != absent})
    tokens = random_tokens(config, 2, 12)
    assert torch.equal(source(tokens), target(tokens))
    assert target.head.weight is target.token_embedding.weight


def test_weights_that_do_not_fit_are_named() -> None:
    config = tiny_config()
    model = random_model(config)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = random_model(config).state_dict()
    del state["blocks.1.norm1.bias"]
    state["blocks.7.norm1.bias"] = torch.zeros(16)
    state["head.weight"] = torch.zeros(31, 16)
    with pytest.raises(ValueError) as caught:
        model.load_weights(state)
    message = str(caught.value)
    for said in ("blocks.1.norm1.bias is missing", "blocks.7.norm1.bias is unknown", "head.weight", "(31, 16)", "(29,"):
        assert said in message
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_untied_head_is_not_loaded_into_a_tied_model() -> None:
    """One of two different tensors would be lost without a word."""
    state = random_model(tiny_config()).state_dict()
    with pytest.raises(ValueError, match=r"head\.weight"):
        random_model(tiny_config(tie_embeddings=True)).load_weights(state)


# ModelConfig


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_layers": -1}, "num_layers is -1"),
        ({"max_seq_len": 12.5}, "max_seq_len is 12.5"),
        ({"num_heads": True}, "num_heads is true"),
        ({"embed_dim": "16"}, 'embed_dim is "16"'),
        ({"embed_dim": None}, "embed_dim is null"),
        ({"activation": "swish"}, "gelu, gelu_tanh, swiglu"),
        ({"norm": "batchnorm"}, "layernorm, rmsnorm"),
        ({"position": "alibi"}, "learned, rope"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"dropout": float("nan")}, "dropout is NaN"),
        ({"dropout": "high"}, 'dropout is "high"'),
        ({"bias": "false"}, 'bias is "false"'),
        ({"qk_norm": 1}, "qk_norm is 1"),
        ({"position": "rope", "embed_dim": 6, "num_heads": 2}, "even"),
    ],
)
def test_values_out_of_range_are_refused(wrong: dict, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        build(ModelConfig, tiny_config().to_dict() | {"head_dim": None} | wrong)
    assert said in str(caught.value)


def test_heads_that_do_not_divide_the_width_are_answered_with_some_that_do() -> None:
    with pytest.raises(ValueError) as caught:
        build(ModelConfig, {"vocab_size": 10, "embed_dim": 48, "num_heads": 7})
    message = str(caught.value)
    assert "num_heads is 7" in message and "48" in message
    suggested = [int(word) for word in message.rsplit(":", 1)[1].split(",")]
    assert {6, 8} <= set(suggested) and all(48 % heads == 0 for heads in suggested)


def test_missing_keys_take_their_defaults() -> None:
    config = ModelConfig(50, embed_dim=24)
    assert (config.position, config.norm, config.activation) == ("learned", "layernorm", "gelu")
    assert config.bias and not config.tie_embeddings and not config.qk_norm
    with pytest.raises(ValueError, match="vocab_size"):
        ModelConfig(embed_dim=24)


def test_a_vocabulary_padded_for_the_gpu_is_not_seen_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same logits, loss and gradients as without the padding, which only a GPU gets."""
    torch.manual_seed(0)
    model = TransformerLanguageModel(ModelConfig(65, 32, 2, 2, max_seq_len=8))
    tokens = torch.randint(65, (16, 8))

    def results() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(tokens, tokens.roll(1))
        loss.backward()
        return [model(tokens), loss, *(parameter.grad.clone() for parameter in model.parameters())]

    plain = results()
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    padded = results()
    assert padded[0].shape == (16, 8, 65)
    for a, b in zip(plain, padded, strict=True):
        torch.testing.assert_close(a, b)


def test_zero_init_starts_with_every_token_equally_likely_and_blocks_that_do_nothing() -> None:
    config = ModelConfig(50, 32, 2, 2, max_seq_len=8, zero_init=True, embed_norm=True, norm="rmsnorm", position="rope")
    model = TransformerLanguageModel(config)
    tokens = torch.randint(50, (2, 8))
    assert model(tokens, tokens).item() == pytest.approx(math.log(50))
    embedded = model.embed_norm(model.token_embedding(tokens))
    torch.testing.assert_close(embedded.square().mean(-1), torch.ones(2, 8), rtol=1e-2, atol=0)
    torch.testing.assert_close(model.hidden(tokens), model.ln_f(embedded))
    assert model.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_what_attention_keeps_grows_with_the_context_not_with_its_square(dropout: float) -> None:
    def largest_kept(length: int) -> int:
        """Elements of the largest tensor that is kept for the backward pass of two sequences."""
        model = TransformerLanguageModel(ModelConfig(40, 32, 2, 2, max_seq_len=length, dropout=dropout))
        tokens = torch.randint(0, 40, (2, length))
        sizes: list[int] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(tokens, tokens).backward()
        return max(sizes)

    assert largest_kept(1024) == 2 * largest_kept(512) < 2 * 2 * 2 * 512 * 512  # sequences, heads, positions squared
    assert not any("mask" in name for name in TransformerLanguageModel(tiny_config()).state_dict())


@pytest.mark.parametrize(("tokens", "dtype"), [(128, torch.float32), (129, torch.bfloat16)])
def test_in_bf16_on_a_cpu_attention_over_few_tokens_is_trained_in_fp32(tokens: int, dtype: torch.dtype) -> None:
    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "flash_attention" in str(func):
                dtypes.add(args[0].dtype)
            return func(*args, **(kwargs or {}))

    dtypes: set[torch.dtype] = set()
    model, ids = TransformerLanguageModel(ModelConfig(300, 32, 2, 2, max_seq_len=129)), torch.randint(300, (2, tokens))
    with Operations(), torch.autocast("cpu", torch.bfloat16):
        model(ids, ids).backward()
    assert dtypes == {dtype}
