"""What has to hold of a life: answers are right, everything ends, nothing is left behind."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING, Any

from pdserve.shared.errors import (
    DeadlineExceeded,
    PdserveError,
    RequestCancelled,
    RequestQuarantined,
)
from tests.lives.adapters import begins_at
from tests.lives.clients import Told
from tests.lives.faults import DEADLY, SILENT, Kind
from tests.lives.kv import POISON, expected

if TYPE_CHECKING:
    from tests.lives.life import World
    from tests.lives.node import NodeProcess

_TO_CONVICT = 3  # failures of nodes, after which somebody innocent may be convicted
_MOST_ATTEMPTS = 6
_SAID_OF_FAULTS = ("a step of %d requests failed", "%s is sick", "%s is quarantined")


class LogListener(logging.Handler):
    """Hears of errors that nobody was told but the log."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.wrong: list[str] = []
        self.is_muted = False

    def __enter__(self) -> LogListener:
        root = logging.getLogger()
        self._level = root.level
        root.setLevel(logging.ERROR)
        root.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        root = logging.getLogger()
        root.removeHandler(self)
        root.setLevel(self._level)

    def emit(self, record: logging.LogRecord) -> None:
        if not self.is_muted and not str(record.msg).startswith(_SAID_OF_FAULTS):
            text = logging.Formatter().format(record)
            self.wrong.append(f"logged: {text}")

    def exception(self, loop: object, context: dict[str, Any]) -> None:
        """What asyncio says of errors that nobody asks for."""
        if not self.is_muted:
            self.wrong.append(f"asyncio: {context['message']} {context.get('exception')!r}")


# ---- answers -----------------------------------------------------------------------------------


def unfinished(world: World) -> list[str]:
    """The requests that hang."""
    wrong = []
    for call in world.plan.calls:
        for told in call.answers:
            if call.refused is None and not told.num_ends:
                route = told.running.route if told.running is not None else None
                state = f"{len(told.tokens)} tokens, route {route}"
                wrong.append(f"{told.request.request_id} hangs: {state}")
    return wrong


def answers(world: World) -> list[str]:
    """The answers that are not what they have to be."""
    wrong = [
        f"{process} has computed without an adapter that a row had"
        for process in [*world.graveyard, *world.nodes]
        if process.machine.num_lacking
    ]
    for call in world.plan.calls:
        if call.refused is None:
            if call.name and not all(told.adapter for told in call.answers):
                wrong.append(f"a call of {call.name} is answered by the model itself")
            for told in call.answers:
                reason = _wrong_with(told, world)
                if reason:
                    wrong.append(f"{told.request.request_id}: {reason}")
    return wrong


def _wrong_with(told: Told, world: World) -> str:
    begin = begins_at(told.adapter, told.request.prompt.token_ids)
    right, tokens = expected(told.request, told.adapter, begin), told.tokens
    at = 0
    for event in told.events:
        if event.index != at:
            return f"index {event.index} instead of {at}"
        at += len(event.token_ids)
    if told.num_ends != 1:
        return f"{told.num_ends} ends"
    if tokens != right.token_ids[: len(tokens)]:
        return f"tokens {tokens} instead of {right.token_ids}"
    logprobs = [entry.chosen for event in told.events for entry in event.logprobs]
    if told.request.sampling.logprobs is not None and logprobs != right.logprobs[: len(logprobs)]:
        return f"log-probabilities {logprobs} instead of {right.logprobs}"
    if told.error is not None:
        return "" if _may_fail(told, told.error, world) else f"ended with {told.error!r}"
    if told.running is not None and POISON in told.request.prompt.token_ids:
        return "a poisonous prompt was computed"
    if len(tokens) != len(right.token_ids):
        return f"{len(tokens)} tokens instead of {len(right.token_ids)}"
    if told.request.sampling.logprobs is not None and len(logprobs) != len(right.logprobs):
        return f"{len(logprobs)} log-probabilities"
    if told.events[-1].finish_reason is not right.finish_reason:
        return f"ended because of {told.events[-1].finish_reason!r}"
    return ""


def _may_fail(told: Told, error: PdserveError, world: World) -> bool:
    """Whether a request may end with this error."""
    request = told.request
    if isinstance(error, RequestCancelled):
        return told.was_cancelled or any(
            told in call.answers and any(other.was_cancelled for other in call.answers)
            for call in world.plan.calls
        )
    if isinstance(error, DeadlineExceeded):
        return bool(request.deadline_s) and told.ended_s >= told.started_s + request.deadline_s
    if isinstance(error, RequestQuarantined):
        num_crashes = _num_failures(world, DEADLY - SILENT)
        return POISON in request.prompt.token_ids or num_crashes >= _TO_CONVICT
    return _num_failures(world, DEADLY) > _MOST_ATTEMPTS


def _num_failures(world: World, kinds: frozenset[Kind]) -> int:
    num_failures = sum(
        fault.amount if fault.kind == "bad steps" else 1
        for fault in world.plan.faults
        if fault.kind in kinds
    )
    if any(POISON in t.request.prompt.token_ids for call in world.plan.calls for t in call.answers):
        num_failures += 2  # by others' deaths
    return num_failures


# ---- what is left ------------------------------------------------------------------------------


