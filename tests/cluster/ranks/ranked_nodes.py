"""What has to be true of nodes of several ranks, whatever ranks these are."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.settings.config import RoutingConfig
from pdserve.settings.prefixes import PrefixConfig
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import HEARD_S, Fleet, fleet_config, poll
from tests.forked_rank import FORKER

FAMILY = "llama, GQA, head_dim 64, llama3 rope"  # 2 KV heads
COMPARED = "abcdefgh"  # salts of requests for every pair
NUM_OUTPUT = 10


class RankHost:
    """A `pdserve rank`, which a node's second host runs."""

    def __init__(self, model: Path, make_child: type[Child] = Child, *flags: str) -> None:
        self._make_child = make_child
        self._reserved = ReservedPort("127.0.0.1")
        port = self._reserved.port
        self.address = f"127.0.0.1:{port}"
        of_host = ["rank", f"--port={port}", f"--model={model}", "--threads=1", *flags]
        self._words = [*OWN_COMMAND, *of_host]
        self._lines: list[str] = []
        self.start()

    def start(self) -> None:
        remember = self._lines.append
        self.process = self._make_child("host", self._words, lambda _, line: remember(line), _ended)

    async def end(self) -> None:
        self._reserved.close()
        assert (await self.process.stop(10.0)).returncode == -signal.SIGTERM
        assert not any("Traceback" in line for line in self._lines), self._lines


def _ended(_: object) -> None:
    """Whoever waits for its end knows."""


def config_of_pairs(model: Path) -> ClusterConfig:
    """Two and two nodes: every pair has its turn, and prefixes are pulled."""
    return fleet_config(
        model,
        prefill=2,
        decode=2,
        engine={"token_budget": 64},
        prefix=PrefixConfig(prefix_pull="always"),
        routing=RoutingConfig(router="random", admission=False),
    )


async def check_every_pair(
    fleet: Fleet, reference: Reference, lengths: Sequence[int], salts: str
) -> None:
    """Every pair of two and two nodes gives the tokens of transformers."""
    requests = [(length, salt) for length in lengths for salt in salts]
    async with Client(fleet.url) as client:
        outputs = await asyncio.gather(
            *(
                client.complete(make_prompt(length), NUM_OUTPUT, cache_salt=salt)
                for length, salt in requests
            )
        )
    expected = {length: reference.greedy(make_prompt(length), NUM_OUTPUT) for length in lengths}
    pairs: Counter[tuple[str | None, str | None]] = Counter()
    for (length, _), output in zip(requests, outputs, strict=True):
        pair = output.prefill_node, output.decode_node
        assert output.tokens == expected[length], f"{length} tokens from {pair}"
        pairs[pair] += 1
    assert len(pairs) == 4, pairs


async def check_prefix_is_pulled(fleet: Fleet, reference: Reference) -> None:
    """By a node of other ranks."""
    prompt = make_prompt(700, "shared")
    expected = reference.greedy(prompt, NUM_OUTPUT)
    async with Client(fleet.url) as client:
        first = await client.complete(prompt, 1)
        assert first.num_cached_tokens == 0
        outputs = await asyncio.gather(*(client.complete(prompt, NUM_OUTPUT) for _ in range(6)))
    assert {output.prefill_node for output in outputs} == {"prefill-0", "prefill-1"}
    for output in outputs:
        assert output.tokens == expected, output
        assert output.num_cached_tokens >= 600, "it was pulled, not computed again"


@asynccontextmanager
async def undisturbed(fleet: Fleet, num_output: int) -> AsyncIterator[None]:
    """Streams have the tokens that they would have had, whatever is done to nodes meanwhile."""
    async with Client(fleet.url) as client:
        prompts = [make_prompt(30, f"stream {number}") for number in range(4)]
        expected = await asyncio.gather(*(client.complete(p, num_output) for p in prompts))
        followers = [Follower(client, prompt, num_output) for prompt in prompts]
        for follower in followers:
            await follower.reached(5)
        yield
        outputs = [await follower.end() for follower in followers]
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]


async def check_streams_move(fleet: Fleet, name: str, num_output: int) -> None:
    """From this node, which drains, with their KV."""

    async with undisturbed(fleet, num_output):
        fleet.send_signal(name, signal.SIGTERM)
    await back_after_end(fleet, name)


async def back_after_end(fleet: Fleet, name: str) -> None:
    """Start this node again, once whoever started it knows that it has ended."""

    async def has_ended() -> bool:
        return not fleet.is_running(name)

    await poll(has_ended, HEARD_S, lambda: f"{name} has not ended")
    await fleet.restore()
    await fleet.wait_back()


async def check_comes_back(fleet: Fleet, name: str, reference: Reference) -> None:
    """This prefill node, which has ended, computes as before."""
    await fleet.restore()
    await fleet.wait_back()
    async with Client(fleet.url) as client:
        prompts = [make_prompt(60, f"back {number}") for number in range(24)]  # drawn at random
        outputs = await asyncio.gather(*(client.complete(prompt, 3) for prompt in prompts))
    assert name in {output.prefill_node for output in outputs}
    assert [o.tokens for o in outputs] == [reference.greedy(prompt, 3) for prompt in prompts]


async def check_killed_rank(fleet: Fleet, name: str, num_ranks: int, num_output: int) -> None:
    """One of the ranks that this node has started: its streams go on elsewhere."""
    node = fleet.pid(name)
    ranks = children(node)
    assert len(ranks) == num_ranks
    async with undisturbed(fleet, num_output):
        os.kill(ranks[-1], signal.SIGKILL)
        await until_gone([node, *ranks])
    await back_after_end(fleet, name)


async def check_lost_host(
    fleet: Fleet, name: str, host: RankHost, num_ranks: int, num_output: int
) -> None:
    """The second host of this node, which ends, and its streams go on elsewhere."""
    lost, node = host.process, fleet.pid(name)
    ranks = children(lost.pid)
    assert len(ranks) == num_ranks
    async with undisturbed(fleet, num_output):
        lost.send_signal(signal.SIGKILL)
        await until_gone([node, *ranks])
    await lost.ended()
    host.start()
    await back_after_end(fleet, name)


async def check_host_waits(fleet: Fleet, name: str, host: RankHost, reference: Reference) -> None:
    """For its node, which is killed and comes back."""
    process = host.process
    ranks = children(process.pid)
    assert len(ranks) == 1
    await fleet.kill_node(name)
    await until_gone(ranks)
    await check_comes_back(fleet, name, reference)
    assert process.is_running


async def check_ranks_end(fleet: Fleet, name: str) -> None:
    """With this node, which is killed."""
    node = fleet.pid(name)
    ranks = children(node)
    assert len(ranks) == 1
    os.kill(node, signal.SIGKILL)
    await until_gone(ranks)
    await fleet.wait_gone(name)  # nobody is asked for its metrics any more


async def until_gone(pids: Sequence[int]) -> None:
    """Wait until all of them have ended; one whose end nobody has asked for yet has, too."""

    async def gone() -> bool:
        return all(_state(pid) in "ZX" for pid in pids)

    await poll(gone, HEARD_S, lambda: f"{pids} are there")


def children(pid: int) -> list[int]:
    """Processes that this one has started, or its forker for it, and that are running."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    started = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    forkers = {child for child in started if _name(child) == FORKER}
    of_forkers = [child for forker in forkers for child in children(forker)]
    return [*(child for child in started if child not in forkers), *of_forkers]


def _name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
