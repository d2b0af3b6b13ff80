"""What every test of the coordinator has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from coordinator.text import renderers
from coordinator.text.grammars import process
from tests.unit.coordinator.text.forked_children import ForkedLimitedProcess, end_server


@pytest.fixture(scope="session", autouse=True)
def _forked() -> Iterator[None]:
    """Who checks grammars or renders templates is forked: it does not start Python anew."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (renderers, process):
            patch.setattr(module, "LimitedProcess", ForkedLimitedProcess)
        yield
    end_server()
