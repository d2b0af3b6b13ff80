"""Which codec is the fastest over a link, by what each has achieved there.

A codec takes time of a core at both ends, and saves time on the network. Which is more depends on
both, and on what else they do. So nothing is computed from their rates: ways are tried, and tried
again, soon at first, or at once when reads show that the network has changed. A trial may have met
a busy core, so the next one forgets it. A network that is faster than the codec alone needs no
trial. Reads at the same time share the network, so each is charged for its share of the time alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from kv_transfer.codecs.codec import RAW, Codec

RAW_FORM: Final = "raw"  # as a status says it

_SMALL_BYTES: Final = 128 << 10  # as they are: a codec would gain less than it costs to begin
_MEASURED_BYTES: Final = 2 << 20  # a way has been tried with so many, ...
_MEASURED_S: Final = 2.0  # ... or for so long: what is too slow for a deadline brings few
_FORGOTTEN_BYTES: Final = 64 << 20  # what has been measured counts half after so many
_RETRIALS: Final = (2, 4, 8, 16, 32)  # reads in the best way until the next trial of another
_MARGIN: Final = 1.1  # cores have other things to do
_SAMPLE_BYTES: Final = 256 << 10
_CHANGE: Final = 2.0  # reads that are so many times as fast as their way was, or as slow, ...
_NUM_CHANGED: Final = 2  # ... as many one after another: it is another network now
_LONG_BYTES: Final = 16 << 20  # of such reads one says so


@dataclass(slots=True)
class Sending:
    """How one read is sent, and what came of it."""

    codec: str = RAW
    num_bytes: int = 0  # that were sent for it
    arrived: int = 0  # bytes of the pool that these were


@dataclass(slots=True)
class _Achieved:
    """What reads that were sent in one way have had in all."""

    bytes: float = 0.0  # of the pool
    sent: float = 0.0
    seconds: float = 0.0
    reads: float = 0.0
    num_changed: int = 0  # the last reads that were far faster than those before; < 0: slower

    @property
    def is_known(self) -> bool:
        return self.bytes >= _MEASURED_BYTES or self.seconds >= _MEASURED_S

    @property
    def rate(self) -> float:
        """Bytes of the pool per second."""
        return self.bytes / max(self.seconds, 1e-9)

    def add(self, num_bytes: int, sent: int, seconds: float) -> None:
        if self.bytes > _FORGOTTEN_BYTES:
            self.bytes, self.sent = self.bytes / 2, self.sent / 2
            self.seconds, self.reads = self.seconds / 2, self.reads / 2
        self.bytes += num_bytes
        self.sent += sent
        self.seconds += seconds
        self.reads += 1

    def has_changed(self, num_bytes: int, seconds: float) -> bool:
        """Whether a further read is one of several in turn that were far faster, or far slower.

        Small reads say nothing of large ones, which spend less of their time on what is the same
        for all.
        """
        if not self.is_known or not 0.5 < num_bytes * self.reads / max(self.bytes, 1) < 2:
            return False
        ratio = num_bytes / max(seconds, 1e-9) / max(self.rate, 1e-9)
        step = (ratio > _CHANGE) - (ratio < 1 / _CHANGE)
        self.num_changed = self.num_changed + step if self.num_changed * step > 0 else step
        return abs(self.num_changed) >= (_NUM_CHANGED if num_bytes < _LONG_BYTES else 1)


@dataclass(slots=True)
class SharedTime:
    """A clock that, while several reads use it, goes slower by their number.

    The differences that they see add up to the time in which there was one at least.
    """

    _num_reads: int = 0
    _shared_s: float = 0.0
    _looked_s: float = 0.0

    def begin(self, now_s: float) -> float:
        """A read begins: the time of this clock, to be given to `end`."""
        self._go_on(now_s)
        self._num_reads += 1
        return self._shared_s

    def end(self, begun_s: float, now_s: float) -> float:
        """It ends: the seconds that it is charged for."""
        self._go_on(now_s)
        self._num_reads -= 1
        return self._shared_s - begun_s

    def _go_on(self, now_s: float) -> None:
        if self._num_reads:
            self._shared_s += (now_s - self._looked_s) / self._num_reads
        self._looked_s = now_s


@dataclass(slots=True)
class CodecChoice:
    """Chooses for each read over one route. `codecs`: those that both ends have."""

    codecs: Mapping[str, Codec]
    _achieved: dict[str, _Achieved] = field(default_factory=dict)
    _coding_rates: dict[str, float] = field(default_factory=dict)
    _kept: str | None = None  # what was best, until something else is tried or dropped
    _num_kept: int = 0  # reads in this way since the last trial
    _num_trials: int = 0  # of others
    _time: SharedTime = field(default_factory=SharedTime)

    def __post_init__(self) -> None:
        self._achieved = {name: _Achieved() for name in (RAW, *self.codecs)}

    def begin(self) -> float:
        """A read begins: give what this returns to `seconds_since`, once, when it has ended."""
        return self._time.begin(time.perf_counter())

    def seconds_since(self, begun: float) -> float:
        """How long a read has had the network for itself, or as good as."""
        return self._time.end(begun, time.perf_counter())

    def __str__(self) -> str:
        """As in a status: the codec in use, and how many bytes it makes of one."""
        name = self._best()
        if name == RAW:
            return RAW_FORM
        found = self._achieved[name]
        return f"{name} {found.bytes / max(found.sent, 1):.2f}x"

    async def next(self, num_bytes: int) -> Sending:
        """How the next read, of so many bytes, is sent."""
        codec = self._chosen(num_bytes)
        if codec is None:
            await self._measure_codecs()
            codec = self._chosen(num_bytes)
        assert codec is not None, "the codecs have been measured"
        return Sending(codec)

    def is_raw_next(self, num_bytes: int) -> bool:
        """Whether the next read will be sent as it is."""
        return self._chosen(num_bytes) == RAW

    def _chosen(self, num_bytes: int) -> str | None:
        """The codec of the next read; None: they have to be measured first."""
        if num_bytes < _SMALL_BYTES or not self.codecs or not self._achieved[RAW].is_known:
            return RAW
        if len(self._coding_rates) < len(self.codecs):
            return None
        is_due = self._num_kept >= _RETRIALS[min(self._num_trials, len(_RETRIALS) - 1)]
        if self._kept is not None and not is_due:
            return self._kept
        worth_trying = [name for name in self._achieved if self._may_win(name)]
        for name in worth_trying:
            if not self._achieved[name].is_known:
                return name
        best = self._kept = self._best()
        others = [name for name in worth_trying if name != best]
        if others and is_due:
            return others[self._num_trials % len(others)]
        return best

    def note_raw(self, num_bytes: int, seconds: float) -> None:
        """A read has brought so many bytes as they are, and taken so long."""
        self.note(Sending(RAW, num_bytes, num_bytes), seconds)

    def note(self, sending: Sending, seconds: float) -> None:
        """A read has taken so long (`seconds_since`) for what has arrived, all of it or not."""
        is_too_slow = sending.codec != RAW and seconds >= _MEASURED_S
        if not self.codecs or (sending.arrived < _SMALL_BYTES and not is_too_slow):
            return
        achieved = self._achieved.get(sending.codec)
        if achieved is None:  # dropped meanwhile
            return
        if self._kept not in (None, sending.codec):
            achieved = self._achieved[sending.codec] = _Achieved()
            self._look_again(self._num_trials + 1)
        elif achieved.has_changed(sending.arrived, seconds):
            self._achieved = {name: _Achieved() for name in self._achieved}
            achieved = self._achieved[sending.codec]
            self._look_again(0)
        elif self._kept is not None:
            self._num_kept += 1
        achieved.add(sending.arrived, sending.num_bytes, seconds)

    def drop(self, codec: str) -> None:
        """Never choose it again: what was sent with it cannot be decoded here."""
        assert codec != RAW
        self._achieved.pop(codec, None)
        self._look_again(self._num_trials)

    def _look_again(self, num_trials: int) -> None:
        """Choose anew, after so many trials."""
        self._kept, self._num_kept, self._num_trials = None, 0, num_trials

    def _best(self) -> str:
        known = [name for name, found in self._achieved.items() if name and found.is_known]
        best = max(known, key=lambda name: self._achieved[name].rate, default=RAW)
        raw = self._achieved[RAW]
        return best if best and self._achieved[best].rate > _MARGIN * raw.rate else RAW

    async def _measure_codecs(self) -> None:
        """Once, in a thread: a codec that has never run takes ten times as long to begin."""
        for name, codec in self.codecs.items():
            if name not in self._coding_rates:
                self._coding_rates[name] = await asyncio.to_thread(coding_rate, codec)

    def _may_win(self, name: str) -> bool:
        return name == RAW or self._achieved[RAW].rate < self._coding_rates[name]


def coding_rate(codec: Codec) -> float:
    """Bytes of a pool that one idle core codes per second: measured in a millisecond."""
    sample = codec.sample(_SAMPLE_BYTES)
    codec.encode(sample)  # what the first call alone takes
    started_s = time.thread_time()
    codec.encode(sample)
    return len(sample) / max(time.thread_time() - started_s, 1e-9)
