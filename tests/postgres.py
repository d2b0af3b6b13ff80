"""A PostgreSQL server of the system's, for tests: bounded, on 127.0.0.1, gone with its parent."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import asyncpg

_NOBODY = 65534
_START_S = 60.0
_PR_SET_PDEATHSIG = 1


def find_program(name: str) -> Path | None:
    """Return a program of the newest PostgreSQL here."""
    if (found := shutil.which(name)) is not None:
        return Path(found)
    versions = Path("/usr/lib/postgresql")
    return max(versions.glob(f"*/bin/{name}"), default=None, key=_version_of)


def _version_of(program: Path) -> float:
    return float(program.parts[-3])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Postgres:
    """One server; it can be killed and started again."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder
        self._port = port
        self._process: subprocess.Popen[bytes] | None = None
        self._num_databases = 0

    def start(self) -> None:
        """Start the server; it takes connections when this returns."""
        options = f"-c listen_addresses=127.0.0.1 -p {self._port} -k {self._folder}".split()
        fast = ["-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=60"]
        command = [str(find_program("postgres")), "-D", str(self._folder / "data"), *options, *fast]
        asked = [str(find_program("pg_isready")), "-q", "-h", "127.0.0.1", "-p", str(self._port)]
        deadline_s = time.monotonic() + _START_S
        self._process = self._popen(command)
        while subprocess.run(asked, check=False).returncode:
            assert time.monotonic() < deadline_s, (self._folder / "log").read_text()
            if self._process.poll() is not None:  # processes of one that was killed still end
                self._process = self._popen(command)

    def make_files(self) -> None:
        """Make the server's files."""
        command = [str(find_program("initdb")), "-D", str(self._folder / "data"), "-U", "pdserve"]
        options = ["-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync"]
        assert self._popen([*command, *options]).wait(60) == 0, (self._folder / "log").read_text()

    def kill(self) -> None:
        """Kill it as a crash would."""
        assert self._process is not None
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(30)

    async def new_database(self) -> str:
        """Make a database; return its URL."""
        self._num_databases += 1
        name = f"t{self._num_databases}"
        connection = await asyncpg.connect(self.url("postgres"))
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        return self.url(name)

    def url(self, database: str) -> str:
        """Return the URL of a database."""
        return f"postgresql://pdserve@127.0.0.1:{self._port}/{database}"

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        is_root = os.geteuid() == 0  # as whom it refuses to run
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                cwd=self._folder,
                user=_NOBODY if is_root else None,
                group=_NOBODY if is_root else None,
                extra_groups=[] if is_root else None,
                preexec_fn=_die_with_parent,
            )


@contextmanager
def running_postgres() -> Iterator[Postgres]:
    """Run a server with empty files."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short, as it has the path of a socket
    try:
        if os.geteuid() == 0:
            os.chown(folder, _NOBODY, _NOBODY)
        server = Postgres(folder, port)
        server.make_files()
        server.start()
        try:
            yield server
        finally:
            server.kill()
    finally:
        shutil.rmtree(folder)
