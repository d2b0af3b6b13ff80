"""Where in a client's JSON schema something stands, and how it is refused there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pdserve.grammar.subschemas import pointer
from pdserve.shared.errors import InvalidRequest

_MAX_CHARS = 200  # of a path that is shown


@dataclass(frozen=True, slots=True)
class SchemaPlace:
    """A schema inside a request's schema."""

    param: str  # the request's parameter
    path: tuple[str, ...] = ()

    def at(self, *names: object) -> SchemaPlace:
        """Return the place of something inside."""
        return SchemaPlace(self.param, (*self.path, *map(str, names)))

    def refusal(self, keywords: str | Collection[str], why: str) -> InvalidRequest:
        """Return the error that names the path, one keyword or several, and the reason."""
        names = [keywords] if isinstance(keywords, str) else keywords
        named = ", ".join(repr(name[:_MAX_CHARS]) for name in names)
        return InvalidRequest(
            f"{self.param!r} cannot be enforced: {named} in {self.pointer!r} {why}", self.param
        )

    @property
    def pointer(self) -> str:
        """The path as a JSON pointer."""
        text = pointer(self.path)
        return text if len(text) <= _MAX_CHARS else text[:_MAX_CHARS] + "..."
