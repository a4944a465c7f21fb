"""What a training is made of, in one object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from model import TransformerLanguageModel
from training.config import Config
from training.machine.hardware import Hardware
from training.numbers.data import TokenData
from training.numbers.optimizer import Optimizer
from training.numbers.prompts import Prompt


@dataclass
class Parts:
    """Three fields change during a training: `step_model` when the model is compiled, `hardware` when that fails, and
    the micro-batch in `config` when that fails or memory runs out."""

    config: Config
    hardware: Hardware
    data: TokenData
    prompts: list[Prompt]  # answered at each evaluation
    model: TransformerLanguageModel
    optimizer: Optimizer
    scaler: torch.amp.GradScaler
    step_model: Callable[..., torch.Tensor]  # the model as it trains: compiled, data-parallel, or just the model
