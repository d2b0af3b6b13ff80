"""What is known of a coordinator's settings without its model; `pdserve up` asks, too."""

from __future__ import annotations

import os
from pathlib import Path

from coordinator.tenants.opening import metrics_token, open_keys
from pdserve.settings.config import ONE_POOL, CoordinatorConfig
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import ConfigError
from pdserve.shared.slo import ServiceClasses, parse_slo_classes


def check_front(config: CoordinatorConfig) -> ServiceClasses:
    """Check what can be known now; return the service classes.

    Raises:
        ConfigError: settings contradict each other, or a file that they name cannot be used.
    """
    if config.routing.rebalance and config.mode in ONE_POOL:
        raise ConfigError(f"--rebalance needs two pools: leave it out with --mode {config.mode}")
    classes = parse_slo_classes(config.routing.slo_classes, config.routing.default_class)
    open_keys(config, classes.by_name, os.environ, SystemClock())
    metrics_token(config.access)
    if config.access.https_dir:
        from coordinator.api.server.https import https_context  # and half a second of the API

        https_context(Path(config.access.https_dir))
    return classes
