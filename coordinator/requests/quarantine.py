"""Prompts that have brought nodes down: for a while, no node is asked to compute them again.

A tenant's quarantine is its own: nobody can have the prompts of others refused.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final

import msgspec

from coordinator.generation import GenerationRequest
from pdserve.shared.clock import Clock
from pdserve.shared.errors import RequestQuarantined

QUARANTINE_S: Final = 600.0
MOST: Final = 1024  # prompts that are remembered


class Quarantine:
    """The prompts of requests that were convicted (`resumes.py`), by hash."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: OrderedDict[bytes, float] = OrderedDict()  # oldest first

    def add(self, request: GenerationRequest) -> None:
        """Keep the request's prompt out from now on."""
        key = _key(request)
        self._until_s[key] = self._clock.now() + QUARANTINE_S
        self._until_s.move_to_end(key)
        if len(self._until_s) > MOST:
            self._until_s.popitem(last=False)

    def check(self, request: GenerationRequest) -> None:
        """Raise RequestQuarantined if nodes have died of this prompt lately."""
        now_s = self._clock.now()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        if self._until_s and (until_s := self._until_s.get(_key(request))) is not None:
            raise RequestQuarantined(
                "several nodes have failed while they computed this prompt; it is not accepted for "
                f"another {until_s - now_s:.0f} s"
            )


def _key(request: GenerationRequest) -> bytes:
    whose = request.slo.tenant, request.prompt.token_ids
    return blake2b(msgspec.msgpack.encode(whose), digest_size=16).digest()
