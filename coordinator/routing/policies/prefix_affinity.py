"""The prefix-affinity policy: equal prefixes go to the same node, unless it is overloaded."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from coordinator.generation import GenerationRequest
from coordinator.routing.candidates import Candidates, Job
from coordinator.routing.loads.slots import Ints

LOAD_BOUND = 1.25  # times the mean load: nodes above it are skipped
POINTS = 32  # per node on the ring
PROMPT_TOKENS = 128  # prompts that share this many first tokens have the same key


@dataclass(frozen=True)
class _Ring:
    """The nodes' points, in ring order."""

    slots: Ints  # the candidates that the ring was made for
    points: npt.NDArray[np.uint64]
    owners: Ints  # of the points: indices into `slots`


class PrefixAffinity:
    """Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam).

    Needs no knowledge of caches: a prompt goes to the node that got earlier prompts with the same
    prefix. When a node joins or leaves, only its own share of prompts moves.
    """

    def __init__(self) -> None:
        self._rings: dict[Job, _Ring] = {}

    def pick(self, candidates: Candidates) -> int:
        """Return the slot of one of the candidates."""
        ring, load = self._ring(candidates), candidates.load.take(candidates.slots)
        bound = LOAD_BOUND * (float(load.mean()) + 1)
        at = int(ring.points.searchsorted(_key_of(candidates.request))) % len(ring.points)
        while load[ring.owners[at]] > bound:  # ends: some node is not above the mean
            at = (at + 1) % len(ring.points)
        return int(candidates.slots[ring.owners[at]])

    def _ring(self, candidates: Candidates) -> _Ring:
        ring = self._rings.get(candidates.job)
        if ring is None or ring.slots is not candidates.slots:  # a new array on any change
            ring = self._rings[candidates.job] = self._make_ring(candidates)
        return ring

    def _make_ring(self, candidates: Candidates) -> _Ring:
        members = (candidates.members[slot] for slot in candidates.slots.tolist())
        points = np.concatenate([_points_of(member.node_id) for member in members if member])
        owners = np.repeat(np.arange(len(candidates.slots)), POINTS)
        order = points.argsort()
        return _Ring(candidates.slots, points[order], owners[order])


def _key_of(request: GenerationRequest) -> np.uint64:
    """Return the ring position of prompts with the same prefix and salt as this one."""
    digest = hashlib.blake2b(request.prompt.beginning(PROMPT_TOKENS), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "big"))


@lru_cache(maxsize=4096)
def _points_of(node_id: str) -> npt.NDArray[np.uint64]:
    digests = (
        hashlib.blake2b(f"{node_id}/{number}".encode(), digest_size=8).digest()
        for number in range(POINTS)
    )
    return np.frombuffer(b"".join(digests), ">u8").astype(np.uint64)
