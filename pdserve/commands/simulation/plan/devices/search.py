"""Which architecture serves a load for the least money: replicas, parts of a model, or two pools.

Every type of node that could be built of the devices is sized; of each architecture the cheapest is
kept, and simulated where that is possible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

import msgspec

from pdserve.commands.simulation.plan.devices.catalogue import Device
from pdserve.commands.simulation.plan.devices.roofline import NodeType, calibration_of
from pdserve.commands.simulation.plan.devices.sizing import MOST_NODES, Load, NotServed, Pool, Sized
from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import FORMS
from pdserve.kv import KvDtype
from pdserve.shared.errors import ConfigError

Architecture = Literal["replicate", "shard", "disaggregate"]
ARCHITECTURES: Final[tuple[Architecture, ...]] = ("replicate", "shard", "disaggregate")
_RANKS: Final = (1, 2, 4, 8)
_STAGES: Final = (1, 2, 4)


class Choice(msgspec.Struct, frozen=True):
    """Pools that serve the load: one that does both, or one for prompts and one for streams."""

    architecture: Architecture
    pools: tuple[tuple[Sized, Pool], ...]
    price: float  # an hour

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

    best: Mapping[Architecture, Choice]
    lacking: Mapping[Architecture, str]  # why there is none: what its nearest would have lacked

    @property
    def chosen(self) -> Choice | None:
        """The cheapest of all."""
        return min(self.best.values(), key=lambda one: one.price, default=None)


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

    def price(sized: Sized, pool: Pool) -> float:
        return pool.count * sized.node.num_devices * prices[sized.node.device.name]

    best: dict[Architecture, Choice] = {}
    lacking: dict[Architecture, str] = {}

    def consider(architecture: Architecture, *pools: tuple[Sized, Pool]) -> None:
        if any(pool.count > MOST_NODES for _, pool in pools):
            return
        choice = Choice(architecture, pools, sum(price(*each) for each in pools))
        if architecture not in best or choice.price < best[architecture].price:
            best[architecture] = choice

    for sized in nodes:
        architecture: Architecture = "replicate" if sized.node.num_devices == 1 else "shard"
        pool = sized.for_both(load)
        if isinstance(pool, NotServed):
            lacking[architecture] = f"{pool.limit}: {pool.why} ({sized.node.text})"
        else:
            consider(architecture, (sized, pool))
    found: dict[KvDtype, dict[str, tuple[Sized, Pool]]] = {}
    for sized in nodes:  # KV of one form: a pool takes what the other makes
        for pool in (sized.for_prompts(load), sized.for_decodes(load)):
            if isinstance(pool, NotServed):
                lacking["disaggregate"] = f"{pool.limit}: {pool.why} ({sized.node.text})"
                continue
            cheapest = found.setdefault(sized.node.kv, {})
            if pool.what not in cheapest or price(sized, pool) < price(*cheapest[pool.what]):
                cheapest[pool.what] = sized, pool
    for cheapest in found.values():
        if len(cheapest) == 2:
            consider("disaggregate", cheapest["prefill"], cheapest["decode"])
    if "replicate" not in best and "replicate" not in lacking and not_fitting:
        lacking["replicate"] = "memory: " + "; ".join(not_fitting.values())
    missing = {one: why for one, why in lacking.items() if one not in best}
    return Compared(best, missing)


def node_types(devices: Sequence[Device]) -> Iterator[NodeType]:
    """Yield all types of nodes that could be built, smallest first."""
    for device, ranks, stages in product(devices, _RANKS, _STAGES):
        if ranks > device.in_host:
            continue
        forms = ["bfloat16"]
        if device.kind == "cpu":
            forms += [f.name for f in FORMS.values() if f.is_quantised and "cpu" in f.devices]
        kv = [KvDtype.BFLOAT16] + [KvDtype.INT8] * (device.kind == "cpu")
        for form, dtype in product(forms, kv):
            yield NodeType(device, ranks, stages, form, dtype)


def _fitting(
    model: ModelConfig, name: str, devices: Sequence[Device], max_model_len: int
) -> tuple[list[Sized], dict[str, str]]:
    """Return what holds the model, and why single devices do not.

    More stages are only for what does not fit otherwise: they wait for each other.
    """
    fitting: list[Sized] = []
    not_fitting: dict[str, str] = {}
    without_stages: set[tuple[str, int, str]] = set()
    for node in node_types(devices):
        if (node.device.name, node.ranks, node.weights) in without_stages and node.stages > 1:
            continue
        try:
            calibration = calibration_of(model, name, node, max_model_len)
        except ConfigError as error:
            if node.num_devices == 1 and node.weights == "bfloat16":
                not_fitting[node.device.name] = error.message
            continue
        if node.stages == 1:
            without_stages.add((node.device.name, node.ranks, node.weights))
        fitting.append(Sized(node, calibration))
    return fitting, not_fitting
