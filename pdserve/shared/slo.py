"""Service classes: the latency targets and the priority of requests.

The default classes promise no latency, so nothing is refused that could be served: how fast is fast
enough is for the operator to say, or to have measured (`AUTO`). As in DistServe, TTFT is the time
from receipt to token 1, and TPOT the mean gap after token 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.shared.errors import ConfigError

Seconds = Annotated[float, Meta(ge=0, le=86400)]

_NUMBERS = {
    "ttft": "ttft_s",
    "tpot": "tpot_s",
    "hold": "hold",
    "priority": "priority",
    "weight": "weight",
    "wait": "wait_s",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SETTING = re.compile(r"(\w+)=(-?\d+(?:\.\d+)?)", re.ASCII)


class SloClass(msgspec.Struct, frozen=True, kw_only=True):
    """One service class. A time of 0 means no target: requests then wait and are not rejected."""

    name: str
    ttft_s: Seconds = 0.0
    tpot_s: Seconds = 0.0
    # Share of the TTFT for which token 1 may be held back while the decode nodes are full.
    hold: Annotated[float, Meta(ge=0, le=1)] = 0.9
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0  # higher goes first, and preempts lower
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # share among classes of equal priority
    wait_s: Seconds = 5.0  # in which a pool that a new request finds empty may have a node again

    @property
    def hold_s(self) -> float:
        """How long after receipt token 1 may be held back; 0 without a TPOT to protect."""
        return self.hold * self.ttft_s if self.tpot_s else 0.0


AUTO = "auto"  # instead of classes: the default ones, with promises that the nodes can keep
DEFAULT_CLASSES = (
    "interactive priority=2",
    "standard priority=1",
    "batch priority=0",
)
DEFAULT_CLASS = "standard"


@dataclass(slots=True)
class ServiceClasses:
    """The service classes of one cluster. Their names stay; their promises may be replaced."""

    by_name: dict[str, SloClass]  # in the order of the configuration
    default_name: str

    def promise(self, classes: Iterable[SloClass]) -> None:
        """Replace classes of these names: requests that arrive from now on are promised this."""
        self.by_name |= {cls.name: cls for cls in classes}

    @property
    def default(self) -> SloClass:
        """The class of requests that name none."""
        return self.by_name[self.default_name]

    @property
    def highest(self) -> SloClass:
        """The class of the highest priority; the first one if there are several."""
        return max(self.by_name.values(), key=lambda cls: cls.priority)

    @property
    def lowest(self) -> SloClass:
        """The class of the lowest priority; the first one if there are several."""
        return min(self.by_name.values(), key=lambda cls: cls.priority)


def parse_slo_class(text: str) -> SloClass:
    """Parse "interactive ttft=0.5 tpot=0.05 priority=2 weight=1"; times are in seconds.

    Raises:
        ConfigError: the text does not describe a class; says what is wrong.
    """
    name, *settings = text.split() or [""]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f'SLO class "{text}": must begin with a name of up to 64 letters, digits, ".", "_" or '
            '"-", as in "interactive ttft=0.5 tpot=0.05 priority=2"'
        )
    values = {"name": name}
    for setting in settings:
        match = _SETTING.fullmatch(setting)
        field = _NUMBERS.get(match[1]) if match else None
        if match is None or field is None or field in values:
            raise ConfigError(
                f'SLO class "{text}": {setting!r} must be NAME=NUMBER, with each of '
                f"{', '.join(_NUMBERS)} at most once"
            )
        values[field] = match[2]
    try:
        return msgspec.convert(values, SloClass, strict=False)
    except msgspec.ValidationError as error:
        problem = str(error).replace(" - at `$.", " for `")
        raise ConfigError(f'SLO class "{text}": {problem}') from error


def as_setting(cls: SloClass) -> str:
    """Write a class as `parse_slo_class` reads it, without what is as by default."""
    plain = SloClass(name=cls.name)
    words = [
        f"{word}={getattr(cls, field):f}".rstrip("0").rstrip(".")
        for word, field in _NUMBERS.items()
        if getattr(cls, field) != getattr(plain, field)
    ]
    return " ".join([cls.name, *words])


def parse_slo_classes(texts: Sequence[str], default: str) -> ServiceClasses:
    """Parse all classes of a cluster; AUTO stands for the default ones.

    Raises:
        ConfigError: one cannot be parsed, two share a name, or `default` is not among them.
    """
    if AUTO in texts:
        if len(texts) > 1:
            raise ConfigError(f'SLO class "{AUTO}" stands for all classes: name no other beside it')
        texts = DEFAULT_CLASSES
    classes = {parsed.name: parsed for parsed in map(parse_slo_class, texts)}
    if len(classes) < len(texts):
        raise ConfigError(f"two SLO classes share a name: {', '.join(texts)}")
    if default not in classes:
        raise ConfigError(f'default_class "{default}" must be one of {", ".join(classes)}')
    return ServiceClasses(classes, default)
