"""Secrets in the environment: the API key, and the supervisor's token.

A coordinator accepts the key, and commands and benchmarks send it. With the token, what has started
a coordinator reads its status, whoever else may.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

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
