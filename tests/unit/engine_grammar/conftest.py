"""One loaded demo model for all of these tests."""

from __future__ import annotations

import pytest

from tests.unit.engine_grammar.answers import DemoModel


@pytest.fixture(scope="session")
def demo() -> DemoModel:
    return DemoModel()
