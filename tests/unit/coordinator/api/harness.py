"""The API on a real socket, and clients for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai

from coordinator.adapters.life import Adapters
from coordinator.api import ApiConfig, HttpServer, RequestSummary, create_app
from coordinator.api.adapters import add_adapter_routes
from coordinator.api.context import CONTEXT, ApiContext
from coordinator.jobs.routes import add_job_routes
from coordinator.jobs.storage.database import Database
from coordinator.models.embedding import EmbeddingModel
from coordinator.models.model import Catalog, make_model
from coordinator.models.scoring import NO_SCORES, ScoringModel
from coordinator.stateful.routes import add_stateful_routes
from coordinator.stateful.storage.store import ResponseStore
from coordinator.tenants import Readers, Tenants
from coordinator.text import Tokenizer
from coordinator.text.parts import ToolFormat
from pdserve._native import Histogram
from pdserve.model_files.sampling_defaults import PLAIN, SamplingDefaults
from pdserve.shared.slo import ServiceClasses
from tests.fakes.generator import MODEL, FakeGenerator, tiny_tokenizer, tool_tokenizer


@dataclass
class RecordingObserver:
    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    finished: list[RequestSummary] = field(default_factory=list)
    tiers: list[tuple[str, str, str]] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    gaps: Histogram = field(default_factory=lambda: Histogram([]))

    def of(self, model: str) -> RecordingObserver:
        return self

    def first_token(self, ttft_s: float) -> None:
        self.ttft_s.append(ttft_s)

    def inter_token(self, itl_s: float) -> None:
        self.itl_s.append(itl_s)

    def request_finished(self, summary: RequestSummary) -> None:
        self.finished.append(summary)
        self.over.set()

    def tier_ended(self, cascade: str, model: str, outcome: str) -> None:
        self.tiers.append((cascade, model, outcome))


@dataclass
class Harness:
    """A served API and a client for it."""

    server: HttpServer
    server_context: ApiContext
    generator: FakeGenerator
    observer: RecordingObserver
    client: aiohttp.ClientSession

    @property
    def base_url(self) -> str:
        return f"{self.server.url}/v1"

    def chat(self, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """POST /v1/chat/completions."""
        messages = [{"role": "user", "content": "Hi"}]
        whole = {"model": MODEL, "messages": messages, **body}
        return self.client.post("/v1/chat/completions", json=whole, headers=headers)

    def complete(self, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """POST /v1/completions."""
        whole = {"model": MODEL, "prompt": "Hi there", **body}
        return self.client.post("/v1/completions", json=whole, headers=headers)

    def embed(self, headers: dict[str, str] | None = None, **body: Any) -> Any:
        """POST /v1/embeddings."""
        whole = {"model": MODEL, "input": "Hi there", **body}
        return self.client.post("/v1/embeddings", json=whole, headers=headers)


async def _metrics() -> bytes:
    return b"pdserve_up 1\n"


@asynccontextmanager
async def served(
    generator: FakeGenerator | None = None,
    tokenizer: Tokenizer | None = None,
    tenants: Tenants | None = None,
    readers: Readers | None = None,
    embedding_model: EmbeddingModel | None = None,
    scoring: ScoringModel = NO_SCORES,
    classes: ServiceClasses | None = None,
    store: ResponseStore | None = None,
    https_dir: Path | None = None,
    tool_format: ToolFormat | None = None,
    jobs: Database | None = None,
    adapters: Adapters | None = None,
    catalog: Catalog | None = None,
    sampling: SamplingDefaults = PLAIN,
    **config: Any,
) -> AsyncIterator[Harness]:
    """The API on a real socket; with a `catalog`, of its models."""
    generator = generator or FakeGenerator()
    observer = RecordingObserver()
    model = make_model(
        generator,
        tokenizer or tiny_tokenizer(),
        [MODEL, "alias"],
        tool_format=tool_format,
        embedding=embedding_model,
        scoring=scoring,
        sampling=sampling,
        adapters=adapters,
    )
    app = create_app(
        catalog or Catalog([model]),
        config=ApiConfig(**config),
        observer=observer,
        metrics=_metrics,
        tenants=tenants,
        readers=readers,
        classes=classes,
    )
    add_stateful_routes(app, store)
    add_job_routes(app, jobs, beat_s=0.02)
    if adapters is not None:
        of_name = dict.fromkeys((None, *model.names), adapters)
        known = adapters.known
        add_adapter_routes(app, of_name.__getitem__, lambda n: adapters if n in known else None)
    timeout = aiohttp.ClientTimeout(total=30)
    async with (
        HttpServer(app, https_dir=https_dir) as server,
        aiohttp.ClientSession(server.url, timeout=timeout) as client,
    ):
        yield Harness(server, app[CONTEXT], generator, observer, client)


def events_of(raw: bytes) -> list[Any]:
    """The events of a stream; comments stay strings."""
    events: list[Any] = []
    blocks = raw.decode().split("\n\n")
    assert blocks[-1] == "", "a stream ends with the end of an event"
    for block in blocks[:-1]:
        if block.startswith("data: {"):
            events.append(json.loads(block.removeprefix("data: ")))
        else:
            events.append(block)
    return events


def is_error_body(body: Any) -> bool:
    """Whether it is an OpenAI error object."""
    return set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}


def client_of(api: Harness) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=api.base_url, api_key="-")


def prompt_of(api: Harness) -> str:
    return tool_tokenizer().decode(
        api.generator.last.request.prompt.token_ids, skip_special_tokens=False
    )


def tail_of_prompt(api: Harness) -> str:
    return prompt_of(api).removeprefix("<s>")
