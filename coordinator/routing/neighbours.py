"""Nodes of one host share its memory: whether it decodes more when both of its pools do.

Decoding reads all weights at every step, so two nodes that do it at once may each take nearly twice
as long. Profiles know nothing of that, since nodes are measured alone. But every report says how
far a node's steps are off, and the books say who decodes: so that is kept twice, averaged over
what was seen while the host's other pool decoded nothing and while it did. Until it was seen, a
prefill node's is its host's decode nodes' (without any: the profile), and beside each other the two
are taken to take turns.

A prefill node decodes only if its host then has more places within the promise than its decode
nodes have alone. Whoever looked at one request more would never see that: while both decode, the
decode nodes are slow, and so a reason to have prefill nodes help them.
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

IN_TURNS = 2.0  # times as long: no two that decode at once need take longer than that
_WEIGHT = 0.25  # of a new report: a ratio follows single steps, and is noisy


class Neighbours(SlotArrays):
    """Decode ratios by slot."""

    def __init__(self, fleet: Fleet, decodes: DecodeLoad) -> None:
        super().__init__()
        self._apart: Floats = np.zeros(self.capacity)  # 0: not seen yet
        self._beside: Floats = np.zeros(self.capacity)
        self._was_beside: Bools = np.zeros(self.capacity, np.bool_)  # at the last report
        self._on_host: defaultdict[str, list[int]] = defaultdict(list)
        self._fleet = fleet
        self._decodes = decodes

    def reported(self, member: Member, now_s: float) -> None:
        """Its ratio is of steps since its last report, if things are as they were then."""
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
        """The node is gone."""
        on_host = self._on_host[_host(member)]
        on_host.remove(member.slot)
        if not on_host:
            del self._on_host[_host(member)]

    def better_not(self, slots: Iterable[int], newcomer: Newcomer, limit_s: float) -> list[int]:
        """Those of these nodes that leave their host no more places for such requests, in steps of
        `limit_s`, if they decode as well."""
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
        """In batches of such requests."""
        tables, num_places = self._fleet.tables, 0
        for row in np.unique(self._fleet.row[slots]):
            num = np.arange(1, tables.max_batch[row] + 1)
            each_s = tables.sampled_s[row] + tables.context_s[row] * newcomer.context
            step_s = tables.rising[row, num] + each_s * num
            limits_s = limit_s / ratio[slots[self._fleet.row[slots] == row]]
            num_places += int(np.searchsorted(step_s, limits_s, side="right").sum())
        return num_places

    def _of(self, on_host: list[int], role: NodeRole) -> Ints:
        """Those of a host that are ready in this pool."""
        slots: Ints = np.array(on_host)
        chosen: Ints = slots[self._fleet.role[slots] == role]
        return chosen


def _other(role: NodeRole) -> NodeRole:
    return NodeRole.DECODE if role is NodeRole.PREFILL else NodeRole.PREFILL


def _host(member: Member) -> str:
    """Where its sessions are: equal for nodes of one host."""
    return member.hello.session_address.rpartition(":")[0]
