"""Calls and questions as callers bring them, over whatever connection, or over none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.read.body import convert_parts, convert_request
from coordinator.api.read.terms import timeout_of, until
from coordinator.models.cascade import Cascade
from coordinator.models.model import Model

_T = TypeVar("_T", bound=Struct)


class Ask(msgspec.Struct, frozen=True):
    """What one call asks for, before it is looked at."""

    values: dict[str, Any]  # its body, a JSON object
    headers: Mapping[str, str]  # those that set its terms; names in any case
    context: ApiContext
    trace: RequestTrace  # of an admitted caller

    async def model(self, name: str | None) -> Model:
        """Return the model of this name, ready to be asked.

        Raises as `ApiContext.listed` and `ListedModel.ready`, and InvalidRequest: the call's
        time-out is none.
        """
        listed = self.context.listed(name, self.trace)
        timeout_s = timeout_of(self.headers, self.context)
        return await listed.ready(until(timeout_s, self.trace.received_s))

    @property
    def cascade(self) -> Cascade | None:
        """The cascade that it is for; None: it is for a model."""
        return self.context.models.cascade(self.values.get("model"), self.trace.owner)


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked about something that is known or kept, or to be changed there."""

    context: ApiContext
    trace: RequestTrace
    names: Mapping[str, str]  # of what it is about, in its path
    query: Mapping[str, str]
    server: str  # as the caller calls it: http://host
    read: Callable[[], Awaitable[dict[str, Any]]]  # its body, a JSON object; raises RequestError

    parts: Callable[[], Awaitable[dict[str, Raw]]]  # the same, with its members as text

    async def body(self, schema: type[_T]) -> _T:
        """Read its body. Raises RequestError."""
        return convert_request(await self.read(), schema)

    async def long_body(self, schema: type[_T]) -> _T:
        """Read a body that has more than others may, in members that `schema` leaves as text."""
        return convert_parts(await self.parts(), schema)
