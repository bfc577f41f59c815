"""What other tools make of the programs of the live benchmark.

A peer is named by its parts, joined by "+"; each part changes the model, the optimizer or the
context of the forward pass. What cannot run on this machine raises, and the benchmark writes
the reason down.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import count
from typing import Any

import torch
from live_workloads import Peer
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}
ATTENTION = {
    getattr(aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    if hasattr(aten, name)
}


class NeedsGpuError(RuntimeError):
    """A peer that this machine cannot run."""


def need_gpu(device: str) -> None:
    """Raise where there is no GPU."""
    if device != "cuda":
        raise NeedsGpuError("needs a GPU")


# -- checkpointing -------------------------------------------------------------------------


def wrap(block: nn.Module, **options: Any) -> None:
    """Checkpoint a block: its forward pass runs again in backward."""
    inner = block.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(inner, *args, use_reentrant=False, **options, **kwargs)

    block.forward = forward


def checkpointed(share: float, _device: str) -> Peer:
    """Checkpoint the first blocks."""

    def on_model(_model: nn.Module, blocks: list[nn.Module]) -> None:
        for block in blocks[: round(len(blocks) * share)]:
            wrap(block)

    return Peer(on_model=on_model)


def every_second_product() -> Any:
    """Keep the results of attention and of every second product, and make the rest again."""
    seen = {False: count(), True: count()}

    def policy(context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = operator in ATTENTION
        if operator in PRODUCTS:
            keep = next(seen[context.is_recompute]) % 2 == 0
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def selective(_device: str) -> Peer:
    """Checkpoint all blocks, but for what is dear to make again."""

    def on_model(_model: nn.Module, blocks: list[nn.Module]) -> None:
        for block in blocks:
            wrap(block, context_fn=every_second_product)

    return Peer(on_model=on_model)


def compiled(memory_budget: float, _device: str) -> Peer:
    """Compile each block; the compiler makes again what does not fit in its share of them."""

    def on_model(_model: nn.Module, blocks: list[nn.Module]) -> None:
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = memory_budget
        for block in blocks:
            block.compile()

    return Peer(on_model=on_model)


# -- offloading ----------------------------------------------------------------------------


def save_on_cpu(device: str) -> Peer:
    """Keep everything that is saved for backward on the host."""
    pinned = device == "cuda"
    return Peer(around=partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned))


def torchao_offload(device: str) -> Peer:
    """Keep the optimizer on the host."""
    try:
        from torchao.optim import CPUOffloadOptimizer
    except ModuleNotFoundError as error:
        if error.name == "torchao":
            raise
        from torchao.prototype.low_bit_optim import CPUOffloadOptimizer
    need_gpu(device)
    return Peer(
        optimizer=lambda parameters, **options: CPUOffloadOptimizer(
            parameters, torch.optim.AdamW, **options
        )
    )


def fsdp_offload(device: str) -> Peer:
    """Keep parameters, gradients and the optimizer on the host: FSDP2 with a single rank."""
    need_gpu(device)
    from torch import distributed
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def on_model(model: nn.Module, blocks: list[nn.Module]) -> None:
        for library in ("NCCL", "GLOO"):  # a machine need not have a network
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        store = f"file://{tempfile.mkdtemp()}/store"
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=store, rank=0, world_size=1
        )
        policy = CPUOffloadPolicy(pin_memory=True)
        for block in blocks:
            fully_shard(block, offload_policy=policy)
        fully_shard(model, offload_policy=policy)

    return Peer(on_model=on_model)


def accelerate_offload(device: str) -> Peer:
    """Keep all weights on the host; each module fetches its own."""
    from accelerate import cpu_offload

    need_gpu(device)

    def on_model(model: nn.Module, _blocks: list[nn.Module]) -> None:
        cpu_offload(model.cpu(), execution_device=torch.device("cuda", 0))

    return Peer(on_model=on_model)


def accelerate_dispatch(share: float, device: str) -> Peer:
    """Keep the first part of the weights on the device, the rest on the host."""
    from accelerate import dispatch_model, infer_auto_device_map

    need_gpu(device)

    def on_model(model: nn.Module, blocks: list[nn.Module]) -> None:
        model.cpu()
        whole = sum(each.numel() * each.element_size() for each in model.parameters())
        room = {0: int(whole * share), "cpu": 1 << 50}
        places = infer_auto_device_map(
            model, max_memory=room, no_split_module_classes=[type(blocks[0]).__name__]
        )
        dispatch_model(model, places, main_device=0)

    return Peer(on_model=on_model)


PARTS: dict[str, Callable[[str], Peer]] = {
    "checkpoint": partial(checkpointed, 1.0),
    "checkpoint-75%": partial(checkpointed, 0.75),
    "checkpoint-50%": partial(checkpointed, 0.5),
    "selective": selective,
    "compile-0.5": partial(compiled, 0.5),
    "compile-0.2": partial(compiled, 0.2),
    "save_on_cpu": save_on_cpu,
    "torchao": torchao_offload,
    "fsdp2": fsdp_offload,
    "cpu_offload": accelerate_offload,
    "dispatch-50%": partial(accelerate_dispatch, 0.5),
}


def make_peer(name: str, device: str) -> Peer:
    """Return what a peer, named by its parts, changes. "": nothing."""
    parts = [PARTS[each](device) for each in name.split("+")] if name else []

    def on_model(model: nn.Module, blocks: list[nn.Module]) -> None:
        # Blocks are wrapped before they are sharded.
        for part in reversed(parts):
            part.on_model(model, blocks)

    made = Peer(on_model=on_model)
    for part in parts:
        made.optimizer = part.optimizer or made.optimizer
        if part.around is not nullcontext:
            made.around = part.around
    return made
