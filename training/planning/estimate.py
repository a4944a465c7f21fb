"""The memory of a training step, estimated before it runs."""

from __future__ import annotations

import dataclasses

from model import TransformerLanguageModel
from training.config import TrainConfig
from training.machine.hardware import Hardware
from training.machine.sharding import largest_share
from training.numbers.data import TokenData
from training.numbers.optimizer import RULES, by_rule

PROCESS_BYTES = 350_000_000  # resident size of a process that has imported torch


def estimate_memory(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> int:
    """Peak bytes of a training step: weights, gradients and the optimizer's state in fp32 (16 bytes a parameter with
    AdamW, 12 with Muon, 4 if it is frozen), and what one micro-batch keeps for the backward pass. With a sharded
    optimizer: the peak of the process that keeps most of its state.

    Counted from the tensors that autograd keeps if the model runs uncompiled, and that the compiled graphs keep
    (docs/benchmarks/gpu_forecast.md).
    """
    parameters, trained = model.num_parameters(), model.num_parameters(trained_only=True)
    several = config.rows_at_once < config.sequences_per_process  # earlier micro-batches left gradients
    sharing = config.processes if config.is_sharded else 1
    state, update = 4 * parameters, 0
    for rule, named in by_rule(model, config).items():
        share = largest_share([parameter.numel() for parameter in named.values()], sharing)
        state += RULES[rule].state_bytes * share
        update += RULES[rule].update_bytes * share  # after the activations are freed
    gradients = 4 * trained
    weight_copies = (
        2 * parameters if hardware.precision != "fp32" else 0
    )  # autocast keeps its casts for the backward pass
    activations = bytes_per_token(config, model, hardware) * config.rows_at_once * config.max_seq_len
    during_backward = weight_copies + activations + several * gradients
    after_it = gradients + max(
        update, several * hardware.compiles * gradients
    )  # compiled code returns all gradients at once
    return state + max(during_backward, after_it)


def bytes_per_token(config: TrainConfig, model: TransformerLanguageModel, hardware: Hardware) -> int:
    """What the forward pass keeps per token for the backward pass, and the logits and their gradient."""
    c = model.config
    half = 4 if hardware.precision == "fp32" else 2
    residual = {"fp32": 4, "fp16": 4, "bf16": 2}[hardware.precision]
    if hardware.compiles:
        # Per block: two norms' inputs and outputs, q, k, v, the attention's output, the activation's input and output.
        block = 2 * residual * c.embed_dim + half * (2 + 3 + 1) * c.embed_dim + half * 2 * c.ff_dim
        head = half * 2 * c.vocab_size
    else:
        # The same, but norms keep their input in fp32, as the head keeps its softmax, its gradient and the logits'.
        block = 2 * 4 * c.embed_dim + half * (2 + 3 + 1) * c.embed_dim + half * 2 * c.ff_dim
        if c.qk_norm and half == 2:
            block += 2 * 4 * c.embed_dim
        head = 3 * 4 * c.vocab_size
    if config.lora_rank and "feed_forward" not in config.lora_targets:  # frozen layers do not keep their input
        block -= half * (c.embed_dim + c.ff_dim)
    if config.lora_rank and "attention" not in config.lora_targets:
        block -= half * c.embed_dim
    if c.position == "rope" or c.qk_norm:
        block += half * 2 * c.embed_dim  # q and k as attention reads them
    # PyTorch's flash kernel for CPUs has no dropout. The other kernel keeps three (T, T) fp32 matrices per head, and
    # needs three more while it runs.
    scores = 3 * 4 * c.num_heads * c.max_seq_len if c.dropout and hardware.device.type == "cpu" else 0
    if config.activation_checkpointing:  # all blocks' inputs, and one block or the head at a time
        return c.num_layers * residual * c.embed_dim + max(head, 2 * (block + scores))
    return c.num_layers * (block + scores) + scores + head


def held_memory(data: TokenData, hardware: Hardware) -> int:
    """Other bytes in the same memory: the tokens and, on a CPU, Python and torch."""
    tokens = data.tokens.nbytes if data.tokens.device.type == hardware.device.type and data.placement != "mmap" else 0
    return tokens if hardware.is_cuda else tokens + PROCESS_BYTES


def with_rows(config: TrainConfig, rows: int, source: str = "memory") -> TrainConfig:
    return dataclasses.replace(config, micro_batch_size=rows, sources={**config.sources, "micro_batch_size": source})
