"""A stand-in for CUDA graphs: a replay runs the work again, on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass
class Replayed:
    """As Recording."""

    work: Callable[[], None]
    num_bytes: int
    num_replays: int = 0

    def replay(self) -> None:
        self.num_replays += 1
        self.work()


@dataclass
class Recorded:
    """As Recorder."""

    num_bytes: int = 1 << 20  # that each recording takes
    recordings: list[Replayed] = field(default_factory=list)

    def record(self, work: Callable[[], None]) -> Replayed:
        work()
        self.recordings.append(Replayed(work, self.num_bytes))
        return self.recordings[-1]

    def record_each(self, works: Sequence[Callable[[], None]]) -> list[Replayed]:
        return [self.record(work) for work in works]
