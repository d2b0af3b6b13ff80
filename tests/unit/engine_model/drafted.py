"""Runs streams with drafts and without, through the engine's core and a real model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pdserve.engine.core import EngineCore
from pdserve.engine.drafts.source import Source
from pdserve.engine.drafts.speculation import Speculation
from pdserve.engine.grammar import GrammarProgress
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.request import Request, SampledToken, Scheduled, finish
from pdserve.engine.scheduler import Queues
from pdserve.protocol import FinishReason, TokenLogprobs
from pdserve.shared.clock import ManualClock
from tests.unit.engine_model.harness import Node

EOS = frozenset({2})
Said = tuple[list[tuple[int, TokenLogprobs | None]], FinishReason | None]


class Told:
    """A source that knows the answer of each request, by its id, and is wrong now and then."""

    name = "told"

    def __init__(self, answers: dict[str, list[int]], seed: int, right: float = 0.8) -> None:
        self._answers = answers
        self._random = random.Random(seed)
        self._right = right

    def drafter(self, request: Request) -> Told:
        return self

    def propose(self, request: Request, most: int) -> tuple[list[int], int]:
        begin = len(request.output_token_ids)
        answer = self._answers[request.request_id]
        known = answer[begin : begin + min(most, self._random.randint(0, 7))]
        right = self._right
        return [t if self._random.random() < right else self._wrong(answer) for t in known], 3

    def ended(self, request: Request) -> None:
        """Nothing is kept."""

    def _wrong(self, answer: Sequence[int]) -> int:
        return self._random.choice([1, *answer])


class Unhurried(GrammarProgress):
    """Whose masks take no time of a step, whatever the machine does beside."""

    def mask_s(self, request: Request) -> float:
        return 1e-6

    def afford(self, request: Request, num_drafts: int) -> int:
        return num_drafts


class Decodes:
    """A policy of decodes only."""

    def plan(self, queues: Queues) -> list[Scheduled]:
        return queues.plan_decodes(64)


class Streams:
    """A core and a runner, and what their streams have said, token 1 included."""

    def __init__(
        self,
        node: Node,
        sources: Sequence[Source] | None,
        masks: GrammarProgress | None = None,
        eos_token_ids: frozenset[int] = EOS,
    ) -> None:
        """Drafts of these sources cost nothing, so all are tried; None: without any."""
        self.pool = BlockPool(node.kv_cache.num_blocks, node.kv_cache.layout.block_size)
        self.runner = ModelRunner(node.model, node.kv_cache, eos_token_ids, grammars=masks)
        self.core = EngineCore(Queues(self.pool, ManualClock()), Decodes(), eos_token_ids)
        self.speculation = Speculation(self.pool, lambda shape: 1.0, 256, sources or ())
        if masks is not None:
            self.speculation.follow(masks)
        if sources is not None:
            self.core.speculate = self.speculation
        self.said: dict[str, list[SampledToken]] = {}
        self.ends: dict[str, FinishReason | None] = {}

    def add(self, request: Request) -> None:
        """Compute what is known of it, with its next token, and begin to decode it."""
        self._compute(request)
        if request.finish_reason is None:
            self.core.adopt(request)

    def preempt(self, request: Request) -> None:
        """Take its blocks, and compute it again."""
        queues = self.core.queues
        queues.preempt(request)
        queues.waiting.remove(request)
        self._compute(request)
        if request.finish_reason is None:
            queues.running.append(request)

    def _compute(self, request: Request) -> None:
        request.block_table = self.pool.allocate(self.pool.blocks_for(request.num_tokens + 1))
        (token,) = self.runner.execute([Scheduled(request, request.num_tokens)])
        assert token is not None
        request.num_computed_tokens = request.num_tokens
        request.output_token_ids.append(token.token_id)
        self.said.setdefault(request.request_id, []).append(token)
        finish(request, self.core.eos_token_ids)
        if request.finish_reason is not None:
            self.ends[request.request_id] = request.finish_reason
            self.pool.release(request.block_table)

    def step(self, during: Callable[[list[Scheduled]], None] = lambda rows: None) -> bool:
        """Whether there was anything to do."""
        core = self.core
        if (drafts := core.draft()) is not None:
            drafts()
        rows = core.begin_step()
        if not rows:
            return False
        sampled = self.runner.execute(rows)
        during(rows)
        sampled = core.accepted(rows, sampled)
        for row, token in zip(rows, sampled, strict=True):
            assert token is not None
            self.said[row.request.request_id] += [token, *token.after]
        for request in core.end_step(rows, sampled, 0.0):
            core.forget(request)
            self.ends[request.request_id] = request.finish_reason
            if request.finish_reason is None:
                self.add(moved(request))
        return True

    def answers(self) -> dict[str, Said]:
        return {
            name: ([(token.token_id, token.logprobs) for token in tokens], self.ends.get(name))
            for name, tokens in self.said.items()
        }


def moved(request: Request) -> Request:
    """The same stream at another node, where its next token is computed."""
    return replace(
        request,
        output_token_ids=list(request.output_token_ids),
        num_emitted_before=len(request.output_token_ids),
        num_computed_tokens=0,
        block_table=[],
        block_hashes=[],
        edits=None,
        guesses=None,
        leg_token_limit=None,
    )


def run(
    streams: Streams, requests: Iterable[Request], disturb: random.Random | None = None
) -> None:
    """Compute all of these together.

    With `disturb`, streams are told to go elsewhere at any time, and do with their next token;
    others are preempted between two steps.
    """
    for request in requests:
        streams.add(request)

    def during(rows: list[Scheduled]) -> None:
        if disturb is not None and disturb.random() < 0.2:
            request = disturb.choice(rows).request
            request.leg_token_limit = len(request.output_token_ids) + 1

    while streams.step(during):
        running = streams.core.queues.running
        if disturb is not None and disturb.random() < 0.1 and running:
            streams.preempt(disturb.choice(running))


def answers(
    node: Node, requests: Iterable[Request], eos_token_ids: frozenset[int] = EOS
) -> dict[str, Said]:
    """What these requests say without drafts."""
    streams = Streams(node, None, None, eos_token_ids)
    run(streams, requests)
    return streams.answers()


def tokens_of(said: dict[str, Said]) -> dict[str, list[int]]:
    return {name: [token for token, _ in tokens] for name, (tokens, _) in said.items()}
