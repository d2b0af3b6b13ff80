"""Which attention backend is the fastest on this GPU, for prompts and for decode steps: measured.

Every backend that works does the attention of a few steps of the model. Decode steps are measured
as they run, replayed by a graph; so only what can be captured takes part in that.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch

from pdserve.engine.attention.interface import Attend, AttentionBackend
from pdserve.engine.cuda.attention.catalog import (
    KINDS,
    AttentionKind,
    AttentionNeeds,
    DecodeAttention,
)
from pdserve.engine.cuda.attention.probe import (
    AttentionTrial,
    Contexts,
    check_attention,
    check_decodes,
    token_bytes,
)
from pdserve.engine.cuda.capture.graphs import Recorder
from pdserve.engine.cuda.stopwatch import DeviceStopwatch

# At most 16k tokens of KV: 64 MiB a layer of 8 heads of 128 in bfloat16.
_PROMPTS: Final[tuple[Contexts, ...]] = (((512, 512),), ((256, 8192),), ((16, 256),) * 32)
_DECODES: Final[tuple[Contexts, ...]] = (((1, 1024),) * 16, ((1, 8192),), ((1, 128),) * 64)

_log = logging.getLogger(__name__)
_Backend = TypeVar("_Backend", AttentionBackend, DecodeAttention)


@dataclass(frozen=True, slots=True)
class RacedBatches:
    """What all have to compute."""

    prompts: Sequence[Contexts] = _PROMPTS  # with chunks of prompts
    decodes: Sequence[Contexts] = _DECODES
    cold_bytes: int = 256 << 20  # of KV: more than a GPU's cache holds, so a layer is from memory


@dataclass(frozen=True, slots=True)
class Fastest:
    """The winners."""

    prompts: AttentionBackend  # for steps with chunks of prompts
    decodes: DecodeAttention | None  # for decode steps in graphs; None: nothing can be captured

    @property
    def names(self) -> str:
        """Theirs, as `opened` takes them."""
        return " ".join(each.name for each in (self.prompts, self.decodes) if each is not None)


def opened(names: str, device: torch.device, kinds: Sequence[AttentionKind] = KINDS) -> Fastest:
    """Return the backends of these names: the one for prompts, and one for decodes if there is."""
    prompts, _, decodes = names.partition(" ")
    by_name = {kind.name: kind for kind in kinds}
    captured = by_name[decodes].open_captured if decodes else None
    return Fastest(by_name[prompts].open(device), None if captured is None else captured(device))


def fastest_attention(
    needs: AttentionNeeds,
    device: torch.device,
    stopwatch: DeviceStopwatch,
    new_recorder: Callable[[], Recorder] | None,
    kinds: Sequence[AttentionKind] = KINDS,
    batches: RacedBatches = RacedBatches(),
) -> Fastest:
    """Return the fastest of the backends that compute what they should.

    Args:
        needs: of the model.
        device: where it runs.
        stopwatch: measures there.
        new_recorder: returns what captures graphs; None: there are none. Each measurement has its
            own, since the memory of graphs that are gone may not be captured in again.
        batches: to measure.
        kinds: the candidates. The last one, which needs no check, is for prompts if no other works.
    """
    *others, last = kinds
    candidates = [kind for kind in others if kind.obstacle(needs) is None]
    course = _Course(needs, device, stopwatch, batches)
    prompts = _first(
        "prompts",
        _working(
            [(kind.name, kind.open) for kind in candidates],
            device,
            lambda backend: check_attention(backend, needs, device),
        ),
        course.prompts_s,
    )
    if prompts is None:
        prompts = last.open(device)
    if new_recorder is None:
        return Fastest(prompts, None)
    decodes = _first(
        "decodes",
        _working(
            [(kind.name, kind.open_captured) for kind in candidates if kind.open_captured],
            device,
            lambda backend: check_decodes(backend, needs, device, new_recorder()),
        ),
        partial(course.decodes_s, new_recorder),
    )
    return Fastest(prompts, decodes)


def _working(
    kinds: Iterable[tuple[str, Callable[[torch.device], _Backend]]],
    device: torch.device,
    check: Callable[[_Backend], None],
) -> list[_Backend]:
    """Open the backends, and return those that pass the check."""
    working = []
    for name, open_backend in kinds:
        try:
            backend = open_backend(device)
            check(backend)
        except Exception:  # noqa: BLE001 - a library raises what its compiler does
            _log.exception("attention by %s does not work here: it is left out", name)
        else:
            working.append(backend)
    return working


@dataclass(frozen=True, slots=True)
class _Course:
    """Where they compute it."""

    needs: AttentionNeeds
    device: torch.device
    stopwatch: DeviceStopwatch
    batches: RacedBatches

    def prompts_s(self, backend: AttentionBackend) -> float:
        """Return the seconds for a step of each batch with chunks of prompts."""
        steps = [self._step(contexts, backend.attend) for contexts in self.batches.prompts]
        return sum(map(self.stopwatch.seconds, steps))

    def decodes_s(self, new_recorder: Callable[[], Recorder], backend: DecodeAttention) -> float:
        """Return the seconds for a step of each batch of decodes."""
        total_s = 0.0
        for contexts in self.batches.decodes:
            step = self._step(contexts, backend.attend_decode)  # kept, with what the graph reads
            graph = new_recorder().record(step)
            total_s += self.stopwatch.seconds(graph.replay)
        return total_s

    def _step(self, contexts: Contexts, attend: Attend) -> Callable[[], None]:
        """Return the attention of one step of the model."""
        trial = AttentionTrial(contexts, self.needs, self.device, self._num_layers(contexts))
        return partial(trial.step, attend, self.needs.windows)

    def _num_layers(self, contexts: Contexts) -> int:
        """Return how many layers' KV differs: all, unless fewer are enough or there is no room."""
        needs = self.needs
        layer_bytes = token_bytes(needs) * sum(context for _, context in contexts)
        room = self.batches.cold_bytes
        if self.device.type == "cuda":
            room = min(room, torch.cuda.mem_get_info(self.device)[0] // 4)
        return min(len(needs.windows), max(1, -(-room // layer_bytes)))


def _first(
    what: str, backends: Sequence[_Backend], seconds: Callable[[_Backend], float]
) -> _Backend | None:
    """Return the fastest backend of those that can be measured; None: none can.

    A single one is not measured.
    """
    if len(backends) == 1:
        return backends[0]
    found: list[tuple[float, _Backend]] = []
    for backend in backends:
        try:
            found.append((seconds(backend), backend))
        except Exception:  # noqa: BLE001 - as above
            _log.exception("attention by %s cannot compute %s here", backend.name, what)
    if not found:
        return None
    _, best = min(found, key=lambda one: one[0])
    times = ", ".join(f"{backend.name} {1e6 * taken_s:.0f} µs" for taken_s, backend in found)
    _log.info("attention for %s is %s, measured: %s", what, best.name, times)
    return best
