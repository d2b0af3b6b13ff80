"""Which attention backend is the fastest on this GPU, for prompts and for decode steps: measured.

Every backend that works computes a few batches of the model's heads. Decode steps are measured as
they run, replayed by a graph; so only what can be captured takes part in that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol, TypeVar

import torch

from pdserve.engine.attention.interface import AttentionBackend
from pdserve.engine.cuda.catalog import KINDS, AttentionKind, AttentionNeeds, DecodeAttention
from pdserve.engine.cuda.graphs import Recorder
from pdserve.engine.cuda.probe import Contexts, Trial, check_attention

# At most 16k tokens of KV: 64 MiB of 8 heads of 128 in bfloat16.
PROMPTS: Final[tuple[Contexts, ...]] = (((512, 512),), ((256, 8192),), ((16, 256),) * 32)
DECODES: Final[tuple[Contexts, ...]] = (((1, 1024),) * 16, ((1, 8192),), ((1, 128),) * 64)
_NUM_RUNS: Final = 20

_log = logging.getLogger(__name__)
_Backend = TypeVar("_Backend", AttentionBackend, DecodeAttention)


class Stopwatch(Protocol):
    """Measures work on a GPU; tests have one without."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long the work takes, once it has been done before."""


class CudaStopwatch:
    """Implements Stopwatch with events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """See Stopwatch.seconds."""
        work()
        stream = torch.cuda.current_stream(self._device)
        begin = stream.record_event(self._event())
        for _ in range(_NUM_RUNS):
            work()
        end = stream.record_event(self._event())
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / _NUM_RUNS

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Fastest:
    """The winners."""

    prompts: AttentionBackend  # for steps with chunks of prompts
    decodes: DecodeAttention | None  # for decode steps in graphs; None: nothing can be captured


def fastest_attention(
    needs: AttentionNeeds,
    device: torch.device,
    stopwatch: Stopwatch,
    new_recorder: Callable[[], Recorder] | None,
    kinds: Sequence[AttentionKind] = KINDS,
) -> Fastest:
    """Return the fastest of the backends that compute what they should: there is always one.

    Args:
        needs: of the model.
        device: where it runs.
        stopwatch: measures there.
        new_recorder: returns what captures graphs; None: there are none. Each backend has its own,
            since the memory of graphs that are gone may not be captured in again.
        kinds: the candidates; the last one takes part only if no other works.
    """
    *others, last = kinds
    working = _working(others, needs, device) or _working([last], needs, device)
    course = _Course(needs, device, stopwatch)
    prompts = _first("prompts", [backend for _, backend in working], course.prompts_s)
    decodes = [kind.open_captured(device) for kind, _ in working if kind.open_captured is not None]
    if new_recorder is None or not decodes:
        return Fastest(prompts, None)
    return Fastest(prompts, _first("decodes", decodes, partial(course.decodes_s, new_recorder)))


def _working(
    kinds: Sequence[AttentionKind], needs: AttentionNeeds, device: torch.device
) -> list[tuple[AttentionKind, AttentionBackend]]:
    working = []
    for kind in kinds:
        if kind.obstacle(needs) is not None:
            continue
        try:
            backend = kind.open(device)
            check_attention(backend, needs, device)
        except Exception:  # noqa: BLE001 - a library raises what its compiler does
            _log.exception("attention by %s does not work here: it is left out", kind.name)
        else:
            working.append((kind, backend))
    return working


@dataclass(frozen=True, slots=True)
class _Course:
    """What all have to compute."""

    needs: AttentionNeeds
    device: torch.device
    stopwatch: Stopwatch

    def prompts_s(self, backend: AttentionBackend) -> float:
        """Return the seconds for all batches with chunks of prompts."""
        return sum(
            self.stopwatch.seconds(partial(trial.attend, backend.attend))
            for trial in self._trials(PROMPTS)
        )

    def decodes_s(self, new_recorder: Callable[[], Recorder], backend: DecodeAttention) -> float:
        """Return the seconds for all batches of decodes."""
        recorder = new_recorder()
        graphs = [
            recorder.record(partial(trial.attend, backend.attend_decode))
            for trial in self._trials(DECODES)
        ]
        return sum(self.stopwatch.seconds(graph.replay) for graph in graphs)

    def _trials(self, batches: Sequence[Contexts]) -> list[Trial]:
        return [Trial(contexts, self.needs, self.device) for contexts in batches]


def _first(
    what: str, backends: Sequence[_Backend], seconds: Callable[[_Backend], float]
) -> _Backend:
    """Return the fastest backend: of those that can be measured, if there are several."""
    if len(backends) == 1:
        return backends[0]
    found: dict[str, float] = {}
    best = backends[0]
    for backend in backends:
        try:
            found[backend.name] = seconds(backend)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("attention by %s cannot compute %s here", backend.name, what)
        else:
            if found[backend.name] == min(found.values()):
                best = backend
    times = ", ".join(f"{name} {1e6 * taken_s:.0f} µs" for name, taken_s in found.items())
    _log.info("attention for %s is %s, measured: %s", what, best.name, times)
    return best
