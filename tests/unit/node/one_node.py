"""One node with both services, whose steps a test takes one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from kv_transfer.memory import ExportedPool
from pdserve.commands.cli.node import SERVICES
from pdserve.engine.interface import StepReport, shape_of
from pdserve.engine.request import Request, SampledToken, Scheduled
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.services import Services
from pdserve.protocol import (
    DecodeLeg,
    HandoffRecord,
    NodeRole,
    PrefillLeg,
    PrefixSource,
    Prompt,
    SamplingParams,
    Sibling,
    TokenBatch,
    TokenLogprobs,
)
from pdserve.settings.config import EngineConfig, NodeConfig
from pdserve.settings.timeouts import NodeTimeouts
from tests.fakes.outbox import RecordingOutbox
from tests.unit.node.parts import made_parts

BLOCK, NUM_BLOCKS = 4, 32
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=BLOCK, dtype=KvDtype.FLOAT32)
MAX_TOKENS = 6


class Link(RecordingOutbox):
    """A coordinator that keeps what it hears, in the order in which everybody is told things."""

    def __init__(self, told: list[msgspec.Struct]) -> None:
        super().__init__()
        self._told = told

    def send(self, message: msgspec.Struct) -> None:
        super().send(message)
        self._told.append(message)

    def tokens_of(self, request_id: str) -> list[int]:
        """Of one request, in order."""
        batches = [message for message in self.sent if isinstance(message, TokenBatch)]
        events = [e for batch in batches for e in batch.each() if e.request_id == request_id]
        assert [e.index for e in events] == list(range(len(events)))
        return [token for event in events for token in event.token_ids]


class Bench:
    """A node whose steps a test takes one by one; its model says how long the request is."""

    def __init__(
        self,
        role: NodeRole,
        *,
        refusal: str = "",
        engine: EngineConfig | None = None,
        orphan_s: float = 60.0,
        short_len: int = 0,
        bound_to: NodeRole | None = None,
    ) -> None:
        timeouts = NodeTimeouts(orphan_s=orphan_s)
        config = NodeConfig(engine=engine or EngineConfig(), timeouts=timeouts)
        self.memory = ExportedPool(NUM_BLOCKS, LAYOUT.block_bytes)
        parts = made_parts("n", self.memory, LAYOUT, config)
        self.parts = replace(parts, short_len=short_len, bound_to=bound_to)
        self.num_reports = 0
        self.pulled: list[str] = []  # what is to be settled
        self.services = Services(
            self.parts, SERVICES, role, prefill_refusal=refusal, on_role=self._report
        )
        self.told: list[msgspec.Struct] = []
        self.link = Link(self.told)

    def _report(self) -> None:
        self.num_reports += 1

    def prefill(
        self,
        request_id: str,
        num_tokens: int = 9,
        link: Link | None = None,
        *,
        siblings: Sequence[str] = (),
        is_heard: bool = True,
        max_tokens: int = MAX_TOKENS,
        grammar: str = "",
        prefix_sources: Sequence[PrefixSource] = (),
        is_long: bool = False,
    ) -> None:
        """A prefill leg arrives; a decode node listens, if it `is_heard`."""
        sampling = SamplingParams(max_tokens=max_tokens, grammar=grammar)
        leg = PrefillLeg(
            request_id=request_id,
            prompt=Prompt(list(range(num_tokens)), request_id, is_long),
            sampling=sampling,
            handoff=max_tokens > 1,
            prefix_sources=list(prefix_sources),
            siblings=[Sibling(request_id=name, seed=i) for i, name in enumerate(siblings)],
        )
        if is_heard:
            self.services.announcer.subscribe(request_id, self.hear)
        self.services.start_prefill(leg, link or self.link)

    def decode(self, request_id: str, num_tokens: int = 9, link: Link | None = None) -> None:
        """A decode leg arrives whose prompt is to be prefilled here."""
        leg = DecodeLeg(
            request_id=request_id,
            prompt=Prompt(list(range(num_tokens)), request_id),
            sampling=SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        )
        self.services.start_decode(leg, link or self.link)

    def hear(self, message: msgspec.Struct) -> None:
        """In place of a decode node, which has pulled everything when the step is over."""
        self.told.append(message)
        if isinstance(message, HandoffRecord):
            self.pulled.append(message.request_id)

    def step(self) -> list[Scheduled]:
        """One step of the engine."""
        engine = self.parts.engine
        rows = engine.begin_step()
        if rows:
            self.services.step_planned(rows)
            sampled = [token_of(row.request) if row.samples else None for row in rows]
            shape = shape_of(rows)
            done = engine.end_step(rows, sampled, 0.0)
            self.services.step_done(StepReport(rows, sampled, 0.0, 0.001, 0.0, shape))
            for request in done:
                engine.forget(request)
        while self.pulled:
            self.services.announcer.settle(self.pulled.pop(), self.hear, was_pulled=True)
        return rows

    def run(self) -> None:
        """Steps until there is nothing to do."""
        for _ in range(200):
            if not self.step():
                return
        raise AssertionError("there is no end to it")

    def run_until_tokens(self, request_id: str, num_tokens: int) -> None:
        """Steps until a stream has so much output."""
        while (request := self.parts.engine.find(request_id)) is not None:
            if len(request.output_token_ids) >= num_tokens:
                return
            self.step()
        raise AssertionError(f"{request_id} has ended before")

    def check_idle(self) -> None:
        """Everything is free, and nobody is waited for."""
        assert self.parts.pool.num_free == NUM_BLOCKS
        self.parts.pool.check_integrity()
        assert len(self.parts.legs) == self.parts.legs.scores.num_kept == 0
        assert self.services.num_pinned_blocks == 0

    async def close(self) -> None:
        await self.services.close()
        await self.parts.exporter.close()
        await self.parts.puller.close()
        self.memory.close()


def token_of(request: Request) -> SampledToken:
    """What the model says next; its siblings' tokens are one more each."""
    first = request.num_tokens
    others = range(first + 1, first + 1 + len(request.siblings))
    return SampledToken(first, scores_of(request, first), tuple(map(SampledToken, others)))


def scores_of(request: Request, token_id: int) -> TokenLogprobs | None:
    """The log-probabilities of a token that is sampled, as many as were asked for."""
    num_top = request.sampling.logprobs
    if num_top is None:
        return None
    top_ids = [token_id + place for place in range(num_top)]
    top_logprobs = [-token_id / 7 - place for place in range(num_top)]
    return TokenLogprobs(chosen=-token_id / 7, top_ids=top_ids, top_logprobs=top_logprobs)
