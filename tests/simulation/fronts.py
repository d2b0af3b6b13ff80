"""Fronts that decide nothing, for tests of the nodes' policies."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.node import Node


class Straight:
    """Dispatches every call to the same nodes, as it arrives."""

    def __init__(
        self,
        cluster: Cluster,
        prefill: Node | None,
        decode: Node | None,
        expected: Callable[[Call], int] = lambda call: 0,
    ) -> None:
        """`expected`: tokens of a call's answer, as nodes are told; 0: nothing is."""
        self._expected = expected
        self._cluster = cluster
        self._prefill = prefill
        self._decode = decode

    def arrive(self, call: Call) -> None:
        """As Front."""
        expected = self._expected(call)
        self._cluster.dispatch(call, self._prefill, self._decode, expected_output=expected)

    def progressed(self, call: Call, num_tokens: int) -> None:
        """As Front; ignored."""

    def silent_until_s(self, call: Call, num_tokens: int) -> float:
        """As Front: nothing has to be reported."""
        return inf

    def ended(self, call: Call) -> None:
        """As Front; ignored."""
