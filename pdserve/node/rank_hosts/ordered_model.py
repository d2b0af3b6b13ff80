"""The model of a further host of a node: what the node orders, of the checkpoint that is here."""

from __future__ import annotations

import msgspec
import torch

from pdserve import _native
from pdserve.engine.models.config import ModelConfig, load_model_config
from pdserve.engine.native.choice import EMULATED, KernelChoice, digest_of
from pdserve.engine.plan.forms import ActivationDtype, WeightForm, form_of
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import check_ranks
from pdserve.engine.weights.codings import native_plan
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.node.memory.meminfo import total_bytes
from pdserve.node.rank_hosts.messages import DevicesOrder, HostOrder
from pdserve.node.start.model import NodeModel, check_devices
from pdserve.shared.errors import ConfigError


def model_of(order: HostOrder, checkpoint: Checkpoint) -> NodeModel:
    """Plan this host's part of a node on CPUs.

    Raises:
        ConfigError: the checkpoint is another one, no build of the kernels here computes as the
            node's does, or its KV does not fit; says what would be right.
    """
    config = _config(order, checkpoint)
    num_layers = config.num_layers - order.part.first_layer(config)
    layout = msgspec.structs.replace(order.layout, num_layers=num_layers)
    if order.num_blocks * layout.block_bytes > total_bytes():
        raise ConfigError(
            f"the node's {order.num_blocks} KV blocks take {layout.block_bytes} bytes each of this "
            f"host, which has {total_bytes() >> 20} MiB: lower kv_memory of the node"
        )
    form, activations = _arithmetic(order)
    return NodeModel(
        checkpoint,
        config,
        torch.device("cpu"),
        layout,
        order.num_blocks,
        order.layout.tokens_in(order.num_blocks),
        form,
        activations,
        kernels=_kernels(order.kernels, native_plan(checkpoint, config, form), activations),
        share=order.part,
    )


def device_model_of(
    order: HostOrder, devices: DevicesOrder, checkpoint: Checkpoint, device: torch.device
) -> NodeModel:
    """Plan this host's part of a node whose ranks have a device each.

    Args:
        order: what is to be loaded.
        devices: its part about devices.
        checkpoint: the one that is here.
        device: the first one of this host.

    Raises:
        ConfigError: the checkpoint is another one, or there are no such devices, or too few.
    """
    config, part = _config(order, checkpoint), order.part
    if device.type != devices.kind:
        raise ConfigError(
            f"the node computes on {devices.kind}, and this host on {device.type}: start both with "
            f"--device {devices.kind}"
        )
    if device.type != "cpu":
        check_devices(device, part.num_ranks, torch.cuda.device_count())
    return NodeModel(
        checkpoint,
        config,
        device,
        order.layout,
        order.num_blocks,
        order.layout.tokens_in(order.num_blocks),
        *_arithmetic(order),
        devices.attention,
        devices.has_graphs,
        share=part,
        worst_step=devices.worst_step,
    )


def _config(order: HostOrder, checkpoint: Checkpoint) -> ModelConfig:
    """Raises ConfigError: the checkpoint is another one."""
    if checkpoint.revision != order.revision:
        raise ConfigError(
            f"the node serves {order.model_id}, revision {order.revision}, and here is "
            f"{checkpoint.model_id}, revision {checkpoint.revision}: start pdserve rank with the "
            "same --model"
        )
    config = load_model_config(checkpoint)
    check_ranks(config, order.part.parallelism)
    return config


def _arithmetic(order: HostOrder) -> tuple[WeightForm, ActivationDtype]:
    activations = ActivationDtype(order.activations or order.layout.dtype)
    return form_of(order.quantization, activations), activations


def _kernels(digest: str, plan: ModelPlan, activations: ActivationDtype) -> KernelChoice:
    """The best build that computes as the node's does, bit for bit."""
    variants = [name for name in _native.kernel_variants() if name != EMULATED]
    for name in variants:
        if digest_of(name, activations, plan.form, is_coded=bool(plan.coded)) == digest:
            return KernelChoice(name, digest)
    raise ConfigError(
        f"no build of the kernels that this CPU can run ({', '.join(variants)}) computes as the "
        "node's does: start the node with --set engine.kernels=NAME, one that its CPU can run, too"
    )
