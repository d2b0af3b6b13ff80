"""Devices as their makers describe them: data, a row each.

Memory, bandwidth and dense bfloat16 arithmetic are of the makers' data sheets (SXM or OAM boards).
The link between devices of one host is per direction; the network is a usual one: 400 Gb/s for each
device of a training board, 100 or 200 Gb/s else. Prices are assumed, in dollars an hour, and only
for comparing before you have your own: `--price h100=2.2`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from pdserve.measured.calibration import DeviceType
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.near import nearest

_GB: Final = 1e9
_TERA: Final = 1e12


class Device(msgspec.Struct, frozen=True):
    """One GPU, or one socket of a CPU."""

    name: str  # as people know it
    kind: DeviceType
    memory_bytes: float
    bytes_per_s: float  # of its memory
    flops_per_s: float  # bfloat16, dense
    link_bytes_per_s: float  # to others of its host, in one direction
    network_bytes_per_s: float  # to other hosts
    in_host: int  # devices of a host
    price: float  # an hour
    cores: int = 8  # that compute, on a GPU those of its process


DEVICES: Final = {
    "a100": Device(
        "A100 80GB", "cuda", 80 * _GB, 2.039 * _TERA, 312 * _TERA, 300 * _GB, 25 * _GB, 8, 1.8
    ),
    "h100": Device(
        "H100 80GB", "cuda", 80 * _GB, 3.35 * _TERA, 989 * _TERA, 450 * _GB, 50 * _GB, 8, 2.9
    ),
    "h200": Device(
        "H200", "cuda", 141 * _GB, 4.8 * _TERA, 989 * _TERA, 450 * _GB, 50 * _GB, 8, 3.6
    ),
    "b200": Device("B200", "cuda", 180 * _GB, 8 * _TERA, 2250 * _TERA, 900 * _GB, 50 * _GB, 8, 5.5),
    "mi300x": Device(
        "MI300X", "cuda", 192 * _GB, 5.3 * _TERA, 1307 * _TERA, 448 * _GB, 50 * _GB, 8, 2.9
    ),
    "l40s": Device(
        "L40S", "cuda", 48 * _GB, 0.864 * _TERA, 362 * _TERA, 32 * _GB, 25 * _GB, 8, 1.0
    ),
    "xeon-8480": Device(  # AMX: 2,048 FLOPs a cycle and core, 56 cores, 2 GHz
        "Xeon 8480+", "cpu", 512 * _GB, 307 * _GB, 229 * _TERA, 50 * _GB, 12.5 * _GB, 2, 1.5, 56
    ),
    "epyc-9654": Device(  # AVX-512: 128 bfloat16 FLOPs a cycle and core, 96 cores, 2.4 GHz
        "EPYC 9654", "cpu", 768 * _GB, 461 * _GB, 29 * _TERA, 50 * _GB, 12.5 * _GB, 2, 1.8, 96
    ),
}


def device_named(name: str) -> Device:
    """Return a device. Raises ConfigError: there is none of this name."""
    if name not in DEVICES:
        raise ConfigError(
            f"--devices {name}: there is no such device{nearest(name, DEVICES)}; known are "
            f"{', '.join(DEVICES)}"
        )
    return DEVICES[name]
