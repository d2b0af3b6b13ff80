"""Service classes: what requests of a class are promised, and who goes first.

Metrics as DistServe defines them: TTFT is token 1 less receipt, TPOT the mean gap behind token 1.
"""

from __future__ import annotations

import msgspec

from pdserve.errors import ConfigError

_NUMBERS = {"ttft": "ttft_s", "tpot": "tpot_s", "priority": "priority", "weight": "weight"}


class SloClass(msgspec.Struct, frozen=True, kw_only=True):
    """One class. A time of 0 is no promise: such requests are never refused while they can wait."""

    name: str
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    priority: int = 0  # higher ones go first, and preempt
    weight: float = 1.0  # share among classes of equal priority


DEFAULT_CLASSES = (
    "interactive ttft=2 tpot=0.1 priority=2",
    "standard ttft=10 tpot=0.25 priority=1",
    "batch priority=0",
)


def parse_slo_class(text: str) -> SloClass:
    """The class that "interactive ttft=0.5 tpot=0.05 priority=2 weight=1" describes; seconds.

    Raises:
        ConfigError: it does not describe one; says what is wrong with it.
    """
    name, *settings = text.split()
    values: dict[str, float] = {}
    for setting in settings:
        key, _, number = setting.partition("=")
        if key not in _NUMBERS:
            known = ", ".join(_NUMBERS)
            raise ConfigError(f'SLO class "{text}": {key!r} is none of {known}')
        try:
            values[_NUMBERS[key]] = float(number)
        except ValueError as error:
            raise ConfigError(f'SLO class "{text}": {number!r} is not a number') from error
    try:
        return msgspec.convert({"name": name, **values}, SloClass, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f'SLO class "{text}": {error}') from error


def parse_slo_classes(texts: list[str], default: str) -> dict[str, SloClass]:
    """All classes by name, as `parse_slo_class` reads them.

    Raises:
        ConfigError: one cannot be read, two share a name, or `default` is not among them.
    """
    classes = {parsed.name: parsed for parsed in map(parse_slo_class, texts)}
    if len(classes) < len(texts):
        raise ConfigError(f"two SLO classes share a name: {', '.join(texts)}")
    if default not in classes:
        raise ConfigError(f'default_class "{default}" is none of {", ".join(classes)}')
    return classes
