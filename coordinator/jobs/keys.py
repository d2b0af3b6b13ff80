"""Where the application keeps what runs batches."""

from __future__ import annotations

from aiohttp import web

from coordinator.jobs.runner import BatchRunner

RUNNER = web.AppKey("RUNNER", BatchRunner)
