"""The guide to two machines, followed word by word over two network namespaces."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.protocol.status import ClusterStatus, read_status
from pdserve.settings.access import keys_of_coordinator
from tests.cluster.documents import guide
from tests.cluster.documents.hosts import Host, obstacle, two_hosts
from tests.cluster.fleet import START_S, poll
from tests.cluster.forked import ForkedChild

pytest.importorskip("cryptography", reason="the certs extra is not installed")

pytestmark = pytest.mark.long  # each link with certificates is tried by default

A, B = "10.0.0.1", "10.0.0.2"
NODES = ["prefill-a", "decode-b"]
SERVERS = ("coordinator", "prefill", "decode")
# Besides the guide's settings: the test needs little memory, and no exact predictions.
SMALL_NODE = '\n[engine]\nkv_memory = "16MiB"\nthreads = 1\n[profile]\nprofile = "off"\n'
# Prints the version of TLS that a node speaks at its KV port, to who shows the certificate in a
# directory, if one is named.
SHAKE_HANDS = """
import socket, ssl, sys
context = ssl.create_default_context(cafile="keys/ca.crt")
if len(sys.argv) > 3:
    context.load_cert_chain(sys.argv[3] + "/tls.crt", sys.argv[3] + "/tls.key")
address = (sys.argv[1], int(sys.argv[2]))
with socket.create_connection(address, 10) as sock:
    with context.wrap_socket(sock, server_hostname="node.pdserve") as secured:
        print(secured.version())
        secured.settimeout(0.3 if len(sys.argv) > 3 else 10)  # who is refused is told so
        try:
            secured.recv(1)
        except TimeoutError:
            print("let in")
