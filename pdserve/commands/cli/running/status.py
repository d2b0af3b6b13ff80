"""`pdserve status`: prints the coordinator's view of both pools, once or live."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.commands.cluster.status import fetch_status
from pdserve.findings.drafts import said_of_drafts
from pdserve.protocol.status import ClusterStatus, NodeStatus
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import OK

_TICK_S = 0.5
_MIN_UNSTABLE_SHARE = 0.01  # of prompt tokens, from which on it is printed
_STATE_STYLES = {"loading": "yellow", "ready": "green", "draining": "magenta", "sick": "bold red"}
_PADDING = (0, 1, 0, 0)
_PIPE_WIDTH = 200
# The last two numbers are predictions of the router: for a new prompt, and with one more stream.
_COLUMNS = (
    "free", "cached", "pinned", "queued", "run", "wait", "step", "queue", "TPOT", "session",
)  # fmt: skip
_DISPENSABLE = ("session", "pinned", "cached", "queue", "queued", "wait")  # in a narrow terminal


def run(url: str, trust: Trust = True, *, watch: bool, as_json: bool) -> int:
    """Show the cluster at `url`; the exit code.

    Raises:
        ClusterError: no answer. (With `watch`, it is shown instead, and the request repeated.)
    """
    # A pipe has no width, and rich would take it to have that of a small terminal.
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_watch(url, trust, console))
        return OK
    status = asyncio.run(fetch_status(url, trust=trust))
    if as_json:
        print(json.dumps(msgspec.to_builtins(status), indent=2))
    else:
        console.print(render(status))
    return OK


def render(status: ClusterStatus) -> RenderableType:
    """A summary of the cluster, and a table for each pool that has nodes."""
    ready = Text("ready", "green") if status.ready else Text("not ready", "bold red")
    head = Text.assemble(
        (status.model, "bold"), f"  {status.mode}  ", ready, f"  {status.inflight} in flight"
    )
    if status.coordinators > 1:
        head.append(f"  one of {status.coordinators} coordinators")
    pools: list[RenderableType] = [
        _NodeTable(f"{role} nodes (free of all blocks; times in ms)", nodes)
        for role in ("prefill", "decode")
        if (nodes := [node for node in status.nodes if node.role == role])
    ]
    if any(node.links for node in status.nodes):
        pools.append(_links(status.nodes))
    notes = [
        *_models(status),
        *_requests(status),
        *_sick(status.nodes),
        *_alone(status.nodes),
        *_failing(status.nodes),
        *_guessed(status.nodes),
    ]
    return Group(head, *notes, *(pools or [Text("no node is attached", "yellow")]))


def _models(status: ClusterStatus) -> Iterator[Text]:
    """A line for each of several models."""
    for model in status.models:
        ready = Text("ready", "green") if model.ready else Text("not ready", "bold red")
        nodes = sum(node.model == model.name for node in status.nodes)
        rest = f"  {nodes} nodes  {model.inflight} in flight  {model.waiting} waiting"
        wakes = f"  asleep: wakes in about {model.wake_s:.2g} s" if model.wake_s else ""
        yield Text.assemble(f"{model.name}  ", ready, rest, wakes)


def _requests(status: ClusterStatus) -> Iterator[Text]:
    """Further lines about requests, where there is something to report."""
    refused = [f"{count} by {reason}" for reason, count in status.refused.items() if count]
    if status.waiting or refused:
        waiting = f"{status.waiting} waiting for room"
        yield Text("  ".join([waiting, *(["refused: " + ", ".join(refused)] if refused else [])]))
    if (costs := status.coordinator.costs) is not None:
        per_million = [
            f"{kind.replace('_', ' ')} {cost:.4g}" for kind, cost in costs.per_million.items()
        ]
        tokens = f"  a million tokens: {', '.join(per_million)}" if per_million else ""
        part = " for this coordinator's part" if status.coordinators > 1 else ""
        idle = f"{costs.idle_share:.0%} of it idle"
        yield Text(f"costs {costs.per_hour:.4g} an hour{part}, {idle}{tokens}")
    prefixes = status.prefixes
    if prefixes.cached_share:
        yield Text(f"{prefixes.cached_share:.0%} of prompt tokens were in a prefix cache")
    if prefixes.unstable_share >= _MIN_UNSTABLE_SHARE:
        yield Text(
            f"{prefixes.unstable_share:.0%} of prompt tokens were recomputed because text at about "
            f"token {prefixes.unstable_token} changes between otherwise equal prompts",
            "yellow",
        )


def _sick(nodes: Iterable[NodeStatus]) -> Iterator[Text]:
    """A line for each node that cannot compute any more, and why."""
    for node in nodes:
        if node.state == "sick":
            yield Text(f"{node.node_id} is sick: {node.reason}", "bold red")


def _alone(nodes: Iterable[NodeStatus]) -> Iterator[Text]:
    """A line for each node that cannot take part in any handoff."""
    for node in nodes:
        if node.is_alone:
            other = "decode" if node.role == "prefill" else "prefill"
            names = " and ".join(node.transports) or "none"
            text = f"{node.node_id} shares no KV transport with any {other} node: it has {names}"
            yield Text(text, "yellow")


def _failing(nodes: Iterable[NodeStatus]) -> Iterator[Text]:
    """A line for each pair of nodes whose handoffs fail; told of its prefill node only."""
    for node in nodes:
        for failing in node.failing if node.role == "prefill" else ():
            text = f"handoffs from {node.node_id} to {failing.peer} fail ({failing.told})"
            yield Text(text, "bold red")


def _guessed(nodes: Iterable[NodeStatus]) -> Iterator[Text]:
    """A line for each node that has guessed tokens."""
    for node in nodes:
        if said := said_of_drafts(node):
            yield Text(f"{node.node_id} has guessed {said}")


async def _watch(url: str, trust: Trust, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                shown = render(await fetch_status(url, trust=trust))
            except ClusterError as error:
                shown = Text(str(error), "bold red")
            live.update(shown, refresh=True)
            await asyncio.sleep(_TICK_S)


class _NodeTable:
    """The nodes of a pool, with as many columns as fit."""

    def __init__(self, title: str, nodes: Iterable[NodeStatus]) -> None:
        self._title = title
        self._nodes = sorted(nodes, key=lambda node: node.node_id)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """See rich."""
        for number in range(len(_DISPENSABLE) + 1):
            table = self._without(_DISPENSABLE[:number])
            if console.measure(table, options=options.update(width=_PIPE_WIDTH)).maximum <= (
                options.max_width
            ):
                break
        yield table

    def _without(self, left_out: Sequence[str]) -> Table:
        table = Table(
            title=self._title, title_justify="left", title_style="bold", box=None, padding=_PADDING
        )
        shown = [column for column in _COLUMNS if column not in left_out]
        has_models = any(node.model for node in self._nodes)
        for column in ("node", *(["model"] if has_models else []), "state"):
            table.add_column(column, no_wrap=True)
        for column in shown:
            table.add_column(
                column, justify="left" if column == "session" else "right", no_wrap=True
            )
        for node in self._nodes:
            numbers = dict(zip(_COLUMNS, _numbers(node), strict=True))
            place = f" on {node.place_of}" if node.place_of else ""
            of_model = [node.model + place] if has_models else []
            table.add_row(
                node.node_id, *of_model, _state(node), *(numbers[column] for column in shown)
            )
        return table


def _links(nodes: Iterable[NodeStatus]) -> Table:
    """Which node pulls from which: by which transport, in which form, why by no better one."""
    table = Table(
        title="KV links", title_justify="left", title_style="bold", box=None, padding=_PADDING
    )
    for column in ("puller", "exporter", "transport", "sent"):
        table.add_column(column, no_wrap=True)
    table.add_column("why", overflow="fold")
    for node in sorted(nodes, key=lambda node: node.node_id):
        for link in node.links:
            table.add_row(node.node_id, link.peer, link.transport, link.codec, link.reason)
    return table


def _state(node: NodeStatus) -> Text:
    if node.is_standby:
        return Text("standby", "blue")
    state = Text(node.state, _STATE_STYLES[node.state])
    if node.state == "loading":
        state.append(f" {node.loading_progress:.0%}")
    return state


def _numbers(node: NodeStatus) -> list[str]:
    """A cell for each of _COLUMNS."""
    counts = (
        node.cached_blocks,
        node.pinned_blocks,
        node.queued_tokens,
        node.running_requests,
        node.waiting_requests,
    )
    return [
        f"{node.free_blocks}/{node.num_blocks}",
        *map(str, counts),
        f"{node.step_time_ms:.1f}",
        f"{node.predicted_queue_ms:.0f}",
        f"{node.predicted_tpot_ms:.1f}",
        node.session_address,
    ]
