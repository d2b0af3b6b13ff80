"""Sends each step on to the next host, and brings back what comes of it."""

from __future__ import annotations

import socket
import threading

import numpy as np
from numpy.typing import NDArray

from pdserve import _native
from pdserve.engine.ranks.adapters import follow
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.node.rank_hosts.adapters import NextHost
from pdserve.node.rank_hosts.lacking import KnownBlocks
from pdserve.node.rank_hosts.messages import CarrierOrder, HostAnswer, HostStep
from pdserve.node.rank_hosts.pool_view import PoolView
from pdserve.node.rank_hosts.step_arrays import HostStepArrays
from pdserve.node.rank_hosts.stream import HostStream


def carry_steps(
    order: CarrierOrder,
    stream: HostStream,
    memory: NDArray[np.uint8],
    data: NDArray[np.uint8],
    generations: NDArray[np.uint64],
) -> None:
    """Carry for ever.

    Args:
        order: as run_carrier.
        stream: to the next host, which is ready.
        memory: as StepMemory.
        data: uint8[num_blocks, block_bytes], the blocks of this host's pool.
        generations: uint64[num_blocks], theirs.

    Raises:
        PeerLost: the next host is lost; says why, if that is known.
        RanksLost: a rank of this host is.
    """
    steps = StepMemory(memory, order.rank, order.stages)
    carrier = _Carrier(order, stream, steps, data, generations)
    group, number = steps.group, 0
    threading.Thread(target=_give_up_with, args=(stream, group), daemon=True).start()
    adapters = NextHost(order.address, order.tls_dir, order.to_next.secret)
    orders = socket.socket(fileno=order.adapters_fd)
    threading.Thread(target=follow, args=(orders, adapters), name="adapters", daemon=True).start()
    group.say_ready()
    try:
        while True:
            number = group.wait_step(number)
            carrier.carry()
            group.tell_layers(order.layout.num_layers)
            group.end_step()
    except _native.RanksLost:
        if not stream.is_silent(0.0):  # it has said why, or just ended
            stream.receive(HostAnswer).check()
        raise
    finally:
        group.give_up()


def _give_up_with(stream: HostStream, group: _native.RankGroup) -> None:
    """Notice the end of the next host also between steps."""
    stream.wait_hung_up()
    group.give_up()


class _Carrier:
    def __init__(
        self,
        order: CarrierOrder,
        stream: HostStream,
        steps: StepMemory,
        data: NDArray[np.uint8],
        generations: NDArray[np.uint64],
    ) -> None:
        self._order = order
        self._stream = stream
        self._steps = steps
        self._pool = PoolView(data, order.layout, order.first_layer)
        self._known = KnownBlocks(generations, order.layout.block_size)

    def carry(self) -> None:
        """Send the step that is running, and write its KV and its results."""
        order, stream, steps = self._order, self._stream, self._steps
        sizes, first_layer = (order.hidden_size, order.vocab_size), order.first_layer_of_model
        step = HostStepArrays.of(steps, sizes, order.layout.block_size, first_layer)
        lacking = self._known.take_lacking(step.tables, step.first, step.end)
        running = steps.step.numpy()
        head = HostStep(len(running), len(lacking))
        stream.send(head, running, lacking)
        for ids in self._pool.few_at_once(lacking):
            stream.send_array(self._pool.blocks(ids))
        for rows in step.parts(order.hidden_size):
            steps.group.take(rows)
            stream.send_array(rows)
        stream.receive(HostAnswer).check()
        tokens, tapped = self._pool.empty_tokens(len(step.slots[0])), step.tapped()
        for array in (tokens, *step.results, tapped):
            stream.receive_array(array)
        self._pool.set_tokens(*step.slots, tokens)
        step.set_tapped(tapped)
