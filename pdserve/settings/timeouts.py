"""How long things may take, in each process and in all of them together."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct, Seconds


class SharedTimeouts(ConfigStruct, frozen=True):
    """The deadlines of every process, by stage. Each has a test."""

    heartbeat_s: Annotated[Seconds, Meta(description="interval between load reports")] = 0.5
    liveness_s: Annotated[
        Seconds,
        Meta(description="silence after which a peer counts as lost, if its host is silent too"),
    ] = 2.0
    connect_s: Annotated[Seconds, Meta(description="deadline to attach or to open a session")] = 3.0
    drain_s: Annotated[
        Seconds, Meta(description="time to finish running requests after SIGTERM")
    ] = 30.0

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if sound nodes would be given up."""
        if self.heartbeat_s >= self.liveness_s:
            raise ValueError(
                f"`heartbeat_s` is {self.heartbeat_s:g}, but must be less than `liveness_s` "
                f"({self.liveness_s:g}): else every node counts as lost between two reports"
            )


RequestDeadline = Annotated[
    Seconds, Meta(description="deadline of a generation, from its start to its end")
]
REQUEST_S = 600.0
ResumeDeadline = Annotated[
    Seconds, Meta(description="how long an interrupted request waits for a node to go on")
]
RESUME_S = 60.0
IdleTimeout = Annotated[
    Seconds,
    Meta(
        description="how long a client's connection may be idle; longer than what proxies in front "
        "keep theirs"
    ),
]
IDLE_S = 75.0


class CoordinatorTimeouts(SharedTimeouts, frozen=True):
    """The deadlines of a coordinator."""

    request_s: RequestDeadline = REQUEST_S
    resume_s: ResumeDeadline = RESUME_S
    idle_s: IdleTimeout = IDLE_S


class NodeTimeouts(SharedTimeouts, frozen=True):
    """The deadlines of a node."""

    orphan_s: Annotated[
        Seconds, Meta(description="how long a stream outlives its coordinator, to be claimed")
    ] = 15.0
    lease_s: Annotated[
        Seconds,
        Meta(description="how long KV waits for a puller (a prefix: at least prefix_s)"),
    ] = 10.0
    transfer_s: Annotated[
        Seconds,
        Meta(description="deadline of one pull of KV; twice what such pulls have taken, if longer"),
    ] = 10.0
    prefix_s: Annotated[
        Seconds, Meta(description="deadline of fetching a prefix from elsewhere; as transfer_s")
    ] = 2.0
    ticket_s: Annotated[Seconds, Meta(description="validity of a ticket for KV blocks")] = 30.0

    @property
    def hold_s(self) -> float:
        """How long a prefix waits for who has asked for it: a pull may take `prefix_s`."""
        return max(self.lease_s, self.prefix_s)


class Timeouts(NodeTimeouts, frozen=True):
    """The deadlines of a whole cluster."""

    request_s: RequestDeadline = REQUEST_S
    resume_s: ResumeDeadline = RESUME_S
    idle_s: IdleTimeout = IDLE_S
