"""A server that a benchmark starts: it answers completions, and keeps a diary of its life."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys

from tests.fakes.server import FakeServer

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"


async def serve(name: str, port: int, diary: str, *, has_child: bool) -> None:
    asked = asyncio.Event()
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", DEAF) if has_child else None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, asked.set)

    def write(what: str, pid: int) -> None:
        with open(diary, "a") as file:
            file.write(f"{what} {name} {pid}\n")

    if child is not None:
        write("child", child.pid)
    async with FakeServer().running(port):
        write("begins", os.getpid())
        await asked.wait()
    write("ends", os.getpid())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--port", type=int)
    parser.add_argument("--diary")
    parser.add_argument("--child", action="store_true")
    given = parser.parse_args()
    asyncio.run(serve(given.name, given.port, given.diary, has_child=given.child))


if __name__ == "__main__":
    main()
