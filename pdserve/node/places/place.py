"""One place of a node, for as long as its process runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from kv_transfer.memory import KvPool, cpu_pool
from pdserve._native import Ledger
from pdserve.engine.kv.shared_pool import SharedPool
from pdserve.engine.plan.sizes import packed_bytes
from pdserve.metrics import NodeMetrics
from pdserve.node.places.memory import PlaceMemory
from pdserve.node.places.turns import LoadingTurns, PlaceTurns
from pdserve.node.roles import NodeParts
from pdserve.node.start.loading import Loading
from pdserve.node.start.model import NodeModel
from pdserve.settings.config import NodeConfig
from pdserve.settings.places import check_place
from pdserve.settings.values import parse_bytes
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """What a process shares with those of other models on its node."""

    ledger: Ledger

    @classmethod
    def of(cls, config: NodeConfig) -> Self | None:
        """Return the place that the config says; None: the node has one.

        Raises:
            ConfigError: another process has it, its file cannot be used, or no node is shared so.
        """
        place = config.place
        if not place.ledger:
            return None
        check_place(config.engine, multiplexed=config.multiplexed)
        try:
            ledger = Ledger(place.ledger, place.place, parse_bytes(place.memory))
        except BlockingIOError as error:
            raise ConfigError(
                f"place {place.place} of {place.ledger} is another process's: give each its own"
            ) from error
        except (OSError, ValueError) as error:
            raise ConfigError(f"ledger of places {place.ledger}: {error}") from error
        return cls(ledger)

    def memory_of(self, memory: KvPool) -> PlaceMemory:
        """Return what the pool of one life takes memory from; nobody else uses `memory` yet."""
        return PlaceMemory(self.ledger, cpu_pool(memory))

    def leave(self) -> None:
        """Have nothing any more, between two lives."""
        self.ledger.leave()


class PlaceLife:
    """A place while it has one model."""

    def __init__(self, place: Place, parts: NodeParts, memory: PlaceMemory) -> None:
        assert isinstance(parts.pool, SharedPool), "made with this memory"
        self._ledger = place.ledger
        self._parts = parts
        self._pool = parts.pool
        self._memory = memory
        self._loading = LoadingTurns(place.ledger, SystemClock())
        policy = parts.config.policy
        self.turns = PlaceTurns(place.ledger, parts.engine, parts.clock, policy.default_tpot_s)

    async def enter(self, model: NodeModel, check_wanted: Callable[[], None]) -> None:
        """Wait until there is memory for the model. Raises as PlaceMemory.enter."""
        num_blocks = model.layout.least_blocks(model.max_model_len)
        floor = num_blocks * model.layout.block_bytes
        await self._memory.enter(_weights(model), floor, check_wanted)

    @property
    def lacks_memory(self) -> bool:
        """Whether it waits for memory that requests for other models use."""
        return self._memory.is_kept_out

    def before_step(self, check_wanted: Callable[[], None]) -> None:
        """Wait for the turn to measure a step, in the thread that does; raises as check_wanted."""
        check_wanted()
        self._loading.next(check_wanted)

    def loaded(self) -> None:
        """Serve from now on: what was measured has left nothing behind."""
        self._loading.over()
        self._memory.free()
        self._memory.begin(self._pool)
        self._parts.engine.turns = self.turns

    async def end(self) -> None:
        """The model is given up. Its engine does not run any more."""
        self._loading.over()
        await self._memory.end()


def begin_life(
    place: Place | None, parts: NodeParts, memory: PlaceMemory | None, loading: Loading
) -> PlaceLife | None:
    """Return the life of a place that is about to load; None: the node has no places."""
    if place is None or memory is None:
        return None
    life = PlaceLife(place, parts, memory)
    loading.before_step = life.before_step
    watch_place(parts.metrics, place.ledger, life.turns)
    return life


def watch_place(metrics: NodeMetrics, ledger: Ledger, turns: PlaceTurns) -> None:
    """Memory and turns of a place."""
    text = "Memory of the place's node: for weights and KV of all its models"
    metrics.watch("place_memory_bytes", text, lambda: ledger.budget)
    metrics.watch("place_kv_bytes", "Of this, KV of this model", lambda: ledger.held)
    text = "Time that steps waited for those of other models on the same cores"
    metrics.count("turn_wait_seconds", text, lambda: turns.waited_s)


def _weights(model: NodeModel) -> int:
    """Bytes that a model takes besides its KV: packed, and what guesses for it."""
    num_bytes, draft = packed_bytes(model.plan(), model.activations), model.draft
    if isinstance(draft, NodeModel):
        return num_bytes + _weights(draft) + draft.num_blocks * draft.layout.block_bytes
    return num_bytes + (0 if draft is None else draft.num_blocks * draft.block_bytes)
