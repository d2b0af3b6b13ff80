"""Serves the model as a cluster on this machine, and asks it over HTTP."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil

from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.bench.serve.backend_process import running
from pdserve.shared.process.user_cache import CACHE_VARIABLE

MODES: Final = {"1P1D": "disaggregated", "co-located": "colocated"}
KV_BYTES: Final = 256 << 20
_SIZES: Final = (f"--kv-memory={KV_BYTES}", "--max-model-len=4096")
_START_S: Final = 300.0
_ANSWER_S: Final = 300.0
_ROLES: Final = {"prefill", "decode"}  # of nodes, in their command lines


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Bytes. Nodes of a machine share pages with what they were forked from, and weights."""

    resident: int = 0  # all that it has mapped, as if it had it alone
    share: int = 0  # a page that several have counts in parts (PSS): what the machine pays


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster that is ready."""

    url: str
    pid: int
    ready_s: float  # from its start
    model: str
    session: aiohttp.ClientSession

    async def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, special ones included."""
        return list((await self._post("/tokenize", prompt=text))["tokens"])

    async def complete(self, prompt: Sequence[int], num_tokens: int) -> Answer:
        """Return a greedy answer of exactly so many tokens."""
        options = {"temperature": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True}
        (choice,) = await self._choices(prompt, max_tokens=num_tokens, **options)
        return Answer(choice["token_ids"], choice["logprobs"]["token_logprobs"])

    async def scores(self, text: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a text but the first."""
        (choice,) = await self._choices(text, max_tokens=0, prompt_logprobs=0)
        shown = zip(text[1:], choice["prompt_logprobs"][1:], strict=True)
        return [entry[str(token_id)]["logprob"] for token_id, entry in shown]

    def node_memory(self) -> NodeMemory:
        """Return the memory of its largest node."""
        processes = psutil.Process(self.pid).children(recursive=True)
        nodes = [one for one in processes if _ROLES & {*one.cmdline()}]
        largest = max((one.memory_full_info() for one in nodes), key=lambda info: info.rss)
        return NodeMemory(largest.rss, largest.pss)

    async def _choices(self, prompt: Sequence[int], **fields: Any) -> list[Any]:
        return list((await self._post("/v1/completions", prompt=list(prompt), **fields))["choices"])

    async def _post(self, path: str, **fields: Any) -> Any:
        body = {"model": self.model, **fields}
        async with self.session.post(self.url + path, json=body) as response:
            return await _json_of(response)


@asynccontextmanager
async def served(model: Path, cache: Path, flags: Sequence[str]) -> AsyncIterator[Served]:
    """Serve a file until the context ends; `cache` has what it packs.

    Raises:
        StartFailed: it does not start.
    """
    pdserve = [sys.executable, "-m", "pdserve", "up", f"--model={model}", "--port={port}"]
    argv = ["env", f"{CACHE_VARIABLE}={cache}", *pdserve, *_SIZES, *flags]
    began_s = time.monotonic()
    async with running(Backend("pdserve", command=shlex.join(argv)), {}, _START_S) as started:
        ready_s = time.monotonic() - began_s
        limit = aiohttp.ClientTimeout(total=_ANSWER_S)
        async with aiohttp.ClientSession(timeout=limit) as session:
            async with session.get(f"{started.url}/v1/models") as response:
                name = (await _json_of(response))["data"][0]["id"]
            assert started.pid is not None, "it was started here"
            yield Served(started.url, started.pid, ready_s, name, session)


async def _json_of(response: aiohttp.ClientResponse) -> Any:
    answer = await response.json()
    if response.status != 200:
        raise aiohttp.ClientError(f"{response.url}: {answer}")
    return answer
