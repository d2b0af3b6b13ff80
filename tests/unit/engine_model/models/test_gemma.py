"""Gemma, against transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.engine_model.harness import DecoderKind
from tests.unit.engine_model.reference import assert_matches


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_gemma_matches_transformers(family: str, checkpoint_of: Callable[..., Path]) -> None:
    assert_matches(checkpoint_of(family), DecoderKind.TORCH)
