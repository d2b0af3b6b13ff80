"""A tenant, as described by its table in the key file."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.shared.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
PerMinute = Annotated[int, Meta(ge=0, le=10**12)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[tenants.NAME]` of the key file."""

    name: str = ""  # the name of its table; empty: any caller, if no keys are required
    keys: list[str] = []  # hashes, as `pdserve key` prints them
    classes: list[str] = []  # service classes that it may use; empty: all
    default_class: str = ""  # for requests that name no class; empty: the cluster's default
    is_operator: bool = False  # may change the cluster: /admin
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # its fair share among others
    requests_per_minute: PerMinute = 0  # 0: no limit
    tokens_per_minute: PerMinute = 0  # prompt and output together; 0: no limit
    # Name of a model, or of a tier elsewhere |-> as `tokens_per_minute`, of it alone.
    model_tokens_per_minute: dict[str, PerMinute] = {}
    adapters: list[str] = []  # names that it may use, as "sql-*"; empty: all
    max_adapters: Annotated[int, Meta(ge=0)] = 0  # that it may load itself; 0: none
    text_may_leave: bool = False  # to tiers of cascades that are elsewhere
    cache_group: str = ""  # tenants of one group share cached prefixes; empty: a group of its own

    @property
    def salt(self) -> str:
        """The salt that separates its cached prefixes from those of others."""
        return self.cache_group or self.name

    def may_use(self, adapter: str) -> bool:
        """Return whether it may use the adapter of a name."""
        return not self.adapters or any(fnmatchcase(adapter, one) for one in self.adapters)

    def cache_salt(self, asked: str) -> str:
        """Return the cache salt of a request, which may ask for further separation (`asked`)."""
        if not self.name:
            return asked
        return f"{len(self.salt)}:{self.salt}:{asked}"  # the length makes it unique


ANYBODY = Tenant(text_may_leave=True)  # who has named the tiers has said so
OWNER = Tenant(
    name="owner", is_operator=True, text_may_leave=True
)  # who has the key in the environment


def check_name(name: str) -> None:
    """Raise ConfigError if a key file cannot have a tenant with this name."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f'tenant "{name}": a name has up to 64 letters, digits, ".", "_" or "-"')
    if name == OWNER.name:
        raise ConfigError(
            f'tenant "{name}": this is the name of who has the key in the environment; '
            "choose another name"
        )
