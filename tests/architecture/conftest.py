"""What these tests read of the repository is read once, and forgotten with the last of them."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.architecture.repository import tree_of


@pytest.fixture(scope="package", autouse=True)
def _trees() -> Iterator[None]:
    gc.disable()  # millions of nodes, and no cycles
    yield
    tree_of.cache_clear()
    gc.enable()