def idle(world: World) -> list[str]:
    """The nodes that still compute, though nobody waits for anything."""
    return [
        f"{process} still computes"
        for process in world.nodes
        if process not in world.graveyard
        and process.node is not None
        and not (process.machine.hangs or process.machine.is_dead)  # it ends itself soon
        and process.node._parts.engine.queues.running
    ]


def leaks(world: World) -> list[str]:
    """What is held for requests that have all ended."""
    wrong = [f"coordinator: {what}" for what in _held_by_flow(world)]
    for process in world.nodes:
        ends_soon = process.machine.hangs or process.machine.is_dead
        if process not in world.graveyard and not ends_soon:
            wrong += [f"{process}: {what}" for what in _held_by_node(process)]
    return wrong


def _held_by_flow(world: World) -> list[str]:
    coordinator = world.coordinator
    flow: Any = coordinator.flow
    resumes, moves = flow.resumes, flow._moves
    queues, decodes = coordinator.router._books.queues, coordinator.router._books.decodes
    held = {
        "requests": len(flow._running),
        "legs": len(flow._by_leg),
        "troubles": len(resumes._troubles),
        "waiting to resume": len(resumes._waiting),
        "resuming": len(resumes._under_way),
        "on trial": resumes._on_trial is not None,
        "moves": len(moves._moves),
        "adapters that nothing needs": len(coordinator.adapters.known._retired),
        "orders of adapters": len(coordinator.adapter_orders._open),
        "in line": len(coordinator.admission.line),
        "admitted": len(coordinator.admission._in_flight),
        "booked prompts": int(queues.num_prompts.any()),
        "booked tokens": int(queues.tokens.any()),
        "booked legs": int(decodes.legs.any()),
        "booked streams": int(decodes._active.any()),
    }
    return [f"{name}: {count}" for name, count in held.items() if count]


def _held_by_node(process: NodeProcess) -> list[str]:
    if process.node is None:
        return ["it has not loaded"]
    node: Any = process.node
    parts, services = node._parts, node._services
    engine, preparation = parts.engine, parts.preparation
    queues, decode = engine.queues, services._decode
    sessions = [
        opening.result()
        for opening in parts.sessions._opening.values()
        if opening.done() and not opening.cancelled() and opening.exception() is None
    ]
    held = {
        "blocks": parts.pool.num_blocks - parts.pool.num_free,
        "legs": len(parts.legs),
        "requests": engine.num_requests,
        "running": len(queues.running),
        "waiting": len(queues.waiting),
        "streams": len(queues.streams),
        "claims": len(queues.claims),
        "arriving": len(queues.arriving),
        "prompts in preparation": len(preparation._prompts),
        "handoffs in preparation": len(preparation._handoffs),
        "prefetches": len(preparation._prefetches),
        "tasks of requests": len(preparation._prompts._requests)
        + len(preparation._handoffs._requests)
        + len(preparation._prefetches._requests),
        "handoffs": len(services._prefill.handoffs),
        "pinned blocks": services.num_pinned_blocks,
        "blocks held for queries": node._prefixes.num_held_blocks,
        "room": len(decode._room),
        "subscriptions to room": len(decode._room._subscriptions),
        "turns": len(decode._intake._turns._pulling)
        if hasattr(decode._intake._turns, "_pulling")
        else 0,
        "subscriptions": sum(len(session._subscriptions) for session in sessions),
        "queries": sum(len(session._answers) for session in sessions),
        "fetches": len(preparation._fetcher._fetching),
        "blocks being filled": preparation._fetcher._filling.num_blocks,
        "pulls": sum(len(session.link._pulls._pulls) for session in sessions)
        if sessions and hasattr(sessions[0].link._pulls, "_pulls")
        else 0,
    }
    wrong = [f"{name}: {count}" for name, count in held.items() if count]
    try:
        parts.pool.check_integrity()
    except AssertionError as error:
        wrong.append(f"its pool: {error}")
    return wrong


def left_behind(world: World) -> list[str]:
    """What processes that have drained leave behind."""
    wrong = []
    for process in world.nodes:
        if process in world.graveyard:
            continue
        if process.life is None or not process.life.done():
            wrong.append(f"{process} does not end")
            continue
        if process.life.exception() is not None:
            wrong.append(f"{process} ended with {process.life.exception()!r}")
        tasks = [task for task in process.tasks if not task.done()]
        wrong += [f"{process}: task {task}" for task in tasks]
        timers = world.loop.timers_of(process)
        wrong += [f"{process}: timer {timer}" for timer in timers]
    return wrong


def counts(world: World) -> dict[str, int]:
    """What a life was about, for summaries."""
    told = [t for call in world.plan.calls for t in call.answers if call.refused is None]
    metrics = world.coordinator.metrics
    return {
        "answers": len(told),
        "refused": sum(call.refused is not None for call in world.plan.calls),
        "finished": sum(t.error is None for t in told),
        "cancelled": sum(t.was_cancelled for t in told),
        "expired": sum(isinstance(t.error, DeadlineExceeded) for t in told),
        "quarantined": sum(isinstance(t.error, RequestQuarantined) for t in told),
        "interruptions": sum(t.running.num_interruptions for t in told if t.running),
        "moves": int(_total(metrics.move_pause)),
        "faults": len(world.plan.faults),
        "deaths": world.num_deaths,
        "reads": world.pulls.num_reads,
    }


def _total(histogram: Any) -> float:
    return sum(
        sample.value
        for metric in histogram.collect()
        for sample in metric.samples
        if sample.name.endswith("_count")
    )
