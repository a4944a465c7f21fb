"""Parameter groups, AdamW (Loshchilov & Hutter 2019) and Muon (Jordan et al. 2024, "Muon: an optimizer for hidden
layers in neural networks")."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from common.machine import has_fast_bf16
from training.config import TrainConfig
from training.machine.processes import share_state, shared_out
from training.machine.sharding import Sharded, keep_own

NEWTON_SCHULZ_STEPS = 5
# Jordan et al. 2024: the steepest start that still stays bounded.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> Optimizer:
    """AdamW for everything, or with `optimizer` "muon" Muon for the matrices inside blocks and AdamW for the rest.

    Weight decay acts on matrices only: decaying biases and norm gains pulls them away from where they work. Beside
    Muon it acts on Muon's matrices alone.
    """
    hidden = hidden_matrices(model) if config.optimizer == "muon" else {}
    rest = [p for name, p in model.named_parameters() if name not in hidden and p.requires_grad]
    decay = 0.0 if hidden else config.weight_decay
    groups = [
        {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    # Not on Apple's GPUs, where the fused kernel does not see what forbids a step (pytorch pull request 186360).
    fused = all(p.device.type != "mps" for p in rest)
    adamw = (ShardedAdamW if config.is_sharded else torch.optim.AdamW)(
        groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=fused
    )
    checks = [checked_state, keep_own] if config.is_sharded else [checked_state]
    for check in checks:
        adamw.register_load_state_dict_pre_hook(check)
    if not hidden:
        return adamw
    # Queries, keys and values are stored fused; each is a matrix of its own.
    three_in_one = [p for name, p in hidden.items() if name.endswith("qkv.weight")]
    single = [p for name, p in hidden.items() if not name.endswith("qkv.weight")]
    groups = [{"params": three_in_one, "pieces": 3}, {"params": single, "pieces": 1}]
    muon = (ShardedMuon if config.is_sharded else Muon)(
        groups, config.muon_learning_rate, config.muon_momentum, config.weight_decay
    )
    for check in checks:
        muon.register_load_state_dict_pre_hook(check)
    return MuonAndAdamW(muon, adamw)


def checked_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """A state dict as it may be loaded: PyTorch takes tensors of any shape, and fails at the first step.

    Its hyperparameters are left out. Those of the configuration are set at each step (`apply_hyperparameters`); the
    others have one value only. Raises ValueError for the state of an optimizer of other parameters.
    """
    groups = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in saved["param_groups"]] != [group["params"] for group in groups]:
        raise ValueError("it has other groups of parameters")
    parameters = dict(enumerate(p for group in optimizer.param_groups for p in group["params"]))
    names = {"momentum_buffer"} if isinstance(optimizer, Muon) else {"step", "exp_avg", "exp_avg_sq"}
    for number, held in saved["state"].items():
        if held.keys() != names:
            raise ValueError(f"it holds {', '.join(map(str, held))} for a parameter, not {', '.join(sorted(names))}")
        for name, tensor in held.items():
            shape = torch.Size() if name == "step" else parameters[number].shape
            if tensor.shape != shape or not tensor.is_floating_point() or not tensor.is_contiguous():
                raise ValueError(
                    f"{name} of parameter {number} is {tensor.dtype} {tuple(tensor.shape)}, not {tuple(shape)}"
                )
    return {"state": saved["state"], "param_groups": groups}


def hidden_matrices(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The matrices inside blocks, by name: what Muon is for."""
    return {name: p for name, p in model.named_parameters() if name.startswith("blocks.") and p.dim() == 2}


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalized: every direction of a matrix is learned at the same pace.

    The same update as `torch.optim.Muon` with its default learning-rate adjustment, sqrt(max(1, rows / columns)), but
    all matrices of one shape are orthogonalized in one batched call, and a group's `pieces` says how many matrices are
    stacked along the rows of each of its parameters.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float, weight_decay: float):
        super().__init__(groups, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "pieces": 1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        # As torch's fused optimizers know it: 1.0 leaves everything as it is.
        found_inf = getattr(self, "found_inf", torch.zeros((), device=self.param_groups[0]["params"][0].device))
        skip, keep = found_inf.bool(), 1 - found_inf
        batches = defaultdict(list)  # shape of a matrix -> (its part of the parameter, its update, its group)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(parameter)
                gradient = torch.where(skip, 0.0, parameter.grad)
                buffer = state["momentum_buffer"].lerp_(gradient, (1 - group["momentum"]) * keep)
                update = gradient.lerp(buffer, group["momentum"])  # Nesterov's
                update = update.to(newton_schulz_dtype(update.device))
                for part, piece in zip(parameter.chunk(group["pieces"]), update.chunk(group["pieces"]), strict=True):
                    batches[piece.shape].append((part, piece, group))
        for shape, batch in batches.items():
            scale = math.sqrt(max(1.0, shape[0] / shape[1]))
            orthogonal = self.orthogonalized(torch.stack([piece for _, piece, _ in batch]))
            for (part, _, group), update in zip(batch, orthogonal * keep, strict=True):
                decay = torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"])
                part.mul_(decay).add_(update, alpha=-group["lr"] * scale)

    def orthogonalized(self, matrices: torch.Tensor) -> torch.Tensor:
        """`orthogonalize`, of which each of several processes does its share: all have the same matrices."""
        return shared_out(orthogonalize, matrices)


class ShardedMuon(Sharded, Muon):
    def orthogonalized(self, matrices: torch.Tensor) -> torch.Tensor:
        return orthogonalize(matrices)


class ShardedAdamW(Sharded, torch.optim.AdamW):
    pass


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """The nearest semi-orthogonal matrix to each of (N, rows, columns), roughly: singular values near 1, the same
    singular vectors. Five Newton-Schulz steps (Jordan et al. 2024)."""
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
    """The iteration stands the rounding of bf16, not the narrow range of fp16."""
    return torch.bfloat16 if has_fast_bf16(device) else torch.float32


class MuonAndAdamW:
    """Two optimizers that step, are saved and are resumed as one."""

    def __init__(self, muon: Muon, adamw: torch.optim.AdamW):
        self.muon = muon
        self.adamw = adamw

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.muon.param_groups + self.adamw.param_groups

    def step(self) -> None:
        self.muon.step()
        self.adamw.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.muon.zero_grad(set_to_none)
        self.adamw.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.muon.load_state_dict(state["muon"])
        self.adamw.load_state_dict(state["adamw"])


Optimizer = torch.optim.AdamW | MuonAndAdamW


def whole_state(optimizer: Optimizer | Muon) -> dict[str, Any]:
    """The state dict, in the first process that of the whole optimizer also where each has a share. All processes have
    to call it."""
    if isinstance(optimizer, MuonAndAdamW):
        return {"muon": whole_state(optimizer.muon), "adamw": whole_state(optimizer.adamw)}
    return optimizer.gather() if isinstance(optimizer, Sharded) else optimizer.state_dict()


def follow_first(optimizer: Optimizer | Muon) -> None:
    """Give all processes the state that the first has loaded."""
    if isinstance(optimizer, MuonAndAdamW):
        follow_first(optimizer.muon)
        follow_first(optimizer.adamw)
    elif isinstance(optimizer, Sharded):
        optimizer.scatter()
    else:
        optimizer.load_state_dict(share_state(optimizer.state_dict()))


def apply_hyperparameters(optimizer: Optimizer, lr: float, config: TrainConfig) -> None:
    """Set what the configuration says now: a resumed optimizer brings the values of the run it was saved in.

    `lr` is AdamW's; Muon's stays in the same proportion to it all along the schedule.
    """
    muon, adamw = (optimizer.muon, optimizer.adamw) if isinstance(optimizer, MuonAndAdamW) else (None, optimizer)
    for group in adamw.param_groups:
        decays = group["params"][0].dim() >= 2 and muon is None
        group |= {
            "lr": lr,
            "betas": (config.beta1, config.beta2),
            "weight_decay": config.weight_decay if decays else 0.0,
        }
    for group in muon.param_groups if muon is not None else []:
        group |= {
            "lr": lr / config.learning_rate * config.muon_learning_rate,
            "momentum": config.muon_momentum,
            "weight_decay": config.weight_decay,
        }


def update(optimizer: Optimizer, grad_norm: torch.Tensor, grad_clip: float, skip: torch.Tensor) -> None:
    """Scale the gradients down to a global L2 norm of `grad_clip` (0: leave them) and take the optimizer's step, unless
    `skip`, () of 1.0 or 0.0, forbids it: decided on the device, nothing waits."""
    adamw = optimizer.adamw if isinstance(optimizer, MuonAndAdamW) else optimizer
    parts: list[torch.optim.Optimizer] = [optimizer.muon, adamw] if isinstance(optimizer, MuonAndAdamW) else [adamw]
    fused = adamw.defaults["fused"]
    folds = fused and bool(grad_clip) and folds_clipping(grad_norm.device)
    if grad_clip:
        in_place = [p for part in parts if not (folds and part is adamw) for p in with_gradients(part)]
        torch.nn.utils.clip_grads_with_norm_(in_place, grad_clip, grad_norm)
    if not fused:  # torch's others have to be told by the host
        if not skip:
            optimizer.step()
        return
    # What a gradient scaler sets, and fused kernels obey: found_inf skips, grad_scale divides the gradients.
    for part in parts:
        part.found_inf = skip  # type: ignore[attr-defined]
    adamw.grad_scale = clip_divisor(grad_norm, grad_clip) if folds else None  # type: ignore[attr-defined]
    optimizer.step()
    for part in parts:
        del part.found_inf  # type: ignore[attr-defined]
    del adamw.grad_scale  # type: ignore[attr-defined]


def folds_clipping(device: torch.device) -> bool:
    """Whether AdamW's own kernel scales the gradients on its way: on a GPU a pass over them costs what their bytes do.
    On a CPU it brings nothing, and the numbers stay to the bit those of clipping first."""
    return device.type == "cuda"


def clip_divisor(grad_norm: torch.Tensor, grad_clip: float) -> torch.Tensor:
    """What `torch.nn.utils.clip_grads_with_norm_` divides gradients by, in effect."""
    return ((grad_norm + 1e-6) / grad_clip).clamp(min=1.0)


def gradient_norm(optimizer: Optimizer) -> torch.Tensor:
    """The global L2 norm of all gradients."""
    return torch.nn.utils.get_total_norm([p.grad for p in with_gradients(optimizer) if p.grad is not None])


def with_gradients(optimizer: torch.optim.Optimizer | MuonAndAdamW) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
