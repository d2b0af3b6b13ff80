"""Makes the tenants from the configuration: a key file, a key in the environment, or no keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from coordinator.tenants.identity import OWNER
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.ledger import Ledger
from coordinator.tenants.readers import Readers
from coordinator.tenants.tenants import Tenants
from pdserve.settings.access import API_KEY_VARIABLE, SUPERVISOR_VARIABLE, AccessConfig, hash_key
from pdserve.settings.config import CoordinatorConfig
from pdserve.settings.values import IN_MEMORY
from pdserve.shared.addresses import is_loopback
from pdserve.shared.clock import Clock
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.user_cache import state_file
from pdserve.wire.security import read_token


def open_tenants(
    config: CoordinatorConfig,
    classes: Collection[str],
    model: str,
    environment: Mapping[str, str],
    clock: Clock,
) -> Tenants:
    """Make a coordinator's tenants.

    Raises:
        ConfigError: a file cannot be used, or there are no keys and its host is not loopback.
    """
    keys = open_keys(config, classes, environment, clock)
    return Tenants(keys, _ledger(config.access, model, config.port), model, clock)


def open_keys(
    config: CoordinatorConfig,
    classes: Collection[str],
    environment: Mapping[str, str],
    clock: Clock,
) -> KeyBook | None:
    """Read the keys that there are; None: nobody needs one. Raises as open_tenants."""
    access = config.access
    key = environment.get(API_KEY_VARIABLE, "")
    if not (key or access.key_file or is_loopback(config.host)):
        raise ConfigError(
            f"without API keys, everyone who can reach {config.host} could use this cluster: give "
            f"--key-file FILE, set {API_KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    if not (key or access.key_file):
        return None
    extra = {hash_key(key): OWNER} if key else {}
    return KeyBook(Path(access.key_file) if access.key_file else None, extra, classes, clock)


def open_readers(config: AccessConfig, tenants: Tenants, environment: Mapping[str, str]) -> Readers:
    """Say who may read the state of the cluster. Raises ConfigError: the token's file is none."""
    return Readers(
        tenants,
        metrics_token(config),
        environment.get(SUPERVISOR_VARIABLE, ""),
        anybody=config.readers == "anybody",
    )


def metrics_token(config: AccessConfig) -> str:
    """Read the token of who scrapes; empty: there is none. Raises as open_readers."""
    file = config.metrics_token_file
    return read_token(Path(file), "metrics token") if file else ""


def _ledger(config: AccessConfig, model: str, port: int) -> Ledger | None:
    """Where limits are kept over a restart: where there may be any, without being asked."""
    if config.usage_db == IN_MEMORY:
        return None
    path = Path(config.usage_db) if config.usage_db else None
    if path is None and config.key_file:
        path = state_file("usage", model, port)
    return None if path is None else Ledger(path)
