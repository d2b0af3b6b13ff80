"""Refuses keys of function tools that nothing here would heed: most of them are misspelt."""

from __future__ import annotations

from typing import Any

from coordinator.api.read.chat import MAX_TOOLS, Function, Tool
from coordinator.api.read.fields import field_names
from pdserve.errors import InvalidRequest

_FUNCTION = field_names(Function)
_TOOL = field_names(Tool)
_FLAT_TOOL = _FUNCTION | {"type"}  # in the Responses API
# Hints to other servers, and descriptions that no template shows.
_IGNORED = frozenset(
    (
        *("allowed_callers", "annotations", "cache_control", "defer_loading"),
        *("eager_input_streaming", "input_examples", "output_schema", "return", "title"),
    )
)


def check_tool_keys(body: dict[str, Any]) -> None:
    """Check the tools of a call, in either API, and functions. Raises InvalidRequest."""
    for name in ("tools", "functions"):
        given = body.get(name)
        for i, tool in enumerate(given[:MAX_TOOLS] if isinstance(given, list) else ()):
            where = f"{name}[{i}]"
            if name == "functions":
                _check(tool, _FUNCTION, where)
            elif isinstance(tool, dict) and tool.get("type") == "function":
                _check(tool, _TOOL if "function" in tool else _FLAT_TOOL, where)
                _check(tool.get("function"), _FUNCTION, f"{where}.function")


def _check(value: Any, known: frozenset[str], where: str) -> None:
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key not in known and key not in _IGNORED and inner is not None:
            key = key[:128]
            raise InvalidRequest(
                f"unrecognized parameter: {key!r} in {where}; known are {', '.join(sorted(known))}",
                f"{where}.{key}",
            )
