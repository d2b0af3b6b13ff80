"""The paths of files and batches; `operations` describes them: one row per route."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from coordinator.adapters.table import SCHEMA as ADAPTERS
from coordinator.api.calls import CALLS, about
from coordinator.api.context import CONTEXT
from coordinator.api.routes import add_routes, post
from coordinator.jobs import batch_endpoints, file_endpoints, message_endpoints
from coordinator.jobs.file_endpoints import sent
from coordinator.jobs.keys import RUNNER
from coordinator.jobs.message_endpoints import BATCHES
from coordinator.jobs.operations import OPERATIONS
from coordinator.jobs.runner import BEAT_S, BatchRunner
from coordinator.jobs.storage.database import Database, PostgresDatabase, SqliteDatabase
from coordinator.jobs.storage.tables import SCHEMA

_FILE = "/v1/files/{file}"
_BATCH = "/v1/batches/{batch}"
_MESSAGES = f"{BATCHES}/{{batch}}"

ROUTES = (
    web.post("/v1/files", file_endpoints.upload_file),
    web.get("/v1/files", about(RUNNER, file_endpoints.list_files)),
    web.get(_FILE, about(RUNNER, file_endpoints.get_file)),
    web.delete(_FILE, about(RUNNER, file_endpoints.delete_file)),
    web.get(f"{_FILE}/content", sent(file_endpoints.get_content)),
    post("/v1/batches", about(RUNNER, batch_endpoints.create_batch)),
    web.get("/v1/batches", about(RUNNER, batch_endpoints.list_batches)),
    web.get(_BATCH, about(RUNNER, batch_endpoints.get_batch)),
    post(f"{_BATCH}/cancel", about(RUNNER, batch_endpoints.cancel_batch)),
    post(BATCHES, about(RUNNER, message_endpoints.create_batch)),
    web.get(BATCHES, about(RUNNER, message_endpoints.list_batches)),
    web.get(_MESSAGES, about(RUNNER, message_endpoints.get_batch)),
    web.delete(_MESSAGES, about(RUNNER, message_endpoints.delete_batch)),
    post(f"{_MESSAGES}/cancel", about(RUNNER, message_endpoints.cancel_batch)),
    web.get(f"{_MESSAGES}/results", sent(message_endpoints.get_results)),
)


def open_jobs(where: str | Path | None) -> Database:
    """Open the database of files, batches and names of adapters: a URL, a file, or None for memory.

    Raises ConfigError.
    """
    schema = (*SCHEMA, *ADAPTERS)
    if isinstance(where, str):
        return PostgresDatabase(where, schema)
    return SqliteDatabase(where, schema)


def add_job_routes(
    app: web.Application, database: Database | None = None, beat_s: float = BEAT_S
) -> None:
    """Add /v1/files and /v1/batches to the API, for all calls that it has by now."""
    calls = app[CALLS]
    app[RUNNER] = BatchRunner(database or open_jobs(None), app[CONTEXT], calls, beat_s=beat_s)
    app.on_startup.append(_begin)
    app.on_cleanup.append(_close)
    add_routes(app, ROUTES, OPERATIONS)


async def _begin(app: web.Application) -> None:
    app[RUNNER].begin()


async def _close(app: web.Application) -> None:
    await app[RUNNER].close()
