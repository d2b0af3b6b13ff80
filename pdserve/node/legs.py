"""Which coordinator each leg belongs to, and the batching of tokens into one message per step;
a leg as a request, and what was sampled for it as an event.

Results of a prompt (log-probabilities, embeddings) are large and are sent as separate messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from pdserve.engine.prompt_results.work import PromptWork
from pdserve.engine.request import Request, SampledToken
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.protocol import (
    DecodeLeg,
    LegFailed,
    PhaseTimes,
    PrefillLeg,
    PrefixSource,
    PromptLogprobs,
    TokenBatch,
    TokenEvent,
    TokenLogprobs,
)
from pdserve.protocol.legs import request_of_leg
from pdserve.shared.errors import PdserveError
from pdserve.wire.outbox import Sender

MOST_SCORES: Final = 1 << 19  # twice what one call may ask for


class KeptScores:
    """The log-probabilities of one node's streams, by leg id.

    Who claims a stream needs those of all its tokens. The tokens themselves are kept by the
    stream's request anyway. A log-probability takes some 70 bytes with the id of its token, and
    each token may list many. So all streams of a node together may keep `most`; beyond that the one
    with the most loses its own, and can no longer be claimed.
    """

    def __init__(self, most: int = MOST_SCORES) -> None:
        self._most = most
        self._of: dict[str, PromptLogprobs | None] = {}  # None: they are not complete
        self.num_kept = 0  # of all streams, chosen and listed ones

    def open(self, leg_id: str, emitted: PromptLogprobs | None, num_emitted: int) -> None:
        """Begin to keep those of a stream; `emitted`: of the tokens that it comes with."""
        columns = self._of[leg_id] = PromptLogprobs.of([])
        if emitted is not None:
            self._extend(columns, emitted)
        if len(columns) != num_emitted:
            self._lose(leg_id)
        self._curb()

    def add(self, leg_id: str, index: int, of_tokens: Sequence[TokenLogprobs]) -> None:
        """Keep those of a stream's next tokens, if its others are kept; `index`: of the first."""
        columns = self._of.get(leg_id)
        if columns is None:
            return
        new = PromptLogprobs.of(of_tokens)
        if index != len(columns) or not _fits(columns, of_tokens):
            self._lose(leg_id)
            return
        self._extend(columns, new)
        self._curb()

    def is_lost(self, leg_id: str) -> bool:
        """Whether a stream has some that are not kept."""
        return leg_id in self._of and self._of[leg_id] is None

    def of(self, leg_id: str) -> PromptLogprobs | None:
        """Those of a stream's tokens so far; None: it has none, or they are not kept."""
        return self._of.get(leg_id)

    def forget(self, leg_id: str) -> None:
        """Keep nothing of a stream any longer; unknown ids are ignored."""
        self._lose(leg_id)
        self._of.pop(leg_id, None)

    # ---- parts ---------------------------------------------------------------------------------

    def _extend(self, columns: PromptLogprobs, new: PromptLogprobs) -> None:
        columns.chosen.extend(new.chosen)
        columns.ranks.extend(new.ranks)
        columns.top_ids.extend(new.top_ids)
        columns.top_logprobs.extend(new.top_logprobs)
        self.num_kept += _size(new)

    def _lose(self, leg_id: str) -> None:
        columns = self._of.get(leg_id)
        if columns is not None:
            self.num_kept -= _size(columns)
            self._of[leg_id] = None

    def _curb(self) -> None:
        while self.num_kept > self._most:
            sizes = {leg_id: _size(c) for leg_id, c in self._of.items() if c is not None}
            self._lose(max(sizes, key=sizes.__getitem__))


def _size(columns: PromptLogprobs) -> int:
    return len(columns.chosen) + len(columns.top_ids)


