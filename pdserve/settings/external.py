"""Servers elsewhere that speak OpenAI's API: the `[external.NAME]` of a models file.

[external.cloud]
url = "https://api.example.com/v1"
model = "large-1"
key_file = "cloud.key"
price = { input = 2.0, output = 8.0 }
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta
from msgspec.structs import replace

from pdserve.settings.prices import Price
from pdserve.settings.struct import ConfigStruct, Seconds
from pdserve.shared.addresses import is_loopback
from pdserve.shared.errors import ConfigError


class ExternalEndpoint(ConfigStruct, frozen=True):
    """One `[external.NAME]`."""

    url: str  # what /chat/completions comes after
    model: Annotated[str, Meta(min_length=1)]  # as it is called there
    answers_as: str = ""  # how answers name it, as "large-*"; empty: `model`, and what follows it
    key_file: str = ""  # has its API key, and nothing else; empty: it needs none
    timeout_s: Seconds = 60.0  # until an answer begins, and between two parts of it
    price: Price | None = None

    def key(self) -> str:
        """Return the API key as it is now; empty: it needs none. Raises ConfigError."""
        if not self.key_file:
            return ""
        try:
            key = Path(self.key_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the key file {self.key_file}: {error}") from error
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            raise ConfigError(f"the key file {self.key_file} must have one line: the key alone")
        return key


def check_external(endpoints: Mapping[str, ExternalEndpoint]) -> None:
    """Raise ConfigError: an address is none, or a key would be sent in the clear."""
    for name, endpoint in endpoints.items():
        parts = urlsplit(endpoint.url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(
                f"external.{name}: url: {endpoint.url!r} is no address of an API: write it as "
                "https://HOST/v1"
            )
        if endpoint.key_file and parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise ConfigError(f"external.{name}: url: a key is only sent to https://")


def here(folder: Path, endpoint: ExternalEndpoint) -> ExternalEndpoint:
    """Return it with the key's file below a folder, unless its path is absolute."""
    if not endpoint.key_file:
        return endpoint
    file = folder / Path(endpoint.key_file).expanduser()
    return replace(endpoint, key_file=str(file))
