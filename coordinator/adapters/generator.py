"""Generates with one version of an adapter, whatever plans the requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from coordinator.adapters.known import Version
from coordinator.generation import Generation, GenerationRequest, Generator
from pdserve.protocol.status import ClusterStatus


@dataclass(frozen=True, slots=True)
class AdaptedGenerator:
    """See Generator."""

    base: Generator  # of the model
    version: Version
    begin: Callable[[Version], None]  # is told of each call; raises ModelNotFound if it is gone

    @property
    def max_model_len(self) -> int | None:
        """See Generator."""
        return self.base.max_model_len

    @property
    def max_inflight(self) -> int:
        """See Generator."""
        return self.base.max_inflight

    def start(self, request: GenerationRequest) -> Generation:
        """As start_siblings."""
        return self.start_siblings([request])[0]

    def start_siblings(self, requests: Sequence[GenerationRequest]) -> Sequence[Generation]:
        """See Generator. Also raises ModelNotFound, or InvalidRequest: no invocation."""
        adapted = [self._adapted(request) for request in requests]
        self.begin(self.version)
        return self.base.start_siblings(adapted)

    def is_ready(self) -> bool:
        """See Generator."""
        return self.base.is_ready()

    def status(self) -> ClusterStatus:
        """See Generator."""
        return self.base.status()

    def _adapted(self, request: GenerationRequest) -> GenerationRequest:
        return structs.replace(request, prompt=self.version.adapt(request.prompt))
