"""What a rank other than 0 does: it loads its share of the weights, and computes steps."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.models.config import load_model_config
from pdserve.engine.native.decoder import NativeDecoder
from pdserve.engine.native.packed_cache import PackedCache
from pdserve.engine.ranks.adapters import OwnDecoder, follow
from pdserve.engine.ranks.order import RankOrder
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.engine.weights.codings import native_plan
from pdserve.engine.weights.load import load_rank
from pdserve.model_files.checkpoint import Checkpoint


def compute_steps(order: RankOrder, memory: NDArray[np.uint8], pool: NDArray[np.uint8]) -> None:
    """Load, and compute steps for ever.

    Args:
        order: what to be.
        memory: as StepMemory.
        pool: the node's KV blocks, of the whole model.

    Raises:
        ModelError: the weights cannot be used.
        RanksLost: another rank has ended.
    """
    torch.set_num_threads(order.num_threads)
    _native.set_num_threads(order.num_threads)
    steps = StepMemory(memory, order.rank, order.stages)
    decoder = _load(order, steps)
    if order.layout.rounded_to is not None:
        decoder.round_kv(order.layout.rounded_to)
    cpu = torch.device("cpu")
    kv_pool = KvCache(order.layout, order.num_blocks, cpu, pool).pool
    orders = socket.socket(fileno=order.adapters_fd), OwnDecoder(decoder)
    threading.Thread(target=follow, args=orders, name="adapters", daemon=True).start()
    steps.group.say_ready()
    hidden_size, vocab_size = decoder.config.hidden_size, decoder.config.vocab_size
    number = 0
    while True:
        number = steps.group.wait_step(number)
        decoder.logits(steps.read(hidden_size, vocab_size), kv_pool)


def _load(order: RankOrder, steps: StepMemory) -> NativeDecoder:
    checkpoint = Checkpoint(Path(order.checkpoint), order.model_id, order.revision)
    folder = None if order.packed_folder is None else Path(order.packed_folder)
    return load_rank(
        checkpoint,
        native_plan(checkpoint, load_model_config(checkpoint), order.form, order.shard),
        order.activations,
        steps,
        lambda _: None,  # rank 0 kills whoever need not go on
        cache=None if folder is None else PackedCache(folder, order.packed_limit),
        kernels=order.kernels,
        first_pool_layer=order.first_pool_layer,
    )
