"""The seam between the HTTP API and the cluster: what the API asks for, and what it gets.

The API turns a user's call into `GenerationRequest`s and shows the tokens of the `Generation`s it
gets for them. Which nodes run a request, and what happens when one is lost, is the other side's
business (`coordinator/flow.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from pdserve.protocol import SamplingParams, Slo, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One token stream to be generated: nothing of text, HTTP or nodes."""

    request_id: str  # made by the coordinator, unique among all requests
    token_ids: list[int]  # the prompt; never empty
    sampling: SamplingParams
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    slo: Slo = field(default_factory=Slo)  # what its class promises; durations from receipt
    waited_s: float = 0.0  # since receipt, until `start`
    deadline_s: float = 0.0  # seconds from start; 0 = the cluster's own, which always holds

    @property
    def ends_with_prompt(self) -> bool:
        """Whether no token is wanted: its only event tells of the prompt."""
        return self.sampling.max_tokens == 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request runs; nowhere while it waits."""

    prefill_node: str | None  # None = prefilled locally by the decode node
    decode_node: str | None  # None = one token is all that is wanted


Listener: TypeAlias = Callable[[TokenEvent | Exception], None]


class Generation(Protocol):
    """One running request. Has one listener."""

    @property
    def route(self) -> Route:
        """As of now; a request that waits for room runs nowhere yet."""
        ...

    def listen(self, listener: Listener) -> None:
        """Have its tokens told as they come, and at once what has come already. Once.

        Events are contiguous by index, and the one with a finish_reason is the last. A request that
        cannot go on ends with an error instead: NodeLost, DeadlineExceeded, NoNodeAvailable,
        RequestCancelled, or whatever a node reported. A listener is called in the middle of a
        node's message: it takes note, and neither waits nor raises.
        """
        ...

    def cancel(self, reason: str) -> None:
        """Stop it and free what it holds on all its nodes. Idempotent; harmless after the end."""
        ...


class Generator(Protocol):
    """All that the API needs of the cluster."""

    @property
    def max_model_len(self) -> int | None:
        """Most tokens, prompt plus output, of one request; None while no node has attached."""
        ...

    @property
    def max_inflight(self) -> int:
        """Most requests at a time, whatever they are."""
        ...

    def start(self, request: GenerationRequest) -> Generation:
        """Dispatch a request, or have it wait. Its holder reads it to the end or cancels it.

        Raises Overloaded, NoNodeAvailable or ContextLengthExceeded; then nothing was started.
        """
        ...

    def start_siblings(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """As `start`, of several answers to one prompt: they differ in id and seed alone, and only
        the first may have the prompt scored.

        They are admitted or refused as one, and the prompt is computed for the first of them.
        Until its token 1 is there, what ends the first ends all of them.
        """
        ...

    def is_ready(self) -> bool:
        """Whether a request started now could be served."""
        ...

    def status(self) -> dict[str, object]:
        """Nodes, loads and counters for a person to read, JSON-ready."""
        ...
