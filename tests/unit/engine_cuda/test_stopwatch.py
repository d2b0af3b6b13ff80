"""The stopwatch of GPUs, over events of a stream that only keeps what is put into it."""

from __future__ import annotations

import pytest
import torch

from pdserve.engine.cuda.stopwatch import CudaStopwatch


class Stream:
    """Each piece of work takes as many milliseconds as there were pieces before it."""

    def __init__(self) -> None:
        self.passed_ms = 0.0
        self.num_pieces = 0
        self.is_waited_for = False

    def work(self) -> None:
        self.passed_ms += self.num_pieces
        self.num_pieces += 1

    def record_event(self, event: Event) -> Event:
        event.at_ms, event.stream = self.passed_ms, self
        return event


class Event:
    at_ms: float
    stream: Stream

    def __init__(self, *, enable_timing: bool = False) -> None:
        self._has_time = enable_timing

    def synchronize(self) -> None:
        self.stream.is_waited_for = True

    def elapsed_time(self, end: Event) -> float:
        """As CUDA's, which has none of events without timing, nor before the end has passed."""
        assert self._has_time
        assert end._has_time
        assert self.stream is end.stream
        assert self.stream.is_waited_for
        return end.at_ms - self.at_ms


def test_the_mean_of_several_runs_behind_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream that is current on the device when it measures."""
    streams = {torch.device("cuda", 1): Stream()}
    monkeypatch.setattr(torch.cuda, "current_stream", streams.__getitem__)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    stopwatch, stream = CudaStopwatch(torch.device("cuda", 1)), streams[torch.device("cuda", 1)]
    assert stopwatch.seconds(stream.work) == pytest.approx((1 + 2 + 3 + 4 + 5) / 5 / 1e3)
    assert stream.num_pieces == 6
