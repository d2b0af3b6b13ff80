import sys

import pytest

from tests.fakes import process


@pytest.fixture
def fake_command() -> tuple[str, ...]:
    """A program that takes the flags of `pdserve coordinator|prefill|decode`."""
    return (sys.executable, process.__file__)
