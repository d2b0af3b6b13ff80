"""Simulated nodes without an engine: they speak the whole protocol, and make up tokens.

A prefill leg is answered with token 1 at once, a decode leg with one token at every step of a beat.
So only the coordinator has work to do. The beat stands in for an engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from secrets import token_hex

from pdserve.commands.bench.load.client import PLAIN_IDS
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.coordinator_link import CoordinatorLink
from pdserve.node.legs import Legs
from pdserve.protocol import (
    Claim,
    Claimed,
    DecodeLeg,
    FinishReason,
    LegFailed,
    LoadAdapter,
    LoadReport,
    NodeHello,
    NodeRole,
    NodeState,
    PerfReport,
    PhaseTimes,
    Prefetch,
    Prefetched,
    PrefillLeg,
    StepCosts,
    TokenEvent,
    TransferCosts,
    TransportReach,
)
from pdserve.protocol.version import PROTOCOL
from pdserve.settings.timeouts import NodeTimeouts
from pdserve.shared.errors import TransportUnavailable
from pdserve.shared.introduction import new_key

_LAYOUT = KvLayout.gqa(layers=32, heads=8, head_dim=128, block_size=16, dtype=KvDtype.BFLOAT16)
_NUM_BLOCKS = 1 << 20
_MAX_MODEL_LEN = 1 << 16
_NOWHERE = "127.0.0.1:1"  # no peer ever connects: there is no KV to pull
_QUICK_S = 1e-6  # predicted time of a prefill or a pull


class Beat:
    """Calls its listeners every `step_s`, from `start` on.

    A beat that is late continues at even intervals from the present: like an engine, it does not
    make up for missed steps.
    """

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._listeners: list[Callable[[], None]] = []

    def listen(self, on_step: Callable[[], None]) -> None:
        """Call `on_step` at every step."""
        self._listeners.append(on_step)

    def start(self) -> None:
        """Start the beat; it continues as long as the running event loop does."""
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._schedule(loop.time() + self.step_s)

    def _schedule(self, due_s: float) -> None:
        self._loop.call_at(due_s, self._step, due_s)

    def _step(self, due_s: float) -> None:
        for on_step in self._listeners:
            on_step()
        self._schedule(max(due_s + self.step_s, self._loop.time()))


@dataclass(slots=True)
class _Decoding:
    """A decode leg in progress."""

    request_id: str
    num_tokens: int  # output tokens so far, token 1 included
    max_tokens: int


class SimulatedNode:
    """A simulated node of either role (`pdserve.node.coordinator_link.LegReceiver`)."""

    def __init__(
        self, node_id: str, role: NodeRole, model_id: str, coordinator: str, beat: Beat
    ) -> None:
        self._step_s = beat.step_s if role is NodeRole.DECODE else _QUICK_S
        self._node_id = node_id
        self._role = role
        self._model_id = model_id
        self._incarnation = token_hex(8)
        self._introduction_key = new_key()
        self._legs = Legs()
        self._decoding: dict[str, _Decoding] = {}
        self._token_ids = cycle(PLAIN_IDS)
        self._is_flush_due = False
        self._link = CoordinatorLink(
            coordinator, self._hello, self._load, self, NodeTimeouts(), self._attached
        )
        beat.listen(self._step)

    async def run(self) -> None:
        """Serve until cancelled."""
        await self._link.run()

    # ---- what the coordinator says ---------------------------------------------------------------

    def start_prefill(self, leg: PrefillLeg, link: CoordinatorLink) -> None:
        """Answer with token 1 at once, and end the leg."""
        ends = not leg.handoff
        for request_id in leg.request_ids:
            self._legs.open(request_id, link)
            self._legs.add_event(
                TokenEvent(
                    request_id=request_id,
                    index=0,
                    token_ids=[next(self._token_ids)],
                    finish_reason=FinishReason.LENGTH if ends else None,
                    times=PhaseTimes(),
                )
            )
            self._legs.close(request_id)
        if not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def start_decode(self, leg: DecodeLeg, link: CoordinatorLink) -> None:
        """Answer with one token at each step, from the next one on; there is no KV to take over."""
        if leg.takes_over:
            error = TransportUnavailable("a simulated node has no KV")
            link.send(LegFailed(request_id=leg.request_id, code=error.code, message=error.message))
            return
        self._legs.open(leg.request_id, link)
        num_tokens = len(leg.output_token_ids) if leg.source is None else 1
        self._decoding[leg.request_id] = _Decoding(
            leg.request_id, num_tokens, leg.sampling.max_tokens
        )

    def prefetch(self, message: Prefetch, link: CoordinatorLink) -> None:
        """Answer at once: there is no KV."""
        link.send(Prefetched(request_id=message.request_id, num_tokens=0))

    def claim(self, message: Claim, link: CoordinatorLink) -> None:
        """Answer that there is nothing."""
        link.send(Claimed(request_id=message.request_id))

    def cancel_leg(self, request_id: str, reason: str) -> None:
        """Stop answering a leg."""
        self._legs.close(request_id)
        self._decoding.pop(request_id, None)

    def set_role(self, role: NodeRole) -> None:
        """Ignore the request: a simulated node keeps its role."""

    def load_adapter(self, order: LoadAdapter, link: CoordinatorLink) -> None:
        """As LegReceiver.load_adapter: it says that it keeps none, and is never asked to."""

    def unload_adapter(self, digest: str, link: CoordinatorLink) -> None:
        """As LegReceiver.unload_adapter: it has none."""

    def drain(self, become: str) -> None:
        """As LegReceiver.drain: it is never asked to."""

    def coordinator_lost(self, link: CoordinatorLink) -> None:
        """As LegReceiver."""
        for request_id in self._legs.of(link):
            self.cancel_leg(request_id, "the coordinator is gone")

    # ---- what it says ----------------------------------------------------------------------------

    def _step(self) -> None:
        """Send one token for each decode leg."""
        token_id = next(self._token_ids)
        over: list[_Decoding] = []
        tokens: list[tuple[str, int, int]] = []
        for leg in self._decoding.values():
            if leg.num_tokens + 1 == leg.max_tokens:
                over.append(leg)
            else:
                tokens.append((leg.request_id, leg.num_tokens, token_id))
                leg.num_tokens += 1
        self._legs.add_tokens(tokens)
        for leg in over:
            self._end(leg, token_id)
        self._legs.flush()

    def _end(self, leg: _Decoding, token_id: int) -> None:
        self._legs.add_event(
            TokenEvent(
                request_id=leg.request_id,
                index=leg.num_tokens,
                token_ids=[token_id],
                finish_reason=FinishReason.LENGTH,
                times=PhaseTimes(),
            )
        )
        self.cancel_leg(leg.request_id, "finished")

    def _flush(self) -> None:
        self._is_flush_due = False
        self._legs.flush()

    def _attached(self, link: CoordinatorLink) -> None:
        """Report performance that matches the node's behaviour, so that predictions are exact."""
        step = StepCosts(knot_tokens=[1, 2048], knot_s=[self._step_s, self._step_s])
        transfers = [TransferCosts(transport="shm", fixed_s=_QUICK_S, bytes_per_s=1e12)]
        link.send(
            PerfReport(step=step, token_budget=2048, max_batch_size=4096, transfers=transfers)
        )

    def _hello(self) -> NodeHello:
        return NodeHello(
            node_id=self._node_id,
            incarnation=self._incarnation,
            role=self._role,
            state=NodeState.READY,
            session_address=_NOWHERE,
            metrics_address=_NOWHERE,
            model_id=self._model_id,
            revision="simulated",
            layout=_LAYOUT,
            num_blocks=_NUM_BLOCKS,
            max_model_len=_MAX_MODEL_LEN,
            introduction_key=self._introduction_key,
            transports=[TransportReach(name="tcp")],
            protocol=PROTOCOL,
        )

    def _load(self) -> LoadReport:
        return LoadReport(
            state=NodeState.READY,
            role=self._role,
            running_requests=len(self._decoding),
            free_blocks=_NUM_BLOCKS,
        )
