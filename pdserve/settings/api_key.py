"""The API key in the environment: a coordinator accepts it; commands and benchmarks send it."""

from __future__ import annotations

from collections.abc import Mapping

API_KEY_VARIABLE = "PDSERVE_API_KEY"


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes that neither check nor send the API key."""
    return {name: value for name, value in environment.items() if name != API_KEY_VARIABLE}
