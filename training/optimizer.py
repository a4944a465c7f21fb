"""The optimizer: AdamW (Loshchilov & Hutter 2019) and Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers
in neural networks"). Each parameter group names the rule that updates it."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.optim.adamw import adamw

from common.machine import has_fast_bf16
from model import TransformerLanguageModel, require_shapes
from model_config import ModelConfig
from training.config import Config
from training.parallel import map_over_processes

ADAMW_BETA1, ADAMW_EPSILON = 0.9, 1e-8
NEWTON_SCHULZ_STEPS = 5
# Jordan et al. 2024: the largest slope at zero with which the iteration stays bounded.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)

Group = dict[str, Any]  # a parameter group of torch.optim


class Optimizer(torch.optim.Optimizer):
    """An optimizer that updates each parameter group by its "rule", a name in RULES. A group's "stacked" lists the rows
    of the matrices stacked in each of its parameters; () means one matrix."""

    def __init__(self, groups: list[Group], fused: bool = True):
        super().__init__(groups, {"fused": fused, "decays": True, "stacked": ()})
        self.stacks: dict[Parameter, torch.Tensor] = {}  # see `stack_momentum`
        self.compiles = False  # Muon's pointwise work

    @torch.no_grad()
    def step(  # type: ignore[override]  # no closure is ever given
        self, closure: None = None, *, found_inf: torch.Tensor | None = None, grad_scale: torch.Tensor | None = None
    ) -> None:
        """Update the parameters, unless `found_inf`, (), is 1.0. Rules with `divides_gradients` divide gradients by
        `grad_scale`, (). Both stay on the device, so the host does not wait."""
        for name, rule in RULES.items():
            if groups := [group for group in self.param_groups if group["rule"] == name]:
                rule.update(self, groups, found_inf, grad_scale)

    def state_of(self, parameter: Parameter, group: Group) -> dict[str, torch.Tensor]:
        """Return the state tensors of a parameter, zeros before its first update."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            for name in RULES[group["rule"]].state:
                state[name] = torch.zeros_like(parameter)
            if "step" in state:
                state["step"] = torch.zeros((), device=parameter.device if group["fused"] else "cpu")
        return state

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all state tensors by name (blocks.0.attention.qkv.weight.exp_avg), zeros before the first update."""
        return {
            f"{name}.{key}": tensor
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for key, tensor in self.state_of(parameter, group).items()
        }

    def stack_momentum(self, parameters: list[Parameter], group: Group) -> torch.Tensor:
        """Return the momentum buffers of N parameters of one shape as one tensor, (N, rows, columns), so that one
        operation updates all. The buffers are views of it."""
        if parameters[0] not in self.stacks:
            buffers = [self.state_of(parameter, group)["momentum_buffer"] for parameter in parameters]
            self.stacks[parameters[0]] = torch.stack(buffers)
            for parameter, part in zip(parameters, self.stacks[parameters[0]], strict=True):
                self.state[parameter]["momentum_buffer"] = part
        return self.stacks[parameters[0]]

    @torch.no_grad()
    def load_tensors(self, saved: dict[str, torch.Tensor]) -> None:
        """Load what `tensors` returned. Raises ValueError if names or shapes differ."""
        shapes = {
            f"{name}.{key}": torch.Size() if key == "step" else parameter.shape
            for group in self.param_groups
            for name, parameter in zip(group["param_names"], group["params"], strict=True)
            for key in RULES[group["rule"]].state
        }
        require_shapes(saved, shapes, "it belongs to other parameters")
        for name, tensor in self.tensors().items():
            tensor.copy_(saved[name])


def _update_adamw(
    optimizer: Optimizer, groups: list[Group], found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None
) -> None:
    """Update by PyTorch's AdamW."""
    for group in groups:
        parameters = _list_with_gradients([group])
        states = [optimizer.state_of(parameter, group) for parameter in parameters]
        adamw(
            list(parameters),
            _list_gradients([group]),
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
    """Return whether a parameter is a matrix inside a block, which Muon updates."""
    return name.startswith("blocks.") and parameter.dim() == 2


def update_muon(
    optimizer: Optimizer, groups: list[Group], found_inf: torch.Tensor | None, grad_scale: torch.Tensor | None
) -> None:
    """Update by orthogonalized momentum, so that a matrix learns at the same speed in every direction.

    The same update as `torch.optim.Muon` with its default learning-rate adjustment, sqrt(max(1, rows / columns)). But
    all matrices of one shape are orthogonalized in one batched call and updated in a few: on a GPU, launching a call
    per matrix would take longer than the work. With several processes, each orthogonalizes its share.
    """
    if found_inf is None:
        found_inf = torch.zeros((), device=groups[0]["params"][0].device)
    skip, keep = found_inf.bool(), 1 - found_inf
    mix, apply = (pointwise(part, optimizer.compiles) for part in (_mix, _apply))
    # Not yet scaled, so fp16 could overflow.
    half = torch.bfloat16 if newton_schulz_dtype(skip.device) == torch.bfloat16 else torch.float32
    batches = []
    for group in groups:
        by_shape = defaultdict(list)
        for parameter in _list_with_gradients([group]):
            by_shape[parameter.shape].append(parameter)
        for parameters in by_shape.values():
            stack, gradients = optimizer.stack_momentum(parameters, group), _list_gradients([{"params": parameters}])
            batches.append(Stacked(parameters, mix(stack, gradients, skip, group["momentum"], half), group))
    for parts, orthogonal, scale, group in _orthogonalize_batches(batches, optimizer.compiles):
        decay = torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"])
        apply(parts, orthogonal, decay, keep * -(group["lr"] * scale))


# The pointwise work. It moves 103 bytes a parameter as it is, and 46 as compiled for a GPU. On a CPU compiling it takes
# longer than it saves.


def _mix(
    stack: torch.Tensor, gradients: list[torch.Tensor], skip: torch.Tensor, momentum: float, dtype: torch.dtype
) -> torch.Tensor:
    """Update the momentum of N parameters of one shape, unless `skip`. Return Nesterov's, (N, rows, columns)."""
    mixed = torch.where(skip, stack, torch.stack(gradients))
    stack.lerp_(mixed, 1 - momentum)
    return mixed.lerp_(stack, momentum).to(dtype)


def _normalize(matrices: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Divide each matrix by its norm, which bounds the largest singular value by 1."""
    return (matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)).to(dtype)


def _apply(parts: list[torch.Tensor], updates: torch.Tensor, decay: torch.Tensor, rate: torch.Tensor) -> None:
    torch._foreach_mul_(parts, decay)
    torch._foreach_add_(parts, list(updates.float() * rate))


@functools.cache
def pointwise(function: Callable[..., Any], compiles: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False) if compiles else function


class Stacked(NamedTuple):
    """Parameters of one shape and group, and their updates before orthogonalization, (N, rows, columns)."""

    parameters: list[Parameter]
    matrices: torch.Tensor
    group: Group


Orthogonalized = Iterator[tuple[list[torch.Tensor], torch.Tensor, float, Group]]


def _orthogonalize_batches(batches: list[Stacked], compiles: bool) -> Orthogonalized:
    """Yield (parts of parameters, their orthogonalized updates, the scale of the updates, the group)."""
    alike = defaultdict(list)  # shape -> (parts of parameters, their matrices, their group)
    for parameters, matrices, group in batches:
        rows = group["stacked"] or (matrices.size(1),)
        split = [parameter.split(rows) for parameter in parameters]
        for parts, pieces in zip(map(list, zip(*split, strict=True)), matrices.split(rows, dim=1), strict=True):
            alike[pieces.shape[1:]].append((parts, pieces, group))
    for (height, width), same in alike.items():
        matrices = torch.cat([pieces for _, pieces, _ in same])
        orthogonal = map_over_processes(functools.partial(orthogonalize, compiles=compiles), matrices)
        for parts, _, group in same:
            updates, orthogonal = orthogonal[: len(parts)], orthogonal[len(parts) :]
            yield parts, updates, math.sqrt(max(1.0, height / width)), group


def orthogonalize(matrices: torch.Tensor, compiles: bool = False) -> torch.Tensor:
    """Approximate the nearest semi-orthogonal matrix to each of (N, rows, columns), with the same singular vectors and
    singular values near 1, by five Newton-Schulz steps (Jordan et al. 2024)."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = pointwise(_normalize, compiles)(matrices.mT if is_tall else matrices, newton_schulz_dtype(matrices.device))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def newton_schulz_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of the iteration, which tolerates bf16's rounding. Normalised matrices also stay in the range of
    fp16, whose error is smaller."""
    if has_fast_bf16(device):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


class Rule(NamedTuple):
    """A rule by which parameters are updated."""

    takes: Callable[[str, Parameter], bool]  # (name, parameter) -> whether this rule updates it; if not, AdamW does
    state: tuple[str, ...]  # state tensors: fp32, in the parameter's shape; "step" is a scalar
    # (config, AdamW's learning rate) -> group keys
    hyperparameters: Callable[[Config, float | torch.Tensor], dict[str, Any]]
    update: Callable[[Optimizer, list[Group], torch.Tensor | None, torch.Tensor | None], None]
    divides_gradients: bool = False  # the kernel divides by grad_scale; other rules get clipped gradients
    splits_stacked: bool = False  # matrices stacked in one parameter are updated separately
    update_bytes: int = 0  # temporary memory of an update, bytes per parameter

    @property
    def state_bytes(self) -> int:
        """Bytes of state per parameter; "step" is too small to count."""
        return sum(4 for name in self.state if name != "step")


RULES = {  # keys: the choices of `optimizer` in training/config.py
    "adamw": Rule(
        takes=lambda name, parameter: True,
        state=("step", "exp_avg", "exp_avg_sq"),
        hyperparameters=lambda config, lr: {"lr": lr, "betas": (ADAMW_BETA1, config.beta2)},
        update=_update_adamw,
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
        splits_stacked=True,
        update_bytes=12,  # the update and Newton-Schulz's temporaries
    ),
}


def group_by_rule(model: torch.nn.Module, config: Config) -> dict[str, dict[str, Parameter]]:
    """Group the trained parameters: rule -> name -> parameter. AdamW updates those that the rule of `config.optimizer`
    does not take."""
    groups: dict[str, dict[str, Parameter]] = {config.optimizer: {}, "adamw": {}}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            takes = RULES[config.optimizer].takes(name, parameter)
            groups[config.optimizer if takes else "adamw"][name] = parameter
    return groups


def _stacked_rows(name: str, config: ModelConfig) -> tuple[int, ...]:
    """Return the rows of each matrix stacked in a parameter (queries, keys and values; gate and up); () for one."""
    if name.endswith("qkv.weight"):
        return config.qkv_rows
    return (config.ff_dim, config.ff_dim) if name.endswith("fc1.weight") and config.is_gated else ()


def build_optimizer(model: TransformerLanguageModel, config: Config) -> Optimizer:
    """Build the optimizer of `config`, with AdamW for the parameters that its rule does not take.

    Weight decay acts only on the matrices of that rule. It would pull biases and norm gains away from useful values.
    Beside Muon, AdamW's matrices (the embeddings and the head) have no decay.
    """
    groups: list[Group] = []
    for rule, tensors in group_by_rule(model, config).items():
        alike = defaultdict(list)
        for name, parameter in tensors.items():
            rows = _stacked_rows(name, model.config) if RULES[rule].splits_stacked else ()
            alike[parameter.dim() >= 2, len(rows), rows].append((name, parameter))
        for is_matrix, _, rows in sorted(alike, reverse=True):
            decays = is_matrix and rule == config.optimizer
            parameters = alike[is_matrix, len(rows), rows]
            groups.append({"params": parameters, "rule": rule, "decays": decays, "stacked": rows})
    # Not on Apple's GPUs: the fused kernel ignores `found_inf` there (pytorch pull request 186360).
    fused = all(parameter.device.type != "mps" for parameter in model.parameters())
    optimizer = Optimizer(groups, fused)
    apply_hyperparameters(optimizer, config.learning_rate, config)
    return optimizer


def apply_hyperparameters(optimizer: Optimizer, lr: float | torch.Tensor, config: Config) -> None:
    """Set learning rates and weight decay. `lr` is AdamW's in this step; other rules follow it in proportion."""
    for group in optimizer.param_groups:
        group |= RULES[group["rule"]].hyperparameters(config, lr)
        group["weight_decay"] = config.weight_decay if group["decays"] else 0.0


def update_parameters(optimizer: Optimizer, grad_norm: torch.Tensor, grad_clip: float, skip: torch.Tensor) -> None:
    """Clip the gradients to a global L2 norm of `grad_clip` (0: no clipping) and take the optimizer's step, unless
    `skip` () is 1.0. The device decides, so the host does not wait."""
    fused = all(group["fused"] for group in optimizer.param_groups)
    folds = fused and bool(grad_clip) and folds_clipping(grad_norm.device)
    if grad_clip:
        ahead = [g for g in optimizer.param_groups if not (folds and RULES[g["rule"]].divides_gradients)]
        factor = (grad_clip / (grad_norm + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grads_with_norm_
        if gradients := _list_gradients(ahead):
            torch._foreach_mul_(gradients, factor)
    if fused:
        divisor = ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0) if folds else None
        optimizer.step(found_inf=skip, grad_scale=divisor)
    elif not skip:  # PyTorch's other kernels cannot skip: the host must wait and decide
        optimizer.step()


def folds_clipping(device: torch.device) -> bool:
    """Return whether AdamW's kernel clips the gradients. This saves a pass over them on a GPU, and nothing on a CPU."""
    return device.type == "cuda"


def gradient_norm(optimizer: Optimizer) -> torch.Tensor:
    """Return the global L2 norm of all gradients, ()."""
    return torch.nn.utils.get_total_norm(_list_gradients(optimizer.param_groups))


def _list_with_gradients(groups: list[Group]) -> list[Parameter]:
    return [parameter for group in groups for parameter in group["params"] if parameter.grad is not None]


def _list_gradients(groups: list[Group]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in _list_with_gradients(groups) if parameter.grad is not None]
