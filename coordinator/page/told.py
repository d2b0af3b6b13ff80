"""What the page is told, as JSON."""

from __future__ import annotations

import msgspec

from coordinator.observers.endings import Ending
from coordinator.requests.journey import PhaseName
from pdserve.findings.finding import Finding
from pdserve.protocol.status import ClusterStatus, RoleName


class Kept(msgspec.Struct, frozen=True):
    """How many calls of a class there were, and how many got what the class promises."""

    kept: int
    calls: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one tenant had of a period."""

    endings: dict[Ending, int]  # calls
    prompt_tokens: int
    output_tokens: int


class Period(msgspec.Struct, frozen=True, kw_only=True):
    """What five seconds were like. All of it can be added up over periods."""

    ends_at: float  # seconds since 1970
    seconds: float
    endings: dict[Ending, int]  # calls
    errors: dict[str, int]  # calls by error code
    prompt_tokens: int
    cached_tokens: int  # of these
    output_tokens: int
    # Milliseconds: bucket b has as many calls between GROWTH ** b and GROWTH ** (b + 1).
    ttft: dict[int, int]
    tpot: dict[int, int]
    promises: dict[str, Kept]  # by class, of those that promise something
    most_inflight: int
    mean_inflight: float
    most_waiting: int
    kv_used: dict[RoleName, float]  # share of the pool's blocks, at its end
    tenants: dict[str, Share]


class Step(msgspec.Struct, frozen=True):
    """A phase of a journey, milliseconds from its receipt."""

    name: PhaseName
    start: float
    end: float
    node: str


class JourneyView(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has ended, as the page shows it. Nothing of its text."""

    request_id: str
    ended_at: float  # seconds since 1970
    ending: Ending
    slo_class: str
    tenant: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    interruptions: int
    error: str  # code; empty: none
    steps: list[Step]


class News(msgspec.Struct, frozen=True, kw_only=True):
    """One event: the first one has the periods that are over, later ones those that ended since."""

    version: str
    status: ClusterStatus
    findings: list[Finding]  # that are not "ok", worst first
    growth: float  # of the buckets of latencies
    periods: list[Period]
    current: Period  # not over
    journeys: list[JourneyView]  # oldest first
