"""The process of a node: as a node of one model, and then of each other one that it is to become.

A life (`runtime.py`) ends when the node has drained. Nothing of it is left in the next one but the
process, with all that it has imported, and pages of files in memory. If the next model cannot be
served (its files are damaged or others by now, or there is no room), the node is one of the model
before again: whoever asks for that one is not to suffer.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys

import uvloop
from msgspec.structs import replace

from pdserve.node.places.place import Place
from pdserve.node.prefixes.host_tier import make_tier_blocks
from pdserve.node.roles import ServiceFactories
from pdserve.node.runtime import Planned, live
from pdserve.node.split_cores.phases import check_splits
from pdserve.node.start.cores import CorePlan, plan_cores, use_service_cores
from pdserve.node.start.draft import plan_models
from pdserve.node.start.model import set_threads, share_of
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig, WeightsConfig
from pdserve.settings.models import node_of_model
from pdserve.shared.errors import CapacityError, ConfigError, ModelError, PdserveError
from pdserve.shared.process.collector import freeze_loaded_objects
from pdserve.shared.process.open_files import raise_file_limit
from pdserve.shared.process.signals import StopSignals
from pdserve.wire.security import check_exposure

log = logging.getLogger(__name__)

# A node has a few connections to each other node, beside files of its own. This is for thousands.
MOST_FILES = 1 << 16
_REFUSALS = (ConfigError, ModelError, CapacityError)  # of models that cannot be served
SWITCH_INTERVAL_S = 0.0005  # how long the engine's thread may have to wait for the interpreter lock


def run(config: NodeConfig, role: NodeRole, make: ServiceFactories) -> None:
    """Run a node, initially in this role, until it has drained for good.

    Raises:
        PdserveError: it cannot start; says why.
    """
    check_exposure(config.security, config.host)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    raise_file_limit(MOST_FILES)
    place = Place.of(config)
    cores = plan_cores(config.engine, sorted(os.sched_getaffinity(0)))
    log.info("%s", cores.describe())
    set_threads(cores.of_rank(0, share_of(config.engine).num_ranks).num_threads)
    use_service_cores(cores)
    uvloop.run(_lives(plan(config, role, cores, place), config, cores, make))


def plan(
    config: NodeConfig,
    role: NodeRole,
    cores: CorePlan,
    place: Place | None = None,
    *,
    has_woken: bool = False,
) -> Planned:
    """Plan a life; `has_woken`: there was one before. Raises as `run`."""
    node = node_of_model(config)
    config = node.config
    model = plan_models(config, role)
    node.check_digest(model.checkpoint.revision)
    check_splits(config, role, cores, model)
    tier_blocks = make_tier_blocks(config, model)
    on_cpu = model.device.type == "cpu"  # what a GPU keeps of a life is not known
    if place is not None and not on_cpu:
        raise ConfigError(f"several places compute on CPUs, not {model.device}: add --device cpu")
    others = node.others if on_cpu else []
    return Planned(config, role, model, tier_blocks, node.name, others, place, has_woken)


async def _lives(
    planned: Planned, config: NodeConfig, cores: CorePlan, make: ServiceFactories
) -> None:
    signals = StopSignals()
    if planned.may_become:  # so that what lives end with is collected, and quickly
        freeze_loaded_objects()
    was = ""  # the last model that it has served
    while True:
        try:
            model, role = await live(planned, cores, make, signals)
            was = planned.name
        except _REFUSALS as error:
            if was in ("", planned.name):
                raise
            _log_refusal(planned.name, was, error)
            model, role = was, planned.role
        if not model or signals.has_heard:
            return
        place = planned.place
        del planned
        gc.collect()
        if place is not None:
            place.leave()

        def woken(name: str, role: NodeRole = role, place: Place | None = place) -> Planned:
            weights = WeightsConfig(model=name)
            return plan(replace(config, checkpoint=weights), role, cores, place, has_woken=True)

        try:
            planned = await asyncio.to_thread(woken, model)
        except _REFUSALS as error:
            _log_refusal(model, was, error)
            planned = await asyncio.to_thread(woken, was)
        if signals.has_heard:
            return
        signals = StopSignals()


def _log_refusal(name: str, was: str, error: PdserveError) -> None:
    log.error("cannot become a node of %s, and is one of %s again: %s", name, was, error)
