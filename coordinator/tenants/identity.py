"""A tenant, as its part of the key file describes it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PerMinute = Annotated[int, Meta(ge=0, le=10**12)]


class Tenant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[tenants.NAME]` of the key file."""

    name: str = ""  # not in the file: it is the table's; empty: anybody, where no keys are needed
    keys: list[str] = []  # hashes, as `pdserve key` prints them
    classes: list[str] = []  # service classes that its requests may be of; empty: all
    default_class: str = ""  # of its requests that name none; empty: the cluster's
    is_operator: bool = False  # may change the cluster: /admin
    weight: Annotated[float, Meta(gt=0, le=1e6)] = 1.0  # its share, beside others of its priority
    requests_per_minute: PerMinute = 0  # 0: no limit
    tokens_per_minute: PerMinute = 0  # prompt and output together; 0: no limit
    cache_group: str = ""  # tenants of one group share cached prefixes; empty: a group of its own

    @property
    def salt(self) -> str:
        """What keeps its cached prefixes apart from those of others."""
        return self.cache_group or self.name

    def cache_salt(self, asked: str) -> str:
        """Of one of its requests, which may ask for more separation still."""
        if not self.name:
            return asked
        return f"{len(self.salt)}:{self.salt}:{asked}"  # the length: no two pairs give one salt


ANYBODY = Tenant()
