"""Where a request will run, and the predicted latencies; how long until a node has a place for it.

A node admits a request to its batch by the batch rule (`pdserve/rules/batch.py`); other requests
wait until one ends. Waits are predicted from the calendar of requests in flight; future arrivals
are not in it.
"""

from __future__ import annotations

import msgspec
import numpy as np

from coordinator.nodes.registry import Member
from coordinator.prefixes.index import Hits
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.decode import DecodeLoad
from coordinator.routing.loads.slots import Ints
from pdserve._native import FleetView
from pdserve.measured.output_lengths import Kind
from pdserve.rules.batch import aimed_s


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """A decision of the router. Times are in seconds from the decision; 0 means unknown.

    Times are unknown for nodes that have not reported a profile yet.
    """

    prefill: Member | None  # None: the decode node prefills the prompt itself
    decode: Member | None  # None: only a single token is wanted
    ttft_s: float
    tpot_s: float  # mean gap after token 1, including the handoff and a wait for room
    wait_s: float  # for a place in the decode batch, after token 1 has been computed
    held_s: float  # part of wait_s for which token 1 is held back: in the TTFT, not in the TPOT
    idle_ttft_s: float  # TTFT and TPOT if the nodes had nothing else to do
    idle_tpot_s: float
    prompt_tokens: int
    uncached_tokens: int  # prompt tokens that the prefilling node does not hold
    output_tokens: int  # expected
    hits: Hits  # which nodes hold how much of the prompt
    kind: Kind = ()  # whose answers are as long as its own is expected to be ...
    usual_tokens: float = 0.0  # ... in total; 0: unknown
    adapter: str = ""  # that its nodes have
    shares_prefill: bool = False  # the prompt is computed for another answer, or was for the stream

    @property
    def queue_s(self) -> float:
        """The part of the TTFT that is spent behind other work."""
        return self.ttft_s - self.idle_ttft_s

    @property
    def revision(self) -> str:
        """The revision that its nodes serve."""
        node = self.decode or self.prefill
        assert node is not None
        return node.hello.revision

    @property
    def side(self) -> str:
        """Which nodes do the work: "pair", "local" or "prefill"; for people and metrics."""
        if self.prefill is None:
            return "local"
        return "pair" if self.decode is not None else "prefill"


class Newcomer(msgspec.Struct, frozen=True):
    """What a new request needs from a decode batch."""

    context: int  # tokens read at each step, averaged over its life
    num_tokens: int  # of KV at its end
    tpot_s: float  # promised; 0: no promise

    def view(
        self, fleet: Fleet, decodes: DecodeLoad, now_s: float, yielding: Ints | None = None
    ) -> FleetView:
        """Return a view of the nodes for this request; valid until books or members change.

        `yielding`: how many requests of each batch would give way to it; None: none.
        """
        if yielding is None:
            yielding = np.zeros(fleet.capacity, np.int64)
        calendar = decodes.forecast.advanced(now_s)
        needs = self.context, self.num_tokens, aimed_s(self.tpot_s)
        return FleetView(fleet.tables, fleet, decodes, calendar, now_s, *needs, yielding)


def tpot_within_s(
    fleet: Fleet,
    decodes: DecodeLoad,
    slots: Ints,
    placement: Placement,
    tpot_s: float,
    now_s: float,
) -> float | None:
    """Return the seconds until one of these nodes keeps this TPOT for such a request.

    None if that is beyond the forecast.
    """
    context = placement.prompt_tokens + placement.output_tokens // 2
    newcomer = Newcomer(context, context, 0.0)
    return newcomer.view(fleet, decodes, now_s).within(slots, tpot_s)
