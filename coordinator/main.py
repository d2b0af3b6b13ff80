"""`pdserve coordinator`: HTTP for clients, gRPC for nodes, one process without torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

import uvloop

from coordinator.front_check import check_front
from coordinator.models.files import ModelFiles, read_all_model_files
from coordinator.runtime import Coordinator
from coordinator.tenants import Readers, Tenants
from coordinator.tenants.opening import open_readers, open_tenants
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import SystemClock
from pdserve.shared.process.signals import StopSignals
from pdserve.shared.slo import ServiceClasses


def run(config: CoordinatorConfig) -> None:
    """Run the coordinator until SIGTERM or SIGINT, then let requests in flight finish.

    Raises:
        PdserveError: the coordinator cannot start; says why.
    """
    classes = check_front(config)
    all_files = read_all_model_files(config)
    first = all_files[0].name
    tenants = open_tenants(config, classes.by_name, first, os.environ, SystemClock())
    try:
        readers = open_readers(config.access, tenants, os.environ)
        uvloop.run(_serve(config, all_files, classes, tenants, readers))
    finally:
        tenants.close()


async def _serve(
    config: CoordinatorConfig,
    all_files: Sequence[ModelFiles],
    classes: ServiceClasses,
    tenants: Tenants,
    readers: Readers,
) -> None:
    signals = StopSignals()
    await Coordinator(config, all_files, classes, tenants, readers).run(signals)
