"""--shard: weights, gradients and the optimizer's state are divided among the processes, by PyTorch's FSDP2
(`fully_shard`; Zhao et al. 2023, "PyTorch FSDP: experiences on scaling fully sharded data parallel").

Each process keeps a slice of the rows of every parameter. Before a block computes, the processes gather its weights
(all-gather); afterwards they free them. Each keeps its slice of the averaged gradient (reduce-scatter). The layers
outside the blocks (embeddings, last norm, head) are gathered for the whole forward pass, and again for the backward.

FSDP2 takes most of a second to import, so only runs that shard import it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from common.errors import is_out_of_memory
from common.lora import add_adapters, lora_of
from common.output import log
from model import TransformerLanguageModel
from training.machine.hardware import Hardware
from training.machine.processes import broadcast_tensors, count, on_rank_0, rank

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}


def shard(model: TransformerLanguageModel, hardware: Hardware) -> None:
    """Keep only this process's slice of each parameter. All processes must have the same weights. Parameters are
    replaced: build the optimizer afterwards.

    Blocks are gathered in the precision of their matrix products: that takes half the bytes, and no casts have to be
    kept for the backward pass. So norms in blocks read their gains in bf16, too. Gradients are averaged in fp32.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(hardware.device.type, (count(),))
    policy = MixedPrecisionPolicy(HALF[hardware.precision], torch.float32, cast_forward_inputs=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # By default the root stays whole after a forward pass, also where no backward pass follows that would free it.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The rows of a sharded tensor (a DTensor) that this process keeps; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All rows of a sharded tensor, from all processes (all-gather); any other tensor as it is."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_sharded(model: torch.nn.Module) -> bool:
    return any(hasattr(parameter, "to_local") for parameter in model.parameters())


def gather(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """On rank 0, copies of the whole tensors in host memory; elsewhere nothing. Every process must call it."""
    gathered = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if rank() == 0:
            gathered[name] = full.detach().to("cpu", copy=full is tensor)
    return gathered


@torch.no_grad()
def scatter(wholes: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite the tensors with their slices of the whole ones, which only rank 0 needs to have. Every process must
    call it."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    for name, tensor in tensors.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if rank() == 0:
            full.copy_(wholes[name])
        if isinstance(tensor, DTensor):
            full = distribute_tensor(full, tensor.device_mesh, tensor.placements)
        else:
            broadcast_tensors([full])
        tensor.copy_(full)


def unsharded_copy(model: TransformerLanguageModel, device: torch.device) -> TransformerLanguageModel:
    """A whole model of the same shape, with adapters if it has some, and without weights yet."""
    with torch.device("meta"):
        copy = TransformerLanguageModel(model.config)
        if lora := lora_of(model):
            add_adapters(copy, lora)
    copy.to_empty(device=device)
    for name, buffer in model.named_buffers():
        copy.get_buffer(name).copy_(buffer)
    if model.config.tie_embeddings:  # `to_empty` separates them
        copy.head.weight = copy.token_embedding.weight
        if lora and "embeddings" in lora.targets:
            copy.head.lora_A, copy.head.lora_B = copy.token_embedding.lora_A, copy.token_embedding.lora_B
    return copy


@torch.no_grad()
def whole_model(model: TransformerLanguageModel) -> TransformerLanguageModel | None:
    """The model; if it is sharded, a whole copy of it on rank 0, and None on the others, or if the copy does not fit in
    memory. Every process must call it."""
    if not is_sharded(model):
        return model
    copies: list[TransformerLanguageModel] = []

    def fits() -> bool:
        try:
            copies.append(unsharded_copy(model, model.device))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            log.info("Warning: the model writes no texts here: a whole copy of it does not fit in memory.")
        return bool(copies)

    if not on_rank_0(fits):
        return None
    for name, parameter in model.named_parameters():
        full = whole(parameter)
        if copies:
            copies[0].get_parameter(name).copy_(full)
    return copies[0] if copies else None


def exchange(pieces: torch.Tensor, shape: torch.Size, like: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """This process's piece of a tensor of `shape` that is divided along dimension `before` among the processes of a
    sharded tensor `like` -> its piece of the same tensor, divided along dimension `after`."""
    from torch.distributed.tensor import DTensor, Shard

    assert isinstance(like, DTensor)
    stride = torch.empty(shape, device="meta").stride()
    divided = DTensor.from_local(pieces, like.device_mesh, [Shard(before)], shape=shape, stride=stride)
    return divided.redistribute(placements=[Shard(after)]).to_local()
