"""What every cluster of nodes with several ranks has: a checkpoint, and what it computes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.checkpoints import Reference, make_family
from tests.cluster.ranks.ranked_nodes import FAMILY
from tests.matrix import matrix


@pytest.fixture(scope="package", params=matrix([FAMILY, "gemma3, qk-norm, windows, two ropes"], 1))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("ranked"), request.param)


@pytest.fixture(scope="package")
def reference(checkpoint: Path) -> Reference:
    return Reference(checkpoint)