def _fits(columns: PromptLogprobs, of_tokens: Sequence[TokenLogprobs]) -> bool:
    """Whether each of these tokens lists as many as those before."""
    listed = {len(each.top_ids) for each in of_tokens}
    if len(columns):
        listed.add(len(columns.top_ids) // len(columns))
    return len(listed) == 1


def request_of(
    leg: PrefillLeg | DecodeLeg, now_s: float, prefix_sources: Sequence[PrefixSource] = ()
) -> Request:
    """Return the engine's request for a leg that has just arrived.

    `prefix_sources` are the nodes from which its KV could be fetched again after a preemption.
    """
    emitted = leg.output_token_ids if isinstance(leg, DecodeLeg) else []
    request = Request(
        request_id=leg.request_id,
        prompt=leg.prompt,
        sampling=leg.sampling,
        lifecycle=Lifecycle(received_s=now_s),
        leg_token_limit=1 if isinstance(leg, PrefillLeg) else None,
        targets=Targets.of(leg.slo, now_s),
        prefix_sources=list(prefix_sources),
        output_token_ids=list(emitted),
        num_emitted_before=len(emitted),
        flows=isinstance(leg, DecodeLeg) and leg.flows,
    )
    if isinstance(leg, DecodeLeg):
        request.prediction = leg.prediction
        request.num_accepted, request.num_refused = leg.accepted, leg.refused
        request.expected_output = leg.expected_output
    return request


def token_event(
    request: Request, token: SampledToken | None, times: PhaseTimes | None
) -> TokenEvent:
    """Return the event of a request's newest tokens; of its end if it ends with its prompt.

    `token` is what the last step found, None if nothing was sampled. `times` belong to a node's
    last event of a request.
    """
    tokens = [] if token is None else [token, *token.after]
    index = len(request.output_token_ids) - len(tokens)
    is_first = index == request.num_emitted_before
    return TokenEvent(
        request_id=request.request_id,
        index=index,
        token_ids=[each.token_id for each in tokens],
        logprobs=[each.logprobs for each in tokens if each.logprobs],
        finish_reason=request.finish_reason,
        stop_token_id=request.stop_token_id,
        cached_tokens=request.num_cached_tokens,
        prompt_logprobs=None if index else _prompt_logprobs(request.prompt_work),
        embedding=request.prompt_work.embedding if request.prompt_work else b"",
        times=times,
        accepted=max(0, len(tokens) - 1),
        refused=0 if token is None else token.refused,
        decode_precision_tokens=request.num_prompt_misfits if is_first else 0,
    )


def _prompt_logprobs(work: PromptWork | None) -> PromptLogprobs | None:
    if work is None or work.sampling.prompt_logprobs is None:
        return None
    return PromptLogprobs.of(work.logprobs)


log = logging.getLogger(__name__)


class Legs:
    """The legs in progress on this node. Answers to other legs are dropped."""

    def __init__(self) -> None:
        self.scores = KeptScores()  # of legs that may outlive their coordinator
        self._links: dict[str, Sender] = {}  # request_id |-> coordinator to answer
        self._claimable: set[str] = set()
        self._traceparents: dict[str, str] = {}  # of legs whose call is recorded
        self._adapters: dict[str, str] = {}  # of legs that have one
        self.on_closed: Callable[[str], None] = lambda adapter: None  # that a closed leg had
        self._batches = _no_batches()
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    def __len__(self) -> int:
        return len(self._links)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._links

    def open(
        self,
        request_id: str,
        link: Sender,
        *,
        is_claimable: bool = False,
        traceparent: str = "",
        adapter: str = "",
    ) -> None:
        """Add a leg whose answers go to `link`; see DecodeLeg for the others."""
        self._links[request_id] = link
        self._is_empty.clear()
        if is_claimable:
            self._claimable.add(request_id)
        if traceparent:
            self._traceparents[request_id] = traceparent
        if adapter:
            self._adapters[request_id] = adapter

    def has_adapter(self, digest: str) -> bool:
        """Whether a leg in progress has this adapter."""
        return digest in self._adapters.values()

    def is_claimable(self, request_id: str) -> bool:
        """Whether a leg may outlive its coordinator."""
        return request_id in self._claimable and not self.scores.is_lost(request_id)

    def hand_over(self, request_id: str, link: Sender) -> None:
        """Have the answers of a leg go to another `link`, which looks after its `scores`, too."""
        self._links[request_id] = link
        self._claimable.discard(request_id)

    def close(self, request_id: str) -> Sender | None:
        """Remove a leg and return its coordinator's link; None if it was removed already."""
        link = self._links.pop(request_id, None)
        if request_id in self._claimable:
            self._claimable.discard(request_id)
            self.scores.forget(request_id)
        self._traceparents.pop(request_id, None)
        if adapter := self._adapters.pop(request_id, ""):
            self.on_closed(adapter)
        if not self._links:
            self._is_empty.set()
        return link

    async def wait_empty(self) -> None:
        """Wait until no leg is left."""
        await self._is_empty.wait()

    def of(self, link: Sender) -> list[str]:
        """The legs of this coordinator."""
        return [request_id for request_id, owner in self._links.items() if owner is link]

    def of_request(self, request_id: str) -> list[str]:
        """The legs of this request, whatever attempt they belong to."""
        return [leg_id for leg_id in self._links if request_of_leg(leg_id) == request_id]

    def link_of(self, request_id: str) -> Sender:
        """Where the answers of a leg go."""
        return self._links[request_id]

    def add_event(self, event: TokenEvent) -> None:
        """Add an event to the step's message to the leg's coordinator."""
        link = self._links.get(event.request_id)
        if link is None:
            return
        if event.token_ids:
            self.scores.add(event.request_id, event.index, event.logprobs)
        if (
            event.prompt_logprobs is not None or event.embedding
        ):  # several may be too large for one message
            link.send(TokenBatch(events=[event]))
        else:
            self._batches[link].events.append(event)

    def add_tokens(self, tokens: Iterable[tuple[str, int, int]]) -> None:
        """As `add_event`, for plain tokens: (request id, output index, token id)."""
        links, batches = self._links, self._batches
        for request_id, index, token_id in tokens:
            link = links.get(request_id)
            if link is not None:
                batch = batches[link]
                batch.request_ids.append(request_id)
                batch.indices.append(index)
                batch.token_ids.append(token_id)

    def flush(self) -> None:
        """Send the messages of the step."""
        batches, self._batches = self._batches, _no_batches()
        for link, batch in batches.items():
            link.send(batch)

    def fail(self, request_id: str, error: PdserveError) -> None:
        """Report a leg as failed, and remove it. Its trace is named in the log."""
        traceparent = self._traceparents.get(request_id)
        link = self.close(request_id)
        if traceparent is not None:
            log.warning("%s failed (trace %s): %s", request_id, traceparent, error)
        if link is not None:
            link.send(LegFailed(request_id=request_id, code=error.code, message=error.message))


def _no_batches() -> defaultdict[Sender, TokenBatch]:
    """Empty messages by link, each with lists of its own to append to."""
    return defaultdict(TokenBatch)
