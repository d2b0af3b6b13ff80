"""What a node's metrics server tells strangers: for probes all, otherwise nothing."""

from __future__ import annotations

import aiohttp

from pdserve.node.reports.metrics_server import MetricsServer
from pdserve.node.reports.readers import KEPT_S, Readers
from pdserve.protocol import NodeState
from pdserve.settings.access import hash_key
from pdserve.shared.clock import ManualClock

STATES = ["standby", *(state.name.lower() for state in NodeState)]


async def no_reader(shown: str | None) -> bool:
    return False


async def test_a_probe_is_told_whether_the_node_is_well() -> None:
    state = ""
    server = MetricsServer(lambda: iter(()), lambda after: b"", lambda: state, no_reader)
    port = await server.start("127.0.0.1", 0)
    told = []
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        for each in STATES:
            state = each
            async with client.get("/health") as response:
                told.append((response.status == 200, await response.text()))
    await server.close()
    assert told == [(each in ("ready", "standby"), each) for each in STATES]


async def test_what_a_node_tells_is_for_readers_and_for_nobody_else() -> None:
    may: dict[str, bool | None] = {hash_key("known"): True, "": False}
    asked: list[str] = []

    async def ask(key_hash: str) -> bool | None:
        asked.append(key_hash)
        return may.get(key_hash, False)

    clock = ManualClock()
    readers = Readers(ask, clock)
    server = MetricsServer(lambda: iter(()), lambda after: b"{}", lambda: "ready", readers.may_read)
    port = await server.start("127.0.0.1", 0)

    async def statuses(shown: str = "", host: str = "localhost") -> list[int]:
        headers = {"Host": host} | ({"Authorization": f"Bearer {shown}"} if shown else {})
        found = []
        for path in ("/health", "/metrics", "/samples", "/other"):
            async with client.get(path, headers=headers) as response:
                found.append(response.status)
        return found

    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as client:
        assert await statuses() == [200, 401, 401, 401]
        assert await statuses("unknown") == [200, 401, 401, 401]
        assert await statuses("known") == [200, 200, 200, 404]
        assert asked.count(hash_key("known")) == 1, "it is remembered"
        may[hash_key("known")] = None  # no coordinator answers
        clock.advance(KEPT_S + 1)
        assert await statuses("known") == [200, 200, 200, 404]
        may[hash_key("known")] = False  # the key was taken away
        assert await statuses("known") == [200, 401, 401, 401]
        may[""] = True  # keys are not in use
        assert await statuses() == [200, 200, 200, 404]
        assert await statuses(host="evil.example") == [200, 403, 403, 403]
    await server.close()
