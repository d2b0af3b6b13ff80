"""Iteration-level batching (Orca): the common part of policies that form a new batch each step,
and the two that differ in its size alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf

from decode_node.policies.line import DecodeLine, make_way
from decode_node.policies.local_prompts import LocalPrompts
from decode_node.policies.pace import Pace
from pdserve.engine.interface import shape_of
from pdserve.engine.prompts import make_prompt_order
from pdserve.engine.prompts.order import BatchSizes
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.scheduler import Queues
from pdserve.measured.perf_model import PerfModel
from pdserve.rules.batch import has_place
from pdserve.settings.config import EngineConfig, PolicyConfig
from pdserve.shared.clock import Clock
from pdserve.shared.fair_share import FairShare


class DecodesFirst(ABC):
    """Schedules decoding requests first, then chunks of local prompts in the same step.

    Decodes never starve a prompt that has begun, however many there are: one row with a few tokens
    is reserved for it.
    """

    def __init__(
        self,
        policy: PolicyConfig,
        engine: EngineConfig,
        perf: PerfModel,
        clock: Clock,
        make_line: type[DecodeLine] = DecodeLine,
    ) -> None:
        self.max_batch_size = engine.max_batch_size
        self.pace = Pace(perf, clock, policy.default_tpot_s)
        shares = FairShare()
        order = make_prompt_order(policy.prefill_policy, perf, clock, engine.token_budget, shares)
        self._sizes = BatchSizes(
            perf, engine.token_budget, policy.prefill_chunk, gives_way=order.rule.gives_way
        )
        self.line = make_line(order, shares, self.pace)
        self.prompts = LocalPrompts(
            self.pace, self.line, engine.token_budget, engine.max_batch_size, policy.local_chunk
        )

    def plan(self, queues: Queues) -> list[Scheduled]:
        """As Policy.plan."""
        self._begin(queues)
        decodes, chunks = self.compose(queues)
        self._charge(queues, decodes, chunks)
        return decodes + chunks

    def plan_decodes(self, queues: Queues) -> list[Scheduled]:
        """As SideBySide.plan_decodes."""
        self._look(queues)
        decodes = queues.decode(self.pick(queues.decoding, self.max_batch_size))
        if decodes:
            self._charge(queues, decodes, [])
        return decodes

    def plan_prompts(self, queues: Queues) -> list[Scheduled]:
        """As SideBySide.plan_prompts. What streams need of the cores is decided elsewhere."""
        self._begin(queues)
        chunks = self.prompts.plan(queues, [], inf, self, self._sizes)
        if chunks:
            self.line.charge_chunks(chunks, self.pace.perf.step_s(shape_of(chunks)))
        return chunks

    def charge(self, request: Request, seconds: float) -> None:
        """As ChargesDrafts.charge."""
        self.line.charge(request, seconds)

    def compose(self, queues: Queues) -> tuple[list[Scheduled], list[Scheduled]]:
        """Return the step's decodes and its chunks of prompts."""
        decoding = queues.decoding
        has_begun_prompt = len(decoding) < len(queues.running)
        decodes = queues.decode(self.pick(decoding, self.max_batch_size - has_begun_prompt))
        chunks: list[Scheduled] = []
        if has_begun_prompt or queues.waiting:
            limit_s = self.limit_s([row.request for row in decodes], queues)
            chunks = self.prompts.plan(queues, decodes, limit_s, self)
        return decodes, chunks

    def _begin(self, queues: Queues) -> None:
        """Begin a plan that may admit prompts."""
        queues.held_back.stop()
        queues.kept_out = None
        self._look(queues)

    def _look(self, queues: Queues) -> None:
        self.line.look(queues)
        make_way(queues, self, self.line.yields_to)

    def repeated(self, seconds: Sequence[float]) -> None:
        """Note steps like the last one, which had no prompts, while the queues do not change.

        `seconds` are what `plan` would have predicted for each. For simulations, which need not
        look at every row of such steps.
        """
        self.line.repeated(seconds)

    def first(self, queues: Queues) -> Request | None:
        """As DecodePolicy.first."""
        return self.line.first(queues)

    @abstractmethod
    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """As DecodePolicy.has_place."""

    @abstractmethod
    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return which of the decoding requests, oldest first, run in this step; at most `most`."""

    @abstractmethod
    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return how long a step with these decodes may take when prompt chunks are added to it."""

    def _charge(
        self, queues: Queues, decodes: Sequence[Scheduled], chunks: Sequence[Scheduled]
    ) -> None:
        """Charge the payers for the step; chunks are charged for the time that they add to it."""
        decoded = [request for request, _ in decodes]
        decode_s = self.pace.decode_s(decoded) if decoded else 0.0
        self.line.charge_decodes(queues, decoded, decode_s)
        if chunks:
            both_s = self.pace.perf.step_s(shape_of([*decodes, *chunks]))
            self.line.charge_chunks(chunks, max(0.0, both_s - decode_s))


class MaxBatch(DecodesFirst):
    """The baseline: batches like vLLM, and like Sarathi-Serve with one token budget.

    A prompt delays the running streams by at most one step of `token_budget` tokens.
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether the batch has fewer than `max_batch_size` requests."""
        return len(members) < self.max_batch_size

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return the oldest requests."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return infinity: only the token budget bounds a step."""
        return inf


class TpotCap(DecodesFirst):
    """Admits a request only while the predicted step time stays within every TPOT.

    The limit is 0.9 of the tightest TPOT, the newcomer's included. The predicted step time is
    corrected by measurements (DistServe's aim; Mooncake and Arrow bound decode load likewise).
    """

    def has_place(self, members: Sequence[Request], newcomer: Request) -> bool:
        """Whether all members and the newcomer keep their TPOT in one batch."""
        batch = [*members, newcomer]
        step_s, limit_s = self.pace.decode_s(batch), self.pace.tightest_s(batch)
        return has_place(len(batch), self.max_batch_size, step_s, limit_s)

    def pick(self, decoding: list[Request], most: int) -> list[Request]:
        """Return all requests, as a rule: each admitted request has a place in every step."""
        return decoding[:most]

    def limit_s(self, decoding: Sequence[Request], queues: Queues) -> float:
        """Return the tightest limit, including that of requests whose KV is arriving."""
        return self.pace.step_limit_s(decoding, queues)
