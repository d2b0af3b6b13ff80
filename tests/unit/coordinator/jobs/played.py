"""A cluster that has a node: lines of batches wait for one."""

from __future__ import annotations

from tests.fakes.generator import FakeGenerator, Script, says
from tests.fakes.statuses import node_status


def cluster(script: Script | None = None) -> FakeGenerator:
    """It follows a script, as far as tests of batches have one."""
    return FakeGenerator(script or says("Hello world"), nodes=[node_status("d0", "decode")])
