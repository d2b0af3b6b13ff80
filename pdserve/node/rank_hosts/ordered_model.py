"""The model of a further host of a node: what the node orders, of the checkpoint that is here."""

from __future__ import annotations

import msgspec
import torch

from pdserve import _native
from pdserve.engine.kv.cache import TORCH_DTYPES
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.choice import EMULATED, KernelChoice, digest_of
from pdserve.engine.native.linear import WeightKind
from pdserve.engine.ranks.shard import check_ranks
from pdserve.errors import ConfigError
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.node.memory.meminfo import total_bytes
from pdserve.node.rank_hosts.messages import HostOrder
from pdserve.node.start.model import NodeModel


def model_of(order: HostOrder, checkpoint: Checkpoint) -> NodeModel:
    """Plan this host's part of a node.

    Raises:
        ConfigError: the checkpoint is another one, no build of the kernels here computes as the
            node's does, or its KV does not fit; says what would be right.
    """
    if checkpoint.revision != order.revision:
        raise ConfigError(
            f"the node serves {order.model_id}, revision {order.revision}, and here is "
            f"{checkpoint.model_id}, revision {checkpoint.revision}: start pdserve rank with the "
            "same --model"
        )
    config = load_model_config(checkpoint)
    check_ranks(config, order.share.parallelism)
    num_layers = config.num_layers - order.share.first_layer(config)
    layout = msgspec.structs.replace(order.layout, num_layers=num_layers)
    if order.num_blocks * layout.block_bytes > total_bytes():
        raise ConfigError(
            f"the node's {order.num_blocks} KV blocks take {layout.block_bytes} bytes each of this "
            f"host, which has {total_bytes() >> 20} MiB: lower kv_memory of the node"
        )
    return NodeModel(
        checkpoint,
        config,
        torch.device("cpu"),
        layout,
        order.num_blocks,
        order.num_blocks * order.layout.block_size,
        order.quantization,
        kernels=_kernels(order),
        share=order.share,
    )


def _kernels(order: HostOrder) -> KernelChoice:
    """The best build that computes as the node's does, bit for bit."""
    dtype = order.layout.dtype
    kind = WeightKind.INT8 if order.quantization == "int8" else WeightKind(dtype)
    variants = [name for name in _native.kernel_variants() if name != EMULATED]
    for name in variants:
        if digest_of(name, TORCH_DTYPES[dtype], kind) == order.kernels:
            return KernelChoice(name, order.kernels)
    raise ConfigError(
        f"no build of the kernels that this CPU can run ({', '.join(variants)}) computes as the "
        "node's does: start the node with --kernels, and one of these that its CPU can run, too"
    )
