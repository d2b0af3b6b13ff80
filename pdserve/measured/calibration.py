"""A calibration: what the steps and pulls of one kind of node were measured to take.

`pdserve calibrate` writes it from live nodes as one JSON file; `pdserve simulate` and `pdserve
plan` predict clusters of such nodes with it, on any machine. It names three kinds of steps, each
with costs of its own: prefill (chunks of prompts that are handed off, which is work beside them),
decode (no chunk) and mixed (both, or chunks that are decoded on the same node). The residuals say
how the measured times scatter around these costs, the errors how wrong the costs are for steps that
they were not fitted to, and the ranges within which anything was measured.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import PerfReport, StepCosts, TransferCosts
from pdserve.shared.errors import CalibrationError, MalformedMessage

VERSION: Final = 4
_BEFORE: Final = 3  # is read, too

Region = Literal["prefill", "decode", "mixed"]
DeviceType = Literal["cpu", "cuda"]

_Count = Annotated[int, Meta(ge=1)]
_Share = Annotated[float, Meta(ge=0)]
_Factor = Annotated[float, Meta(ge=1)]
_Ratio = Annotated[float, Meta(gt=0)]
_Stretch = Annotated[list[_Ratio], Meta(min_length=1)]


class ModelShape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of the model that was measured; of the whole model, not of one rank."""

    layers: _Count
    hidden: _Count
    kv_heads: _Count
    head_dim: _Count
    vocab: _Count
    dtype: KvDtype  # of the KV
    block_size: _Count  # tokens
    weight_bytes: _Count  # as loaded, so after quantisation
    is_latent: bool = False  # its KV is that of latent attention
    windows: tuple[int, ...] = ()  # by which the node gives KV back, as a KvLayout has them
    state_bytes: Annotated[int, Meta(ge=0)] = 0  # likewise

    @property
    def layout(self) -> KvLayout:
        """The layout of this model's KV blocks."""
        sizes = self.layers, self.kv_heads, self.head_dim, self.block_size
        return KvLayout(
            *sizes,
            self.dtype,
            is_latent=self.is_latent,
            windows=self.windows,
            state_bytes=self.state_bytes,
        )


class NodeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of the measured node, as it said them when it joined."""

    num_blocks: _Count  # of its KV pool
    token_budget: _Count  # most tokens of a step
    max_batch_size: _Count  # most requests of a step
    max_model_len: _Count  # most tokens of a request


class Range(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """From the least to the most that was measured: `[least, most]` in JSON."""

    least: int
    most: int


class Ranges(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the measured steps covered."""

    prompt_tokens: Range  # tokens of a prompt
    batch: Range  # requests that decode in one step
    context: Range  # tokens of one decoding request: prompt and answer so far


class Residuals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured over predicted times, in stretches of successive ones; empty: no scatter known.

    Stretches are drawn at random and replayed, since slow moments last longer than a step. Their
    ratios stand one by one: means hide tails.
    """

    prefill: list[_Stretch] = []
    decode: list[_Stretch] = []
    mixed: list[_Stretch] = []
    pull: list[_Stretch] = []
    prompt_beside: list[_Stretch] = []  # prefill and mixed steps beside those of another node
    decode_beside: list[_Stretch] = []


class HeldOutErrors(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean of |predicted / measured - 1| over what the costs were not fitted to; None: unknown."""

    prefill: _Share | None
    decode: _Share | None
    mixed: _Share | None
    pull: _Share | None


class Sharing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """By which factor a step takes longer while another node of the host computes one.

    Decoding reads all weights for few tokens, so two nodes on one memory bus slow each other down.
    Beyond that, more threads than cores take turns, those of services among them.
    """

    cores: Annotated[int, Meta(ge=0)] = 0  # that all nodes of a host have together; 0: enough
    # On average, that want a node's core while it computes: the engine's, and that of its event
    # loop for as long as both have something to do.
    node_threads: _Factor = 1.0
    decode_beside_decode: _Factor = 1.0
    decode_beside_prompt: _Factor = 1.0
    prompt_beside_decode: _Factor = 1.0
    prompt_beside_prompt: _Factor = 1.0


