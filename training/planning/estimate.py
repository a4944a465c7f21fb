"""The memory of a training step, estimated before it runs."""

from __future__ import annotations

import math

import torch

from model import TransformerLanguageModel
from training.config import Config
from training.machine.hardware import Hardware
from training.numbers.data import TokenData
from training.numbers.optimizer import RULES, by_rule

PROCESS_BYTES = 350_000_000  # resident size of a process that has imported torch


def estimate_memory(config: Config, model: TransformerLanguageModel, hardware: Hardware, rows: int) -> int:
    """Peak bytes of a training step that takes `rows` sequences per forward pass: weights, gradients and the
    optimizer's state in fp32 (16 bytes a parameter with AdamW, 12 with Muon, 4 if it is frozen), and what one
    micro-batch keeps for the backward pass. If sharded: those of the slices that a process keeps, and the weights that
    it gathers.

    Counted from the tensors that autograd keeps if the model runs uncompiled, and that the compiled graphs keep
    (docs/benchmarks/gpu_forecast.md).
    """
    sharing = config.processes if config.is_sharded else 1
    parameters = sum(largest_slice(parameter, sharing) for parameter in model.parameters())
    trained = sum(largest_slice(parameter, sharing) for parameter in model.parameters() if parameter.requires_grad)
    several = rows < config.sequences_per_process  # earlier micro-batches left gradients
    state, update = 4 * parameters, 0
    for rule, named in by_rule(model, config).items():
        share = sum(largest_slice(parameter, sharing) for parameter in named.values())
        state += RULES[rule].state_bytes * share
        update += RULES[rule].update_bytes * share  # after the activations are freed
    gradients = 4 * trained
    if config.is_sharded:
        state += gathered_bytes(model, hardware)
    cast = sum(parameter.numel() for parameter in (model.head if config.is_sharded else model).parameters())
    weight_copies = 2 * cast if hardware.precision != "fp32" else 0  # autocast keeps its casts for the backward pass
    activations = bytes_per_token(config, model, hardware) * rows * model.config.max_seq_len
    during_backward = weight_copies + activations + several * gradients
    at_once = hardware.compiles and not config.is_sharded  # the compiled model returns all gradients together
    after_it = gradients + max(update, several * at_once * gradients)
    at_start = 4 * model.num_parameters()  # a process divides the weights once it has all of them
    return max(state + max(during_backward, after_it), at_start)


def largest_slice(parameter: torch.Tensor, processes: int) -> int:
    """Numbers in the slice of the process that keeps most of a parameter: FSDP2 divides the rows."""
    return math.ceil(len(parameter) / processes) * (parameter.numel() // len(parameter))


def gathered_bytes(model: TransformerLanguageModel, hardware: Hardware) -> int:
    """What is whole at the peak if the model is sharded: the layers outside the blocks, and either the buffer that they
    are gathered through, or a block, the next one on its way, and the gradients of the last, which are averaged in
    fp32."""
    block = sum(parameter.numel() for parameter in model.blocks[0].parameters())
    outside = sum(parameter.numel() for parameter in model.parameters()) - len(model.blocks) * block
    half = 4 if hardware.precision == "fp32" else 2
    return 4 * outside + max(4 * outside, (3 * half + 4) * block)


def bytes_per_token(config: Config, model: TransformerLanguageModel, hardware: Hardware) -> int:
    """Bytes that the forward pass keeps per token for the backward pass, and the logits and their gradient."""
    c = model.config
    half = 4 if hardware.precision == "fp32" else 2
    residual = {"fp32": 4, "fp16": 4, "bf16": 2}[hardware.precision]
    queries, keys, _ = c.qkv_rows
    feed_forward = (4 if c.is_gated else 2) * c.ff_dim  # of SwiGLU: gate, up, the gate's activation and the product
    if hardware.compiles:
        # Per block: two norms' inputs and outputs, q, k, v, the attention's output, the activation's input and output.
        feed_forward -= c.ff_dim * c.is_gated  # computed again from the gate
        block = 2 * residual * c.embed_dim
        head = half * 2 * c.vocab_size
    else:
        # The same, but norms keep their input in fp32, as the head keeps its softmax, its gradient and the logits'.
        block = 2 * 4 * c.embed_dim
        if c.qk_norm and half == 2:
            block += 4 * (queries + keys)
        if c.norm_gain:  # and what the gain multiplies
            block += 4 * (2 * c.embed_dim + (queries + keys) * c.qk_norm)
        head = 3 * 4 * c.vocab_size
    block += half * (2 * c.embed_dim + 2 * queries + 2 * keys + feed_forward)
    if config.lora_rank and "feed_forward" not in config.lora_targets:  # frozen layers do not keep their input
        block -= half * (c.embed_dim + c.ff_dim)
    if config.lora_rank and "attention" not in config.lora_targets:
        block -= half * c.embed_dim
    if c.position == "rope" or c.qk_norm:
        block += half * (queries + keys)  # q and k as attention reads them
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
