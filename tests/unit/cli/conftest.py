import sys
from pathlib import Path

import pytest


@pytest.fixture
def fake_command() -> tuple[str, ...]:
    """A program that takes the flags of `pdserve coordinator|prefill|decode`."""
    return (sys.executable, str(Path(__file__).with_name("fake_process.py")))
