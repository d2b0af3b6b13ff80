"""What a rank other than 0 does: it loads its share of the weights, and follows rank 0's steps."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from kv_transfer.cuda.catalog import open_driver
from kv_transfer.cuda.pool import OpenedPool
from pdserve import _native
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.layer_progress import LayerProgress
from pdserve.engine.models.config import load_model_config
from pdserve.engine.models.decoder import Decoder
from pdserve.engine.ranks.adapters import OwnDecoder, follow
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.steps.batch import Batch
from pdserve.engine.weights.codings import device_plan
from pdserve.engine.weights.load import load_device_weights
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.node.device_ranks.decoders import make_decoder
from pdserve.node.device_ranks.order import DeviceRankOrder
from pdserve.node.device_ranks.rendezvous import meet
from pdserve.shared.errors import NodeSick

_NOBODY: Final = LayerProgress((), lambda _: None)


def follow_steps(
    order: DeviceRankOrder, memory: NDArray[np.uint8], pool: NDArray[np.uint8] | None
) -> NoReturn:
    """Load, and compute steps for ever.

    Args:
        order: what to be.
        memory: as StepMemory.
        pool: this rank's KV, on a CPU.

    Raises:
        ModelError: the weights cannot be used.
        DeviceError: the GPU cannot be.
        RanksLost: another rank has ended.
    """
    torch.set_num_threads(order.num_threads)
    device = torch.device(order.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    steps = StepMemory(memory, order.rank, order.stages)
    decoder = _load(order, steps, device)
    buffer = pool if pool is not None else _opened_pool(order, device)
    kv_pool = KvCache(order.layout, order.num_blocks, device, buffer).pool
    orders = socket.socket(fileno=order.adapters_fd), OwnDecoder(decoder)
    threading.Thread(target=follow, args=orders, name="adapters", daemon=True).start()
    number = 0
    while True:
        number = steps.group.wait_step(number)
        try:
            _compute(decoder, kv_pool, steps)
        except NodeSick:
            _wait_for_the_end(steps.group, number)


def _compute(decoder: Decoder, kv_pool: torch.Tensor, steps: StepMemory) -> None:
    config = decoder.config
    batch = with_slots(steps.read(config.hidden_size, config.vocab_size), kv_pool.shape[4])
    # So that all ranks choose alike between launching a step and replaying it.
    decoder.logits(batch, kv_pool, _NOBODY if steps.reports_layers else None)
    steps.group.end_step()


def with_slots(batch: Batch, block_size: int) -> Batch:
    """Return a batch that was read from the step memory, with its slots."""
    attention = batch.attention
    starts = attention.query_start.long()
    counts, contexts = starts.diff(), attention.context_lens.long()
    rows = torch.repeat_interleave(counts)  # of each token: the number of its request
    positions = torch.arange(len(batch.token_ids)) + (contexts - starts[1:])[rows]
    blocks = attention.block_tables[rows, positions // block_size].long()
    slots = blocks * block_size + positions % block_size
    return replace(batch, attention=replace(attention, slot_mapping=slots))


def _load(order: DeviceRankOrder, steps: StepMemory, device: torch.device) -> Decoder:
    checkpoint = Checkpoint(Path(order.checkpoint), order.model_id, order.revision)
    config = load_model_config(checkpoint)
    plan = device_plan(checkpoint, config, order.form, order.shard)
    weights = load_device_weights(checkpoint, plan, order.activations, device)
    steps.group.say_ready()
    check = partial(_check, steps.group)
    while not steps.group.wait_ready(1.0):
        pass  # the others still load; raises RanksLost
    ranks = meet(order.rendezvous, order.shard, device, check)
    return make_decoder(
        config,
        weights,
        ranks,
        order.attention,
        has_graphs=order.has_graphs,
        worst_step=order.worst_step,
        tap_layers=order.tap_layers,
        kv_codes=order.layout.dtype.is_coded,
    )


def _check(group: _native.RankGroup) -> None:
    if group.is_lost:
        raise _native.RanksLost


def _opened_pool(order: DeviceRankOrder, device: torch.device) -> OpenedPool | None:
    if not order.pool_handle:
        return None
    num_bytes = order.num_blocks * order.layout.block_bytes
    return OpenedPool(open_driver(device.index), order.pool_handle, num_bytes)


def _wait_for_the_end(group: _native.RankGroup, number: int) -> NoReturn:
    """A rank could not compute with the others: rank 0 knows which one has ended, and kills all.

    Whoever ended now would be taken for the one.
    """
    while True:
        number = group.wait_step(number)
