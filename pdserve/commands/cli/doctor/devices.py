"""GPUs and RDMA devices."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

from pdserve.commands.cli.doctor.component import Availability, Component

_GPU = "GPUs"
_ATTENTION = "attention on GPUs"
_RDMA = "RDMA"
_GIB = 2**30


def gpu_components(driver: Path = Path("/proc/driver/nvidia/version")) -> list[Component]:
    """All GPUs that torch can use, or why there is none."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        return [_no_gpu("torch", f"torch cannot be imported: {error}")]
    if not torch.cuda.is_available():
        return [_no_gpu("cuda", _why_no_cuda(torch, driver))]
    return [_gpu(torch, i) for i in range(torch.cuda.device_count())]


def attention_components() -> list[Component]:
    """All attention backends for GPUs: a node uses the fastest of those that support its model."""
    try:
        catalog = importlib.import_module("pdserve.engine.cuda.attention.catalog")
    except ImportError as error:
        return [_attention("torch", f"torch cannot be imported: {error}")]
    return [_attention(kind.name, kind.obstacle(None)) for kind in catalog.KINDS]


def rdma_components(devices: Path = Path("/sys/class/infiniband")) -> list[Component]:
    """All RDMA devices that the kernel knows."""
    names = sorted(path.name for path in devices.iterdir()) if devices.is_dir() else []
    if not names:
        return [
            Component(
                topic=_RDMA,
                name="devices",
                verdict=Availability.ABSENT,
                detail=f"none in {devices}",
                needed_for="KV transfer between hosts that costs no CPU",
            )
        ]
    return [
        Component(
            topic=_RDMA, name=name, verdict=Availability.OK, detail=_rdma_ports(devices / name)
        )
        for name in names
    ]


def _rdma_ports(device: Path) -> str:
    states = []
    for port in sorted((device / "ports").glob("*")):
        words = [(port / name).read_text().strip() for name in ("state", "rate", "link_layer")]
        states.append(f"port {port.name}: {', '.join(words)}")
    return "; ".join(states) or "no ports"


def _why_no_cuda(torch: ModuleType, driver: Path) -> str:
    if not driver.exists():
        return "no NVIDIA driver is loaded"
    if torch.version.cuda is None:
        return f"a driver is loaded, but torch {torch.__version__} is built without CUDA"
    return f"a driver is loaded, but torch {torch.__version__} finds no device"


def _no_gpu(name: str, detail: str) -> Component:
    return Component(
        topic=_GPU,
        name=name,
        verdict=Availability.ABSENT,
        detail=detail,
        needed_for="serving on GPUs; CPUs serve without",
    )


def _attention(name: str, obstacle: str | None) -> Component:
    works = "always there, and slow" if name == "reference" else "works here"
    return Component(
        topic=_ATTENTION,
        name=name,
        verdict=Availability.OK if obstacle is None else Availability.ABSENT,
        detail=obstacle or works,
        needed_for="serving on GPUs faster than what is below it",
    )


def _gpu(torch: ModuleType, index: int) -> Component:
    device = torch.cuda.get_device_properties(index)
    return Component(
        topic=_GPU,
        name=f"cuda:{index}",
        verdict=Availability.OK,
        detail=f"{device.name}, {device.total_memory / _GIB:.0f} GiB, "
        f"compute capability {device.major}.{device.minor}",
    )
