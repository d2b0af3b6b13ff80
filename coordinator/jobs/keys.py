"""Where the application keeps what runs batches."""

from __future__ import annotations

from aiohttp import web

from coordinator.jobs.runner import Runner

RUNNER = web.AppKey("RUNNER", Runner)