class ServiceTimes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """CPU seconds that a process takes for what passes through it."""

    request_s: _Share = 0.0
    prompt_token_s: _Share = 0.0  # per token of the prompt; of decode nodes, per pulled one
    step_s: _Share = 0.0  # per step that tells it tokens; of nodes it is in the time of the step
    token_s: _Share = 0.0  # per such token


class Services(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes do beside the steps of engines."""

    coordinator: ServiceTimes = ServiceTimes()
    client: ServiceTimes = ServiceTimes()  # that sends all requests, as that of benchmarks
    prefill: ServiceTimes = ServiceTimes()  # a node, for a prompt that it computes
    decode: ServiceTimes = ServiceTimes()  # a node, for a prompt whose KV it pulls


class Overheads(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is left of the way of a request, in seconds: messages, and threads that wake up."""

    first_token_s: _Share = 0.0  # to its TTFT
    handoff_s: _Share = 0.0  # between tokens 1 and 2 of a request that is handed off


class Drafts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What nodes guess of the tokens to come, which depends on the text."""

    share: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of streams' steps, that something is guessed
    right: Annotated[float, Meta(ge=0, le=1)] = 0.0  # of tokens guessed behind right ones


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of node: its machine, its model, and what these take together."""

    version: int = VERSION
    date: str  # ISO 8601, UTC: when it was measured
    device: str  # processor or GPU, as people know it
    device_type: DeviceType = "cpu"  # as `--device`
    cpus: int  # cores of one node's engine; on GPUs those of the process
    model: str  # checkpoint or hub id
    shape: ModelShape
    limits: NodeLimits
    tensor_parallel: _Count = 1
    pipeline_parallel: _Count = 1
    quantisation: str = ""  # as `--quantization`; empty: none
    prefill: StepCosts
    decode: StepCosts
    mixed: StepCosts
    believed: StepCosts | None = None  # what nodes reckon with; None: with the costs of mixed steps
    pull: TransferCosts
    residuals: Residuals = Residuals()
    ranges: Ranges
    errors: HeldOutErrors
    host: Sharing = Sharing()
    overheads: Overheads = Overheads()
    services: Services = Services()
    drafts: Drafts = Drafts()  # without, each step gives a stream one token

    def check(self) -> None:
        """Check what the types do not say.

        Raises:
            MalformedMessage: a cost or a limit is impossible.
        """
        limits = self.limits
        for costs in (self.prefill, self.decode, self.mixed, self.believed or self.mixed):
            PerfReport(costs, limits.token_budget, limits.max_batch_size, [self.pull]).check()


def read_calibration(path: Path) -> Calibration:
    """Read a calibration file.

    Raises:
        CalibrationError: it cannot be read, is no calibration, or one of another version.
    """
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Versioned).version
        if version not in (_BEFORE, VERSION):
            raise CalibrationError(
                f"{path} is a calibration of version {version}, and this pdserve reads versions "
                f"{_BEFORE} and {VERSION}: make it anew with `pdserve calibrate`"
            )
        made = msgspec.json.decode(text)
        calibration = msgspec.convert(_upgraded(made) if version == _BEFORE else made, Calibration)
        calibration.check()
    except OSError as error:
        raise CalibrationError(f"cannot read the calibration {path}: {error}") from error
    except (msgspec.MsgspecError, MalformedMessage) as error:
        raise CalibrationError(f"{path} is not a calibration: {error}") from error
    return calibration


def _upgraded(made: dict[str, Any]) -> dict[str, Any]:
    """Return what a file of the version before says, in the words of this one.

    It says how often guesses were right, but not how often there were any: it is left out.
    """
    kept = {name: value for name, value in made.items() if name != "drafts_right"}
    return kept | {"version": VERSION}


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration file, whole or not at all."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    whole = path.with_name(f".{path.name}.new")
    whole.write_bytes(text + b"\n")
    whole.replace(path)


class _Versioned(msgspec.Struct):
    version: int
