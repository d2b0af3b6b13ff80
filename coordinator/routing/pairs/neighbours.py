"""Nodes of one host share its memory bandwidth: does the host decode more if both pools decode?

Decoding reads all weights at every step, so two nodes of a host that decode at once wait for each
other's reads; small steps may take nearly twice as long. Profiles do not show this, since nodes are
measured alone. But every report contains the node's decode ratio (real / profiled step time), and
the books say which nodes are decoding. So two averages of the ratio are kept per node: one while
the host's other pool decoded nothing ("apart"), and one while it did ("beside"). Until a prefill
node's ratio apart has been seen, that of its host's decode nodes is used (without any: the
profile).

A step reads the weights once, however many streams it has. So what `beside` adds counts in seconds,
of the steps in which it was seen: it is little in the large steps of a loose promise. Until it has
been seen, nodes are assumed to take turns with the weights, so a step waits as long as a step of
one stream takes.

A prefill node decodes only if its host then has more places within the promise than its decode
nodes have alone. A rule that looked only at one more request would never find this: while both
pools decode, the decode nodes are slow, which looks like a reason for prefill nodes to help them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count

import numpy as np

from coordinator.nodes.registry import Member
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.decode import DecodeLoad
from coordinator.routing.loads.slots import Bools, Floats, Ints, SlotArrays
from pdserve._native import FleetView
from pdserve.protocol import NodeRole

_WEIGHT = 0.25  # of a new report: a ratio follows single steps, and is noisy


@dataclass(frozen=True, slots=True)
class _Host:
    number: int  # from 1
    slots: list[int] = field(default_factory=list)


class Neighbours(SlotArrays):
    """Decode ratios by slot, with and without decoding in the host's other pool."""

    def __init__(self, fleet: Fleet, decodes: DecodeLoad) -> None:
        super().__init__()
        self.host: Ints = np.zeros(self.capacity, np.int64)  # number; 0: no node there
        self.apart: Floats = np.zeros(self.capacity)  # 0: not seen yet
        self.beside: Floats = np.zeros(self.capacity)
        self.beside_step_s: Floats = np.zeros(self.capacity)  # profiled, while `beside` was seen
        self._was_beside: Bools = np.zeros(self.capacity, np.bool_)  # at the last report
        self._hosts: dict[str, _Host] = {}  # by name
        self._numbers = count(1)
        self._fleet = fleet
        self._decodes = decodes

    def reported(self, member: Member, now_s: float) -> None:
        """Average the ratio of a node's report.

        It counts only if the node has seen one, and if the other pool's state (decoding or not) is
        as at the last report, since the ratio is about the steps in between.
        """
        slot = member.slot
        self.reserve(slot)
        host = self._host_of(member)
        if self.host[slot] != host.number:
            host.slots.append(slot)
            self.host[slot] = host.number
            self.apart[slot] = self.beside[slot] = self.beside_step_s[slot] = 0.0
        if len(host.slots) < 2:
            return
        other_pool = member.role.other
        is_beside = any(
            self._fleet.role[other] == other_pool and self._decodes.has_requests(other, now_s)
            for other in host.slots
        )
        ratio = member.load.decode_ratio  # 0: not seen yet
        is_same = is_beside == self._was_beside[slot]
        if ratio > 0 and is_same and self._decodes.has_requests(slot, now_s):
            if is_beside:
                _average(self.beside, slot, ratio)
                _average(self.beside_step_s, slot, self._profiled_s(slot, now_s))
            else:
                _average(self.apart, slot, ratio)
        self._was_beside[slot] = is_beside

    def lost(self, member: Member) -> None:
        """Remove a lost node from its host."""
        host = self._host_of(member)
        self.host[member.slot] = 0
        host.slots.remove(member.slot)
        if not host.slots:
            del self._hosts[_name(member)]

    def better_not(self, view: FleetView, near: Ints, limit_s: float) -> list[int]:
        """Return the prefill nodes on the hosts of the slots `near` that should not decode.

        If they decoded as well, their hosts would not have more places for such requests within
        steps of `limit_s`.
        """
        prefills, decodes = (self._fleet.ready(role) for role in NodeRole)
        seen = self.apart, self.beside, self.beside_step_s
        return view.better_not(near, decodes, prefills, self.host, *seen, limit_s)

    def _profiled_s(self, slot: int, now_s: float) -> float:
        """Return the time of a step of the current batch, as profiled."""
        batch = self._decodes.at(now_s, now_s)
        num_requests, context = int(batch.requests[slot]), int(batch.context[slot])
        step_s = self._fleet.decode_one_s(slot, num_requests, context)
        return step_s / float(self._fleet.decode_ratio[slot])

    def _host_of(self, member: Member) -> _Host:
        name = _name(member)
        if name not in self._hosts:
            self._hosts[name] = _Host(next(self._numbers))
        return self._hosts[name]


def _average(seen: Floats, slot: int, new: float) -> None:
    """Move an average towards a new value; the first one is taken as it is."""
    seen[slot] += (_WEIGHT if seen[slot] else 1.0) * (new - seen[slot])


def _name(member: Member) -> str:
    """Return the host part of the session address: equal for nodes of one host."""
    return member.hello.session_address.rpartition(":")[0]
