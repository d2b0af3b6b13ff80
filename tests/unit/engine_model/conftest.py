from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.unit.engine_model.harness import DecoderKind


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session", params=matrix(DecoderKind, 1), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> DecoderKind:
    """Each decoder in turn: what holds for one holds for the other.

    By default, torch's has to have transformers' logits of each family (EACH_DECODER), and it
    computes what is tested of GPUs.
    """
    return request.param


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_checkpoint, once per set of arguments and session. Not to be written to."""
    made: dict[str, Path] = {}

    def make(family: str, **kwargs: Any) -> Path:
        key = repr((family, sorted(kwargs.items())))
        if key not in made:
            made[key] = make_checkpoint(tmp_path_factory.mktemp(family), family, **kwargs)
        return made[key]

    return make
