"""Tells nodes whom they may tell what they tell: who may read the state of the cluster here."""

from __future__ import annotations

from typing import TypeAlias

import grpc.aio

from coordinator.tenants import Readers
from pdserve.wire import coordinator_pb2_grpc
from pdserve.wire.coordinator_pb2 import Reader, Reading

Context: TypeAlias = grpc.aio.ServicerContext[Reader, Reading]


class ReadersService(coordinator_pb2_grpc.ReadersServicer):
    """gRPC service for nodes, which know no keys."""

    def __init__(self, readers: Readers) -> None:
        self._readers = readers

    async def MayRead(self, request: Reader, context: Context) -> Reading:  # noqa: N802
        """Say whether who shows the key of a hash may read."""
        return Reading(may_read=self._readers.may_read(request.key_hash))
