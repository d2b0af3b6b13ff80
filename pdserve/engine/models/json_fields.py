"""Typed access to a model's config.json: a wrong type is an error that names key and value."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any, Final

from pdserve.shared.errors import ModelError

MOST: Final = 2**31 - 1  # of any whole number in a config


class JsonFields:
    """The fields of one JSON object. `null` is read as an absent field."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        self._fields = fields
        self.where = where  # for error messages: the file, and the path inside it

    def __contains__(self, key: str) -> bool:
        return self._fields.get(key) is not None

    def has_key(self, key: str) -> bool:
        """Whether the object has the field at all, even if it is null."""
        return key in self._fields

    def keys(self) -> list[str]:
        """Names of all fields that are not null."""
        return [key for key, value in self._fields.items() if value is not None]

    def raw(self, key: str) -> Any:
        """Return the field as parsed from JSON; None when absent."""
        return self._fields.get(key)

    def integer(
        self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = MOST
    ) -> int:
        """Return a whole number. Raises ModelError when absent without a default, or out of range.

        Args:
            key: of the field.
            default: if it is absent.
            minimum: that it may be.
            maximum: likewise; what is counted is listed, whatever the weights turn out to be.
        """
        value = self._present(key, default)
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not minimum <= value <= maximum:
            is_large = is_whole and value > maximum
            raise self.error(
                key, f"a whole number {f'up to {maximum}' if is_large else f'from {minimum} up'}"
            )
        return int(value)

    def number(self, key: str, default: float | None = None, *, above: float = -math.inf) -> float:
        """Return a finite number. Raises ModelError when absent without a default, or too small."""
        value = self._present(key, default)
        # Python's JSON also has NaN and Infinity, and whole numbers of any size.
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not above < value <= sys.float_info.max:
            raise self.error(
                key, "a finite number" if above == -math.inf else f"a number above {above:g}"
            )
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        """Return a boolean. Raises ModelError for another type."""
        value = self._present(key, default)
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string. Raises ModelError when absent without a default."""
        value = self._present(key, default)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings; None when absent."""
        value = self._fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int] | None:
        """Return a list of whole numbers; None when absent."""
        value = self._fields.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.error(key, "a list of whole numbers")
        return value

    def nested(self, key: str) -> JsonFields:
        """Return the object in a field; an empty one when absent."""
        value = self._fields.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self.error(key, "an object")
        return JsonFields(value, f"{self.where}: {key}")

    def error(self, key: str, expected: str) -> ModelError:
        """Return an error that says what the field is and what it should be."""
        found = "is absent" if key not in self else f"is {self._fields[key]!r}"
        return ModelError(f"{self.where}: {key} {found}; it must be {expected}")

    def _present(self, key: str, default: Any) -> Any:
        value = self._fields.get(key)
        return default if value is None else value
