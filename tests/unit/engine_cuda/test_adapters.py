"""Adapters in CudaDecoder: what TorchDecoder computes with them, in any mix."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton")

from pdserve.shared.errors import AdapterRefused
from tests.adapters import make_adapter
from tests.checkpoints import make_checkpoint
from tests.fakes.late_copies import PromptCopies
from tests.unit.engine_cuda.adapted import (
    CPU,
    SIZES,
    check_bits,
    check_mix,
    nodes_of,
    said,
    taken,
)

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.long  # interpreted; the bits of a row are looked at by default
def test_a_mix_of_adapters_says_what_torch_says(tmp_path: Path) -> None:
    check_mix(tmp_path, CPU, PromptCopies())


def test_the_bits_of_a_row_do_not_depend_on_its_batch() -> None:
    check_bits(CPU)


@pytest.mark.long
def test_routers_and_shared_experts_are_adapted_and_others_refused(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen2_moe", **SIZES)
    torch_node, cuda = nodes_of(base, CPU, PromptCopies())
    modules = ("q_proj", "mlp.gate", "shared_expert.up_proj", "shared_expert.down_proj")
    adapters = taken([torch_node, cuda], base, make_adapter(tmp_path / "a", base, modules=modules))
    assert said(cuda, adapters) == said(torch_node, adapters)
    with pytest.raises(
        AdapterRefused, match=r"experts\.0\..*: experts, and heads .* are not adapted on GPUs"
    ):
        taken([cuda], base, make_adapter(tmp_path / "b", base, modules=("experts.0.up_proj",)))
