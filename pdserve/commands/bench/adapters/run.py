"""`pdserve bench adapters`: a cluster's speed with adapters and without, and what cold ones wait.

A prefill node and a decode node load the cold adapters first, then others, then those of the batch:
so the cold ones have lost their places. Each is called once, a warm one before it. Where
`engine.adapter_memory` has room they are still in memory; else their files are read again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Final

from rich.table import Table

from pdserve.commands.bench.adapters.config import AdaptersBenchConfig, AdaptersReport, Turn
from pdserve.commands.bench.adapters.random_adapter import write_adapter
from pdserve.commands.bench.checkpoints.named import checkpoint_of
from pdserve.commands.bench.load.client import PLAIN_IDS, Client, group_within, open_session
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.commands.bench.overhead.run import WatchedNode, measure_overhead
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.supervisor import Cluster
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.config import CheckpointConfig
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import OK

_AT_ONCE: Final = 8  # adapters that are being loaded
_SHORT: Final = 16  # tokens of a prompt


def run(config: AdaptersBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the cluster failed, or the settings leave nothing to measure.
    """
    with TemporaryDirectory() as folder:
        report = asyncio.run(_measure(config, Path(folder)))
    if config.json:
        print_json(report, setup)
    else:
        print_tables([table(report, machine_and_date(setup))], remarks(report))
    return OK


async def _measure(config: AdaptersBenchConfig, folder: Path) -> AdaptersReport:
    others, model = config.others, checkpoint_of(config.shape)
    load_average = os.getloadavg()[0]
    checkpoint = resolve_checkpoint(model)
    cold, hot = (
        [f"{kind}{n}" for n in range(count)]
        for kind, count in (("cold", config.cold), ("hot", config.adapters))
    )
    small = [f"other{n}" for n in range(others)]
    say(f"writing {config.known} adapters")
    for seed, name in enumerate([*cold, *small, *hot]):
        rank, ends = (1, ("q_proj",)) if name in small else (config.rank, ("_proj",))
        write_adapter(folder / name, checkpoint, seed, rank=rank, ends=ends)
    cluster = ClusterConfig(port=0, checkpoint=CheckpointConfig(model=model), engine=config.engine)
    async with Cluster(cluster) as running:
        bench = _Bench(config, running, (await running.status()).model)
        for names in (cold, small, hot):
            await bench.load(folder, names)
        address = (await running.metrics_addresses())["decode-0"]
        node = WatchedNode(address, running.pid("decode-0"))
        warm_ms, cold_ms = await bench.call(cold, hot)
        return AdaptersReport(
            [await bench.decode(node, hot) for _ in range(config.rounds)],
            [await bench.prefill(hot[n % len(hot)]) for n in range(2 * config.rounds)],
            warm_ms,
            cold_ms,
            load_average,
        )


class _Bench:
    """The parts of a measurement of one cluster."""

    def __init__(self, config: AdaptersBenchConfig, cluster: Cluster, model: str) -> None:
        self._config = config
        self._url = cluster.url
        self._model = model
        self._num_prompts = 0  # so far, each another one

    async def load(self, folder: Path, names: Sequence[str]) -> None:
        """Load them, whose folders have their names, a few at once."""
        say(f"loading {len(names)} adapters")
        turns = asyncio.Semaphore(_AT_ONCE)
        late = f"{len(names)} adapters were not loaded within {self._config.deadline_s:g} s"
        async with open_session() as session, group_within(self._config.deadline_s, late) as tasks:

            async def load(name: str) -> None:
                body = {"lora_name": name, "lora_path": str(folder / name)}
                async with (
                    turns,
                    session.post(f"{self._url}/v1/load_lora_adapter", json=body) as response,
                ):
                    if not response.ok:
                        raise ClusterError(f"{name} is not loaded: {await response.text()}")

            for name in names:
                tasks.create_task(load(name))

    async def decode(self, node: WatchedNode, hot: Sequence[str]) -> Turn:
        """Time decode steps of all streams, without adapters and with these."""
        config = self._config
        rows = [
            await measure_overhead(
                self._url, names, node, config.streams, config.tokens, config.deadline_s
            )
            for names in ([self._model], hot)
        ]
        return Turn(*(row.model_ms for row in rows))

    async def prefill(self, name: str) -> Turn:
        """Time a prompt alone, without an adapter and with this one."""
        tokens = self._config.prompt_tokens
        return Turn(await self._call_ms(self._model, tokens), await self._call_ms(name, tokens))

    async def call(
        self, cold: Sequence[str], hot: Sequence[str]
    ) -> tuple[list[float], list[float]]:
        """Time a call of each cold adapter, and before it of one that is not."""
        warm_ms, cold_ms = [], []
        for number, name in enumerate(cold):
            warm_ms.append(await self._call_ms(hot[number % len(hot)], _SHORT))
            cold_ms.append(await self._call_ms(name, _SHORT))
        return warm_ms, cold_ms

    async def _call_ms(self, name: str, num_tokens: int) -> float:
        self._num_prompts += 1
        numbers = range(self._num_prompts, self._num_prompts + num_tokens)
        prompt = [PLAIN_IDS[number * number % len(PLAIN_IDS)] for number in numbers]
        late = f"a call was not answered within {self._config.deadline_s:g} s"
        async with open_session() as session, group_within(self._config.deadline_s, late):
            began_s = time.perf_counter()
            await Client(session, self._url, name).stream(prompt, 1)
            return (time.perf_counter() - began_s) * 1e3


def table(report: AdaptersReport, caption: str) -> Table:
    """For people."""
    table = Table(title="with adapters and without", caption=caption)
    for column in ("", "without ms", "with ms", "kept, median", "least", "most"):
        table.add_column(column, justify="left" if not column else "right")
    for what, turns in (("a decode step", report.decode), ("a prompt's token 1", report.prefill)):
        kept = [turn.kept for turn in turns]
        table.add_row(
            what,
            f"{median(turn.without_ms for turn in turns):.1f}",
            f"{median(turn.with_ms for turn in turns):.1f}",
            *(f"{number:.2f}" for number in (median(kept), min(kept), max(kept))),
        )
    return table


def remarks(report: AdaptersReport) -> list[str]:
    """What is said below."""
    more_ms = [cold - warm for warm, cold in zip(report.warm_ms, report.cold_ms, strict=True)]
    return [
        f"a cold adapter's call waits {median(more_ms):.0f} ms more than a warm one's "
        f"({median(report.warm_ms):.0f} ms) in the median, {max(more_ms):.0f} ms at most, of "
        f"{len(more_ms)}",
        f"load average at the beginning: {report.load_average:.1f}",
    ]
