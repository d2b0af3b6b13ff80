"""OpenAI's and Anthropic's SDKs for Node, unchanged, where both are installed."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pytest

from pdserve.demo_model import CHECKPOINT_PATH
from tests.architecture.repository import ROOT
from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet, fleet_config, running

NODE = shutil.which("node")
SDKS = ("openai", "@anthropic-ai/sdk")
PROGRAM = Path(__file__).with_name("node_sdks.mjs")
WITHIN_S = 120.0


def lacks(sdk: str) -> bool:
    assert NODE is not None
    found = subprocess.run([NODE, "-e", f"require.resolve('{sdk}')"], cwd=ROOT, capture_output=True)
    return found.returncode != 0


async def test_they_run_unchanged() -> None:
    if NODE is None:
        pytest.skip("no node is installed")
    if absent := [sdk for sdk in SDKS if lacks(sdk)]:
        pytest.skip(f"not installed: npm install --no-save {' '.join(absent)}")
    async with running(Fleet(fleet_config(CHECKPOINT_PATH))) as fleet:  # whose model has tools
        await run(str(PROGRAM), fleet.url, MODEL)
        await fleet.assert_baseline()


async def run(*words: str) -> None:
    """Run a program for Node, which must end well."""
    assert NODE is not None
    child = await asyncio.create_subprocess_exec(
        NODE, *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), WITHIN_S)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0, output.decode()
