"""Nodes that change pools while streams run over them: nobody notices but the router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.commands.cli.main import main
from pdserve.settings.config import RoutingConfig
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import DEADLINE_S, Client, Follower, Output
from tests.cluster.fleet import Fleet, fleet_config, poll, running

LIMIT = 100  # tokens of output
LENGTHS = (5, 40, 333, 1100)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    engine = {"token_budget": 37, "max_model_len": 2048}
    # Every node of a pool has its turn, and a slow machine has nobody refused.
    routing = RoutingConfig(router="round-robin", admission=False)
    config = fleet_config(tiny_checkpoint, prefill=2, engine=engine, routing=routing)
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(fleet.url) as client:
        yield client
    await fleet.assert_baseline(within_s=20.0)


async def change_role(fleet: Fleet, *arguments: str) -> tuple[int, str]:
    """`pdserve role`: its exit code, and what it said."""
    said = StringIO()

    def run() -> int:
        with redirect_stdout(said), redirect_stderr(said):
            return main(["role", *arguments, "--url", fleet.url])

    return await asyncio.to_thread(run), said.getvalue()


async def roles(fleet: Fleet) -> dict[str, str]:
    """node id |-> its role in GET /status."""
    return {node.node_id: node.role for node in (await fleet.status()).nodes}


async def begun(client: Client, salt: str) -> list[Follower]:
    """Streams of all lengths, each at its second token."""
    followers = [
        Follower(client, make_prompt(length), LIMIT, cache_salt=salt) for length in LENGTHS
    ]
    for follower in followers:
        await follower.reached(2)
    return followers


class Load:
    """Streams one after another, for each length of prompt, so that some always run."""

    def __init__(self, client: Client) -> None:
        self.ended: list[tuple[str, int, Output]] = []  # phase it began in, prompt length
        self._client = client
        self._phase = "before"
        self._salts = count()
        self._streams = [asyncio.create_task(self._stream(length)) for length in LENGTHS]

    async def enter(self, phase: str) -> list[Output]:
        """Wait until streams that began in a new phase have ended, and return them."""
        self._phase = phase

        async def look() -> bool:
            return len(self.of(phase)) >= 2 * len(LENGTHS)

        await poll(look, DEADLINE_S, lambda: f"{phase}: {len(self.of(phase))} streams have ended")
        return self.of(phase)

    def of(self, phase: str) -> list[Output]:
        """What has ended of the streams that began in this phase."""
        return [output for began, _, output in self.ended if began == phase]

    async def stop(self) -> None:
        """Begin no further streams, and wait for those that run."""
        self._phase = ""
        await asyncio.gather(*self._streams)

    async def _stream(self, length: int) -> None:
        while self._phase:
            salt = str(next(self._salts))  # so nothing is cached
            phase = self._phase
            follower = Follower(self._client, make_prompt(length), LIMIT, cache_salt=salt)
            self.ended.append((phase, length, await follower.end()))


async def test_a_node_goes_to_the_other_pool_and_comes_back_under_load(
    fleet: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    load = Load(client)
    before = await load.enter("before")
    assert {output.decode_node for output in before} == {"decode-0"}

    code, said = await change_role(fleet, "prefill-1", "decode")
    assert code == 0, said
    assert "prefill-1 is a decode node now" in said
    assert "1 prefill, 2 decode" in said
    assert await roles(fleet) == {
        "prefill-0": "prefill",
        "prefill-1": "decode",
        "decode-0": "decode",
    }
    during = await load.enter("during")
    assert {output.prefill_node for output in during} == {"prefill-0"}
    assert {output.decode_node for output in during} == {"prefill-1", "decode-0"}

    code, said = await change_role(fleet, "prefill-1", "prefill")
    assert code == 0, said
    assert "prefill-1 is a prefill node now" in said
    assert (await roles(fleet))["prefill-1"] == "prefill"
    after = await load.enter("after")
    assert {output.decode_node for output in after} == {"decode-0"}

    await load.stop()
    reference = Reference(tiny_checkpoint)
    tokens: dict[int, list[int]] = {}  # by prompt length
    for _, length, output in load.ended:
        assert output.tokens == tokens.setdefault(length, output.tokens)
    for length in LENGTHS:
        assert len(tokens[length]) == LIMIT
        assert reference.is_greedy(make_prompt(length), tokens[length])


@pytest.mark.long
async def test_the_last_node_of_a_pool_goes_by_force_only(fleet: Fleet, client: Client) -> None:
    code, said = await change_role(fleet, "decode-0", "prefill")
    assert code == 1
    assert "decode-0 is the only ready decode node, and disaggregated mode needs one" in said
    streams = await begun(client, "forced")

    code, said = await change_role(fleet, "decode-0", "prefill", "--force")
    assert code == 0, said
    refused = await client.complete(make_prompt(5), 4)
    assert refused.status == 503
    assert refused.error is not None
    assert "no decode node is ready" in refused.error["message"]
    for stream in streams:
        assert len((await stream.end()).tokens) == LIMIT

    code, said = await change_role(fleet, "decode-0", "decode")
    assert code == 0, said
    assert len((await client.complete(make_prompt(5), 4)).tokens) == 4


async def test_who_has_the_role_already_and_who_is_not_there(fleet: Fleet, client: Client) -> None:
    code, said = await change_role(fleet, "prefill-1", "prefill")
    assert code == 0
    assert "prefill-1 is a prefill node already" in said
    code, said = await change_role(fleet, "decode-7", "prefill")
    assert code == 1
    assert 'there is no node "decode-7"; attached: decode-0, prefill-0, prefill-1' in said
