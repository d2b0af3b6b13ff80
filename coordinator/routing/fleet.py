"""What members have reported about themselves, as arrays: pool, readiness, costs, and capacity.

A node's report covers the load from all coordinators, but arrives late. A coordinator knows its own
share of the load at once. Whatever a report shows beyond our own share is attributed to others
(`loads/`), so the sum is the larger of the two views.

`StepTables` has the step costs that they report, in the layout that csrc/routing/node.h reads.
Nodes that report the same costs share a row. The part of a step's time that is piecewise linear in
its tokens is tabulated, with one column per number of tokens; each other cost has its own array.
"""

from __future__ import annotations

from heapq import heappop, heappush

import msgspec
import numpy as np

from coordinator.generation import Needs
from coordinator.nodes.registry import Member, Registry
from coordinator.routing.loads.ratios import Ratios
from coordinator.routing.loads.slots import Floats, Ints, SlotArrays
from pdserve.measured.perf_model import GUESS, PerfModel, StepShape
from pdserve.protocol import NodeRole, PerfReport, TransferCosts


class StepTables(SlotArrays):
    """Step costs by row, without the nodes' own ratios of real to profiled time."""

    def __init__(self) -> None:
        super().__init__(capacity=1)
        self.seconds: Floats = np.zeros((1, 1))  # [row, tokens] of a step
        self.num_tabulated: Ints = np.zeros(1, np.int64)  # largest valid column of `seconds`
        self.token_budget: Ints = np.ones(1, np.int64)
        self.max_batch: Ints = np.ones(1, np.int64)
        self.full_step_s: Floats = np.ones(1)  # step of the full token budget
        self.sampled_s: Floats = np.zeros(1)
        self.pair_s: Floats = np.zeros(1)
        self.context_s: Floats = np.zeros(1)
        self.rising: Floats = np.zeros((1, 1))  # running maximum of `seconds` along tokens
        self._rows: dict[bytes, int] = {}  # by encoded costs
        self._keys: list[bytes] = []  # by row
        self._num_users: list[int] = []
        self._free: list[int] = []  # a heap of rows

    def take(self, perf: PerfReport) -> int:
        """Return the row of these costs, and count one more user of it."""
        key = msgspec.msgpack.encode((perf.step, perf.token_budget, perf.max_batch_size))
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = self._free_row()
            self._keys[row] = key
            self._fill(row, perf)
        self._num_users[row] += 1
        return row

    def drop(self, row: int) -> None:
        """Count one user less; a row without users is free."""
        self._num_users[row] -= 1
        if self._num_users[row] == 0:
            del self._rows[self._keys[row]]
            heappush(self._free, row)

    def _free_row(self) -> int:
        if self._free:
            return heappop(self._free)
        self._keys.append(b"")
        self._num_users.append(0)
        self.reserve(len(self._keys) - 1)
        return len(self._keys) - 1

    def _fill(self, row: int, perf: PerfReport) -> None:
        width = max(perf.token_budget, perf.max_batch_size) + 1
        num_new = width - self.seconds.shape[1]
        if num_new > 0:
            self.seconds = np.pad(self.seconds, ((0, 0), (0, num_new)))
        model = PerfModel(perf.step)
        self.seconds[row] = 0.0  # a step of no tokens takes no time
        self.seconds[row, 1:width] = [model.step_s(StepShape(n)) for n in range(1, width)]
        self.full_step_s[row] = self.seconds[row, perf.token_budget]
        self.num_tabulated[row] = width - 1
        self.token_budget[row] = perf.token_budget
        self.max_batch[row] = perf.max_batch_size
        self.sampled_s[row] = perf.step.sampled_s
        self.pair_s[row] = perf.step.pair_s
        self.context_s[row] = perf.step.context_s
        # Measured times may dip a little; what matters is where a step first takes longer.
        self.rising = np.maximum.accumulate(self.seconds, axis=1)

    def reserve(self, slot: int) -> None:
        """Grow the arrays, whose first axis is rows here; new divisors are 1."""
        former = self.capacity
        super().reserve(slot)
        for ones in (self.token_budget, self.max_batch, self.full_step_s):
            ones[former:] = 1


