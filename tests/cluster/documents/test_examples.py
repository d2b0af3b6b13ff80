"""Every example of `examples/` runs, and shows what it says."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from pdserve.commands.bench.compare import clusters
from pdserve.commands.cli.main import main
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.settings.access import AccessConfig
from pdserve.settings.file import load_config
from tests.architecture.repository import ROOT
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.cluster.forked import ForkedChild, HastyChild
from tests.installed import finds, install
from tests.matrix import matrix

EXAMPLES = ROOT / "examples"
WITHIN_S = 120.0
CASCADE_S = 900.0  # for 1,500 questions, on a busy machine


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(
    tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fleet]:
    """A cluster with the example's tenants and the example's policies."""
    site = install(EXAMPLES / "own_policy", tmp_path_factory.mktemp("site"))

    class ChildThatFinds(ForkedChild):
        def _prepare(self, words: list[str]) -> Callable[[], None]:
            return finds(site)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        no_refusals = {"routing": {"admission": False}}  # however slow the machine is
        named = load_config(ClusterConfig, EXAMPLES / "own_policy/cluster.toml", no_refusals)
        config = fleet_config(
            tiny_checkpoint,
            decode=2,
            policy=named.policy,
            routing=named.routing,
            access=AccessConfig(
                key_file=str(EXAMPLES / "two_tenants/keys.toml"), readers="anybody"
            ),
        )
        async with running(Fleet(config, make_child=ChildThatFinds)) as fleet:
            yield fleet


async def output_of(*words: str, within_s: float = WITHIN_S) -> str:
    """What the program prints; it must end well."""
    child = await asyncio.create_subprocess_exec(
        *words, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        output, _ = await asyncio.wait_for(child.communicate(), within_s)
    finally:
        if child.returncode is None:
            child.kill()
    assert child.returncode == 0, output.decode()
    return output.decode()


async def test_the_openai_client(fleet: Fleet) -> None:
    program = str(EXAMPLES / "openai_client.py")
    lines = await output_of(sys.executable, program, fleet.url, "pds-example-acme")
    assert re.search(r"^\d+ tokens$", lines, re.MULTILINE)
    assert re.search(r"^about 42: {'is_even': (True|False), 'digit': [012]}$", lines, re.MULTILINE)
    assert re.search(r"^refused: .*temperature", lines, re.MULTILINE)


@pytest.mark.long  # quotas of tenants are by default
async def test_two_tenants(fleet: Fleet) -> None:
    lines = await output_of(sys.executable, str(EXAMPLES / "two_tenants/clients.py"), fleet.url)
    assert "acme: 8 answered, 0 refused" in lines
    assert "nightly: 5 answered, 3 refused" in lines
    assert "again in" in lines
    assert "a stranger: " in lines


async def test_a_router_of_one_s_own(fleet: Fleet) -> None:
    """Which node is the last of its pool depends on which came first."""
    headers = {"Authorization": "Bearer pds-example-acme"}
    nodes = []
    async with aiohttp.ClientSession(headers=headers) as session:
        for num_tokens in (10, 300, 11, 301, 12, 302):
            body = {"model": "tiny", "prompt": [65] * num_tokens, "max_tokens": 4}
            async with session.post(f"{fleet.url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                nodes.append(response.headers["x-pdserve-decode-node"])
    assert sorted({*nodes}) == ["decode-0", "decode-1"]
    assert nodes == nodes[:2] * 3


@pytest.mark.long
@pytest.mark.parametrize("flags", matrix([["--modes=disaggregated"], []], 1))
async def test_a_comparison(
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Forked, since it starts and ends two clusters for each mode."""
    monkeypatch.setattr(clusters, "Cluster", partial(Cluster, make_child=HastyChild))
    words = [f"--config={EXAMPLES}/comparison.toml", f"--out={tmp_path}/out", *flags]
    assert await asyncio.to_thread(main, ["bench", "compare", *words]) == 0
    assert "goodput" in capsys.readouterr().out
    assert (tmp_path / "out/report.json").is_file()


def test_every_example_is_run() -> None:
    listed = re.findall(r"\]\((\w[\w/.]*)\)", (EXAMPLES / "README.md").read_text())
    files = [path for path in EXAMPLES.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    named = {str(path.relative_to(EXAMPLES)) for path in files} - {"README.md"}
    assert named == set(listed)


@pytest.mark.long
@pytest.mark.timeout(CASCADE_S + 30.0)
async def test_a_cascade_is_better_than_chance_and_cheaper_than_its_large_model() -> None:
    words = [str(EXAMPLES / "cascade/compare.py"), "12", "40"]
    lines = await output_of(sys.executable, *words, within_s=CASCADE_S)
    told = re.findall(r"^(\w+): ([\d.]+)% right, (\d+)% by large", lines, re.MULTILINE)
    arms = {name: (float(right), int(share)) for name, right, share in told}
    assert arms["large"][1] == 100
    assert arms["cascade"][1] < 60
    assert arms["cascade"][1] == arms["chance"][1]
    assert arms["routed"][1] < 70
    for name in "cascade", "routed":
        assert arms[name][0] >= arms["large"][0] - 4
        assert arms[name][0] >= arms["chance"][0] + 4
