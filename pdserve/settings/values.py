"""Values of configs: sizes in bytes, lists of cores and shares as text, and numbers of nodes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import inf
from typing import Final

from pdserve.shared.errors import ConfigError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS = _DECIMAL | {"KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}

_MOST_BYTES: Final = 1 << 62  # what native code counts
IN_MEMORY: Final = "memory"  # as `answers.store` and `access.usage_db`: no file


def parse_bytes(text: str) -> int:
    """Bytes of "1048576", "512MiB" or "2GB".

    Raises:
        ConfigError: the text is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?\s*", text.upper())
    if match is None:
        raise ConfigError(f'"{text}" is not a size: write it as "512MiB", "2GB" or in bytes')
    size = float(match[1]) * _UNITS[match[2] or ""]
    if size >= _MOST_BYTES:
        raise ConfigError(f'"{text[:32]}" is too large: sizes are below {_MOST_BYTES >> 60} EiB')
    return int(size)


def parse_cpus(text: str) -> list[int]:
    """Core numbers of a list such as "0,2-3"; empty text gives an empty list.

    Raises:
        ConfigError: the text is not a list of cores.
    """
    cores: list[int] = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise ConfigError(f'"{text}" is not a list of cores: write it as "0,2-3"')
        cores.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return cores


def format_cpus(cores: Sequence[int]) -> str:
    """The shortest text that `parse_cpus` reads as these ascending cores: "0,2-3"."""
    parts: list[str] = []
    start = 0
    for i, core in enumerate(cores):
        if i + 1 == len(cores) or cores[i + 1] != core + 1:
            parts.append(str(core) if i == start else f"{cores[start]}-{core}")
            start = i + 1
    return ",".join(parts)


# They decide where a request is served: without adaptive mode, that is decided already.
SIDES_ROUTERS: Final = ("deflection", "conserve", "ppd", "prfaas")


def check_router(router: str, mode: str) -> None:
    """Raise ValueError where a router would decide nothing."""
    if router in SIDES_ROUTERS and mode != "adaptive":
        raise ValueError(
            f"routing.router: {router} decides in mode adaptive, not in {mode}: give that mode, or "
            "another router"
        )


def check_equal_pools(modes: Sequence[str], num_prefill: int, num_decode: int) -> None:
    """Raise ConfigError if these pools are not equal, and one of the modes needs that."""
    if "multiplexed" in modes and num_prefill != num_decode:
        raise ConfigError(
            f"--prefill {num_prefill} --decode {num_decode}: a node of mode multiplexed has what "
            "one prefill and one decode node have, so there must be as many of each"
        )


def parse_shares(texts: Sequence[str]) -> dict[str, float]:
    """Return the shares of revisions, each by the first characters of the revision.

    Raises:
        ValueError: a text is not of the form REVISION=SHARE; says which.
    """
    shares = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        try:
            shares[name] = float(number)
        except ValueError:
            name = ""
        if not name or not 0 <= shares[name] < inf:
            raise ValueError(f"{text!r} is no share: write REVISION=SHARE, such as 4f0c=0.9")
    return shares


def parse_adapters(texts: Sequence[str]) -> dict[str, str]:
    """Return the paths of adapters by their names.

    Raises:
        ValueError: a text is not of the form NAME=PATH, or two have one name; says which.
    """
    paths: dict[str, str] = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not (name and path):
            raise ValueError(f"{text!r} is no adapter: write NAME=PATH")
        if name in paths:
            raise ValueError(f"two adapters are named {name!r}: {paths[name]} and {path}")
        paths[name] = path
    return paths
