"""The optimizer. Each group of parameters names the rule that updates it: AdamW (Loshchilov & Hutter 2019) or Muon
(Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks")."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.optim.adamw import adamw

from common.machine import has_fast_bf16
from training.config import TrainConfig
from training.machine.processes import broadcast_state, count, map_over_ranks, rank
from training.machine.sharding import broadcast_from_owners, gather_state, owners, scatter_state, share_of

ADAMW_EPSILON = 1e-8
NEWTON_SCHULZ_STEPS = 5
# Jordan et al. 2024: the largest slope at zero with which the iteration stays bounded.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

Group = dict[str, Any]  # of parameters, as torch.optim knows it


class Optimizer(torch.optim.Optimizer):
    """Updates each group of parameters by its "rule", a name in RULES.

    With `is_sharded`, each process updates its own share of the parameters and keeps the state of those only.
    `state_dict` then returns that share, and `whole_state` the whole state. A group's "pieces" is the number of
    matrices that are stacked along the rows of each of its parameters.
    """

    def __init__(self, groups: list[Group], fused: bool = True, is_sharded: bool = False):
        super().__init__(groups, {"fused": fused, "decays": True, "pieces": 1})
        self.is_sharded = is_sharded
        self.loaded: dict[int, Any] = {}  # if sharded: the whole state, until each process has its share

    @property
    def parameters(self) -> list[Parameter]:
        """All parameters, in the order of their numbers in a state dict."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @functools.cached_property
    def owners(self) -> list[int]:
        """If sharded: the rank that updates each parameter. Each rule's parameters are divided separately, because
        rules differ in their cost per parameter."""
        rules = [group["rule"] for group in self.param_groups for _ in group["params"]]
        sizes = [parameter.numel() for parameter in self.parameters]
        owner: dict[int, int] = {}
        for rule in RULES:
            numbers = [number for number, named in enumerate(rules) if named == rule]
            owner |= zip(numbers, owners([sizes[number] for number in numbers], count()), strict=True)
        return [owner[number] for number in range(len(sizes))]

    @torch.no_grad()
    def step(  # type: ignore[override]  # no closure is ever given
        self, closure: None = None, *, found_inf: torch.Tensor | None = None, grad_scale: torch.Tensor | None = None
    ) -> None:
        """If `found_inf` () is 1.0, nothing changes. Rules with `divides_gradients` divide gradients by `grad_scale`
        (). Both stay on the device, so the host does not wait."""
        if self.is_sharded:
            for parameter, owner in zip(self.parameters, self.owners, strict=True):
                if owner != rank():
                    parameter.grad = None  # only its owner updates it
        for name, rule in RULES.items():
            if groups := [group for group in self.param_groups if group["rule"] == name]:
                rule.update(self, groups, found_inf, grad_scale)
        if self.is_sharded:
            broadcast_from_owners(self.parameters, self.owners)

    def state_of(self, parameter: Parameter, group: Group) -> dict[str, torch.Tensor]:
        """The tensors that the group's rule keeps for a parameter: zeros before its first update."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            for name in RULES[group["rule"]].state:
                state[name] = torch.zeros_like(parameter)
            if "step" in state:
                state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of all parameters; checkpoints of older versions work too. If sharded, keep only this
        process's share; `follow_rank_0` sends the other processes theirs. Raises ValueError for the state of other
        parameters."""
        checked = self.checked(joined(state_dict))
        if self.is_sharded:
            self.loaded = checked["state"]
            checked |= {"state": share_of(self.loaded, self.owners, rank())}
        super().load_state_dict(checked)

    def checked(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state dict, if it is safe to load: PyTorch accepts tensors of any shape and fails only at the next step.

        Drops saved hyperparameters: `apply_hyperparameters` sets those of the configuration at each step. Raises
        ValueError for the state of other parameters.
        """
        groups = self.state_dict()["param_groups"]
        if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in groups]:
            raise ValueError("it has other groups of parameters")
        rules = [group["rule"] for group in groups for _ in group["params"]]
        known = dict(enumerate(zip(self.parameters, rules, strict=True)))
        for number, held in saved["state"].items():
            parameter, rule = known[number]
            names = RULES[rule].state
            if held.keys() != set(names):
                raise ValueError(
                    f"it holds {', '.join(map(str, held))} for a parameter, not {', '.join(sorted(names))}"
                )
            for name, tensor in held.items():
                shape = torch.Size() if name == "step" else parameter.shape
                if tensor.shape != shape or not tensor.is_floating_point() or not tensor.is_contiguous():
                    raise ValueError(
                        f"{name} of parameter {number} is {tensor.dtype} {tuple(tensor.shape)}, not {tuple(shape)}"
                    )
        return {"state": saved["state"], "param_groups": groups}


def joined(saved: dict[str, Any]) -> dict[str, Any]:
    """One state dict. Older versions saved two, for Muon and for AdamW, and numbered the parameters of each from 0."""
    if "muon" not in saved:
        return saved
    muon, rest = saved["muon"], saved["adamw"]
    first = sum(len(group["params"]) for group in muon["param_groups"])
    groups = [{"params": [first + number for number in group["params"]]} for group in rest["param_groups"]]
    state = muon["state"] | {first + number: held for number, held in rest["state"].items()}
    return {"state": state, "param_groups": muon["param_groups"] + groups}


def update_adamw(
    optimizer: Optimizer, groups: list[Group], found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None
) -> None:
    """Calls PyTorch's function."""
    for group in groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [optimizer.state_of(parameter, group) for parameter in parameters]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=group["fused"],
            found_inf=found_inf,
            grad_scale=grad_scale,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=ADAMW_EPSILON,
            maximize=False,
        )


