"""The guide to a rollout in docs/OPERATING.md, followed word by word in a network of its own."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.model_files.checkpoint import resolve_checkpoint
from tests.architecture.repository import ROOT
from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import VOCAB_SIZE
from tests.cluster.documents.hosts import Host, obstacle, two_hosts
from tests.cluster.fleet import START_S, poll
from tests.cluster.forked import ForkedChild

URL = "http://127.0.0.1:8000"
SERVERS = ("coordinator", "prefill", "decode")
# Besides the guide's words: the test needs little memory, and no exact predictions.
SMALL = ("--set=engine.kv_memory=16MiB", "--threads=1", "--set=profile.profile=off")
BODY = json.dumps({"model": "chat", "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0})
ASK = ("curl", "-s", "-H", "Content-Type: application/json", f"{URL}/v1/completions", "-d", BODY)


def steps() -> list[str]:
    """The lines of the guide's first block of commands."""
    section = (ROOT / "docs/OPERATING.md").read_text().split("\n## Rollouts\n")[1]
    return section.split("```sh\n")[1].split("```")[0].splitlines()


class Rollout:
    """What comes of following the guide on one machine."""

    def __init__(self, host: Host, names: dict[str, str], stack: AsyncExitStack) -> None:
        self._host = host
        self._names = names  # the guide's name of a revision |-> the real one
        self._stack = stack
        self._children: dict[str, ForkedChild] = {}  # by node id, or "coordinator"
        self.lines: list[str] = []
        self.fingerprints: dict[str, str] = {}  # line of the guide |-> of an answer after it

    async def follow(self) -> None:
        """Do all that the guide says, and ask something once something can be answered."""
        for line in steps():
            words = shlex.split(line, comments=True)
            if line.startswith("# stop "):
                for node_id in re.findall(r"[pd]\d", line):
                    await self._children.pop(node_id).stop(10.0)
                continue
            for name, revision in self._names.items():
                words = [word.replace(name, revision[:8]) for word in words]
            if words[1] in SERVERS:
                self._start(words[1:])
                continue
            await self._settled(lets_in="=" in " ".join(self.fingerprints))
            code, told = await self._host.run(*OWN_COMMAND, *words[1:])
            assert code == 0, f"{line}: {told}"
            await self._settled(lets_in="=" in line)
            self.fingerprints[line.partition("#")[0].strip()] = await self._ask()

    def _start(self, words: list[str]) -> None:
        host = self._host
        is_node = "--node-id" in words
        name = words[words.index("--node-id") + 1] if is_node else words[0]

        class ChildThere(ForkedChild):
            def _prepare(self, words: list[str]) -> Callable[[], None]:
                return host.prepare

        argv = [*OWN_COMMAND, *words, *(SMALL if is_node else ())]
        take = lambda _, line: self.lines.append(f"{name}: {line}")  # noqa: E731
        child = ChildThere(name, argv, take, lambda end: None)
        self._children[name] = child
        self._stack.push_async_callback(child.stop, 10.0)

    async def _settled(self, *, lets_in: bool) -> None:
        """Every node that runs is ready or, unless shares let it in, was refused."""

        async def are() -> bool:
            _, told = await self._host.run("curl", "-s", f"{URL}/status")
            nodes = json.loads(told)["nodes"] if told else []
            ready = {node["node_id"] for node in nodes if node["state"] == "ready"}
            refused = {line.split(":")[0] for line in self.lines if "FAILED_PRECONDITION" in line}
            refused = set() if lets_in else refused
            return self._children.keys() - {"coordinator"} <= ready | refused

        await poll(are, START_S, lambda: "\n".join(self.lines))

    async def _ask(self) -> str:
        code, told = await self._host.run(*ASK)
        assert code == 0, told
        fingerprint = json.loads(told)["system_fingerprint"]
        assert isinstance(fingerprint, str)
        return fingerprint


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Host]:
    """One with the two checkpoints."""
    if why := await obstacle():
        pytest.skip(why)
    root = tmp_path_factory.mktemp("rollout")
    async with two_hosts(root, ("10.0.0.1", "10.0.0.2")) as (one, _):
        for name, seed in (("m1", 1), ("m2", 2)):
            make_checkpoint(one.home / name, "llama", seed=seed, vocab_size=VOCAB_SIZE)
        yield one


@pytest.mark.long
async def test_the_guide_ends_with_the_new_weights(host: Host) -> None:
    revisions = {m: resolve_checkpoint(str(host.home / m)).revision for m in ("m1", "m2")}
    names = {"4f0c": revisions["m1"], "d81a": revisions["m2"]}
    async with AsyncExitStack() as stack:
        rollout = Rollout(host, names, stack)
        await rollout.follow()
        said = "\n".join(rollout.lines)
    old, new = (f"fp_{revisions[m][:8]}_" for m in ("m1", "m2"))
    told = rollout.fingerprints
    assert told["pdserve revisions"].startswith(old)
    assert told["pdserve revisions 4f0c=1 d81a=0"].startswith(old)
    assert told["pdserve revisions 4f0c=0 d81a=1"].startswith(new)
    assert told["pdserve revisions d81a=1"].startswith(new)
    assert f"give their revision {revisions['m2'][:8]} a share" in said
    assert "Traceback" not in said
