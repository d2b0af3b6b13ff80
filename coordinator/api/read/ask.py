"""A call as its caller brings it, over whatever connection, or over none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.api.context import ApiContext, RequestTrace
from coordinator.models.cascade import Cascade


@dataclass(frozen=True, slots=True)
class Ask:
    """What one call asks for, before it is looked at."""

    values: dict[str, Any]  # its body, a JSON object
    headers: Mapping[str, str]  # those that set its terms; names in any case
    context: ApiContext
    trace: RequestTrace  # of an admitted caller

    @property
    def cascade(self) -> Cascade | None:
        """The cascade that it is for; None: it is for a model."""
        return self.context.models.cascade(self.values.get("model"), self.trace.owner)
