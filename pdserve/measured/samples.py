"""What the steps and pulls of a live node really took, as its metrics port tells it.

GET /samples?after=NUMBER answers with a `NodeSamples`: what was measured since, oldest first, as
far as the node still has it. Nothing of any request is in it but sizes.
"""

from __future__ import annotations

import msgspec

from pdserve.measured.calibration import DeviceType, ModelShape, NodeLimits
from pdserve.measured.perf_model import StepShape
from pdserve.protocol import StepCosts


class StepSample(msgspec.Struct, frozen=True, array_like=True):
    """One step. Times are in seconds of the host's monotonic clock."""

    number: int  # of all that the node has measured, steps and pulls
    ended_s: float
    period_s: float  # since the step before, or since the node was idle
    tokens: int
    sampled: int
    prefill_pairs: int
    decode_context: int

    @property
    def shape(self) -> StepShape:
        """What the time of the step depends on."""
        return StepShape(self.tokens, self.sampled, self.prefill_pairs, self.decode_context)

    @property
    def began_s(self) -> float:
        """When the step before had ended."""
        return self.ended_s - self.period_s


class PullSample(msgspec.Struct, frozen=True, array_like=True):
    """One complete pull of KV."""

    number: int
    transport: str
    num_bytes: int
    seconds: float  # from the query to the last byte


class DraftTally(msgspec.Struct, frozen=True, array_like=True):
    """What came of guessed tokens."""

    tried: int = 0  # steps of streams that had some
    drafted: int = 0  # tokens
    accepted: int = 0  # of these, right
    wrong: int = 0  # tries with a wrong token; what was guessed behind it tells nothing

    def plus(self, other: DraftTally) -> DraftTally:
        """Return the sum of both."""
        return DraftTally(
            self.tried + other.tried,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
            self.wrong + other.wrong,
        )

    def since(self, earlier: DraftTally) -> DraftTally:
        """Return what has come since an earlier tally."""
        return DraftTally(
            self.tried - earlier.tried,
            self.drafted - earlier.drafted,
            self.accepted - earlier.accepted,
            self.wrong - earlier.wrong,
        )


class NodeKind(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured: nodes of one kind take the same time for the same step."""

    device: str  # processor or GPU, as people know it
    device_type: DeviceType
    cpus: int  # threads of the engine
    host_cores: int  # of the host, for all its processes
    model: str
    shape: ModelShape
    limits: NodeLimits
    tensor_parallel: int
    pipeline_parallel: int = 1
    quantisation: str  # empty: none


class NodeSamples(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one node."""

    node_id: str
    host_id: str  # the same for all processes of a host
    kind: NodeKind
    # Of its steps, as it profiled them: what its policies reckon with. None: by an earlier build.
    believed: StepCosts | None = None
    newest: int  # number of the newest measurement there is
    steps: list[StepSample]
    pulls: list[PullSample]
    drafts: DraftTally = DraftTally()  # since the node started
