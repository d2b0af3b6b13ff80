"""What `pdserve up` shows: the logs of its processes, what a start waits for, an example request.

Everything is written to stderr, except for the address and the example request (stdout). Nobody
waits for who reads either: a held terminal would hold up the processes that have to start again.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import IO, Final, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn
from rich.text import Text

from pdserve.commands.cluster.child import reported_error
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.protocol.status import ClusterStatus, NodeStatus
from pdserve.settings.access import API_KEY_VARIABLE
from pdserve.shared.process.patient_log import PatientLog

_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_cyan", "bright_green")
_NAME_WIDTH = 12  # fits "coordinator"
_STDOUT, _STDERR = 1, 2
_TAKEN_S: Final = 2.0  # at the end, for who reads slowly


class UpScreen:
    """Writes to the terminal, or to a log file."""

    def __init__(self, stdout: int = _STDOUT, stderr: int = _STDERR) -> None:
        """Both are descriptors."""
        self._stdout, self._stderr = PatientLog(stdout), PatientLog(stderr)
        self._console = Console(file=cast(IO[str], self._stderr))
        self._colours: dict[str, str] = {}

    def line(self, name: str, text: str) -> None:
        """Print a line of a child's output, but not its error, which is told with its end."""
        if reported_error(text):
            return
        colour = self._colours.setdefault(name, _COLOURS[len(self._colours) % len(_COLOURS)])
        self._print(Text.assemble((f"{name:<{_NAME_WIDTH}}| ", colour), Text.from_ansi(text)))

    def say(self, text: str) -> None:
        """Print a line of `pdserve up` itself."""
        self._print(Text.assemble((f"{'pdserve up':<{_NAME_WIDTH}}| ", "bold"), text))

    def invite(self, text: str) -> None:
        """Print the `invitation`."""
        self._stdout.write(text + "\n")

    def finish(self) -> None:
        """Wait a moment for who reads: no more will be printed."""
        self._stdout.finish(_TAKEN_S)
        self._stderr.finish(_TAKEN_S)

    def loading(self, names: list[str]) -> LoadingBars:
        """Progress bars for loading these nodes, as a context manager."""
        return LoadingBars(self._console, names)

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)


class LoadingBars:
    """One progress bar per node; without a terminal, one line when a node is ready."""

    def __init__(self, console: Console, names: list[str]) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn(f"{{task.description:<{_NAME_WIDTH}}}|"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[state]}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {
            name: self._bars.add_task(name, total=1.0, state="starting") for name in names
        }
        self._ready: set[str] = set()
        self._status: ClusterStatus | None = None

    def __enter__(self) -> LoadingBars:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def show(self, status: ClusterStatus) -> None:
        """Update the bars from the cluster's status."""
        self._status = status
        for name, task in self._tasks.items():
            node = status.node(name)
            if node is None:
                continue
            self._bars.update(
                task, completed=node.loading_progress, state=state_text(node, 0) or "ready"
            )
            if node.state == "ready" and name not in self._ready:
                self._ready.add(name)
                self._console.print(f"{name:<{_NAME_WIDTH}}| ready", highlight=False)

    def tell(self, num_downloaded: int) -> None:
        """Say what is awaited: in the bars, or without a terminal in a line.

        `num_downloaded` are bytes of a model that is being downloaded; 0: none is.
        """
        for name, task in self._tasks.items():
            node = None if self._status is None else self._status.node(name)
            self._bars.update(task, state=state_text(node, num_downloaded) or "ready")
        text = waiting_text(list(self._tasks), self._status, num_downloaded)
        if text and not self._console.is_terminal:
            self._console.print(
                f"{'pdserve up':<{_NAME_WIDTH}}| {text}", soft_wrap=True, highlight=False
            )


def invitation(
    url: str, status: ClusterStatus, *, has_page: bool = False, needs_key: bool = False
) -> str:
    """The cluster's address, that of its page, and an example request, which shows no key."""
    body = json.dumps(
        {
            "model": status.models[0].name if status.models else status.model,
            "messages": [{"role": "user", "content": "What is 7 plus 5?"}],
            "max_tokens": 64,
            "stream": True,
        }
    )
    page = f", watch it at {url}/" if has_page else ""
    key = f'-H "Authorization: Bearer ${API_KEY_VARIABLE}" ' if needs_key else ""
    return (
        f"{status.model} is served at {url} ({status.mode}){page}; try\n\n"
        f"curl -N {url}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d {shlex.quote(body)}\n"
    )


def waiting_text(
    names: Sequence[str], status: ClusterStatus | None, num_downloaded: int = 0
) -> str:
    """Name the processes that are not ready, and what they do; nothing if all are.

    Args:
        names: of the nodes.
        status: the last one; None: the coordinator has not answered yet.
        num_downloaded: bytes of a model that is being downloaded; 0: none is.
    """
    states = [] if status is not None else [f"{COORDINATOR} (importing)"]
    for name in names:
        state = state_text(None if status is None else status.node(name), num_downloaded)
        if state:
            states.append(f"{name} ({state})")
    return f"waiting for {', '.join(states)}" if states else ""


def state_text(node: NodeStatus | None, num_downloaded: int) -> str:
    """What one node does; nothing if it is ready."""
    if node is None:
        megabytes = num_downloaded / 1e6
        return f"downloading, {megabytes:.0f} MB so far" if num_downloaded else "importing"
    if node.state == "ready" or node.is_standby:
        return ""
    if node.state != "loading":
        return node.state
    if node.loading_progress < 1:
        return f"loading, {node.loading_progress:.0%}"
    return "measuring its steps"
