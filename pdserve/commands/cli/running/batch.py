"""`pdserve batch run`: has the lines of a file answered, and shows how far they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, TypeAlias

import aiohttp
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pdserve.commands.cluster.coordinator_http import Trust, key_headers
from pdserve.shared.errors import ClusterError, ConfigError
from pdserve.shared.process.exit_codes import FAILED, OK

Answer: TypeAlias = dict[str, Any]
_LOOK_S: Final = 1.0  # between two looks at how far it is
_LOST_S: Final = 60.0  # for which a coordinator may be away
_SILENCE_S: Final = 300.0
_ENDED: Final = ("completed", "failed", "expired", "cancelled")


def run(url: str, file: Path, output: Path | None, trust: Trust = True) -> int:
    """Run a batch to its end; the exit code. Ctrl-C leaves it running.

    `output`: for the answers; errors stand beside it. None: beside the file.

    Raises:
        ConfigError: the file cannot be read, or the output is there already.
        ClusterError: the coordinator refuses, or does not come back.
    """
    output = output or file.with_suffix(".answers.jsonl")
    errors = output.with_suffix(".errors.jsonl")
    for path in (output, errors):
        if path.exists():
            raise ConfigError(f"{path} is there already: name another file with --output")
    try:
        endpoint = _endpoint(file)
        batch = asyncio.run(_run(url, file, endpoint, (output, errors), trust))
    except OSError as error:
        raise ConfigError(f"cannot read {file}, or write beside it: {error}") from error
    counts = batch["request_counts"]
    print(f"{batch['id']} {batch['status']}: {counts['completed']} of {counts['total']} answered")
    for fault in (batch["errors"] or {"data": []})["data"]:
        print(f"line {fault['line']}: {fault['message']}")
    for path in (output, errors):
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


async def _run(
    url: str, file: Path, endpoint: str, outputs: tuple[Path, Path], trust: Trust
) -> Answer:
    timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
    async with aiohttp.ClientSession(
        url.rstrip("/"), timeout=timeout, headers=key_headers()
    ) as session:
        form = aiohttp.FormData({"purpose": "batch"})
        with file.open("rb") as lines:
            form.add_field("file", lines, filename=file.name)
            given = await _asked(session, "POST", "/v1/files", trust, data=form)
        body = {"input_file_id": given["id"], "endpoint": endpoint, "completion_window": "24h"}
        batch = await _asked(session, "POST", "/v1/batches", trust, json=body)
        batch = await _followed(session, batch, trust)
        for name, path in zip(("output_file_id", "error_file_id"), outputs, strict=True):
            if batch[name] is not None:
                await _fetch(session, f"/v1/files/{batch[name]}/content", path, trust)
        return batch


async def _followed(session: aiohttp.ClientSession, batch: Answer, trust: Trust) -> Answer:
    """Show how far a batch is until it has ended; a coordinator may be away meanwhile."""
    loop = asyncio.get_running_loop()
    seen_s = loop.time()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(batch["status"], total=None)
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_LOOK_S)  # nothing tells a client that polls
            try:
                batch = await _asked(session, "GET", f"/v1/batches/{batch['id']}", trust)
                seen_s = loop.time()
            except _Away as error:
                if loop.time() - seen_s > _LOST_S:
                    raise ClusterError(f"{batch['id']} goes on without us: {error}") from error
                continue
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            total = counts["total"] or None
            progress.update(task, description=batch["status"], completed=done, total=total)
    return batch


class _Away(ClusterError):
    """The coordinator cannot be reached, or asks to come back later."""


async def _asked(
    session: aiohttp.ClientSession, method: str, path: str, trust: Trust, **sent: Any
) -> Answer:
    try:
        async with session.request(method, path, ssl=trust, **sent) as response:
            content = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _Away(f"no answer from the coordinator: {error}") from error
    if response.status == 503:
        raise _Away(f"the coordinator says {content[:500].decode(errors='replace')}")
    if response.status != 200:
        said = content[:500].decode(errors="replace")
        raise ClusterError(f"{method} {path}: status {response.status}: {said}")
    return dict(msgspec.json.decode(content))


async def _fetch(session: aiohttp.ClientSession, path: str, to: Path, trust: Trust) -> None:
    try:
        async with session.get(path, ssl=trust) as response:
            if response.status != 200:
                raise ClusterError(f"GET {path}: status {response.status}")
            with to.open("xb") as file:
                async for piece in response.content.iter_any():
                    file.write(piece)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ClusterError(f"the answers cannot be fetched: {error}") from error
