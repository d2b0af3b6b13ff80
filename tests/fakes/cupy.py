"""As much of cupy as the KV transfer's driver calls, over host memory, without any GPU.

Work is done when its stream is waited for. Every call must be made while a device is current, as
CUDA's device is that of the thread.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kv_transfer.cuda as package

MODULES = ("cupy", "cupy.cuda", "cupy.cuda.runtime", "kv_transfer.cuda.cupy_driver")
PORTABLE, DEFAULT_KIND = 1, 4  # CUDA's numbers


class CudaError(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError."""


@dataclass
class FakeCuda:
    """What calls have left behind, and what shall fail."""

    memory: dict[int, NDArray[np.uint8]] = field(default_factory=dict)  # live allocations
    pinned: dict[int, NDArray[np.uint8]] = field(default_factory=dict)
    streams: list[FakeStream] = field(default_factory=list)  # all that were ever made
    kinds: list[int] = field(default_factory=list)  # of the copies that were asked for
    pin_flags: list[int] = field(default_factory=list)
    current: list[int] = field(default_factory=list)  # the device, innermost last
    pin_error: str = ""
    wait_error: str = ""  # of waiting for any stream

    def take(self, num_bytes: int, allocations: dict[int, NDArray[np.uint8]]) -> int:
        """Allocate; returns the address."""
        self.check()
        room = np.zeros(num_bytes, np.uint8)
        allocations[room.ctypes.data] = room
        return room.ctypes.data

    def check(self) -> None:
        assert self.current, "a call to CUDA without a current device"

    def stream(self, pointer: int) -> FakeStream:
        return self.streams[pointer - 1]

    def modules(self) -> dict[str, ModuleType]:
        """The modules, by name."""
        runtime = ModuleType("cupy.cuda.runtime")
        runtime.__dict__.update(
            CUDARuntimeError=CudaError,
            memcpyHostToDevice=1,
            memcpyDefault=DEFAULT_KIND,
            hostAllocPortable=PORTABLE,
            getDeviceCount=lambda: 2,
            deviceGetPCIBusId=lambda device: f"0000:{device:02x}:00.0",
            deviceSynchronize=self.check,
            malloc=lambda size: self.take(size, self.memory),
            memset=lambda address, value, size: ctypes.memset(address, value, size),
            free=lambda address: self.memory.pop(address),
            hostAlloc=self._pin,
            freeHost=lambda address: self.pinned.pop(address),
            memcpyAsync=self._copy,
        )
        cuda = ModuleType("cupy.cuda")
        compiler = ModuleType("cupy.cuda.compiler")
        compiler.__dict__.update(CompileException=type("CompileException", (Exception,), {}))
        cuda.__dict__.update(
            runtime=runtime,
            compiler=compiler,
            Device=lambda number: FakeDevice(self, number),
            Stream=lambda **options: FakeStream(self, options),
            Event=lambda **options: FakeEvent(self),
        )
        cupy = ModuleType("cupy")
        cupy.__dict__.update(cuda=cuda, RawModule=FakeKernels)
        return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime}

    def _pin(self, num_bytes: int, flags: int) -> int:
        if self.pin_error:
            raise CudaError(self.pin_error)
        self.pin_flags.append(flags)
        return self.take(num_bytes, self.pinned)

    def _copy(self, to: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        self.check()
        self.kinds.append(kind)
        self.stream(stream).work.append(lambda: ctypes.memmove(to, source, num_bytes))


class FakeDevice:
    """As cupy.cuda.Device."""

    def __init__(self, cuda: FakeCuda, number: int) -> None:
        self.id = number
        self._cuda = cuda

    def __enter__(self) -> None:
        self._cuda.current.append(self.id)

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._cuda.current.pop()


class FakeStream:
    """As cupy.cuda.Stream; with what it was made."""

    def __init__(self, cuda: FakeCuda, options: dict[str, Any]) -> None:
        cuda.check()
        self.options = options
        self.work: list[Callable[[], object]] = []
        cuda.streams.append(self)
        self.ptr = len(cuda.streams)


class FakeEvent:
    """As cupy.cuda.Event, of which each is recorded before it is waited for."""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda
        self._stream: FakeStream | None = None

    def record(self, stream: FakeStream) -> None:
        self._stream = stream

    def synchronize(self) -> None:
        self._cuda.check()
        assert self._stream is not None
        if self._cuda.wait_error:
            raise CudaError(self._cuda.wait_error)
        work, self._stream.work = self._stream.work, []
        for job in work:
            job()


class FakeKernels:
    """As cupy.RawModule, whose kernels nobody here launches."""

    def __init__(self, code: str, options: tuple[str, ...]) -> None:
        self._code = code

    def get_function(self, name: str) -> FakeKernels:
        assert f"void {name}(" in self._code
        return self

    def compile(self) -> None:
        pass


@contextmanager
def installed(cuda: FakeCuda) -> Iterator[ModuleType]:
    """The module kv_transfer.cuda.cupy_driver, imported over this CUDA."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.modules.update(cuda.modules())
    try:
        import kv_transfer.cuda.cupy_driver as driver

        yield driver
    finally:
        package.__dict__.pop("cupy_driver", None)
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
