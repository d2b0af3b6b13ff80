"""A network as it might be between two nodes, for studies on machines that do not have it.

    exporter ──delay──► puller      what is read arrives when the link could have carried it
             ◄──delay──             messages of the session are late by the delay

A read takes as long as its request and its bytes would: reads over one link share its bandwidth,
in order. Lost packets cost bandwidth: TCP has at most MSS / RTT * sqrt(3 / 2) / sqrt(loss) bytes/s
(Mathis et al., 1997). Whatever the real link needs is part of that time, so it must be the faster
one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf, sqrt
from typing import Final

_MSS: Final = 1448  # bytes of payload in a packet
_SETTING: Final = re.compile(r"([a-z]+)=([0-9.eE+-]+)")
_EXAMPLE: Final = "prefill-* decode-* bandwidth=1.25e9 delay=0.02 loss=0.0001"
_RAW: Final = "raw"


@dataclass(frozen=True, slots=True)
class SimulatedLink:
    """The link from exporters to pullers whose node ids match."""

    exporters: str = "*"  # pattern, as of file names
    pullers: str = "*"
    bandwidth: float = inf  # bytes/s
    delay: float = 0.0  # seconds, one way
    loss: float = 0.0  # share of the packets
    is_raw: bool = False  # KV is sent as it is, whatever codecs there are

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that no link has."""
        if not (self.bandwidth > 0 and 0 <= self.delay < inf and 0 <= self.loss < 1):
            raise ValueError("needs bandwidth > 0, delay >= 0 and loss from 0 to less than 1")
        if self.loss and not self.delay:
            raise ValueError("loss costs time in round trips only: give a delay, too")

    @property
    def bytes_per_s(self) -> float:
        """What it can carry; infinite if nothing limits it."""
        if not self.loss:
            return self.bandwidth
        return min(self.bandwidth, _MSS / (2 * self.delay) * sqrt(1.5 / self.loss))


class Carrier:
    """One link in use. Times are of any one clock."""

    def __init__(self, link: SimulatedLink) -> None:
        self.link = link
        self._free_s = -inf

    def arrival_s(self, num_bytes: int, asked_s: float) -> float:
        """Return when the last byte of a read arrives that was asked for at `asked_s`."""
        begin_s = max(asked_s + self.link.delay, self._free_s)
        self._free_s = begin_s + num_bytes / self.link.bytes_per_s
        return self._free_s + self.link.delay


def parse_link(text: str) -> SimulatedLink:
    """Parse "EXPORTERS PULLERS bandwidth=BYTES/S delay=SECONDS loss=SHARE raw".

    Raises ValueError.
    """
    exporters, pullers, *settings = [*text.split(), "", ""]
    numbers: dict[str, float] = {}
    is_raw = _RAW in settings
    for setting in settings:
        if setting in ("", _RAW):
            continue
        match = _SETTING.fullmatch(setting)
        if match is None or match[1] not in ("bandwidth", "delay", "loss") or match[1] in numbers:
            raise ValueError(f'link "{text}": {setting!r} is wrong, should be as in "{_EXAMPLE}"')
        numbers[match[1]] = float(match[2])
    if not numbers or "=" in exporters + pullers:
        raise ValueError(f'link "{text}" should be as in "{_EXAMPLE}"')
    try:
        return SimulatedLink(exporters, pullers, **numbers, is_raw=is_raw)
    except ValueError as error:
        raise ValueError(f'link "{text}" {error}') from None


def link_between(
    links: Iterable[SimulatedLink], exporter: str, puller: str
) -> SimulatedLink | None:
    """Return the first of `links` for these nodes, if there is one."""
    for link in links:
        if fnmatchcase(exporter, link.exporters) and fnmatchcase(puller, link.pullers):
            return link
    return None


def check_links(texts: Sequence[str]) -> None:
    """Raise ValueError, which becomes a ConfigError, if one cannot be parsed."""
    for text in texts:
        parse_link(text)
