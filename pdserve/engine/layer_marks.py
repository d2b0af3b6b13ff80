"""Tells when layers that were launched on a device have really been computed."""

from __future__ import annotations

from collections import deque

import torch

from pdserve.engine.layer_progress import LayerProgress


class LayerMarks:
    """Reports the layers of one step once their KV is actually written, also on a GPU."""

    def __init__(self, progress: LayerProgress, device: torch.device) -> None:
        self.heard = LayerProgress(progress.ends, self._on_kv)  # passed to the model
        self._progress = progress
        self._device = device
        self._is_asynchronous = device.type != "cpu"
        self._launched: deque[tuple[int, torch.cuda.Event]] = deque()

    def _on_kv(self, num_layers: int) -> None:
        """Handle that the KV of `num_layers` layers was written, or on a GPU launched."""
        if not self._is_asynchronous:
            self._progress.done(num_layers)
            return
        event = torch.cuda.current_stream(self._device).record_event()
        self._launched.append((num_layers, event))
        while _is_complete(self._launched[0][1]) and self._report_first():
            pass

    def wait(self) -> None:
        """Wait for layers that were launched but not reported yet, and report them in order."""
        while self._launched:
            self._launched[0][1].synchronize()
            self._report_first()

    def _report_first(self) -> bool:
        """Report the first launched group of layers; return whether more were launched."""
        num_layers, _ = self._launched.popleft()
        self._progress.done(num_layers)
        return bool(self._launched)


def _is_complete(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
