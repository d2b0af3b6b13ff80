"""The machine's processor, cores and memory, and how much of them this process may use."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pdserve.commands.cli.doctor.component import Availability, Component
from pdserve.node.memory.meminfo import container_limit_bytes, memory_bytes
from pdserve.node.start.cores import plan_cores, processor_name
from pdserve.settings.config import EngineConfig
from pdserve.settings.values import format_cpus

_TOPIC = "machine"
_GIB = 2**30


def machine_components(root: Path = Path("/")) -> list[Component]:
    """Processor, cores, memory."""
    return [
        _ok("processor", processor_name(_read(root / "proc/cpuinfo"))),
        _ok("cores", _cores(root)),
        _ok("one node", plan_cores(EngineConfig(), sorted(os.sched_getaffinity(0))).describe()),
        _ok("memory", _memory(root)),
    ]


def cpu_quota(cpu_max: str) -> float | None:
    """The CPU limit in the text of a cgroup's cpu.max, in cores; None: no limit."""
    match = re.fullmatch(r"\s*(\d+)\s+(\d+)\s*", cpu_max)
    return int(match[1]) / int(match[2]) if match else None


def _cores(root: Path) -> str:
    usable = sorted(os.sched_getaffinity(0))
    text = f"{len(usable)} usable of {os.cpu_count()} ({format_cpus(usable)})"
    quota = cpu_quota(_read(root / "sys/fs/cgroup/cpu.max"))
    return text if quota is None else f"{text}, limited to {quota:g} cores' worth of time"


def _memory(root: Path) -> str:
    meminfo = _read(root / "proc/meminfo")
    total, available = (memory_bytes(meminfo, name) for name in ("MemTotal", "MemAvailable"))
    if total is None or available is None:
        return "unknown"
    text = f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f} GiB"
    limit = container_limit_bytes(root)
    if limit is None or limit >= total:
        return text
    return f"{text}, limited to {limit / _GIB:.1f} GiB"


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _ok(name: str, detail: str) -> Component:
    return Component(topic=_TOPIC, name=name, verdict=Availability.OK, detail=detail)