"""


@dataclass
class Cluster:
    """What comes of following the guide."""

    hosts: dict[str, Host]  # the guide's name of a machine |-> host
    lines: dict[str, list[str]] = field(default_factory=dict)  # what each server has written
    outputs: dict[str, str] = field(default_factory=dict)  # of programs that ended, by their words

    @property
    def told(self) -> str:
        """All that the servers have written."""
        return "\n".join(f"{name}: {line}" for name in self.lines for line in self.lines[name])

    async def follow(self, stack: AsyncExitStack) -> None:
        """Do all that the guide says; servers end with the stack."""
        for step in guide.steps():
            host = self.hosts[step.machine]
            if isinstance(step, guide.File):
                small = "" if step.name == "coordinator.toml" else SMALL_NODE
                (host.home / step.name).write_text(step.text + small)
            elif step.words[0] == "scp":
                self._copy(host, step.words[2:])
            elif step.words[0] == "pdserve" and step.words[1] in SERVERS:
                with _environment(step):
                    self.start(stack, step.words[1], host, *step.words[1:])
            else:
                if set(SERVERS) <= set(self.lines):
                    await self.wait_until(lambda status: not status.waiting_for(NODES))
                words = (*OWN_COMMAND, *step.words[1:])
                with _environment(step):
                    code, told = await host.run(
                        *(words if step.words[0] == "pdserve" else step.words)
                    )
                assert code == 0, f"{step.words}: {told}"
                self.outputs[" ".join(step.words[:2])] = told

    def start(self, stack: AsyncExitStack, name: str, host: Host, *words: str) -> None:
        """Start `pdserve` there; its lines can be found under the name."""
        lines = self.lines.setdefault(name, [])

        class ChildThere(ForkedChild):
            def _prepare(self, words: list[str]) -> Callable[[], None]:
                return host.prepare

        child = ChildThere(
            name,
            [*OWN_COMMAND, *words],
            lambda _, line: lines.append(line),
            lambda end: None,
            keys=keys_of_coordinator(os.environ, ""),
        )
        stack.push_async_callback(child.stop, 10.0)

    async def wait_until(self, is_so: Callable[[ClusterStatus], bool]) -> None:
        """Until the coordinator reports this."""

        async def look() -> bool:
            known = ("--cacert", "keys/ca.crt", "-H", "Authorization: Bearer sk-mine")
            words = ("curl", "-s", *known, f"https://{A}:8000/status")
            code, told = await self.hosts["yours"].run(*words)
            return code == 0 and is_so(read_status(told.encode()))

        await poll(look, START_S, lambda: self.told)

    async def wait_for(self, name: str, told: str) -> None:
        """Until that server has written a line with this."""

        async def look() -> bool:
            return any(told in line for line in self.lines[name])

        await poll(look, START_S, lambda: f"{told!r} is not in {self.lines[name]}")

    def _copy(self, host: Host, words: list[str]) -> None:
        *sources, target = words
        (home,) = (there.home for there in self.hosts.values() if f"{there.address}:" == target)
        for source in sources:
            shutil.copytree(host.home / source, home / Path(source).name)


@contextmanager
def _environment(step: guide.Command) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in step.environment.items():
            patch.setenv(name, value)
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """The guide was followed to its end."""
    if why := await obstacle():
        pytest.skip(why)
    root = tmp_path_factory.mktemp("hosts")
    async with two_hosts(root, (A, B)) as (a, b), AsyncExitStack() as stack:
        yours = replace(b, address="", home=root / "yours")  # it reaches A over the cable
        yours.home.mkdir()
        cluster = Cluster({"A": a, "B": b, "yours": yours})
        await cluster.follow(stack)
        yield cluster
        assert "Traceback" not in cluster.told, cluster.told


async def test_a_chat_is_answered_over_https(cluster: Cluster) -> None:
    told = cluster.outputs["curl --cacert"]
    answer = json.loads(told[told.index("{") :])  # curl tells its progress before
    assert "42" in answer["choices"][0]["message"]["content"]


async def test_the_doctor_finds_no_problem(cluster: Cluster) -> None:
    lines = cluster.outputs["pdserve doctor"].splitlines()
    assert any(re.match("ok +pools +ready: 1 prefill and 1 decode", line) for line in lines), lines
    assert not [line for line in lines if line.startswith("problem")]


async def test_kv_went_over_tcp_with_tls(cluster: Cluster) -> None:
    def has_pulled(status: ClusterStatus) -> bool:
        links = {(node.node_id, link.peer): link for node in status.nodes for link in node.links}
        pulled = links.get(("decode-b", "prefill-a"))
        return pulled is not None and pulled.transport == "tcp"

    await cluster.wait_until(has_pulled)
    program = (sys.executable, "-c", SHAKE_HANDS, A, "8012")
    yours = cluster.hosts["yours"]
    assert await yours.run(*program, "keys/node") == (0, "TLSv1.3\nlet in\n")
    code, told = await yours.run(*program)
    assert code == 1
    assert "CERTIFICATE_REQUIRED" in told


async def test_metrics_are_for_who_has_the_monitors_certificate(cluster: Cluster) -> None:
    assert "pdserve_kv_cache_usage_ratio" in cluster.outputs["curl --cert"]
    yours, there = cluster.hosts["yours"], ("--connect-to", f"node.pdserve:8011:{B}:8011")
    for words in (
        ("-s", f"http://{B}:8011/metrics"),
        ("-s", "--cacert", "keys/ca.crt", *there, "https://node.pdserve:8011/metrics"),
    ):
        _, told = await yours.run("curl", *words)
        assert "pdserve_" not in told


async def test_the_ports_are_those_that_are_told(cluster: Cluster) -> None:
    for name in ("A", "B"):
        assert cluster.hosts[name].open_ports() == guide.ports(name)


async def test_a_node_over_both_hosts_serves(cluster: Cluster) -> None:
    a, b = cluster.hosts["A"], cluster.hosts["B"]
    settings = (b.home / "decode.toml").read_text().replace("801", "0 #")
    (b.home / "wide.toml").write_text(settings.replace("decode-b", "wide"))
    rank = ("rank", "--host", A, "--threads", "1", "--set", "security.tls_dir=node")
    async with AsyncExitStack() as stack:
        cluster.start(stack, "rank", a, *rank)
        await cluster.wait_for("rank", "listens on")
        code, told = await cluster.hosts["yours"].run(sys.executable, "-c", SHAKE_HANDS, A, "7100")
        assert code == 1
        assert "CERTIFICATE_REQUIRED" in told
        cluster.start(
            stack, "wide", b, "decode", "--config", "wide.toml", "--rank-hosts", f"{A}:7100"
        )
        await cluster.wait_until(lambda status: not status.waiting_for(["wide"]))
        await cluster.wait_for("rank", "ready")


async def test_who_has_a_wrong_certificate_is_told_so(cluster: Cluster) -> None:
    b = cluster.hosts["B"]
    code, told = await b.run(*OWN_COMMAND, "certs", "others", "--role", "node")
    assert code == 0, told
    settings_of = {"stranger": "others/node", "impostor": "coordinator"}
    shutil.copytree(cluster.hosts["A"].home / "coordinator", b.home / "coordinator")
    async with AsyncExitStack() as stack:
        for name, directory in settings_of.items():
            settings = (b.home / "decode.toml").read_text().replace("801", "0 #")
            settings = settings.replace("decode-b", name).replace('"node"', f'"{directory}"')
            (b.home / f"{name}.toml").write_text(settings)
            cluster.start(stack, name, b, "decode", "--config", f"{name}.toml")
        await cluster.wait_for("stranger", guide.complaint("of another CA"))
        await cluster.wait_for("impostor", guide.complaint("the coordinator's certificate"))
        await cluster.wait_for("coordinator", f"refused ipv4:{B}")