def is_hidden_matrix(name: str, parameter: Parameter) -> bool:
    """Whether Muon updates this parameter: the matrices inside blocks."""
    return name.startswith("blocks.") and parameter.dim() == 2


def update_muon(
    optimizer: Optimizer, groups: list[Group], found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None
) -> None:
    """Momentum with an orthogonalized update: a matrix learns at the same speed in every direction.

    The same update as `torch.optim.Muon` with its default learning-rate adjustment, sqrt(max(1, rows / columns)). But
    one batched call orthogonalizes all matrices of one shape. If several processes hold the same matrices, each
    orthogonalizes its share.
    """
    if found_inf is None:
        found_inf = torch.zeros((), device=groups[0]["params"][0].device)
    skip, keep = found_inf.bool(), 1 - found_inf
    batches = defaultdict(list)  # shape -> (part of a parameter, its update, its group)
    for group in groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            gradient = torch.where(skip, 0.0, parameter.grad)
            buffer = optimizer.state_of(parameter, group)["momentum_buffer"]
            buffer.lerp_(gradient, (1 - group["momentum"]) * keep)
            update = gradient.lerp(buffer, group["momentum"])  # Nesterov's
            update = update.to(newton_schulz_dtype(update.device))
            for part, piece in zip(parameter.chunk(group["pieces"]), update.chunk(group["pieces"]), strict=True):
                batches[piece.shape].append((part, piece, group))
    for shape, batch in batches.items():
        scale = math.sqrt(max(1.0, shape[0] / shape[1]))
        matrices = torch.stack([piece for _, piece, _ in batch])
        orthogonal = orthogonalize(matrices) if optimizer.is_sharded else map_over_ranks(orthogonalize, matrices)
        for (part, _, group), update in zip(batch, orthogonal * keep, strict=True):
            decay = torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"])
            part.mul_(decay).add_(update, alpha=-group["lr"] * scale)


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """Approximates the nearest semi-orthogonal matrix to each of (N, rows, columns): the same singular vectors,
    singular values near 1. Five Newton-Schulz steps (Jordan et al. 2024)."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrices
    is_tall = x.size(1) > x.size(2)
    if is_tall:
        x = x.mT
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # the largest singular value is now at most 1
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """The iteration tolerates bf16's rounding, but not fp16's narrow range."""
    return torch.bfloat16 if has_fast_bf16(device) else torch.float32


class Rule(NamedTuple):
    """How parameters are updated."""

    takes: Callable[[str, Parameter], bool]  # whether the rule updates this parameter; if not, AdamW does
    state: tuple[str, ...]  # tensors kept for each parameter: fp32, in its shape; "step" is a single number
    hyperparameters: Callable[[TrainConfig, float], dict[str, Any]]  # given AdamW's learning rate of a step
    update: Callable[[Optimizer, list[Group], torch.Tensor | None, torch.Tensor | None], None]
    divides_gradients: bool = False  # by grad_scale; for other rules, gradients are clipped before the update
    splits_qkv: bool = False  # queries, keys and values are stored as one matrix; the rule updates them as three
    update_bytes: int = 0  # temporary memory of an update, per parameter

    @property
    def state_bytes(self) -> int:
        """Per parameter; "step" is too small to count."""
        return sum(4 for name in self.state if name != "step")


RULES = {  # the choices of `optimizer` in training/config.py
    "adamw": Rule(
        takes=lambda name, parameter: True,
        state=("step", "exp_avg", "exp_avg_sq"),
        hyperparameters=lambda config, lr: {"lr": lr, "betas": (config.beta1, config.beta2)},
        update=update_adamw,
        divides_gradients=True,
    ),
    "muon": Rule(
        takes=is_hidden_matrix,
        state=("momentum_buffer",),
        hyperparameters=lambda config, lr: {  # follows AdamW's learning rate in a fixed proportion
            "lr": lr / config.learning_rate * config.muon_learning_rate,
            "momentum": config.muon_momentum,
        },
        update=update_muon,
        splits_qkv=True,
        update_bytes=12,  # the update and Newton-Schulz's temporaries
    ),
}


def by_rule(model: torch.nn.Module, config: TrainConfig) -> dict[str, dict[str, Parameter]]:
    """Rule -> name -> parameter, for the parameters that are trained. `config.optimizer` updates those that its rule
    takes, AdamW the others."""
    named: dict[str, dict[str, Parameter]] = {config.optimizer: {}, "adamw": {}}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            takes = RULES[config.optimizer].takes(name, parameter)
            named[config.optimizer if takes else "adamw"][name] = parameter
    return named


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> Optimizer:
    """The optimizer of `config.optimizer`, with AdamW for the parameters that its rule does not take.

    Weight decay acts only on the matrices of that rule. Decay would pull biases and norm gains away from useful values.
    With another rule, AdamW's matrices (the embeddings and the head) have no decay.
    """
    groups: list[Group] = []
    for rule, named in by_rule(model, config).items():
        alike = defaultdict(list)
        for name, parameter in named.items():
            pieces = 3 if RULES[rule].splits_qkv and name.endswith("qkv.weight") else 1
            alike[parameter.dim() >= 2, pieces].append(parameter)
        for is_matrix, pieces in sorted(alike, reverse=True):  # checkpoints store the state in this order
            decays = is_matrix and rule == config.optimizer
            groups.append({"params": alike[is_matrix, pieces], "rule": rule, "decays": decays, "pieces": pieces})
    # Not on Apple's GPUs: the fused kernel ignores `found_inf` there (pytorch pull request 186360).
    fused = all(parameter.device.type != "mps" for parameter in model.parameters())
    optimizer = Optimizer(groups, fused, config.is_sharded)
    apply_hyperparameters(optimizer, config.learning_rate, config)
    return optimizer


def apply_hyperparameters(optimizer: Optimizer, lr: float, config: TrainConfig) -> None:
    """Set the configuration's values. `lr` is AdamW's learning rate of this step; the other rules follow it."""
    for group in optimizer.param_groups:
        group |= RULES[group["rule"]].hyperparameters(config, lr)
        group["weight_decay"] = config.weight_decay if group["decays"] else 0.0


def whole_state(optimizer: Optimizer) -> dict[str, Any]:
    """The state dict. If it is sharded, rank 0 gets the state of all parameters. Every process must call this."""
    saved = optimizer.state_dict()
    return saved | {"state": gather_state(saved["state"])} if optimizer.is_sharded else saved


def follow_rank_0(optimizer: Optimizer) -> None:
    """Send all processes the state that rank 0 has loaded. Every process must call this."""
    saved = optimizer.state_dict()
    if not optimizer.is_sharded:
        optimizer.load_state_dict(saved | {"state": broadcast_state(saved["state"])})
        return
    share = scatter_state(optimizer.loaded, optimizer.owners)
    if rank():
        optimizer.load_state_dict(saved | {"state": share})
    optimizer.loaded = {}


def update(optimizer: Optimizer, grad_norm: torch.Tensor, grad_clip: float, skip: torch.Tensor) -> None:
    """Clip the gradients to a global L2 norm of `grad_clip` (0: no clipping) and take the optimizer's step, unless
    `skip` () is 1.0. The device decides, so the host does not wait."""
    fused = all(group["fused"] for group in optimizer.param_groups)
    folds = fused and bool(grad_clip) and folds_clipping(grad_norm.device)
    if grad_clip:
        ahead = [g for g in optimizer.param_groups if not (folds and RULES[g["rule"]].divides_gradients)]
        torch.nn.utils.clip_grads_with_norm_(with_gradients(ahead), grad_clip, grad_norm)
    if fused:
        optimizer.step(found_inf=skip, grad_scale=clip_divisor(grad_norm, grad_clip) if folds else None)
    elif not skip:  # PyTorch's other kernels cannot skip: the host must wait and decide
        optimizer.step()


def folds_clipping(device: torch.device) -> bool:
    """Whether AdamW's kernel scales the gradients. On a GPU this saves one pass over them. On a CPU it saves nothing,
    and clipping first keeps the numbers of older versions to the bit."""
    return device.type == "cuda"


def clip_divisor(grad_norm: torch.Tensor, grad_clip: float) -> torch.Tensor:
    """`torch.nn.utils.clip_grads_with_norm_` divides gradients by this."""
    return ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0)


def gradient_norm(optimizer: Optimizer) -> torch.Tensor:
    """The global L2 norm of all gradients."""
    gradients = [parameter.grad for parameter in with_gradients(optimizer.param_groups)]
    return torch.nn.utils.get_total_norm([gradient for gradient in gradients if gradient is not None])


def with_gradients(groups: list[Group]) -> list[Parameter]:
    return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]
