"""Runs a cluster: starts, watches, kills, restarts and stops its processes.

    async with Cluster(ClusterConfig(port=0, decode=2)) as cluster:  # everything is ready here
        print(cluster.url)
        await cluster.kill_node("decode-1")
        await cluster.start_node("decode-1")

A process is planned, started, loading, ready (both according to /status), and ended. The nodes are
stopped first, so that they can drain, and the coordinator last. No process outlives this one.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from pdserve.commands.cluster.child import Child, Exit, LineSink, Process
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.commands.cluster.plan import COORDINATOR, Machine, ProcessPlan, planned_again
from pdserve.commands.cluster.readiness import wait_until
from pdserve.commands.cluster.site import Site, ThisMachine, remote_site
from pdserve.commands.cluster.status import fetch_status
from pdserve.protocol.status import ClusterStatus, NodeStatus
from pdserve.shared.errors import ClusterError

OWN_COMMAND = (sys.executable, "-m", "pdserve")


class Cluster:
    """One coordinator and its nodes, named "coordinator", "prefill-0", ..., "decode-0", ...

    Use it only from the thread that runs the event loop. The children are killed when that thread
    ends, so it must live as long as the cluster.
    """

    def __init__(
        self,
        config: ClusterConfig,
        *,
        on_line: LineSink = lambda name, line: None,
        command: Sequence[str] = OWN_COMMAND,
        make_child: Callable[..., Child] = Child,
        machine: Machine | None = None,
        site: Site | None = None,
        stop_margin_s: float = 3.0,
        restarts: bool = False,
        before_nodes: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Nothing is started yet. Raises ConfigError: Ray is to run it, and is not installed.

        Args:
            config: what to start; port 0 stands for any free port.
            on_line: called with (process name, line) for every line that a child writes.
            command: the program that understands `coordinator|prefill|decode FLAGS`.
            make_child: what runs such a command on this machine, called as `Child` is.
            machine: the resources of it to use; default: all that this process may use.
            site: where to start processes, whatever `config`, `make_child` and `machine` say.
            stop_margin_s: time for a process to exit after its drain deadline.
            restarts: whether nodes that are lost will be started again, so that streams wait.
            before_nodes: what `make_child` needs before it makes nodes; the coordinator starts.
        """
        self.config = config
        self._on_line = on_line
        self._command = list(command)
        self._site = site or remote_site(config) or ThisMachine(config, make_child, machine)
        self._stop_margin_s = stop_margin_s
        self._restarts = restarts
        self._before_nodes = before_nodes
        self._plans: dict[str, ProcessPlan] = {}
        self._restarted: dict[str, ProcessPlan] = {}  # of what was not started as planned
        self._processes: dict[str, Process] = {}
        self._exits: asyncio.Queue[Exit] = asyncio.Queue()
        self._retired: set[str] = set()  # nodes that were drained for good
        self._on_standby: set[str] = set()  # nodes that began on standby at their last start

    async def __aenter__(self) -> Self:
        try:
            await self.spawn()
            await self.wait_ready()
        except BaseException:
            await self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.stop()
        finally:
            await self.kill()

    # ---- state -----------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """Address for clients: "http://127.0.0.1:8000"."""
        scheme = "https" if self.config.access.https_dir else "http"
        return f"{scheme}://{self._site.http_address}"

    @property
    def _trust(self) -> Trust:
        """The process is known without a certificate, which is hardly for a loopback address."""
        return not self.config.access.https_dir

    @property
    def grpc_address(self) -> str:
        """Address for nodes: "127.0.0.1:8001"."""
        return self._site.grpc_address

    @property
    def warning(self) -> str:
        """Why the cluster will be slower than it might be; empty if it will not. Set by `spawn`."""
        return self._site.warning

    @property
    def _stop_grace_s(self) -> float:
        return self.config.timeouts.drain_s + self._stop_margin_s

    @property
    def node_names(self) -> list[str]:
        """All planned nodes, prefill nodes first; the names are also the node ids."""
        return [name for name in self._plans if name != COORDINATOR]

    @property
    def started_nodes(self) -> list[str]:
        """Those that were started and not retired since."""
        started = (name for name in self.node_names if name in self._processes)
        return [name for name in started if name not in self._retired]

    @property
    def unplaced_nodes(self) -> list[str]:
        """Those of them that no machine has had room for yet."""
        return [name for name in self.started_nodes if not self.pid(name)]

    def pid(self, name: str) -> int:
        """The process id, also after the end of the process."""
        return self._processes[name].pid

    def is_running(self, name: str) -> bool:
        """Whether the process was started and has not ended."""
        return name in self._processes and self._processes[name].is_running

    def is_retired(self, name: str) -> bool:
        """Whether the node was drained for good, and not started since."""
        return name in self._retired

    def begins_on_standby(self, name: str) -> bool:
        """Whether the node was last started to load and wait, whatever it does by now."""
        return name in self._on_standby

    def command_line(self, name: str) -> list[str]:
        """The command that starts the process by hand, for instance as a replacement."""
        return [*self._command, *self._restarted.get(name, self._plans[name]).arguments]

    async def status(self) -> ClusterStatus:
        """The current status, from the coordinator.

        Raises:
            ClusterError: the coordinator does not answer.
        """
        return await fetch_status(self.url, trust=self._trust, key=self._site.supervisor_token)

    async def metrics_addresses(self) -> dict[str, str]:
        """Node name |-> host:port of its /metrics, for the attached nodes."""
        return {node.node_id: node.metrics_address for node in (await self.status()).nodes}

    # ---- start -----------------------------------------------------------------------------------

    async def spawn(self) -> None:
        """Start all processes; returns before they are ready.

        Raises:
            ConfigError: a port is in use, or the config contradicts itself.
            StartFailed: the machines cannot be had.
        """
        for plan in await self._site.plan():
            self._plans[plan.name] = plan
        self._start(COORDINATOR)
        if self._before_nodes is not None:
            await self._before_nodes()
        scale = self.config.scale
        for name in self.node_names:
            if scale is None or scale.is_first(name):
                self._start(name)

    async def wait_ready(self, on_status: Callable[[ClusterStatus], None] | None = None) -> None:
        """Wait until all nodes are ready; `on_status` is called with every status on the way.

        Raises:
            StartFailed: a process ended first, or `start_s` passed.
        """

        def is_ready(status: ClusterStatus) -> bool:
            if on_status is not None:
                on_status(status)
            return status.ready and not status.waiting_for(self.started_nodes)

        await self._wait_until(is_ready, list(self._processes.values()))

    async def start_node(self, name: str, *, on_standby: bool = False) -> None:
        """Start a process that has ended, and wait until it is ready.

        A node's new incarnation is ready, or `on_standby`, at the coordinator, which may be away
        for a while; the coordinator, when it answers. Of several models, a node is that which it
        was. To start what has ended as it began, pass
        `begins_on_standby`.

        Raises:
            StartFailed: it ended before that, or `start_s` passed.
            ClusterError: it is running, perhaps since another call began it.
            OSError: the system cannot have another process now.
        """
        status: ClusterStatus | None = None
        if not self.is_running(name):
            with suppress(ClusterError):
                status = await self.status()
        if self.is_running(name):  # by now
            raise ClusterError(f"{name} is still running: kill it before starting it again")
        if on_standby:
            self._on_standby.add(name)
        else:
            self._on_standby.discard(name)
        former: NodeStatus | None = None
        self._restarted.pop(name, None)
        if status is not None:
            former = status.node(name)
            self._restarted[name] = planned_again(self._plans[name], status)
        self._start(name)

        def is_ready(status: ClusterStatus) -> bool:
            node = status.node(name)
            is_former = node and former and node.incarnation == former.incarnation
            is_up = node is not None and (node.state == "ready" or node.is_standby)
            return (is_up and not is_former) or name == COORDINATOR

        await self._wait_until(is_ready, [self._processes[name]])

    def _start(self, name: str) -> None:
        words = self.command_line(name)
        if name in self._on_standby:
            words.append("--set=standby=true")
        if name == COORDINATOR and self._restarts:
            words.append("--set=restarts=true")
        self._processes[name] = self._site.start(name, words, self._on_line, self._exits.put_nowait)
        self._retired.discard(name)  # else it is still one that is not there

    async def _wait_until(
        self, is_ready: Callable[[ClusterStatus], bool], processes: Sequence[Process]
    ) -> None:
        await wait_until(is_ready, self.status, processes, self.config.start_s)

    # ---- end -------------------------------------------------------------------------------------

    async def next_exit(self) -> Exit:
        """Wait for the next end of any process that was not retired; each is returned once."""
        while (end := await self._exits.get()).name in self._retired:
            pass
        return end

    def send_signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to the process, without waiting."""
        self._processes[name].send_signal(number)

    async def kill_node(self, name: str) -> Exit:
        """Send SIGKILL; returns when the process has ended."""
        self.send_signal(name, signal.SIGKILL)
        return await self._processes[name].ended()

    async def retire_node(self, name: str) -> Exit:
        """As drain_node, and nobody starts it again unless it is needed."""
        self._retired.add(name)
        end = await self.drain_node(name)
        if name in self._retired:  # nobody has started it again meanwhile
            self._site.leave(name)
        return end

    async def drain_node(self, name: str) -> Exit:
        """Send SIGTERM, and SIGKILL after the drain deadline; returns when it has ended."""
        return await self._processes[name].stop(self._stop_grace_s)

    async def stop(self) -> list[Exit]:
        """Drain all nodes, then stop the coordinator. Returns how each running process ended."""
        running = [name for name in self.node_names if self.is_running(name)]
        ends = await asyncio.gather(*(self.drain_node(name) for name in running))
        if self.is_running(COORDINATOR):
            ends.append(await self.drain_node(COORDINATOR))
        await self._site.release()
        return ends

    async def kill(self) -> None:
        """Send SIGKILL to all processes at once, and wait until they have ended."""
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        await asyncio.gather(*(process.ended() for process in self._processes.values()))
        await self._site.release()
