"""Which driver there is, and what is missing for one. cupy is imported only when it is needed."""

from __future__ import annotations

from kv_transfer.cuda.driver import Driver
from pdserve.shared.errors import TransportUnavailable
from pdserve.shared.hints.extras import how_to_install

_INSTALL = how_to_install("cuda")


def missing() -> str | None:
    """What this process lacks for using GPU memory through CUDA; None: nothing."""
    try:
        from kv_transfer.cuda import cupy_driver
    except ImportError as error:
        return f"{error}: {_INSTALL}"
    return cupy_driver.no_device()


def nccl_missing() -> str | None:
    """What this process lacks for NCCL; None: nothing."""
    lacking = missing()
    if lacking is not None:
        return lacking
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return f"{error}: {_INSTALL}"
    # If the library is not found, cupy provides a placeholder module.
    return None if nccl.available else f"the NCCL library is not found: {_INSTALL}"


def open_driver(device: int) -> Driver:
    """The GPU with this ordinal.

    Raises:
        TransportUnavailable: something is missing; says what.
        DeviceError: CUDA failed.
    """
    lacking = missing()
    if lacking is not None:
        raise TransportUnavailable(lacking)
    from kv_transfer.cuda import cupy_driver

    return cupy_driver.CupyDriver(device)
