"""Every Triton kernel, as served, compiles for A100, H100 and B200, and fits what they have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

WITHIN_S = 300.0
pytestmark = pytest.mark.timeout(WITHIN_S + 10.0)

ROOT = Path(__file__).parents[3]
# Shared memory that one block may have.
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Compute capability |-> its kernels. One process compiles all: it takes seconds to start."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.engine_cuda.compile_kernels"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_every_kernel_compiles(capability: int, compiled: dict[str, list[dict[str, Any]]]) -> None:
    found = compiled[str(capability)]
    assert len({kernel["kernel"] for kernel in found}) == 14
    for kernel in found:
        assert kernel["spilled_bytes"] == 0, kernel
        assert kernel["shared_bytes"] <= SHARED_BYTES[capability], kernel
        is_product = kernel["kernel"] in (
            "attend_chunks",
            "attend_single_rows",
            "multiply_experts",
        )
        # In float32 the cores would cut the numbers off.
        assert kernel["uses_tensor_cores"] == (is_product and not kernel["is_float32"]), kernel
        assert not (kernel["kernel"] == "choose_tokens" and kernel["fuses"]), "not as on CPUs"
