"""What requests in flight depend on: times, nodes that may come, and their process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.admission.decisions import Awaited
from coordinator.generation import GenerationRequest
from coordinator.prefixes.index import PromptHashes
from coordinator.requests.claims import ANSWER_S
from coordinator.requests.journey import Journey
from coordinator.requests.line_keeper import LINE_GAP_S
from coordinator.requests.moves import PREFETCH_S, TAKEOVER_S
from pdserve.protocol import NodeRole, Prompt, Slo
from pdserve.protocol.status import CoordinatorStatus


@dataclass(frozen=True, slots=True)
class FlowTimes:
    """How long requests may take, and how long they wait for others."""

    request_s: float
    resume_s: float  # for a node to go on
    line_gap_s: float = LINE_GAP_S
    answer_s: float = ANSWER_S
    takeover_s: float = TAKEOVER_S
    prefetch_s: float = PREFETCH_S


@dataclass(frozen=True, slots=True)
class WantedNodes:
    """Which nodes a request is for, and whether it waits for some that are not there."""

    revision_of: Callable[[GenerationRequest], str] = lambda request: ""  # empty: any
    are_awaited: bool = False  # a request waits in line if there are none: some will be started
    # Whether a node of the pool was lost, and is being started again.
    comes_back: Callable[[NodeRole], bool] = lambda role: False
    # What a request waits for where there are no nodes; None: nobody knows.
    until_awake: Callable[[Slo, Prompt], Awaited | None] = lambda slo, prompt: None
    wake_s: Callable[[], float] = lambda: 0.0  # until the model has nodes
    # Gets the digest of an adapter that a request needs, and no node has.
    adapter_missing: Callable[[str], None] = lambda digest: None


@dataclass(frozen=True, slots=True)
class FlowProcess:
    """The process that requests are in flight in: what it is told, and what it tells."""

    # Gets the journey and the prompt of each request that has ended.
    on_ended: Callable[[Journey, PromptHashes], None] = lambda journey, prompt: None
    # Gets how many requests there are, and how many of them wait, as that changes.
    on_load: Callable[[int, int], None] = lambda inflight, waiting: None
    # What there is to tell of the process, beside its requests.
    describe: Callable[[], CoordinatorStatus] = CoordinatorStatus
