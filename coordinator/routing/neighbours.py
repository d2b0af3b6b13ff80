"""Nodes of one host share its memory bandwidth: does the host decode more if both pools decode?

Decoding reads all weights at every step, so two nodes of a host that decode at once may each take
nearly twice as long. Profiles do not show this, since nodes are measured alone. But every report
contains the node's decode ratio (real / profiled step time), and the books say which nodes are
decoding. So two averages of the ratio are kept per node: one while the host's other pool decoded
nothing ("apart"), and one while it did ("beside"). Until a prefill node's ratio apart has been
seen, that of its host's decode nodes is used (without any: the profile). Until a ratio beside has
been seen, the two nodes are assumed to take turns.

A prefill node decodes only if its host then has more places within the promise than its decode
nodes have alone. A rule that looked only at one more request would never find this: while both
pools decode, the decode nodes are slow, which looks like a reason for prefill nodes to help them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from coordinator.registry import Member
from coordinator.routing.decode_load import DecodeLoad
from coordinator.routing.fleet import Fleet
from coordinator.routing.slots import Bools, Floats, Ints, SlotArrays
from coordinator.routing.waiting import Newcomer
from pdserve.protocol import NodeRole

IN_TURNS = 2.0  # slowdown if two nodes take turns: decoding at once need not be slower than that
_WEIGHT = 0.25  # of a new report: a ratio follows single steps, and is noisy


class Neighbours(SlotArrays):
    """Decode ratios by slot, with and without decoding in the host's other pool."""

    def __init__(self, fleet: Fleet, decodes: DecodeLoad) -> None:
        super().__init__()
        self._apart: Floats = np.zeros(self.capacity)  # 0: not seen yet
        self._beside: Floats = np.zeros(self.capacity)
        self._was_beside: Bools = np.zeros(self.capacity, np.bool_)  # at the last report
        self._on_host: defaultdict[str, list[int]] = defaultdict(list)
        self._fleet = fleet
        self._decodes = decodes

    def reported(self, member: Member, now_s: float) -> None:
        """Average the ratio of a node's report.

        It counts only if the other pool's state (decoding or not) is as at the last report, since
        the ratio is about the steps in between.
        """
        slot = member.slot
        self.reserve(slot)
        on_host = self._on_host[_host(member)]
        if slot not in on_host:
            on_host.append(slot)
            self._apart[slot] = self._beside[slot] = 0.0
        if len(on_host) < 2:
            return
        requests = self._decodes.at(now_s, now_s).requests
        is_beside = bool(requests[self._of(on_host, _other(member.role))].any())
        if requests[slot] and is_beside == self._was_beside[slot]:
            seen = self._beside if is_beside else self._apart
            ratio = member.load.decode_ratio
            seen[slot] = ratio if seen[slot] == 0 else seen[slot] + _WEIGHT * (ratio - seen[slot])
        self._was_beside[slot] = is_beside

    def lost(self, member: Member) -> None:
        """Remove a lost node from its host."""
        on_host = self._on_host[_host(member)]
        on_host.remove(member.slot)
        if not on_host:
            del self._on_host[_host(member)]

    def better_not(self, slots: Iterable[int], newcomer: Newcomer, limit_s: float) -> list[int]:
        """Return the prefill nodes on the hosts of `slots` that should not decode.

        If they decoded as well, their hosts would not have more places for such requests within
        steps of `limit_s`.
        """
        hosts = {_host(self._fleet.member(slot)) for slot in slots}
        shared = [on_host for host in hosts if len(on_host := self._on_host[host]) > 1]
        return [
            slot
            for on_host in shared
            if not self._gains(on_host, newcomer, limit_s)
            for slot in self._of(on_host, NodeRole.PREFILL).tolist()
        ]

    def _gains(self, on_host: list[int], newcomer: Newcomer, limit_s: float) -> bool:
        decodes, prefills = (self._of(on_host, r) for r in (NodeRole.DECODE, NodeRole.PREFILL))
        if len(decodes) == 0:
            return True
        known = self._apart[decodes][self._apart[decodes] > 0]
        apart = np.where(self._apart > 0, self._apart, known.mean() if known.size else 1.0)
        beside = np.where(self._beside > 0, self._beside, IN_TURNS * apart)
        alone = self._num_places(decodes, apart, newcomer, limit_s)
        together = np.concatenate([decodes, prefills])
        return self._num_places(together, beside, newcomer, limit_s) > alone

    def _num_places(self, slots: Ints, ratio: Floats, newcomer: Newcomer, limit_s: float) -> int:
        """Return how many such requests fit into batches with steps of at most `limit_s`."""
        tables, num_places = self._fleet.tables, 0
        for row in np.unique(self._fleet.row[slots]):
            num = np.arange(1, tables.max_batch[row] + 1)
            each_s = tables.sampled_s[row] + tables.context_s[row] * newcomer.context
            step_s = tables.rising[row, num] + each_s * num
            limits_s = limit_s / ratio[slots[self._fleet.row[slots] == row]]
            num_places += int(np.searchsorted(step_s, limits_s, side="right").sum())
        return num_places

    def _of(self, on_host: list[int], role: NodeRole) -> Ints:
        """Return the slots of a host that are ready in this pool."""
        slots: Ints = np.array(on_host)
        chosen: Ints = slots[self._fleet.role[slots] == role]
        return chosen


def _other(role: NodeRole) -> NodeRole:
    return NodeRole.DECODE if role is NodeRole.PREFILL else NodeRole.PREFILL


def _host(member: Member) -> str:
    """Return the host part of the session address: equal for nodes of one host."""
    return member.hello.session_address.rpartition(":")[0]
