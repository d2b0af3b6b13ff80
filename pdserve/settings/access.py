"""Who may use the API, and who may join a cluster.

Secrets in the environment: the API key, and the supervisor's token.

A coordinator accepts the key, and commands and benchmarks send it. With the token, what has started
a coordinator reads its status, whoever else may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.settings.struct import ConfigStruct

API_KEY_VARIABLE = "PDSERVE_API_KEY"
SUPERVISOR_VARIABLE = "PDSERVE_SUPERVISOR_TOKEN"
_SECRETS = (API_KEY_VARIABLE, SUPERVISOR_VARIABLE)


def hash_key(key: str) -> str:
    """Return the hash to store of a key: "sha256:" and 64 hexadecimal digits."""
    sent = key.encode(errors="surrogateescape")  # how header bytes that are not UTF-8 are decoded
    return "sha256:" + hashlib.sha256(sent).hexdigest()


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for processes that neither check nor send the API key."""
    return {name: value for name, value in environment.items() if name not in _SECRETS}


def keys_of_coordinator(environment: Mapping[str, str], supervisor_token: str) -> dict[str, str]:
    """Return what its environment has beside those."""
    key = environment.get(API_KEY_VARIABLE, "")
    return {SUPERVISOR_VARIABLE: supervisor_token} | ({API_KEY_VARIABLE: key} if key else {})


class SecurityConfig(ConfigStruct, frozen=True):
    """Who may join the cluster, and what keeps others from listening."""

    tls_dir: Annotated[
        str,
        Meta(description="directory of ca.crt, tls.crt and tls.key, for mTLS between processes"),
    ] = ""
    join_token_file: Annotated[
        str, Meta(description="file with the secret that all processes of the cluster share")
    ] = ""
    insecure: Annotated[
        bool, Meta(description="listen beyond this machine though neither of these is set")
    ] = False


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
