"""Parameter groups and AdamW (Loshchilov & Hutter 2019)."""

from __future__ import annotations

import torch

from training.config import TrainConfig


def build_optimizer(model: torch.nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: decaying biases and norm gains pulls them away from where they work."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)


def apply_hyperparameters(optimizer: torch.optim.Optimizer, lr: float, config: TrainConfig) -> None:
    """Set what the configuration says now: a resumed optimizer brings the values of the run it was saved in."""
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["betas"] = (config.beta1, config.beta2)
        group["weight_decay"] = config.weight_decay if group["params"][0].dim() >= 2 else 0.0


def clip_gradients(optimizer: torch.optim.Optimizer, grad_clip: float) -> torch.Tensor:
    """Scale the gradients down to a global L2 norm of `grad_clip` (0: leave them). Returns the norm before that."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    if grad_clip:
        torch.nn.utils.clip_grads_with_norm_(parameters, grad_clip, norm)
    return norm
