"""`pdserve batch run`: has the lines of a file answered, and shows how far they are.

A note beside the output names the batch until its answers are there. So a command that was
interrupted, or has lost its coordinator, is given again: it follows the batch that goes on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.commands.cluster.coordinator_http import Trust, key_headers, not_reached
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import FAILED, OK

Answer: TypeAlias = dict[str, Any]
T = TypeVar("T")
_LOOK_S: Final = 1.0  # between two looks at how far it is
_LOST_S: Final = 60.0  # for which a coordinator may be away, or busy
_SILENCE_S: Final = 300.0
_BUSY: Final = (429, 503)
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


class _Note(msgspec.Struct):
    """Which batch runs for a file."""

    batch_id: str
    sha256: str  # of the file


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be done."""

    url: str
    trust: Trust
    file: Path
    output: Path
    sha256: str

    @property
    def errors(self) -> Path:
        return self.output.with_suffix(".errors.jsonl")

    @property
    def note(self) -> Path:
        return self.output.with_suffix(".batch.json")

    def begun(self) -> str | None:
        """Return the id of the batch that a command before has begun. Raises ConfigError."""
        try:
            note = msgspec.json.decode(self.note.read_bytes(), type=_Note)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{self.note} names no batch: delete it to begin anew") from error
        if note.sha256 != self.sha256:
            raise ConfigError(
                f"{self.file} is not as it was when {note.batch_id} began: name another file with "
                f"--output, or delete {self.note} to forget that batch"
            )
        return note.batch_id


def run(url: str, file: Path, output: Path | None, trust: Trust = True) -> int:
    """Run a batch to its end; the exit code. Ctrl-C leaves it running.

    `output`: for the answers; errors stand beside it. None: beside the file.

    Raises:
        ConfigError: the file cannot be read, or the output is there already.
        ClusterError: the coordinator refuses, or does not come back.
    """
    try:
        with file.open("rb") as lines:
            digest = file_digest(lines, "sha256").hexdigest()
        job = _Job(url, trust, file, output or file.with_suffix(".answers.jsonl"), digest)
        for path in (job.output, job.errors):
            if path.exists():
                raise ConfigError(f"{path} is there already: name another file with --output")
        endpoint = _endpoint(file)
        try:
            batch = asyncio.run(_run(job, endpoint))
        except KeyboardInterrupt:
            if (begun := job.begun()) is not None:
                print(f"{begun} goes on; the same command follows it", file=sys.stderr)
            raise
        job.note.unlink()
    except OSError as error:
        raise ConfigError(f"cannot read {file}, or write beside it: {error}") from error
    return _told(job, batch)


def _told(job: _Job, batch: Answer) -> int:
    counts = batch["request_counts"]
    print(f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']} answered")
    for fault in (batch["errors"] or {"data": []})["data"]:
        where = job.file if fault["line"] is None else f"line {fault['line']}"
        print(f"{where}: {fault['message']}")
    for path in (job.output, job.errors):
        if path.exists():
            print(path)
    return OK if batch["status"] == "completed" and not counts["failed"] else FAILED


def _endpoint(file: Path) -> str:
    """Return what the first line calls: all lines of a batch call the same."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return str(msgspec.json.decode(first)["url"])
    except (msgspec.MsgspecError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{file} does not begin with a request of a batch: a line is JSON with 'custom_id', "
            "'method', 'url' and 'body'"
        ) from error


async def _run(job: _Job, endpoint: str) -> Answer:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=key_headers()) as session:
        client = _Client(session, job.url.rstrip("/"), job.trust)
        if (begun := job.begun()) is None:
            batch = await _begin(client, job, endpoint)
        else:
            batch = await _again(client, job, begun)
        batch = await _followed(client, batch)
        for name, path in (("output_file_id", job.output), ("error_file_id", job.errors)):
            if batch[name] is not None:
                await client.patiently(client.fetch, f"/v1/files/{batch[name]}/content", path)
        return batch


async def _begin(client: _Client, job: _Job, endpoint: str) -> Answer:
    given = await client.patiently(client.upload, job.file)
    body = {"input_file_id": given["id"], "endpoint": endpoint, "completion_window": "24h"}
    batch = await client.patiently(client.create, body)
    job.note.write_bytes(msgspec.json.encode(_Note(batch["id"], job.sha256)))
    return batch


async def _again(client: _Client, job: _Job, batch_id: str) -> Answer:
    try:
        return await client.get(batch_id)
    except _NotThere as error:
        raise ClusterError(f"{error}: delete {job.note} to begin anew") from error


async def _followed(client: _Client, batch: Answer) -> Answer:
    """Show how far a batch is until it has ended; a coordinator may be away meanwhile."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(batch["status"], total=None)
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_LOOK_S)  # nothing tells a client that polls
            try:
                batch = await client.patiently(client.get, batch["id"])
            except _Away as error:
                raise ClusterError(
                    f"{batch['id']} goes on without us, and the same command follows it: {error}"
                ) from error
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            total = counts["total"] or None
            progress.update(task, description=batch["status"], completed=done, total=total)
    return batch