TIER = "tier"  # in a node's transfer costs: loading from its own host tier
_NO_PULLS = (TIER, "store")  # there, too: what comes from no other node

# Assumed until a node has reported its profile: 10 Gbit/s Ethernet, and the default engine.
PULL_GUESS = TransferCosts(transport="", fixed_s=0.005, bytes_per_s=1e9)
PERF_GUESS = PerfReport(step=GUESS, token_budget=512, max_batch_size=64)
ANY = Needs()  # what every node serves


class Fleet(SlotArrays):
    """All members by slot; a slot without a member is never ready."""

    def __init__(self, registry: Registry) -> None:
        super().__init__()
        self.members: list[Member | None] = []
        self.tables = StepTables()
        self.tables.take(PERF_GUESS)  # its row is kept: filling it takes time
        self._perfs: list[PerfReport] = []  # by slot: the profiles in the arrays
        self._adapters: list[frozenset[str]] = []  # by slot: what its member had
        self._ready: dict[tuple[NodeRole | None, Needs], Ints] = {}  # cache, by pool
        n = self.capacity
        self.role: Ints = np.zeros(n, np.int64)  # 0: not ready for legs
        self.is_silent = np.zeros(n, np.bool_)
        self.is_profiled = np.zeros(n, np.bool_)
        self.row: Ints = np.zeros(n, np.int64)  # in `tables`
        self._prefill_ratios, self._decode_ratios = Ratios(), Ratios()
        self.prefill_ratio: Floats = self._prefill_ratios.values
        self.decode_ratio: Floats = self._decode_ratios.values
        self.block_size: Ints = np.ones(n, np.int64)
        self.kv_tokens: Ints = np.zeros(n, np.int64)  # capacity
        self.kv_companions: Ints = np.zeros(n, np.int64)  # as need.PerRequest, as what follows
        self.kv_seen: Ints = np.zeros(n, np.int64)
        self.kv_state: Ints = np.zeros(n, np.int64)
        self.pull_fixed_s: Floats = np.zeros(n)
        self.pull_token_s: Floats = np.zeros(n)
        self.tier_fixed_s: Floats = np.zeros(n)
        self.tier_token_s: Floats = np.zeros(n)
        self.queued_tokens: Ints = np.zeros(n, np.int64)  # as reported
        self.free_blocks: Ints = np.zeros(n, np.int64)  # as reported
        for member in registry:
            self._changed(member)
        registry.on_changed(self._changed)
        registry.on_lost(self._lost)

    def reserve(self, slot: int) -> None:
        """Grow the arrays; new divisors are 1."""
        former = self.capacity
        if slot < former:
            return
        super().reserve(slot)
        self.block_size[former:] = 1
        self._prefill_ratios.reserve(slot)
        self._decode_ratios.reserve(slot)
        self.prefill_ratio = self._prefill_ratios.values
        self.decode_ratio = self._decode_ratios.values

    def ready(self, role: NodeRole | None, needs: Needs = ANY) -> Ints:
        """Return the slots of a pool's members that accept new legs; None: of both pools.

        Of those that serve such needs. A member that is silent is only asked where there is no
        other in its pool: it is late, or will soon be lost.
        """
        slots = self._ready.get((role, needs))
        if slots is None:
            pools = NodeRole if role is None else (role,)
            slots = np.sort(np.concatenate([self._heard_of(pool, needs) for pool in pools]))
            self._ready[role, needs] = slots
        return slots

    def _heard_of(self, pool: NodeRole, needs: Needs) -> Ints:
        slots = self.serving(np.flatnonzero(self.role == pool), needs)
        heard = slots[~self.is_silent[slots]]
        return heard if len(heard) else slots

    def serving(self, slots: Ints, needs: Needs) -> Ints:
        """Return those of the members' slots that serve such needs."""
        if needs == ANY:
            return slots
        serves = [self.member(slot).serves(needs) for slot in slots.tolist()]
        return slots if all(serves) else slots[serves]

    def member(self, slot: int) -> Member:
        """Return the member that owns a slot."""
        member = self.members[slot]
        assert member is not None
        return member

    def full_step_s(self, slot: int) -> float:
        """Return the seconds of a node's step of prompts with the full token budget."""
        return float(self.tables.full_step_s[self.row[slot]] * self.prefill_ratio[slot])

    def token_s(self, slot: int) -> float:
        """Return a node's prefill seconds per prompt token, in steps of the full token budget."""
        return self.full_step_s(slot) / int(self.tables.token_budget[self.row[slot]])

    def decode_one_s(self, slot: int, num_requests: int, num_context: int) -> float:
        """Return `PerfModel.decode_s` of a batch at one node; `num_context` is its total context.

        Requests beyond the maximum batch size take turns.
        """
        tables, row = self.tables, int(self.row[slot])
        rows = min(num_requests, int(tables.max_batch[row]))
        step_s = float(tables.seconds[row, rows]) + float(tables.sampled_s[row]) * rows
        raw = step_s * num_requests / rows + float(tables.context_s[row]) * num_context
        return raw * float(self.decode_ratio[slot])

    # ---- reports of members --------------------------------------------------------------------

    def _changed(self, member: Member) -> None:
        slot = member.slot
        self.reserve(slot)
        while slot >= len(self.members):
            self.members.append(None)
            self._perfs.append(PERF_GUESS)
            self._adapters.append(frozenset())
        if self.members[slot] is not member:
            self.members[slot] = member
            self._perfs[slot] = PERF_GUESS
            self._set_row(slot, self.tables.take(PERF_GUESS))
            self._describe(slot, member, PERF_GUESS)
        if member.perf is not self._perfs[slot] and member.perf is not None:
            self._profile(slot, member, member.perf)
        if member.adapters != self._adapters[slot]:
            self._adapters[slot], self._ready = member.adapters, {}
        load = member.load
        self._set_role(slot, int(member.role) if member.is_ready else 0, is_silent=member.is_silent)
        self._prefill_ratios.report(slot, load.prefill_ratio, self.row)
        self._decode_ratios.report(slot, load.decode_ratio, self.row)
        self.queued_tokens[slot] = load.queued_tokens
        self.free_blocks[slot] = load.free_blocks

    def _profile(self, slot: int, member: Member, perf: PerfReport) -> None:
        self._perfs[slot] = perf
        former = int(self.row[slot])
        self._set_row(slot, self.tables.take(perf))
        self.tables.drop(former)
        self.is_profiled[slot] = True
        self._describe(slot, member, perf)

    def _describe(self, slot: int, member: Member, perf: PerfReport) -> None:
        layout = member.hello.layout
        token_bytes = layout.token_bytes
        self.block_size[slot] = layout.block_size
        self.kv_tokens[slot] = layout.tokens_in(member.hello.num_blocks)
        each = layout.per_request
        self.kv_companions[slot], self.kv_seen[slot] = each.num_companions, each.seen_tokens
        self.kv_state[slot] = each.state_tokens
        pulls = [t for t in perf.transfers if t.transport not in _NO_PULLS] or [PULL_GUESS]
        pull = max(pulls, key=lambda costs: costs.bytes_per_s)
        tier = next((t for t in perf.transfers if t.transport == TIER), pull)
        self.pull_fixed_s[slot] = pull.fixed_s
        self.pull_token_s[slot] = token_bytes / pull.bytes_per_s
        self.tier_fixed_s[slot] = tier.fixed_s
        self.tier_token_s[slot] = token_bytes / tier.bytes_per_s

    def _set_row(self, slot: int, row: int) -> None:
        self.row[slot] = row
        self._prefill_ratios.forget_typical()
        self._decode_ratios.forget_typical()

    def _set_role(self, slot: int, role: int, *, is_silent: bool = False) -> None:
        if (self.role[slot], self.is_silent[slot]) != (role, is_silent):
            self.role[slot], self.is_silent[slot] = role, is_silent
            self._ready = {}

    def _lost(self, member: Member) -> None:
        slot = member.slot
        self._set_role(slot, 0)
        self.tables.drop(int(self.row[slot]))
        self.is_profiled[slot] = False
        self._prefill_ratios.forget(slot)
        self._decode_ratios.forget(slot)
        self.members[slot] = None
