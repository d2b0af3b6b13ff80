"""Prompts that are text, and how many of a model's answers' tokens are guessed behind them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import aiohttp
import msgspec

from coordinator.text import Tokenizer
from pdserve.commands.bench.compare.cases import CompareCase, made_up
from pdserve.commands.bench.drafts.texts import functions_text
from pdserve.commands.bench.load.open_loop import open_loop_client
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.bench.load.workload import Sketch, TimedRequest, Workload
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.commands.simulation.calibrate.samples import NodeReader
from pdserve.commands.simulation.crossover.cells import Cell
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.config import CheckpointConfig, EngineConfig

_DEADLINE_S = 120.0  # of one request


class WrittenWorkload:
    """Implements `Workload`: the requests of another one, whose prompts are pieces of a text."""

    def __init__(self, workload: Workload, ids: Sequence[int]) -> None:
        """`ids`: the text's tokens, over again where a prompt is longer."""
        self.block_tokens = workload.block_tokens
        self._workload = workload
        self._ids = ids

    def sketched(self, rate: float, count: int, turn: int = 0) -> Iterator[Sketch]:
        """As Workload.sketched."""
        return self._workload.sketched(rate, count, turn)

    def timed(
        self, rate: float, count: int, turn: int = 0, contents: int = 0
    ) -> list[TimedRequest]:
        """As Workload.timed."""
        requests = self._workload.timed(rate, count, turn, contents)
        sketches = self._workload.sketched(rate, count, turn)
        return [
            self._written(request, f"{sketch.number} {contents}")
            for request, sketch in zip(requests, sketches, strict=True)
        ]

    def first(self, count: int, contents: int = 0) -> list[TimedRequest]:
        """As Workload.first."""
        requests = self._workload.first(count, contents)
        return [self._written(request, f"{n} {contents}") for n, request in enumerate(requests)]

    def _written(self, request: TimedRequest, seed: str) -> TimedRequest:
        start, ids = Random(seed).randrange(len(self._ids)), self._ids
        prompt = [ids[(start + i) % len(ids)] for i in range(len(request.prompt))]
        return replace(request, prompt=prompt)


def text_ids(model: str) -> list[int]:
    """Return the text's tokens: functions of Python's standard library, as in `bench drafts`.

    Raises:
        PdserveError: the checkpoint cannot be found, or has no tokenizer.
    """
    checkpoint = resolve_checkpoint(model, with_weights=False)
    tokenizer = Tokenizer.from_checkpoint(checkpoint.path)
    return tokenizer.encode(functions_text(), add_special_tokens=False)


def case_of(
    scenario: ScenarioName, max_model_len: int, length_scale: float, ids: Sequence[int]
) -> CompareCase:
    """Return the scenario, with prompts of this text; `ids` empty: of random tokens.

    Raises:
        ConfigError: as `made_up`.
    """
    case = made_up(scenario, max_model_len, length_scale, 0)
    return replace(case, workload=WrittenWorkload(case.workload, ids)) if ids else case


class Guessed(msgspec.Struct, frozen=True):
    """How much of a model's answers to text was guessed, one stream at a time."""

    model: str
    tokens: int  # of steps of decodes
    accepted: int  # of these, guessed

    @property
    def share(self) -> float:
        """Chance that a token is guessed, if those before it in its step are."""
        return self.accepted / self.tokens

    @property
    def tokens_per_step(self) -> float:
        """Of a stream."""
        return self.tokens / max(1, self.tokens - self.accepted)


def guessed(
    model: str, cell: Cell, base: EngineConfig, scenario: ScenarioName, scale: float, count: int
) -> Guessed:
    """Ask a node of these formats for answers to text.

    Raises:
        PdserveError: it cannot be started, or does not answer.
    """
    config = ClusterConfig(
        port=0,
        mode="colocated",
        checkpoint=CheckpointConfig(model=model),
        engine=cell.formats.engine(base),
        speculation=cell.speculation,
    )
    return asyncio.run(_guessed(config, scenario, scale, count))


async def _guessed(
    config: ClusterConfig, scenario: ScenarioName, scale: float, count: int
) -> Guessed:
    ids = text_ids(config.checkpoint.model)
    cluster = Cluster(config, on_line=lambda _name, _line: None)
    async with cluster as running, aiohttp.ClientSession() as session:
        reader = NodeReader(session, list((await running.metrics_addresses()).values()))
        await reader.read()
        assert reader.kind is not None
        case = case_of(scenario, reader.kind.limits.max_model_len, scale, ids)
        name = (await running.status()).model
        async with open_loop_client(running.url, name) as client:
            outcomes = await client.one_by_one(case.sample(count), "guessed", _DEADLINE_S)
        tallies = (await reader.read()).tallies.values()
    tokens = sum(outcome.num_received - 1 for outcome in outcomes)
    return Guessed(name, tokens, sum(tally.accepted for tally in tallies))
