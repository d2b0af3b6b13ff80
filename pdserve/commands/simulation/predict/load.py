"""The calls of a workload: the very requests that `pdserve bench compare` would send, unmade."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Final
from zlib import crc32

from msgspec.structs import replace

from pdserve.commands.bench.compare.cases import CompareCase, made_up, replayed
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.bench.load.traces import TraceRow, read_trace
from pdserve.commands.bench.load.workload import Sketch
from pdserve.commands.simulation.call import MOST_OUTPUT, Call
from pdserve.commands.simulation.machine import Machine
from pdserve.commands.simulation.prompts import KnownPrompt
from pdserve.measured.calibration import Calibration, Range
from pdserve.protocol import Slo
from pdserve.shared.errors import CalibrationError

_TURNS: Final = 61
_HOLD = 0.9  # share of the TTFT for which token 1 may be held back, as service classes have it


@dataclass(frozen=True, slots=True)
class Question:
    """Which requests, how many of them, and in what form."""

    trace: str  # file; empty: the scenario
    scenario: ScenarioName
    length_scale: float  # 0: chosen to fit the model
    count: int

    def case(self, calibration: Calibration, seed: int, longer: float = 1.0) -> CompareCase:
        """Return the workload for a seed; `longer` is a factor on its lengths.

        Raises:
            ConfigError: the trace cannot be read, or requests do not fit the model.
        """
        longest = most_tokens(calibration)
        if self.trace:
            name, rows = Path(self.trace).stem, rows_of(self.trace, seed)
            case = replayed(name, rows, longest, self.length_scale, seed)
            if longer == 1.0:
                return case
            return replayed(name, rows, longest, case.length_factor * longer, seed)
        scale = self.length_scale or 1.0
        return made_up(self.scenario, longest, scale * longer, seed)


@lru_cache(maxsize=4)
def rows_of(trace: str, seed: int) -> list[TraceRow]:
    """Return the rows of a trace, which many runs want again. Raises ConfigError."""
    return read_trace(Path(trace), seed)


def most_tokens(calibration: Calibration) -> int:
    """Return the most tokens of a request that such a node can hold."""
    limits, layout = calibration.limits, calibration.shape.layout
    # With its state, and the snapshot that it goes on behind, as nodes have room for.
    num_blocks = max(0, limits.num_blocks - 2 * layout.state_blocks)
    return min(limits.max_model_len, layout.tokens_in(num_blocks))


def turn_at(rate: float) -> int:
    """Return which of a workload's requests come at a rate: others at each.

    With the same ones, one unlucky series would move the whole curve.
    """
    return crc32(f"{rate:.6g}".encode()) % _TURNS


def calls_of(
    case: CompareCase,
    rate: float,
    count: int,
    promise: Promise | None,
    ranges: Ranged,
    most_tokens: int = 0,
) -> Iterator[Call]:
    """Yield the calls of a workload at this rate, in order of time; `most_tokens`: see `call_of`.

    Raises:
        CalibrationError: a call lies outside of what was measured, and that is not allowed.
    """
    slo = Slo()
    if promise is not None:
        hold_s = _HOLD * promise.ttft_s
        slo = Slo(ttft_s=promise.ttft_s, tpot_s=promise.tpot_s, hold_s=hold_s)
    for sketch in case.workload.sketched(rate, count, turn_at(rate)):
        ranges.check(sketch)
        yield call_of(sketch, sketch.at_s, case.workload.block_tokens, slo, most_tokens)


def call_of(sketch: Sketch, at_s: float, block_tokens: int, slo: Slo, most_tokens: int = 0) -> Call:
    """Return the call that a sketch stands for.

    `most_tokens`: that prompt and answer may have, which is all that its client says of the answer;
    0: the client asks for just as many as it gets, as that of `pdserve bench compare`.
    """
    prompt = KnownPrompt(sketch.number, sketch.num_prompt, sketch.blocks, block_tokens)
    return Call(
        call_id=str(sketch.number),
        at_s=at_s,
        prompt=prompt.as_prompt,
        num_output=sketch.num_output,
        slo=slo,
        most_output=min(MOST_OUTPUT, most_tokens - sketch.num_prompt),
        is_exact=not most_tokens,
        kind=sketch.kind,
        after="" if sketch.after is None else str(sketch.after),
        think_s=sketch.think_s,
    )


def capacity(calibration: Calibration, question: Question, num_nodes: int) -> float:
    """Return roughly the rate that so many nodes can serve, per second: where to search first."""
    case, perf = question.case(calibration, 0), Machine.of(calibration).perf()
    batch, budget = min(8, calibration.limits.max_batch_size), calibration.limits.token_budget
    sketches = list(case.workload.sketched(1.0, case.whole_decks(100)))
    seconds = 0.0
    for sketch in sketches:
        context = batch * (sketch.num_prompt + sketch.num_output)
        seconds += perf.prefill_s(sketch.num_prompt, 0, budget)
        seconds += sketch.num_output * perf.decode_s(batch, context) / batch
    return num_nodes * len(sketches) / seconds


class RateOutside(CalibrationError):
    """A run cannot be predicted at this rate; at a lower one it may."""

    why: ClassVar[str]  # for people, of all such rates


class BatchOutside(RateOutside):
    """Decode batches were larger than any that was measured."""

    why = "batches are larger than any that was calibrated"


class ClientLimit(RateOutside):
    """The load client did not keep up, so times that it sees are partly its own."""

    why = "the load client is the limit"


class Ranged:
    """Compares what is simulated with the ranges of the calibration."""

    def __init__(
        self,
        calibration: Calibration,
        *,
        extrapolates: bool,
        prompts_of: Calibration | None = None,
    ) -> None:
        """
        Args:
            calibration: of all nodes, or of those that decode.
            extrapolates: what lies outside is counted, and otherwise refused.
            prompts_of: of other nodes, whose prompts have to be within it, too.
        """
        self._ranges = calibration.ranges
        if prompts_of is not None:
            own, others = self._ranges.prompt_tokens, prompts_of.ranges.prompt_tokens
            both = Range(max(own.least, others.least), min(own.most, others.most))
            self._ranges = replace(self._ranges, prompt_tokens=both)
        self._extrapolates = extrapolates
        self.outside: dict[str, tuple[int, int]] = {}  # what |-> the least and the most of it

    def check(self, sketch: Sketch) -> None:
        """Check a request.

        Raises:
            CalibrationError: it lies outside, and that is not allowed.
        """
        self._within("prompt_tokens", sketch.num_prompt, self._ranges.prompt_tokens)
        self._within("context", sketch.num_prompt + sketch.num_output, self._ranges.context)

    def check_batches(self, largest: Sequence[int]) -> None:
        """Check the largest decode batch of each node.

        Raises:
            BatchOutside: one lies outside, and that is not allowed.
        """
        for size in largest:
            if size:
                self._within("batch", size, self._ranges.batch, BatchOutside)

    def check_client(self, rate: float, late_ms: float, promise: Promise) -> None:
        """Check by how much a client was late itself, at the 99th percentile.

        Raises:
            ClientLimit: it was by too much to tell of this promise, and that is not allowed.
        """
        if not self._extrapolates and not promise.is_measured(late_ms):
            raise ClientLimit(
                f"at {rate:.3g} requests/s the load client sends {late_ms:.0f} ms late, so it is "
                "the limit, and no node: ask for a lower rate, or give --extrapolate and take the "
                "answer with that much more doubt"
            )

    def widen(self, outside: Mapping[str, tuple[int, int]]) -> None:
        """Note what lay outside in other simulations."""
        for what, (least, most) in outside.items():
            before = self.outside.get(what, (least, most))
            self.outside[what] = min(least, before[0]), max(most, before[1])

    def _within(
        self,
        what: str,
        value: int,
        measured: Range,
        error: type[CalibrationError] = CalibrationError,
    ) -> None:
        if measured.least <= value <= measured.most:
            return
        if not self._extrapolates:
            raise error(
                f"{what} {value} is outside of what was calibrated, {measured.least} to "
                f"{measured.most}: calibrate a wider range, change the load (--length-scale, "
                "--rates), or give --extrapolate and take the answer with that much more doubt"
            )
        self.widen({what: (value, value)})
