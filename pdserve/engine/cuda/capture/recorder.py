"""Captures CUDA graphs with torch. See graphs.py for what is captured."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class CudaRecording:
    """Implements `graphs.Recording`."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self._graph = graph
        self.num_bytes = num_bytes

    def replay(self) -> None:
        """Launch the work again, on the current stream."""
        self._graph.replay()


class CudaRecorder:
    """Implements `graphs.Recorder`. Graphs share a memory pool: only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._memory = torch.cuda.graph_pool_handle()
            # Captured kernels keep their stream's priority. Copies of KV have the lowest one.
            _, highest = torch.cuda.current_stream(device).priority_range()
            self._stream = torch.cuda.Stream(device, highest)  # type: ignore[no-untyped-call]

    def record(self, work: Callable[[], object]) -> CudaRecording:
        """Run the work at least once, and capture it."""
        return self.record_each([work])[0]

    def record_each(self, works: Sequence[Callable[[], object]]) -> list[CudaRecording]:
        """Run and capture several in order; each needs what those before made."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream(self._device)
            # Run once uncaptured: Triton compiles and cuBLAS allocates, which capturing forbids.
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for work in works:
                    work()
            current.wait_stream(self._stream)
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()  # what that took is not the graphs'
            with torch.cuda.stream(current):  # a capture that fails leaves the thread on its own
                return [self._captured(work) for work in works]

    def _captured(self, work: Callable[[], object]) -> CudaRecording:
        free_before, _ = torch.cuda.mem_get_info(self._device)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy KV and allocate meanwhile; only this one must not.
        with torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        torch.cuda.synchronize(self._device)
        free_after, _ = torch.cuda.mem_get_info(self._device)
        return CudaRecording(graph, max(0, free_before - free_after))
