"""Which architecture serves a load for the least money: replicas, parts of a model, or two pools.

Every type of node that could be built of the devices is sized; of each architecture the cheapest is
kept, and simulated where that is possible. What rounds the model to fewer bits is another answer,
which is kept beside that of the model as it is stored, if it is cheaper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import inf
from typing import Final, Literal, TypeAlias

import msgspec

from pdserve.commands.simulation.plan.devices.catalogue import Device
from pdserve.commands.simulation.plan.devices.roofline import NodeType, calibration_of
from pdserve.commands.simulation.plan.devices.rounding import OF_WEIGHTS, off_by
from pdserve.commands.simulation.plan.devices.sizing import MOST_NODES, Load, NotServed, Pool, Sized
from pdserve.engine.models.config import ModelConfig
from pdserve.kv import KvDtype
from pdserve.shared.errors import ConfigError

Architecture = Literal["replicate", "shard", "disaggregate"]
ARCHITECTURES: Final[tuple[Architecture, ...]] = ("replicate", "shard", "disaggregate")
_RANKS: Final = (1, 2, 4, 8)
_STAGES: Final = (1, 2, 4)
_KV: Final = (KvDtype.BFLOAT16, KvDtype.INT8)  # fp8 takes the bytes of int8, and is further off

_Pooled: TypeAlias = tuple[Sized, Pool]


class Choice(msgspec.Struct, frozen=True):
    """Pools that serve the load: one that does both, or one for prompts and one for streams."""

    architecture: Architecture
    pools: tuple[tuple[Sized, Pool], ...]
    price: float  # an hour

    @property
    def is_as_stored(self) -> bool:
        """Whether no node rounds the model to fewer bits."""
        return all(sized.node.is_as_stored for sized, _ in self.pools)

    @property
    def off_by(self) -> float:
        """How far off its forms are: see rounding.py."""
        first, last = self.pools[0][0].node, self.pools[-1][0].node
        return off_by(first.weights, last.weights, last.kv)

    @property
    def num_nodes(self) -> int:
        """Nodes of all pools."""
        return sum(pool.count for _, pool in self.pools)

    @property
    def text(self) -> str:
        """For people: "3 decode nodes of 2 x H100 80GB, 1 prefill node of H100 80GB"."""
        words = []
        for sized, pool in self.pools:
            kind = "" if pool.what == "both" else f"{pool.what} "
            number = f"{pool.count} {kind}node{'s' * (pool.count > 1)}"
            words.append(f"{number} of {sized.node.text}")
        return " and ".join(words)


@dataclass(frozen=True, slots=True)
class Compared:
    """The cheapest of each architecture, and why others serve nothing."""

    best: Mapping[Architecture, Choice]  # of the model as it is stored
    rounded: Mapping[Architecture, Choice]  # in fewer bits, if that is cheaper
    # Why there is none of the model as it is stored: what its nearest would have lacked.
    lacking: Mapping[Architecture, str]

    @property
    def chosen(self) -> Choice | None:
        """The cheapest of the model as it is stored; if none serves the load, in fewer bits."""
        choices = self.best or self.rounded
        return min(choices.values(), key=lambda one: one.price, default=None)

    @property
    def choices(self) -> list[Choice]:
        """All that serve the load."""
        every = (self.best, self.rounded)
        return [found[name] for name in ARCHITECTURES for found in every if name in found]


def compare(
    model: ModelConfig,
    name: str,
    devices: Sequence[Device],
    prices: Mapping[str, float],
    load: Load,
    max_model_len: int,
) -> Compared:
    """Size all types of nodes for a load.

    Args:
        model: what they serve; `name`: what it is called.
        devices: of which nodes are built, each of one kind.
        prices: of a device's hour, by its name.
        load: what is to be served.
        max_model_len: tokens of a request for which a pool has to have room.
    """
    nodes, not_fitting = _fitting(model, name, devices, max_model_len)
    search = _Search(prices, load)
    for sized in nodes:
        search.alone(sized)
    for usable in ([sized for sized in nodes if sized.node.is_as_stored], nodes):
        search.apart(usable)
    lacking = search.lacking
    if "replicate" not in search.best and "replicate" not in lacking and not_fitting:
        lacking["replicate"] = "memory: " + "; ".join(not_fitting.values())
    missing = {one: why for one, why in lacking.items() if one not in search.best}
    return Compared(search.best, search.cheaper(), missing)


@dataclass(slots=True)
class _Search:
    """What was found so far for a load, given prices of a device's hour."""

    prices: Mapping[str, float]
    load: Load
    best: dict[Architecture, Choice] = field(default_factory=dict)
    rounded: dict[Architecture, Choice] = field(default_factory=dict)
    lacking: dict[Architecture, str] = field(default_factory=dict)

    def alone(self, sized: Sized) -> None:
        """Consider nodes that serve prompts and streams."""
        architecture: Architecture = "replicate" if sized.node.num_devices == 1 else "shard"
        self._consider(architecture, self._served(architecture, sized, sized.for_both(self.load)))

    def apart(self, nodes: Sequence[Sized]) -> None:
        """Consider the cheapest of these for prompts, and the cheapest for streams."""
        found: dict[tuple[KvDtype, str], _Pooled] = {}
        for sized in nodes:  # KV of one form: a pool takes what the other makes
            for pool in (sized.for_prompts(self.load), sized.for_decodes(self.load)):
                served = self._served("disaggregate", sized, pool)
                if served is None:
                    continue
                key = (sized.node.kv, served[1].what)
                if key not in found or self._order(served) < self._order(found[key]):
                    found[key] = served
        for kv in KvDtype:
            self._consider("disaggregate", found.get((kv, "prefill")), found.get((kv, "decode")))

    def cheaper(self) -> dict[Architecture, Choice]:
        """Return what costs less in fewer bits than anything does as it is stored."""
        least = min((choice.price for choice in self.best.values()), default=inf)
        return {name: choice for name, choice in self.rounded.items() if choice.price < least}

    def _served(
        self, architecture: Architecture, sized: Sized, pool: Pool | NotServed
    ) -> _Pooled | None:
        if isinstance(pool, Pool):
            return sized, pool
        if sized.node.is_as_stored:
            self.lacking[architecture] = f"{pool.limit}: {pool.why} ({sized.node.text})"
        return None

    def _consider(self, architecture: Architecture, *pools: _Pooled | None) -> None:
        served = tuple(pooled for pooled in pools if pooled is not None)
        if len(served) < len(pools) or any(pool.count > MOST_NODES for _, pool in served):
            return
        choice = Choice(architecture, served, sum(self._price(pooled) for pooled in served))
        found = self.best if choice.is_as_stored else self.rounded
        kept = found.get(architecture)
        if kept is None or (choice.price, choice.off_by) < (kept.price, kept.off_by):
            found[architecture] = choice

    def _price(self, pooled: _Pooled) -> float:
        sized, pool = pooled
        return pool.count * sized.node.num_devices * self.prices[sized.node.device.name]

    def _order(self, pooled: _Pooled) -> tuple[float, float]:
        node = pooled[0].node
        return self._price(pooled), off_by(node.weights, node.weights, node.kv)


def node_types(devices: Sequence[Device]) -> Iterator[NodeType]:
    """Yield all types of nodes that could be built, smallest first."""
    for device, ranks, stages in product(devices, _RANKS, _STAGES):
        if ranks > device.in_host:
            continue
        for form, kv in product(OF_WEIGHTS, _KV):
            yield NodeType(device, ranks, stages, form, kv)


def _fitting(
    model: ModelConfig, name: str, devices: Sequence[Device], max_model_len: int
) -> tuple[list[Sized], dict[str, str]]:
    """Return what holds the model, and why single devices do not.

    More stages are only for what does not fit otherwise: they wait for each other.
    """
    fitting: list[Sized] = []
    not_fitting: dict[str, str] = {}
    without_stages: set[NodeType] = set()
    for node in node_types(devices):
        if replace(node, stages=1) in without_stages:
            continue
        try:
            calibration = calibration_of(model, name, node, max_model_len)
        except ConfigError as error:
            if node.num_devices == 1 and node.is_as_stored:
                not_fitting[node.device.name] = error.message
            continue
        if node.stages == 1:
            without_stages.add(node)
        fitting.append(Sized(node, calibration))
    return fitting, not_fitting
