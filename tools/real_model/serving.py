"""Serves the model as a cluster on this machine, and asks it over HTTP."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp

from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.bench.serve.backend_process import running
from pdserve.shared.process.user_cache import CACHE_VARIABLE

MODES: Final = {"1P1D": "disaggregated", "co-located": "colocated"}
KV_BYTES: Final = 256 << 20
_SIZES: Final = (f"--kv-memory={KV_BYTES}", "--max-model-len=4096")
_START_S: Final = 300.0
_ANSWER_S: Final = 300.0
_RESIDENT = re.compile(rb"^process_resident_memory_bytes (\S+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens, and the log-probability of each."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster that is ready."""

    url: str
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

    async def node_bytes(self) -> int:
        """Return the memory of its largest node."""
        found = []
        for target in await self._get("/metrics/targets"):
            for address in target["targets"]:
                async with self.session.get(f"http://{address}/metrics") as response:
                    found += _RESIDENT.findall(await response.read())
        return int(max(map(float, found)))

    async def _choices(self, prompt: Sequence[int], **fields: Any) -> list[Any]:
        return list((await self._post("/v1/completions", prompt=list(prompt), **fields))["choices"])

    async def _post(self, path: str, **fields: Any) -> Any:
        body = {"model": self.model, **fields}
        async with self.session.post(self.url + path, json=body) as response:
            return await _json_of(response)

    async def _get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as response:
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
            yield Served(started.url, ready_s, name, session)


async def _json_of(response: aiohttp.ClientResponse) -> Any:
    answer = await response.json()
    if response.status != 200:
        raise aiohttp.ClientError(f"{response.url}: {answer}")
    return answer
