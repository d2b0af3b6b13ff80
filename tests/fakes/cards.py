"""GPUs as torch tells of them: how many, and what is free on each. Nothing can be computed there.

`tests/fakes/gpus.py` has those that the KV transfer copies between.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

CARD_BYTES = 80 << 30


def show_cards(
    monkeypatch: pytest.MonkeyPatch,
    free_bytes: Sequence[int],
    capability: tuple[int, int] = (9, 0),
) -> None:
    """In place of this machine's: one for each of `free_bytes`, of CARD_BYTES."""

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        return free_bytes[device.index or 0], CARD_BYTES

    told = {
        "is_available": lambda: bool(free_bytes),
        "device_count": lambda: len(free_bytes),
        "mem_get_info": mem_get_info,
        "get_device_capability": lambda: capability,
    }
    for name, answer in told.items():
        monkeypatch.setattr(torch.cuda, name, answer)
