"""The README's example, run as it stands there, against the demo model."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from tests.cluster.forked import HastyChild

README = Path(__file__).resolve().parents[3] / "README.md"


async def test_the_example_prints_the_answer() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    async with Cluster(ClusterConfig(port=0), make_child=HastyChild) as cluster:
        program = example.replace("http://127.0.0.1:8000", cluster.url)
        assert program != example
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(child.communicate(), 60)
    assert child.returncode == 0
    assert "42" in output.decode()
