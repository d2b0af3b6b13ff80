"""Makes the tenants from the configuration: a key file, a key in the environment, or no keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from coordinator.tenants.identity import OWNER
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.keys import hash_key
from coordinator.tenants.ledger import Ledger
from coordinator.tenants.tenants import Tenants
from pdserve.addresses import is_loopback
from pdserve.clock import Clock
from pdserve.errors import ConfigError
from pdserve.settings.api_key import API_KEY_VARIABLE
from pdserve.settings.config import AccessConfig


def open_tenants(
    config: AccessConfig,
    host: str,
    classes: Collection[str],
    model: str,
    environment: Mapping[str, str],
    clock: Clock,
) -> Tenants:
    """Make the tenants for a coordinator that listens on `host`.

    Raises:
        ConfigError: a file cannot be used, or there are no keys and `host` is not loopback.
    """
    key = environment.get(API_KEY_VARIABLE, "")
    if not (key or config.key_file or is_loopback(host)):
        raise ConfigError(
            f"without API keys, everyone who can reach {host} could use this cluster: give "
            f"--key-file FILE, set {API_KEY_VARIABLE}, or listen on 127.0.0.1"
        )
    keys: KeyBook | None = None
    if key or config.key_file:
        extra = {hash_key(key): OWNER} if key else {}
        path = Path(config.key_file) if config.key_file else None
        keys = KeyBook(path, extra, classes, clock)
    ledger = Ledger(Path(config.usage_db)) if config.usage_db else None
    return Tenants(keys, ledger, model, clock)
