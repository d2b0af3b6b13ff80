"""The formats of strings: what JSON Schema means by each, and none without an end."""

from __future__ import annotations

from typing import Any

from coordinator.text.grammars.places import SchemaPlace

# Years from 0001, as programs have them, and the days that each month of a year has.
_LEAP_YEAR = r"(0[48]|[2468][048]|[13579][26])"
_YEAR = r"(\d{3}[1-9]|\d{2}[1-9]\d|\d[1-9]\d{2}|[1-9]\d{3})"
_DAY = (
    r"(0[13578]|1[02])-(0[1-9]|[12]\d|3[01])|(0[469]|11)-(0[1-9]|[12]\d|30)"
    r"|02-(0[1-9]|1\d|2[0-8])"
)
_DATE = rf"({_YEAR}-({_DAY})|(\d{{2}}{_LEAP_YEAR}|{_LEAP_YEAR}00)-02-29)"
_FRACTION = r"(\.\d{1,9})?"
_ZONE = r"([Zz]|[+-]([01]\d|2[0-3]):[0-5]\d)"
_TIME = rf"([01]\d|2[0-3]):[0-5]\d:[0-5]\d{_FRACTION}{_ZONE}"
# A leap second is the last one of a day in UTC, of June or December (RFC 3339, 5.7). Zones that are
# hours away have it at another time of their day; nobody writes it so.
_LEAP_SECOND = rf"23:59:60{_FRACTION}([Zz]|[+-]00:00)"
_LEAP_DAY = rf"{_YEAR}-(06-30|12-31)"

_N = r"\d{1,9}"
_CLOCK = rf"T({_N}H({_N}M({_N}S)?)?|{_N}M({_N}S)?|{_N}S)"
_DAYS = rf"({_N}Y({_N}M({_N}D)?)?|{_N}M({_N}D)?|{_N}D)"
_LABEL = r"[a-zA-Z0-9]{1,24}(-[a-zA-Z0-9]{1,9}){0,3}"  # two hyphens announce another script
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,3}}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"

PATTERNS = {
    "date": _DATE,
    "time": rf"({_TIME}|{_LEAP_SECOND})",
    "date-time": rf"({_DATE}[Tt]{_TIME}|{_LEAP_DAY}[Tt]{_LEAP_SECOND})",
    "duration": rf"P({_DAYS}({_CLOCK})?|{_CLOCK}|{_N}W)",
    "email": rf"{_ATOM}(\.{_ATOM}){{0,2}}@{_HOST}",
    "hostname": _HOST,
}
MAX_URI_CHARS = 1024
_BOUNDED = frozenset(("ipv4", "ipv6", "uuid"))  # by the library itself
_REFUSED = frozenset(
    (
        *("idn-email", "idn-hostname", "uri-reference", "uri-template", "iri", "iri-reference"),
        *("json-pointer", "relative-json-pointer", "regex"),
    )
)


def narrow_format(node: dict[str, Any], types: frozenset[str] | None, place: SchemaPlace) -> None:
    """Replace a format by what is enforced of it. Raises InvalidRequest.

    A format that JSON Schema does not define is a remark that fits every value.
    """
    name = node.get("format")
    is_for_strings = types is None or "string" in types
    if name is None:
        return
    if not isinstance(name, str):
        raise place.refusal("format", "must be a string")
    if name in _BOUNDED and is_for_strings:
        return
    if name in _REFUSED and is_for_strings:
        raise place.refusal("format", f"is {name!r}, which is not supported")
    del node["format"]
    if not is_for_strings:
        return
    if name == "uri":
        node["format"] = name
        node["maxLength"] = min(node.get("maxLength", MAX_URI_CHARS), MAX_URI_CHARS)
    elif name in PATTERNS:
        ours = f"^{PATTERNS[name]}$"
        if "pattern" in node:
            node["allOf"] = [*node.get("allOf", ()), {"pattern": ours}]
        else:
            node["pattern"] = ours
