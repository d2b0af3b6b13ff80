"""Every Triton kernel, as served, compiles for A100, H100 and B200, and fits what they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.matrix import matrix

pytest.importorskip("triton")

WITHIN_S = 900.0
pytestmark = pytest.mark.timeout(WITHIN_S + 10.0)

ROOT = Path(__file__).parents[3]
# Shared memory that one block may have.
SHARED_BYTES = {100: 227 << 10, 90: 227 << 10, 80: 163 << 10}


AS_ON_CPUS = ("choose_tokens", "multiply", "multiply_quantised_experts", "quantise_rows")

ALL = ""
CASES = [(100, "launch_adapters"), *((capability, ALL) for capability in SHARED_BYTES)]


def compiled(capability: int, only: str, cache: Path) -> list[dict[str, Any]]:
    """The kernels for a GPU of this compute capability, compiled by a process of their own."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine_cuda.compile_kernels", str(capability), only],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("capability", "only"), matrix(CASES, 1))
def test_every_kernel_compiles(capability: int, only: str, tmp_path: Path) -> None:
    found = compiled(capability, only, tmp_path)
    assert len({kernel["kernel"] for kernel in found}) == (2 if only else 24)
    for kernel in found:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        is_product = kernel["kernel"] in (
            "attend_chunks",
            "attend_single_rows",
            "multiply",
            "multiply_experts",
            "multiply_quantised_experts",
            "shrink_rows",
        )
        # In float32 the cores would cut the numbers off.
        assert kernel["uses_tensor_cores"] == (is_product and not kernel["is_float32"]), kernel
        assert not (kernel["kernel"] in AS_ON_CPUS and kernel["fuses"]), kernel
