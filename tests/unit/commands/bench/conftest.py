"""What benchmarks change of the process that runs them."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pdserve import _native


@pytest.fixture
def cores() -> Iterator[None]:
    """What a run changes for the whole process is as it was."""
    cpus, threads, native = os.sched_getaffinity(0), torch.get_num_threads(), _native.num_threads()
    yield
    os.sched_setaffinity(0, cpus)
    torch.set_num_threads(threads)
    _native.set_num_threads(native)
