"""A real Prometheus scrapes a real cluster: no rule and no panel is dead."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from pdserve.commands.cluster.ports import ReservedPort
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, poll
from tests.operations.promql import PROMETHEUS, Query, alerts, panels, recorded

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="needs prometheus (Debian's package prometheus)"
)
WITHIN_S = 40.0
EVERY = "500ms"


async def test_every_query_of_rules_and_dashboards_returns_data(
    fleet: Fleet, client: Client, tmp_path: Path
) -> None:
    queries = [*recorded(), *panels(), *_what_alerts_look_at()]
    async with prometheus(tmp_path, fleet.url) as ask:

        async def look() -> bool:
            await asyncio.gather(*(client.complete(make_prompt(80 + i), 4) for i in range(4)))
            queries[:] = [query for query in queries if not await ask(query.text)]
            return not queries

        await poll(look, WITHIN_S, lambda: f"no data for {[query.where for query in queries]}")
        health = await ask("ALERTS{alertstate='firing'}")
    assert health == [], "a cluster that is well has no alert"


def _what_alerts_look_at() -> list[Query]:
    """Alerts are empty as long as all is well; what they look at must not be."""
    names = {name for query in alerts() for name, _ in query.selectors()}
    return [Query(name, name) for name in sorted(names)]


@asynccontextmanager
async def prometheus(folder: Path, coordinator: str) -> AsyncIterator[Any]:
    """A server with the example's configuration, but in a hurry; yields what asks it."""
    with closing(ReservedPort("127.0.0.1")) as port:
        address = f"127.0.0.1:{port.port}"
    (folder / "prometheus.yml").write_text(_config(coordinator))
    process = await asyncio.create_subprocess_exec(
        "prometheus",
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address={address}",
        "--log.level=warn",
    )
    try:
        async with aiohttp.ClientSession(f"http://{address}") as session:

            async def ask(expression: str) -> list[Any]:
                asked = expression.replace("$__rate_interval", "1m")
                async with session.get("/api/v1/query", params={"query": asked}) as response:
                    answer = await response.json()
                assert answer["status"] == "success", (expression, answer)
                return answer["data"]["result"]

            async def is_up() -> bool:
                try:
                    async with session.get("/-/ready") as response:
                        return response.status == 200
                except aiohttp.ClientConnectionError:
                    return False

            await poll(is_up, WITHIN_S, lambda: "prometheus is not ready")
            yield ask
    finally:
        process.terminate()
        await process.wait()


def _config(coordinator: str) -> str:
    """The example's, for this cluster."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": EVERY, "evaluation_interval": EVERY}
    config["rule_files"] = [str(PROMETHEUS / name) for name in config["rule_files"]]
    of_coordinator, of_nodes = config["scrape_configs"]
    of_coordinator["static_configs"] = [{"targets": [coordinator.removeprefix("http://")]}]
    url = of_nodes["http_sd_configs"][0]["url"]
    of_nodes["http_sd_configs"] = [
        {"url": coordinator + url[url.index("/metrics") :], "refresh_interval": "1s"}
    ]
    return yaml.safe_dump(config)
