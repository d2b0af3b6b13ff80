"""What was loaded is set aside; what comes later is not."""

from __future__ import annotations

import ctypes
import gc
import resource
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.shared.process.collector import freeze_loaded_objects, pause_collector

YOUNG = 50 * 700  # objects: as many passes over the youngest as five over older ones by default


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.long
@pytest.mark.usefixtures("collector_off")
def test_only_what_comes_later_is_looked_at() -> None:
    gc.unfreeze()
    loaded = [Circle()]
    freeze_loaded_objects()
    assert all(found is not loaded for found in gc.get_objects())
    later = weakref.ref(Circle())
    assert later() is not None
    gc.collect()
    assert later() is None


@pytest.mark.usefixtures("collector_off")
def test_there_are_no_passes_during_a_start() -> None:
    gc.enable()
    pause_collector()
    assert not gc.isenabled()
    freeze_loaded_objects()
    assert gc.isenabled()


@pytest.mark.usefixtures("collector_off")
def test_what_is_under_way_is_hardly_looked_at() -> None:
    passes: list[int] = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            passes.append(about["generation"])

    freeze_loaded_objects()
    gc.callbacks.append(note)
    gc.enable()
    under_way = [[number] for number in range(YOUNG)]
    gc.callbacks.remove(note)
    assert len(under_way) == YOUNG
    assert len(passes) > 20
    assert set(passes) == {0}


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_what_loading_has_freed_goes_back_to_the_system() -> None:
    kept: list[bytearray] = []

    def load() -> None:
        """In an arena of its own, at whose end something stays."""
        many = [bytearray(1000) for _ in range(64_000)]
        kept.append(bytearray(1000))
        many.clear()

    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    before = resident_bytes()
    freeze_loaded_objects()
    assert resident_bytes() < before - 32_000_000


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
