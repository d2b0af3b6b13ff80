"""Who may use the API."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.settings.struct import ConfigStruct


class AccessConfig(ConfigStruct, frozen=True):
    """Who may use the API, and the record of its use."""

    key_file: Annotated[
        str, Meta(description="TOML file of tenants and API keys; reloaded when it changes")
    ] = ""
    metrics_token_file: Annotated[
        str,
        Meta(
            description="file with a token that, as any key, lets its bearer read /status and "
            "/metrics"
        ),
    ] = ""
    readers: Annotated[
        Literal["known", "anybody"],
        Meta(
            description="who may read /status and all /metrics; known: who shows a key or the "
            "metrics token, where there are some"
        ),
    ] = "known"
    https_dir: Annotated[
        str, Meta(description="directory of tls.crt and tls.key, to speak HTTPS; empty: HTTP")
    ] = ""
    cors_origins: Annotated[
        list[str],
        Meta(description='web origins that may use the API, such as "https://a.org"; "*": all'),
    ] = msgspec.field(default_factory=list)
    page: Annotated[bool, Meta(description="serve a page at / that shows the cluster")] = True
    usage_db: Annotated[
        str,
        Meta(
            description="SQLite file of usage and of what tenants owe to their limits; memory: "
            "none; empty: with a key file, one in the user's state directory, none with port 0"
        ),
    ] = ""
