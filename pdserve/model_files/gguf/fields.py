"""Typed access to the values of a GGUF file: what is wrong is an error that names key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.shared.errors import ModelError


class GgufFields:
    """The values whose keys begin alike."""

    def __init__(self, values: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self._values = values
        self._path = path
        self._prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def names(self) -> list[str]:
        """Keys, without what they all begin with."""
        begin = len(self._prefix)
        return [key[begin:] for key in self._values if key.startswith(self._prefix)]

    def under(self, prefix: str) -> GgufFields:
        """Those of them whose keys go on like this."""
        return GgufFields(self._values, self._path, self._prefix + prefix)

    def raw(self, key: str) -> Any:
        """The value as it was read; None when absent."""
        return self._values.get(self._prefix + key)

    def integer(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number, which may also be said for each layer if it is always the same."""
        value = default if (found := self.raw(key)) is None else found
        if isinstance(value, list):
            if len({*value}) != 1:
                raise self.error(key, "the same for all layers, since others are not served")
            value = value[0]
        if type(value) is not int or value < minimum:
            raise self.error(key, f"a whole number from {minimum} up")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = default if (found := self.raw(key)) is None else found
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, "a number")
        if not (math.isfinite(value) and value > 0):
            raise self.error(key, "a finite number above 0")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """True or false."""
        value = default if (found := self.raw(key)) is None else found
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        value = default if (found := self.raw(key)) is None else found
        if not isinstance(value, str):
            raise self.error(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts."""
        value = self.raw(key)
        if not isinstance(value, list) or not {*map(type, value)} <= {str}:
            raise self.error(key, "a list of texts")
        return value

    def error(self, key: str, expected: str) -> ModelError:
        """An error that says what the value is and what it should be."""
        value = self.raw(key)
        found = "is absent" if value is None else f"is {_short(value)}"
        return ModelError(f"{self._path}: {self._prefix}{key} {found}; it must be {expected}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
