"""How many requests come, and how many will: by service class, in bins of ten seconds.

Three forecasts compete, and the one counts that was least off within the last day or so:

    last    as in the last half minute: what there is without history
    trend   the line through the last two minutes, continued
    daily   as in the last half minute, and then the change that former days had at this time

Refused requests count: they were wanted. The daily pattern outlives the process
(`arrival_file.py`); what came in the last minutes does not.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from math import exp, nan
from operator import mul
from typing import Final, Literal

import msgspec

BIN_S: Final = 10.0
LEAD_S: Final = 60.0  # how far ahead forecasts are compared: about the start of a node
DAY_S: Final = 86_400.0
MOST_CLASSES: Final = 64  # with a forecast of their own; those met later share one
_SLOT_S: Final = 120.0  # of the daily pattern
_SLOT_BINS: Final = round(_SLOT_S / BIN_S)
_NUM_SLOTS: Final = round(DAY_S / _SLOT_S)
_LEAD_BINS: Final = round(LEAD_S / BIN_S)
_RECENT: Final = 3  # bins
RECENT_S: Final = _RECENT * BIN_S
_LINE: Final = 12  # bins
_NEW_DAY: Final = 0.3  # weight of the latest day in the pattern
_KEPT: Final = exp(-BIN_S / DAY_S)  # of former errors, with each bin
_NEWEST: Final = 0.02  # weight of the latest request in means

Way = Literal["last", "trend", "daily"]
_PREFERRED: Final[tuple[Way, ...]] = ("daily", "last", "trend")  # among equally good ones


class DayOfClass(msgspec.Struct, frozen=True):
    """What former days had of one class."""

    rates: list[float | None]  # requests/s by slots of the day; None: not known
    prompt_s: float  # as in `_OfClass`
    off: dict[Way, float]  # by how much each way to forecast was off lately
    steps: float = 0.0  # as in `_OfClass`
    held: float = 0.0


class Pattern(msgspec.Struct, frozen=True):
    """What is kept of arrivals beyond a process."""

    at_s: float  # since 1970, when its slot began
    classes: dict[str, DayOfClass]


@dataclass(slots=True)
class _OfClass:
    """The arrivals of one class."""

    prompt_s: float = 0.0  # mean time of a prompt on an idle node,
    steps: float = 0.0  # of expected tokens of an answer,
    held: float = 0.0  # and of tokens of KV, summed over these steps
    num_open: int = 0  # in the bin that is not over
    bins: deque[int] = field(default_factory=lambda: deque(maxlen=_LINE))
    num_bins: int = 0
    slot_sum: int = 0
    day: array[float] = field(default_factory=lambda: array("d", [nan]) * _NUM_SLOTS)
    due: deque[dict[Way, float]] = field(default_factory=deque)  # forecasts of coming bins
    off: dict[Way, float] = field(default_factory=lambda: dict.fromkeys(_PREFERRED, 0.0))

    def observe(self, prompt_s: float, num_prompt: int, num_output: float) -> None:
        self.num_open += 1
        held = num_output * (num_prompt + num_output / 2)
        self.prompt_s = _moved(self.prompt_s, prompt_s)
        self.steps, self.held = _moved(self.steps, num_output), _moved(self.held, held)

    def go_on(self, day: DayOfClass, slots: int) -> None:
        """Go on with what was known so many slots ago."""
        known = [nan if rate is None else rate for rate in day.rates]
        slots %= _NUM_SLOTS
        self.day = array("d", known[slots:] + known[:slots])
        self.off = {way: day.off[way] for way in _PREFERRED}
        self.prompt_s, self.steps, self.held = day.prompt_s, day.steps, day.held

    def known_day(self) -> DayOfClass:
        """Return what is known, from the present slot on."""
        slot = self.num_bins // _SLOT_BINS % _NUM_SLOTS
        rates = [*self.day[slot:], *self.day[:slot]]
        known = [None if rate != rate else round(rate, 4) for rate in rates]
        return DayOfClass(known, self.prompt_s, dict(self.off), self.steps, self.held)

    def recent_rate(self, over_s: float) -> float:
        """Return the mean rate of the last bins, for about so long."""
        recent = [*self.bins][-max(1, round(over_s / BIN_S)) :]
        return sum(recent) / (len(recent) * BIN_S) if recent else 0.0

    def rate(self, way: Way, in_s: float) -> float:
        """Return the rate that is forecast for so many seconds from now, in requests/s."""
        last = self.recent_rate(RECENT_S)
        match way:
            case "trend" if len(self.bins) == _LINE:
                middle = (_LINE - 1) / 2
                slope = sum((at - middle) * number for at, number in enumerate(self.bins))
                slope /= sum((at - middle) ** 2 for at in range(_LINE))
                line = sum(self.bins) / _LINE + slope * (middle + in_s / BIN_S)
                return max(0.0, line / BIN_S)
            case "daily":
                change = self._usual(in_s) - self._usual(0.0)
                return max(0.0, last + change) if change == change else last  # nan: not known yet
        return last

    @property
    def best(self) -> Way:
        return min(_PREFERRED, key=lambda way: self.off[way])

    def close_bin(self) -> tuple[float, float] | None:
        """Begin the next bin; return (how far its forecast was off, and "last" was), if known."""
        number, self.num_open = self.num_open, 0
        told = None
        if len(self.due) == _LEAD_BINS:
            forecast, best = self.due.popleft(), self.best
            off = {way: abs(rate * BIN_S - number) for way, rate in forecast.items()}
            told = off[best], off["last"]
            self.off = {way: _KEPT * self.off[way] + off[way] for way in _PREFERRED}
        self.bins.append(number)
        self._note_slot(number)
        self.due.append({way: self.rate(way, LEAD_S) for way in _PREFERRED})
        return told

    def _note_slot(self, number: int) -> None:
        self.slot_sum += number
        self.num_bins += 1
        if self.num_bins % _SLOT_BINS == 0:
            slot, rate = (self.num_bins // _SLOT_BINS - 1) % _NUM_SLOTS, self.slot_sum / _SLOT_S
            before = self.day[slot]
            self.day[slot] = rate if before != before else before + _NEW_DAY * (rate - before)
            self.slot_sum = 0

    def _usual(self, in_s: float) -> float:
        """Return the rate of former days at this time; nan: there was none."""
        return self.day[int(self.num_bins * BIN_S + in_s) // round(_SLOT_S) % _NUM_SLOTS]


def _moved(mean: float, value: float) -> float:
    """Return a moving mean with one more value; 0: nobody knows."""
    return mean + (value - mean) * (_NEWEST if mean else 1.0) if value else mean


class Arrivals:
    """The arrivals at one coordinator, by its clock."""

    def __init__(self) -> None:
        self._until_s: float | None = None  # end of the present bin; None: none has come
        self._by_class: dict[str, _OfClass] = {}
        # By how many requests forecasts of a minute ahead were off, bin by bin.
        self.num_off: dict[Literal["forecast", "last"], float] = {"forecast": 0.0, "last": 0.0}

    def observe(
        self,
        slo_class: str,
        prompt_s: float,
        now_s: float,
        num_prompt: int = 0,
        num_output: float = 0.0,
    ) -> None:
        """Count a request whose prompt takes so long on an idle node; 0: nobody knows.

        `num_prompt`, `num_output`: its tokens, and those that are expected; 0: nobody knows.
        """
        if self._until_s is None:
            self._until_s = now_s + BIN_S
        self.look(now_s)
        if slo_class not in self._by_class and len(self._by_class) >= MOST_CLASSES:
            slo_class = next(reversed(self._by_class))
        self._by_class.setdefault(slo_class, _OfClass()).observe(prompt_s, num_prompt, num_output)

    def pattern(self, time_s: float) -> Pattern:
        """Return what is to be kept; `time_s`: since 1970."""
        classes = {name: of_class.known_day() for name, of_class in self._by_class.items()}
        open_bins = max((each.num_bins % _SLOT_BINS for each in self._by_class.values()), default=0)
        return Pattern(time_s - open_bins * BIN_S, classes)

    def go_on(self, pattern: Pattern, now_s: float, time_s: float) -> None:
        """Go on with what a former process has kept, within two minutes of the time of day.

        Raises:
            ValueError: it is not of this form.
        """
        for day in pattern.classes.values():
            if len(day.rates) != _NUM_SLOTS or set(day.off) != set(_PREFERRED):
                raise ValueError(f"its days must have {_NUM_SLOTS} slots")
        slots = round((time_s - pattern.at_s) / _SLOT_S)
        self._until_s = now_s + BIN_S
        for name, day in [*pattern.classes.items()][:MOST_CLASSES]:
            self._by_class[name] = _OfClass()
            self._by_class[name].go_on(day, slots)

    def look(self, now_s: float) -> None:
        """Let time pass."""
        while self._until_s is not None and now_s >= self._until_s:
            self._until_s += BIN_S
            for of_class in self._by_class.values():
                told = of_class.close_bin()
                if told is not None:
                    self.num_off["forecast"] += told[0]
                    self.num_off["last"] += told[1]

    @property
    def are_known(self) -> bool:
        """Whether there have been any for long enough to forecast anything."""
        return any(len(of_class.bins) >= _RECENT for of_class in self._by_class.values())

    def recent_rate(self, over_s: float) -> float:
        """Return the mean rate of the last bins, for about so long but two minutes at most."""
        return sum(of_class.recent_rate(over_s) for of_class in self._by_class.values())

    def recent_busy(self, over_s: float) -> float:
        """Return how many nodes the prompts of that time keep busy, if each is computed alone."""
        return sum(each.recent_rate(over_s) * each.prompt_s for each in self._by_class.values())

    def growth(self, in_s: float, over_s: float) -> float:
        """Return how many times as much will come then for decode nodes, as has come for so long.

        Of tokens or of KV, whichever grows more: a class with long contexts or answers counts for
        as many of others as it takes. By requests, if nothing is known of these.
        """
        classes = [*self._by_class.values()]
        then = [each.rate(each.best, in_s) for each in classes]
        lately = [each.recent_rate(over_s) for each in classes]
        grown = []
        for sizes in ([each.steps for each in classes], [each.held for each in classes]):
            usual = sum(sizes) / len(sizes) if any(sizes) else 1.0
            known = [size or usual for size in sizes]
            before = sum(map(mul, lately, known))
            grown.append(sum(map(mul, then, known)) / before if before else 1.0)
        return max(grown, default=1.0)

    def forecast(self, in_s: float) -> tuple[float, float]:
        """Return what comes then: requests/s, and nodes that their prompts keep busy."""
        rates = [(each.rate(each.best, in_s), each) for each in self._by_class.values()]
        return sum(rate for rate, _ in rates), sum(rate * each.prompt_s for rate, each in rates)
