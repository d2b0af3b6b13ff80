"""What was loaded is set aside; what comes later is not."""

from __future__ import annotations

import gc
import weakref

import pytest

from pdserve.collector import keep_what_is_loaded


class Circle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("collector_off")
def test_only_what_comes_later_is_looked_at() -> None:
    gc.unfreeze()
    loaded = [Circle()]
    keep_what_is_loaded()
    assert all(found is not loaded for found in gc.get_objects())
    later = weakref.ref(Circle())
    assert later() is not None
    gc.collect()
    assert later() is None
