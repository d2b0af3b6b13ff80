"""Maps API keys to tenants, from a TOML file that may change while the coordinator runs.

[tenants.acme]
keys = ["sha256:..."]            # pdserve key acme
default_class = "interactive"
requests_per_minute = 600
tokens_per_minute = 200000

[tenants.nightly]
keys = ["sha256:..."]
classes = ["batch"]
weight = 0.5
adapters = ["nightly-*"]         # that it may use; it may load two itself
max_adapters = 2
"""

from __future__ import annotations

import logging
import os
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec

from coordinator.tenants.identity import OWNER, Tenant, check_name
from coordinator.tenants.keys import is_key_hash
from pdserve.settings.access import hash_key
from pdserve.shared.clock import Clock
from pdserve.shared.errors import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two checks whether the file has changed


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tenants: dict[str, Tenant]


def parse_key_file(text: str, classes: Collection[str]) -> dict[str, Tenant]:
    """Parse a key file; return key hash |-> tenant.

    Raises:
        ConfigError: the text is not a valid key file, two tenants have the same key, or a class is
            not one of `classes`.
    """
    try:
        tenants = msgspec.convert(tomllib.loads(text), _File).tenants
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise ConfigError(str(error).replace(" - at `$.", " for `")) from error
    owners: dict[str, Tenant] = {}
    for name, described in tenants.items():
        tenant = msgspec.structs.replace(described, name=name)
        _check(tenant, classes)
        for key_hash in tenant.keys:
            if key_hash in owners:
                raise ConfigError(
                    f"{name} and {owners[key_hash].name} have the same key {key_hash}"
                )
            owners[key_hash] = tenant
    return owners


def _check(tenant: Tenant, classes: Collection[str]) -> None:
    check_name(tenant.name)
    if tenant.cache_group == OWNER.salt:
        raise ConfigError(
            f'{tenant.name}: the cache group "{OWNER.salt}" is that of who has the key in the '
            "environment; choose another name"
        )
    for key_hash in tenant.keys:
        if not is_key_hash(key_hash):
            raise ConfigError(
                f"{tenant.name}: {key_hash[:12]!r}... is not the hash of a key; "
                f"`pdserve key {tenant.name}` makes a key and prints its hash"
            )
    for name in [*tenant.classes, *filter(None, [tenant.default_class])]:
        if name not in classes:
            raise ConfigError(
                f"{tenant.name}: there is no service class {name!r}, only {', '.join(classes)}"
            )
    if tenant.classes and tenant.default_class not in tenant.classes:
        raise ConfigError(f"{tenant.name}: default_class must be one of {tenant.classes}")


class KeyBook:
    """The keys of a file, plus extra keys. Follows changes of the file."""

    def __init__(
        self,
        path: Path | None,
        extra: Mapping[str, Tenant],
        classes: Collection[str],
        clock: Clock,
    ) -> None:
        """Read the file. `extra` maps the hashes of further valid keys to tenants.

        Raises:
            ConfigError: the file cannot be read or is invalid; says why.
        """
        self._path = path
        self._extra = dict(extra)
        self._classes = classes
        self._clock = clock
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = clock.now()
        self._owners = self._extra
        if path is not None:
            self._stamp = self._stamp_of(path)
            self._owners = self._read(path)

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, key: str) -> tuple[Tenant, str] | None:
        """Return (tenant, key hash) of a key; None if the key is unknown."""
        self._follow()
        key_hash = hash_key(key)
        tenant = self._owners.get(key_hash)
        return None if tenant is None else (tenant, key_hash)

    def has(self, key_hash: str) -> bool:
        """Return whether this is the hash of a key."""
        self._follow()
        return key_hash in self._owners

    def tenant(self, name: str) -> Tenant | None:
        """Return the tenant of this name; None if no key is its."""
        self._follow()
        return next((tenant for tenant in self._owners.values() if tenant.name == name), None)

    def _follow(self) -> None:
        """Read the file again if it has changed; an invalid file leaves the keys unchanged."""
        now_s = self._clock.now()
        if self._path is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            stamp = self._stamp_of(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._owners = self._read(self._path)
        except ConfigError as error:
            log.error("keys stay as they were: %s", error)
        else:
            log.info("%s: %d keys", self._path, len(self._owners))

    def _read(self, path: Path) -> dict[str, Tenant]:
        try:
            return parse_key_file(path.read_text(), self._classes) | self._extra
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {path}: {error}") from error
        except ConfigError as error:
            raise ConfigError(f"key file {path}: {error}") from error

    @staticmethod
    def _stamp_of(path: Path) -> tuple[int, int, int]:
        try:
            found = os.stat(path)
        except OSError as error:
            raise ConfigError(f"cannot read the key file {path}: {error}") from error
        return found.st_mtime_ns, found.st_size, found.st_ino