class _Away(ClusterError):
    """The coordinator is busy or cannot be reached: the same may be asked again."""

    def __init__(self, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class _NotThere(ClusterError):
    """There is nothing of this name."""


class _Client:
    """Calls of one coordinator."""

    def __init__(self, session: aiohttp.ClientSession, url: str, trust: Trust) -> None:
        self._session = session
        self._url = url
        self._trust = trust

    async def patiently(self, call: Callable[..., Awaitable[T]], *given: Any) -> T:
        """Make a call again while the coordinator is away, or busy, for as long as it may be."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _LOST_S
        while True:
            try:
                return await call(*given)
            except _Away as error:
                wait_s = max(error.wait_s, _LOOK_S)
                if loop.time() + wait_s > until_s:
                    raise
                await asyncio.sleep(wait_s)

    async def upload(self, file: Path) -> Answer:
        """Send a file."""
        form = aiohttp.FormData({"purpose": "batch"})
        with file.open("rb") as lines:
            form.add_field("file", lines, filename=file.name)
            return await self._asked("POST", "/v1/files", data=form)

    async def create(self, body: dict[str, str]) -> Answer:
        """Begin a batch."""
        return await self._asked("POST", "/v1/batches", json=body)

    async def get(self, batch_id: str) -> Answer:
        """Return a batch as it is now."""
        return await self._asked("GET", f"/v1/batches/{batch_id}")

    async def fetch(self, path: str, to: Path) -> None:
        """Write a file, which is there once it is whole."""
        part = to.with_name(f"{to.name}.part")
        try:
            async with self._session.get(self._url + path, ssl=self._trust) as response:
                _check(response, "GET", path, b"" if response.ok else await response.read())
                with part.open("wb") as file:
                    async for piece in response.content.iter_any():
                        file.write(piece)
            part.rename(to)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Away(f"the answers cannot be fetched: {error}") from error
        finally:
            part.unlink(missing_ok=True)

    async def _asked(self, method: str, path: str, **sent: Any) -> Answer:
        try:
            async with self._session.request(
                method, self._url + path, ssl=self._trust, **sent
            ) as response:
                content = await response.read()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            lost = not_reached(self._url, error)
            # What was sent may have been done: only questions are asked again.
            raise (_Away(lost.message) if method == "GET" else lost) from error
        _check(response, method, path, content)
        return dict(msgspec.json.decode(content))


def _check(response: aiohttp.ClientResponse, method: str, path: str, content: bytes) -> None:
    """Raises ClusterError: it is no good answer."""
    if response.status == 200:
        return
    said = content[:500].decode(errors="replace")
    if response.status in _BUSY:
        wait = response.headers.get("Retry-After", "")
        raise _Away(f"the coordinator says {said}", float(wait) if wait.isdecimal() else 0.0)
    kind = _NotThere if response.status == 404 else ClusterError
    raise kind(f"{method} {path}: status {response.status}: {said}")
