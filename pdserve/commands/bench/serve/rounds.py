"""Compares completion servers under the same load: `pdserve bench serve`.

Any server with an OpenAI API will do. Each load is a closed loop of streams, or an open loop with
Poisson arrivals at a rate. Prompts are random, of one length, and new in each round, so that no
prefix cache holds them. With several servers, rounds alternate between them, each server being
first equally often, and ratios compare neighbouring rounds.

Definitions are those of outcome.py. ITL is measured by arrival: tokens sent in one piece have no
time between them, and `tokens_per_piece` shows this. The server's token counts are used if it
reports usage; otherwise each piece counts as one token.

The client takes about 40 us of CPU time for a token that arrives alone (3 % of a core for 16
streams with 700 tokens a second), and can read 100,000 tokens a second if they arrive that fast.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import aiohttp
import msgspec

from pdserve.commands.bench.load.client import open_session
from pdserve.commands.bench.load.client_run import Run
from pdserve.commands.bench.load.open_loop import OpenLoopClient
from pdserve.commands.bench.load.workload import TimedRequest, poisson_times, random_ids
from pdserve.commands.bench.serve.config import Load, ServePlan
from pdserve.commands.bench.serve.report import ServeReport, serve_ratio, serve_row
from pdserve.shared.errors import ClusterError, ConfigError

_ANSWER_S = 10.0  # deadline for the list of models
_WARM_UP_OUTPUT = 2  # tokens
_ARRIVALS, _TOKENS, _WARM_UP = range(3)  # purposes of random numbers
_LEAST_CLOSED = 8  # least requests of a closed-loop round
_PER_STREAM = 4
_OPEN = 32


@dataclass(frozen=True, slots=True)
class Target:
    """A measured server."""

    url: str
    model: str
    client: OpenLoopClient


async def serve(
    targets: Sequence[Target],
    plan: ServePlan,
    report: ServeReport,
    tell: Callable[[str], None] = lambda text: None,
) -> None:
    """Run every load on every server, in turns; `report` has each load as soon as it is done."""
    for load in plan.loads:
        rounds: list[list[Run]] = [[] for _ in targets]  # one list per target
        for number in range(plan.rounds):
            for index in turns(len(targets), number):
                tell(f"{load}, round {number + 1} of {plan.rounds}: {targets[index].url}")
                rounds[index].append(await run_round(targets[index], load, plan, number))
        report.rows.extend(
            serve_row(target.url, target.model, load, some)
            for target, some in zip(targets, rounds, strict=True)
        )
        report.ratios.extend(
            serve_ratio(target.url, load, rounds[0], some)
            for target, some in zip(targets[1:], rounds[1:], strict=True)
        )


def turns(count: int, number: int) -> Iterator[int]:
    """Yield each of `count` indices, starting with another one in each round."""
    return ((number + index) % count for index in range(count))


async def run_round(target: Target, load: Load, plan: ServePlan, number: int) -> Run:
    """Run round `number` of a load on one server."""
    requests = requests_of(plan, load, number)
    salt = f"{plan.seed}-{load}-{number}"
    if load.concurrency:
        return await target.client.run_closed(requests, salt, load.concurrency, plan.round_s)
    return await target.client.run(requests, salt, plan.round_s)


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


@asynccontextmanager
async def open_targets(
    urls: Sequence[str],
    models: Sequence[str],
    plan: ServePlan,
    headers: Mapping[str, str] | None = None,
) -> AsyncIterator[list[Target]]:
    """Yield clients for servers that have answered a prompt of the plan's length.

    Prompts are sent as token ids if the server accepts them.

    Args:
        urls: of the servers.
        models: the model to request from each server; empty: the first one that it lists.
        plan: the load.
        headers: sent with every request, such as an API key that is valid for all servers.

    Raises:
        ConfigError: the numbers of models and urls differ.
        ClusterError: a server cannot be reached, or does not serve completions.
    """
    if models and len(models) != len(urls):
        raise ConfigError(f"{len(models)} models for {len(urls)} urls: name one for each, or none")
    async with AsyncExitStack() as stack:
        targets = []
        for index, given in enumerate(urls):
            url = given.rstrip("/").removesuffix("/v1")
            # Some servers (llama.cpp's) close a connection after a stream without saying so.
            session = await stack.enter_async_context(
                open_session(headers, keeps_connections=False)
            )
            model = models[index] if models else await _first_model(session, url)
            targets.append(Target(url, model, await _warm_client(session, url, model, plan)))
        yield targets


async def _first_model(session: aiohttp.ClientSession, url: str) -> str:
    try:
        async with (
            asyncio.timeout(_ANSWER_S),
            session.get(f"{url}/v1/models", raise_for_status=True) as response,
        ):
            models = msgspec.json.decode(await response.read(), type=_Models).data
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        raise ClusterError(f"{url} does not list its models: {error}") from error
    if not models:
        raise ClusterError(f"{url} lists no model")
    return models[0].id


async def _warm_client(
    session: aiohttp.ClientSession, url: str, model: str, plan: ServePlan
) -> OpenLoopClient:
    """Return a client whose first request succeeded: with token ids or, if refused, with text."""
    prompt = warm_up_prompt(plan)
    request = TimedRequest(0.0, "warm-up", prompt, _WARM_UP_OUTPUT)
    client = OpenLoopClient(session, url, model)
    try:
        await client.one_by_one([request], "warm-up", plan.round_s)
    except ClusterError as refusal:
        client = OpenLoopClient(session, url, model, sends_text=True)
        try:
            await client.one_by_one([request], "warm-up", plan.round_s)
        except ClusterError as error:
            raise ClusterError(
                f"{url} answers neither a prompt of token ids ({refusal}) nor one of text ({error})"
            ) from error
    return client


def requests_of(plan: ServePlan, load: Load, number: int) -> list[TimedRequest]:
    """Return the requests of round `number` of one of the plan's loads."""
    times = _times(plan, load, number)
    where = [plan.seed, _TOKENS, plan.loads.index(load), number]
    return [
        TimedRequest(
            at_s, "bench", random_ids(plan.prompt_tokens, [*where, index]), plan.output_tokens
        )
        for index, at_s in enumerate(times)
    ]


def warm_up_prompt(plan: ServePlan) -> list[int]:
    """Return a prompt of the measured length that is not one of the measured prompts."""
    return random_ids(plan.prompt_tokens, [plan.seed, _WARM_UP])


def _times(plan: ServePlan, load: Load, number: int) -> list[float]:
    """Return when each request is due; all at once for a closed loop, which sends them in turn."""
    if load.concurrency:
        return [0.0] * (plan.num_requests or max(_LEAST_CLOSED, _PER_STREAM * load.concurrency))
    return poisson_times(load.rate, plan.num_requests or _OPEN, [plan.seed, _ARRIVALS, number])
