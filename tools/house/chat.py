"""Which files of the project one chat enters: a cluster whose processes note what they run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
ROLES = ("coordinator", "prefill", "decode")
START_S = 120.0
SETTLE_S = 1.0  # after the last byte the nodes free what they hold; asking would be noted, too
IDLE_S = 12.0  # longer than anything that looks at regular intervals
# Load reports that come between would be counted as if they were the chat's.
CONFIG = """port = 0
[timeouts]
heartbeat_s = 60
liveness_s = 600
"""


@dataclass(frozen=True)
class Entered:
    """The files of the project that one process enters, as paths from its root."""

    by_chat: set[Path]  # while a chat runs: what is the chat's, and what just then was due
    by_ticks: set[Path]  # while the cluster is idle

    @property
    def together(self) -> set[Path]:
        """Both: what looks at regular intervals is counted, whether or not it was due."""
        return self.by_chat | self.by_ticks


def files_of_a_chat(root: Path) -> dict[str, Entered]:
    """Process |-> the files below `root` that one chat enters there, after one like it.

    What looks at regular intervals would be entered by chance while the chat runs. So it is noted
    while the cluster is idle, too.

    The cluster is `pdserve up` of the working directory with the demo model: one prefill node and
    one decode node.

    Raises:
        TimeoutError: a process did not begin, or did not write what it noted.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "up.toml")
        config.write_text(CONFIG)
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parent / "entered"),
            "HOUSE_ENTERED": folder,
        }
        words = [sys.executable, "-m", "pdserve", "up", "--config", str(config)]
        with open(Path(folder, "log"), "w+") as log:
            up = subprocess.Popen(words, cwd=root, env=environment, stdout=log, stderr=log)
            try:
                url = _wait(lambda: _url(Path(folder, "log")), f"{words} is ready")
                pids = _processes(up.pid)
                _chat(url, "What is 12 plus 30?")
                time.sleep(SETTLE_S)
                idle = _entered(pids, folder, lambda: time.sleep(IDLE_S))
                chat = _entered(pids, folder, lambda: _chat(url, "What is 11 plus 31?"))
                return {
                    role: Entered(_files(chat[role], root), _files(idle[role], root))
                    for role in ROLES
                }
            finally:
                up.send_signal(signal.SIGINT)
                up.wait(START_S)


def _entered(pids: dict[str, int], folder: str, do: Callable[[], None]) -> dict[str, set[str]]:
    """Process |-> the functions that it enters meanwhile: path, space, name."""
    _signal(pids)
    do()
    time.sleep(SETTLE_S)
    _signal(pids)
    return {role: _noted(Path(folder, str(pid))) for role, pid in pids.items()}


def _noted(file: Path) -> set[str]:
    _wait(file.is_file, f"{file} is written")
    functions = set(file.read_text().splitlines())
    file.unlink()
    return functions


def _files(functions: set[str], root: Path) -> set[Path]:
    paths = {Path(function.rpartition(" ")[0]) for function in functions}
    ours = {path.relative_to(root) for path in paths if path.is_relative_to(root)}
    return {path for path in ours if path.parts[0] not in (".venv", "tools")}


def _url(log: Path) -> str | None:
    found = re.search(r"curl .*?(http://[^/\s]+)/", log.read_text())
    return found[1] if found else None


def _processes(up: int) -> dict[str, int]:
    """Role |-> pid, below `pdserve up`: nodes are children of the process they are forked from."""
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_text() for pid in _descendants(up)}
    return {
        role: pid
        for role in ROLES
        for pid, line in lines.items()
        if role in re.split(r"[\0 ]", line)
    }


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            yield child
            yield from _descendants(child)


def _signal(pids: dict[str, int]) -> None:
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR1)


def _chat(url: str, question: str) -> None:
    body = {
        "model": "pdserve-demo",
        "messages": [{"role": "user", "content": question}],
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=START_S) as response:
        if not response.read().endswith(b"data: [DONE]\n\n"):
            raise RuntimeError("the chat did not come to its end")


def _wait(look: Callable[[], T | None], what: str) -> T:
    """Look until there is something, which is returned."""
    deadline_s = time.monotonic() + START_S
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"not within {START_S} s: {what}")
        time.sleep(0.1)
    return found
