"""The interface between the HTTP API and the cluster.

The API turns a user's call into `GenerationRequest`s, and shows the tokens of the `Generation`s
that it gets for them. Which nodes run a request, and what happens when a node is lost, is decided
on the other side of this interface (`coordinator/requests/flow.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import msgspec

from coordinator.tracing.call_span import CallSpan
from pdserve._native import TokenRun
from pdserve.protocol import Prompt, SamplingParams, Slo, TokenEvent, TokenLogprobs
from pdserve.protocol.status import ClusterStatus


class Needs(NamedTuple):
    """What a node has to serve for a request."""

    revision: str = ""  # empty: any
    adapter: str = ""  # its digest; empty: the model alone, which every node serves


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One token stream to generate; knows nothing of text, HTTP or nodes."""

    request_id: str  # made by the coordinator, unique among all requests
    prompt: Prompt  # never empty
    sampling: SamplingParams
    output_token_ids: list[int] = []  # emitted before an interruption
    num_accepted: int = 0  # of these: they had been guessed
    num_refused: int = 0  # guesses before the interruption that were wrong
    prediction: Sequence[int] = ()  # what the client expects it to say
    output_logprobs: list[TokenLogprobs] = []  # if it is claimable
    slo: Slo = Slo()  # the promise of its class; durations from receipt
    waited_s: float = 0.0  # from receipt until `start`
    is_claimable: bool = False  # made under a key: another coordinator would give it the same id
    conversation: int | None = None  # 32 bits, the same for all its turns; None: it stands alone
    revision: str = ""  # whose nodes are to serve it, while there are any; empty: any
    span: CallSpan | None = None  # of the call; None: it is not recorded
    deadline_s: float = 0.0  # seconds from start; 0 = only the cluster's limit, which always holds
    was_interrupted: bool = False  # it goes where handoffs work, and tries none that have failed
    wait_s: float = 0.0  # for which it waits in line, from its start, if a pool has no node for it

    @property
    def context(self) -> Prompt:
        """The prompt and the output: their KV is needed before the next token can be sampled."""
        return self.prompt.then(self.output_token_ids)

    @property
    def needs(self) -> Needs:
        """What its nodes have to serve."""
        return Needs(self.revision, self.prompt.adapter)

    @property
    def traceparent(self) -> str:
        """The W3C header for what is done on its behalf; empty if its call is not recorded."""
        return "" if self.span is None else self.span.traceparent

    @property
    def ends_with_prompt(self) -> bool:
        """Whether no output token is wanted: the only event is about the prompt."""
        return self.sampling.max_tokens == 0


class Route(msgspec.Struct, frozen=True):
    """The nodes that a request runs on; both None while it waits in line."""

    prefill_node: str | None  # None = prefilled locally by the decode node
    decode_node: str | None  # None = only one token is wanted
    revision: str = ""  # of the model that they serve

    @property
    def was_dispatched(self) -> bool:
        """Whether the request was sent to nodes, which then may have worked for it."""
        return self.prefill_node is not None or self.decode_node is not None


Listener: TypeAlias = Callable[[TokenEvent | Exception], None]


class Generation(Protocol):
    """One running request, with one listener."""

    @property
    def route(self) -> Route:
        """The current route; a request that waits for room has no nodes yet."""
        ...

    def listen(
        self, listener: Listener, on_tokens: Callable[[TokenRun], None] | None = None
    ) -> None:
        """Pass all events to `listener`: those so far at once, later ones as they arrive.

        Tokens of which nothing else is to be said may come to a run instead, and then `on_tokens`
        is told when it has some to be read. They come before whatever the listener is told next.

        May be called once. Events are contiguous by index, and the one with a finish_reason is the
        last. A request that cannot continue ends with an error instead: NodeLost, DeadlineExceeded,
        NoNodeAvailable, RequestCancelled, or the error that a node reported. The listener is called
        while a node's message is handled, so it must neither block nor raise.
        """
        ...

    def cancel(self, reason: str) -> None:
        """Stop the request and free what it holds on its nodes.

        Idempotent; does nothing after the end.
        """
        ...

    def leave(self) -> None:
        """Know nothing of the request any more, and let its nodes go on.

        They keep it for whoever claims it once this process has ended. Does nothing after the end.
        """
        ...


class Generator(Protocol):
    """Everything that the API needs from the cluster."""

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of one request, prompt plus output; None before any node attached."""
        ...

    @property
    def max_inflight(self) -> int:
        """The most requests in flight at a time, of any kind."""
        ...

    def start(self, request: GenerationRequest) -> Generation:
        """Dispatch or queue a request. The caller must read it to its end or cancel it.

        Raises Overloaded, NoNodeAvailable or ContextLengthExceeded; then nothing was started.
        """
        ...

    def start_siblings(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """Start several answers to one prompt, as `start` does for one.

        The requests differ only in id and seed, and only the first may have the prompt scored. They
        are admitted or refused as one, and the prompt is computed once, for the first. Until its
        token 1 has arrived, an error or cancellation of the first ends all of them.
        """
        ...

    def is_ready(self) -> bool:
        """Return whether a request started now could be served."""
        ...

    def status(self) -> ClusterStatus:
        """Return nodes, loads and counters for people to read, JSON-ready."""
        ...
