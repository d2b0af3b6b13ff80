"""Requests that a lost coordinator may have begun: nodes may still have their streams.

A client that made its request under a key can make it again, at any coordinator. Such a request has
the same id everywhere, so before it is dispatched, every node is asked for a stream of that id.
What has been emitted is shown, and the stream goes on from there. Several nodes may have a part: a
stream that another node has taken over is still kept where it was, with the tokens of that time. So
the longest part counts, when all have answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from coordinator.nodes.registry import Member, Registry
from coordinator.requests.running import RunningRequest
from pdserve.protocol import Claim, Claimed, TokenEvent, TokenLogprobs

ANSWER_S: Final = 0.5  # how long nodes are waited for


@dataclass(slots=True)
class _Asked:
    answers: Sequence[RunningRequest]  # to one prompt, the first one first
    waits_for: set[tuple[Member, str]]  # (node, request id)
    then: Callable[[], None]
    # The most that a node has emitted, that node's revision, the adapter and from where on it
    # computes, by request id.
    emitted: dict[str, tuple[TokenEvent, str, str, int]] = field(default_factory=dict)
    timer: asyncio.TimerHandle | None = None


class Claims:
    """The claims of one coordinator that nodes have not answered yet."""

    def __init__(self, registry: Registry, answer_s: float = ANSWER_S) -> None:
        self._registry = registry
        self._answer_s = answer_s
        self._asked: dict[str, _Asked] = {}  # by request id; siblings share theirs
        registry.on_lost(self._lost)

    def __contains__(self, request_id: str) -> bool:
        """Whether nodes are still asked for a request."""
        return request_id in self._asked

    def ask(self, answers: Sequence[RunningRequest], then: Callable[[], None]) -> None:
        """Ask for the streams of several answers to one prompt; call `then` when it is known.

        By then each answer has what was emitted of it, and may have ended.
        """
        ids = [answer.request_id for answer in answers]
        members = [member for member in self._registry if member.exports_kv]
        waits_for = {(member, request_id) for member in members for request_id in ids}
        asked = _Asked(answers, waits_for, then)
        asked.timer = asyncio.get_running_loop().call_later(self._answer_s, self._over, asked)
        self._asked |= dict.fromkeys(ids, asked)
        for member, request_id in list(waits_for):
            member.send(Claim(request_id=request_id))
        if not waits_for:
            self._over(asked)

    def claimed(self, message: Claimed, sender: Member) -> None:
        """Note what a node has of a request; without all it asks for, that is as good as nothing.

        Raises:
            MalformedMessage: see PromptLogprobs.check.
        """
        asked = self._asked.get(message.request_id)
        if asked is None:
            return
        running = next(a for a in asked.answers if a.request_id == message.request_id)
        logprobs = _logprobs_of(message)
        lacks_logprobs = running.request.sampling.logprobs is not None and not logprobs
        former = asked.emitted.get(message.request_id)
        is_more = len(message.token_ids) > (len(former[0].token_ids) if former else 0)
        # The name of an adapter may stand for other bytes by now, but never for the model alone.
        is_of_kind = bool(message.adapter) == bool(running.request.prompt.adapter)
        if is_more and is_of_kind and not lacks_logprobs:
            event = TokenEvent(
                request_id=message.request_id,
                index=0,
                token_ids=message.token_ids,
                logprobs=logprobs,
                finish_reason=message.finish_reason,
                stop_token_id=message.stop_token_id,
                accepted=message.accepted,
                refused=message.refused,
            )
            by = sender.hello.revision, message.adapter, message.adapted_from
            asked.emitted[message.request_id] = event, *by
        self._heard(asked, {(sender, message.request_id)})

    def ended(self, running: RunningRequest) -> None:
        """Forget a request; its siblings still wait for what nodes have of them."""
        asked = self._asked.pop(running.request_id, None)
        if asked is not None:
            asked.waits_for = {who for who in asked.waits_for if who[1] != running.request_id}

    def _lost(self, member: Member) -> None:
        for asked in {id(asked): asked for asked in self._asked.values()}.values():
            self._heard(asked, {(member, answer.request_id) for answer in asked.answers})

    def _heard(self, asked: _Asked, from_whom: set[tuple[Member, str]]) -> None:
        asked.waits_for -= from_whom
        if not asked.waits_for:
            self._over(asked)

    def _over(self, asked: _Asked) -> None:
        if asked.timer is not None:
            asked.timer.cancel()
        for answer in asked.answers:
            self._asked.pop(answer.request_id, None)
        for answer in asked.answers:
            emitted = asked.emitted.get(answer.request_id)
            if emitted is not None:
                answer.begin_with(*emitted)
        asked.then()


def _logprobs_of(message: Claimed) -> list[TokenLogprobs]:
    """Those of all its tokens, or none."""
    if message.logprobs is None:
        return []
    message.logprobs.check()
    is_complete = len(message.logprobs) == len(message.token_ids)
    return message.logprobs.within(0, len(message.token_ids)) if is_complete else []
