"""Numbers in schemas: enforced exactly as they are given, and none without an end.

The library compares text with doubles, which it reads from JSON with an error in the last digit if
there are many. So a number is handed on only if nothing of it is lost; all others are refused by
name. Bounds that no answer will reach are narrowed to what can be enforced: a model that favours
digits would never end an integer, nor the fraction of a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from coordinator.text.grammars.places import SchemaPlace
from pdserve.grammar.size import MAX_MULTIPLE

KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
MAX_INTEGER = 10**18 - 128  # of 18 digits: a double, as all that the library compares with
_MAX_64_BITS = 2**63 - 1024  # likewise; beyond are no integers for the library
MAX_NUMBER = 10**15 - 1
MAX_DECIMALS = 9
_MAX_COEFFICIENT = 2**32  # of what the library takes multiples of, with all decimals
_MAX_EXPONENT = 22  # of powers of ten that are doubles
_NARROW = Decimal("1e-6")  # in a range narrower than this, decimals are not counted
_LOST = "has more digits than a double holds, so it could not be enforced exactly"
_NOT_COUNTED = "is not exact in doubles, so multiples of it could not be told exactly"
_EMPTY = "leave no number"


def check_value(value: Any, keyword: str, place: SchemaPlace) -> Any:
    """Return a constant in which all numbers are held exactly. Raises InvalidRequest."""
    if isinstance(value, list):
        return [check_value(one, keyword, place.at(i)) for i, one in enumerate(value)]
    if isinstance(value, dict):
        return {name: check_value(one, keyword, place.at(name)) for name, one in value.items()}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if not -(2**63) < value < 2**63:
        raise place.refusal(keyword, f"is {_shown(value)}: numbers of up to 64 bits are supported")
    if not (int(float(value)) == value if isinstance(value, int) else is_held(value)):
        raise place.refusal(keyword, f"is {_shown(value)}, which {_LOST}")
    return value


def is_held(value: float) -> bool:
    """Whether the library reads and writes exactly this number."""
    try:
        double = float(value)
    except OverflowError:
        return False
    if not math.isfinite(double) or Decimal(repr(double)) != _exact(value):
        return False
    sign, digits, exponent = Decimal(repr(double)).normalize().as_tuple()
    assert isinstance(exponent, int)
    significand = float(int("".join(map(str, digits))))
    if abs(exponent) > _MAX_EXPONENT:
        return False
    power = 10.0 ** abs(exponent)
    read = significand / power if exponent < 0 else significand * power
    return (-read if sign else read) == double


@dataclass(frozen=True, slots=True)
class _Bound:
    """An end of a range."""

    value: Decimal
    keyword: str
    is_exclusive: bool


class NumberRules:
    """Narrows the numbers of one document."""

    def __init__(self, multiples: set[Decimal], *, combines: bool) -> None:
        """`multiples`: all of the document, which are multiplied where schemas are combined."""
        self._combines = combines
        decimals = max(map(_decimals, multiples), default=0)
        product = math.prod(int(one.scaleb(decimals)) for one in multiples) if combines else 1
        self._fits = product < _MAX_COEFFICIENT
        room = (_MAX_COEFFICIENT - 1) // product
        self._decimals = min(MAX_DECIMALS, decimals * combines + len(str(room)) - 1)

    def narrow(
        self, node: dict[str, Any], types: frozenset[str] | None, place: SchemaPlace
    ) -> None:
        """Narrow what a schema says of numbers. Raises InvalidRequest.

        `types`: of its values; None: of any.
        """
        if types is not None and not types & {"integer", "number"}:
            for keyword in KEYWORDS:
                node.pop(keyword, None)
            return
        if types is None and not any(keyword in node for keyword in KEYWORDS):
            return
        lowest, highest = _bounds(node, place)
        if "multipleOf" in node:
            self._check_multiple(node["multipleOf"], place)
        is_value = "enum" in node or "const" in node
        if is_value and lowest is None and highest is None:
            return
        for keyword in KEYWORDS[:4]:
            node.pop(keyword, None)
        if types is not None and "number" not in types:
            node |= _integer_range(lowest, highest, place)
            return
        least, most = _number_range(lowest, highest, place)
        node |= {"minimum": least, "maximum": most}
        if not self._combines:
            _take_exclusive(node, lowest, highest)
        is_narrow = _exact(most) - _exact(least) < _NARROW
        if "multipleOf" not in node and not is_value and not is_narrow:
            node["multipleOf"] = float(f"1e-{self._decimals}") if self._decimals else 1

    def _check_multiple(self, multiple: Any, place: SchemaPlace) -> None:
        if _number(multiple, "multipleOf", place) <= 0:
            raise place.refusal("multipleOf", "must be more than 0")
        if Fraction(_exact(multiple)).numerator > MAX_MULTIPLE:
            raise place.refusal("multipleOf", f"is {_shown(multiple)}, more than {MAX_MULTIPLE}")
        if not is_held(multiple) or not _is_counted(multiple):
            raise place.refusal("multipleOf", f"is {_shown(multiple)}, which {_NOT_COUNTED}")
        if not self._fits:
            raise place.refusal("multipleOf", "cannot be combined with the others of this schema")


def multiples_of(nodes: Iterable[dict[str, Any]]) -> set[Decimal]:
    """Return the different multiples that schemas ask for."""
    found = [node["multipleOf"] for node in nodes if "multipleOf" in node]
    return {_exact(one) for one in found if _is_number(one) and is_held(one) and one > 0}


def _bounds(node: dict[str, Any], place: SchemaPlace) -> tuple[_Bound | None, _Bound | None]:
    ends: list[list[_Bound]] = [[], []]
    for index, keyword in enumerate(KEYWORDS[:4]):
        value = node.get(keyword)
        if keyword not in node or value is False:
            continue
        plain = KEYWORDS[index % 2]
        if value is True and index > 1:  # of draft 4, beside the bound
            value = node.get(plain)
            if value is None:
                continue
        number = _number(value, keyword, place)
        ends[index % 2].append(_Bound(_exact(number), keyword, index > 1))
    lowest = max(ends[0], key=lambda one: (one.value, one.is_exclusive), default=None)
    highest = min(ends[1], key=lambda one: (one.value, not one.is_exclusive), default=None)
    return lowest, highest


def _integer_range(
    lowest: _Bound | None, highest: _Bound | None, place: SchemaPlace
) -> dict[str, int]:
    """Return the bounds of integers, of 18 digits if the given ones leave any of these."""
    least, most = -_MAX_64_BITS, _MAX_64_BITS
    if lowest is not None:
        least = math.floor(lowest.value) + 1 if lowest.is_exclusive else math.ceil(lowest.value)
    if highest is not None:
        most = math.ceil(highest.value) - 1 if highest.is_exclusive else math.floor(highest.value)
    given = [one.keyword for one in (lowest, highest) if one is not None]
    if least > most:
        raise place.refusal(given, "leave no whole number" if len(given) > 1 else "is too far out")
    limit = MAX_INTEGER if least <= MAX_INTEGER and most >= -MAX_INTEGER else _MAX_64_BITS
    found = {"minimum": max(least, -limit), "maximum": min(most, limit)}
    if found["minimum"] > found["maximum"]:
        raise place.refusal(given, "leave no whole number of 64 bits")
    ends: list[tuple[_Bound | None, str, int]] = [(lowest, "minimum", 1), (highest, "maximum", -1)]
    for bound, keyword, inward in ends:
        if bound is not None and bound.is_exclusive and _is_whole_double(bound.value):
            while not _is_whole_double(found[keyword]):
                found[keyword] += inward
        if bound is not None and not _is_whole_double(found[keyword]):
            raise place.refusal(bound.keyword, f"is {_shown(bound.value)}, which {_LOST}")
    return found


def _is_whole_double(value: int | Decimal) -> bool:
    return -_MAX_64_BITS <= value <= _MAX_64_BITS and int(float(value)) == value


def _number_range(
    lowest: _Bound | None, highest: _Bound | None, place: SchemaPlace
) -> tuple[float, float]:
    """Return the bounds of numbers, both inclusive."""
    given = [one.keyword for one in (lowest, highest) if one is not None]
    least = Decimal(-MAX_NUMBER) if lowest is None else _inclusive(lowest, Decimal(1), place)
    most = Decimal(MAX_NUMBER) if highest is None else _inclusive(highest, Decimal(-1), place)
    if lowest is not None and highest is not None and least > most:
        raise place.refusal(given, _EMPTY)
    if least > MAX_NUMBER or most < -MAX_NUMBER:
        raise place.refusal(given, f"{_EMPTY} of at most {len(str(MAX_NUMBER))} digits")
    least, most = max(least, Decimal(-MAX_NUMBER)), min(most, Decimal(MAX_NUMBER))
    return _plain(least), _plain(most)


def _take_exclusive(node: dict[str, Any], lowest: _Bound | None, highest: _Bound | None) -> None:
    """Have the library keep out exclusive bounds, which leaves shorter numbers before them.

    It lets a whole one through if both bounds have the same whole part.
    """
    least = node["minimum"] if lowest is None else lowest.value
    most = node["maximum"] if highest is None else highest.value
    if math.trunc(least) == math.trunc(most):
        return
    for bound, keyword in ((lowest, "minimum"), (highest, "maximum")):
        if bound is None or not bound.is_exclusive or abs(bound.value) > MAX_NUMBER:
            continue
        if is_held(_plain(bound.value)):
            del node[keyword]
            node[bound.keyword] = _plain(bound.value)


def _inclusive(bound: _Bound, inward: Decimal, place: SchemaPlace) -> Decimal:
    """Return the first number inside a bound, with as many decimals as are held."""
    if abs(bound.value) > MAX_NUMBER:
        return bound.value
    tries = [bound.value]
    if bound.is_exclusive:
        tries = [bound.value + inward.scaleb(-n) for n in range(MAX_DECIMALS, -1, -1)]
    for value in tries:
        if is_held(_plain(value)) and _exact(_plain(value)) == value:
            return value
    raise place.refusal(bound.keyword, f"is {_shown(bound.value)}, which {_LOST}")


def _plain(value: Decimal) -> float:
    return int(value) if value == value.to_integral_value() else float(value)


def _exact(value: float | Decimal) -> Decimal:
    return value if isinstance(value, Decimal) else Decimal(repr(value))


def _decimals(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    assert isinstance(exponent, int)
    return max(0, -exponent)


def _is_counted(multiple: float) -> bool:
    """Whether the library finds the decimals of a multiple, which it counts with doubles."""
    value, decimals = float(multiple), 0
    while value % 1 and decimals < 30:
        value, decimals = value * 10, decimals + 1
    exact = _exact(multiple)
    return decimals == _decimals(exact) and int(value) == exact.scaleb(decimals)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, keyword: str, place: SchemaPlace) -> float:
    if not _is_number(value):
        raise place.refusal(keyword, "must be a number")
    number: float = value
    return number


def _shown(value: float | Decimal) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:40] + "..."
