"""The process of a node: as a node of one model, and then of each other one that it is to become.

A life (`runtime.py`) ends when the node has drained. Nothing of it is left in the next one but the
process, with all that it has imported, and pages of files in memory. If the next model cannot be
served (its files are damaged or others by now, or there is no room), the node is one of the model
before again, as that was, whatever the file of models says by now: whoever asks for that one is not
to suffer.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from dataclasses import dataclass

import uvloop
from msgspec.structs import replace

from pdserve.node.places.place import Place
from pdserve.node.planned import Planned
from pdserve.node.prefixes.host_tier import make_tier_blocks
from pdserve.node.roles import ServiceFactories
from pdserve.node.runtime import live
from pdserve.node.split_cores.phases import check_splits
from pdserve.node.start.cores import CorePlan, plan_cores, use_service_cores
from pdserve.node.start.known_plans import KnownPlans
from pdserve.node.start.model import set_threads, share_of
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig, WeightsConfig
from pdserve.settings.models import NodeOfModel, node_of_model
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
    cores = plan_cores(config.engine, sorted(os.sched_getaffinity(0)))
    process = _Process(config, cores, Place.of(config), KnownPlans())
    log.info("%s", cores.describe())
    set_threads(cores.of_rank(0, share_of(config.engine).num_ranks).num_threads)
    use_service_cores(cores)
    uvloop.run(_lives(process, process.plan(node_of_model(config), role), make))


@dataclass(frozen=True, slots=True)
class _Process:
    """What all lives have in common."""

    config: NodeConfig
    cores: CorePlan
    place: Place | None
    plans: KnownPlans

    def plan(
        self, node: NodeOfModel, role: NodeRole, was: NodeOfModel | None = None, refused: str = ""
    ) -> Planned:
        """Plan a life; `was`, `refused`: as of Planned. Raises as `run`."""
        config = node.config
        model = self.plans.of(config, role)
        node.check_digest(model.checkpoint.revision)
        check_splits(config, role, self.cores, model)
        tier_blocks = make_tier_blocks(config, model)
        on_cpu = model.device.type == "cpu"  # what a GPU keeps of a life is not known
        if self.place is not None and not on_cpu:
            raise ConfigError(
                f"several places compute on CPUs, not {model.device}: add --device cpu"
            )
        if not on_cpu:
            node = node._replace(others=())
        return Planned(node, role, model, tier_blocks, self.place, was, refused)

    def plan_next(self, name: str, role: NodeRole, was: NodeOfModel, refused: str) -> Planned:
        """Plan a life as a node of this model or, if that cannot be, as what the node was."""
        if name != was.name:
            try:
                weights = WeightsConfig(model=name)
                node = node_of_model(replace(self.config, checkpoint=weights))
                return self.plan(node, role, was)
            except _REFUSALS as error:
                _log_refusal(name, was.name, error)
                refused = name
        return self.plan(was, role, was, refused)


async def _lives(process: _Process, planned: Planned, make: ServiceFactories) -> None:
    signals = StopSignals()
    if planned.node.others:  # so that what lives end with is collected, and quickly
        freeze_loaded_objects()
    while True:
        was, refused = planned.node, ""
        try:
            name, role = await live(planned, process.cores, make, signals)
        except _REFUSALS as error:
            if planned.was is None or not planned.can_go_back:
                raise
            _log_refusal(was.name, planned.was.name, error)
            refused = was.name
            was, role = planned.was, planned.role
            name = was.name
        if not name or signals.has_heard:
            return
        del planned
        gc.collect()
        if process.place is not None:
            process.place.leave()
        planned = await asyncio.to_thread(process.plan_next, name, role, was, refused)
        if signals.has_heard:
            return
        signals = StopSignals()


def _log_refusal(name: str, was: str, error: PdserveError) -> None:
    log.error("cannot become a node of %s, and is one of %s again: %s", name, was, error)
