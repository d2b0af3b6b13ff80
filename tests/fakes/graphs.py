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

    refusal: str = ""  # of all recordings, as a driver or a library may forbid them
    refuses_each: bool = False  # only those of several at once

    def record(self, work: Callable[[], None]) -> Replayed:
        if self.refusal and not self.refuses_each:
            raise RuntimeError(self.refusal)
        work()
        self.recordings.append(Replayed(work, self.num_bytes))
        return self.recordings[-1]

    def record_each(self, works: Sequence[Callable[[], None]]) -> list[Replayed]:
        if self.refuses_each:
            raise RuntimeError(self.refusal)
        return [self.record(work) for work in works]
