"""`pdserve bench models`: models that sleep, behind one endpoint, beside other servers of many.

Each server has memory for `awake` models. Models are asked in turn, one request at a time, so that
each sleeps when its turn comes, wherever who was not asked for longest goes to sleep. Before that,
each is asked once: files are in memory then, and packed. Then come streams that ask for models by
Zipf's law: the second one half as often as the first, and so on. They end after a given time.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic

from rich.table import Table

from pdserve.commands.bench.checkpoints.gguf_checkpoint import write_gguf
from pdserve.commands.bench.checkpoints.random_checkpoint import write_random_checkpoint
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.load.client import open_session
from pdserve.commands.bench.load.open_loop import OpenLoopClient
from pdserve.commands.bench.load.outcome import Outcome, Percentiles
from pdserve.commands.bench.load.slo_score import throughput
from pdserve.commands.bench.load.workload import TimedRequest, random_ids
from pdserve.commands.bench.models.config import ModelsBenchConfig, ModelsReport, ModelsRow
from pdserve.commands.bench.output import machine_and_date, print_json, print_tables, say
from pdserve.commands.bench.serve.backend_process import running
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import FAILED, OK

_WARM, _WAKES, _MIX = range(3)  # purposes of random numbers
_MOST_A_SECOND = 64  # requests of the mix
_TOLD = 4  # wakes between two lines of progress


def run(config: ModelsBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code is 1 if a request failed.

    Raises:
        PdserveError: a server cannot be started or used, or the models cannot be made.
    """
    if config.shape not in SHAPES:
        raise ConfigError(f'--shape "{config.shape}" is none of {", ".join(SHAPES)}')
    with TemporaryDirectory(prefix="pdserve-models-") as folder:
        report = asyncio.run(_measure(config, Path(folder)))
    if config.json:
        print_json(report, setup)
    else:
        print_tables([_table(report, config, machine_and_date(setup))], _remarks(report))
    return FAILED if any(row.failed for row in report.rows) else OK


async def _measure(config: ModelsBenchConfig, folder: Path) -> ModelsReport:
    report = ModelsReport([], os.getloadavg()[0])
    backends = config.backends
    say(f"writing {config.models} models of {config.shape} to {folder}")
    has_gguf = any("gguf" in backend.command for backend in backends)
    await asyncio.to_thread(write_models, config, folder, has_gguf=has_gguf)
    places = {
        "folder": str(folder),
        "awake": str(config.awake),
        "threads": str(config.threads or len(os.sched_getaffinity(0))),
    }
    for backend in backends:
        async with running(backend, places, config.start_s, say) as started:
            report.rows.append(await measured(backend.name, started.url, config))
    return report


def write_models(config: ModelsBenchConfig, folder: Path, *, has_gguf: bool) -> None:
    """Write the models, each with random weights of its own, and the file that registers them."""
    lines = [f"shared = {{ prefill = 1, decode = 1, at_once = {config.awake} }}"]
    for seed, name in enumerate(config.names):
        write_random_checkpoint(folder / name, seed=seed, shape=SHAPES[config.shape])
        lines += [f"[models.{name}]", f'source = "{name}"', "min = {}"]
        if has_gguf:
            (folder / "gguf").mkdir(exist_ok=True)
            write_gguf(folder / name, folder / "gguf" / f"{name}.gguf")
    (folder / "models.toml").write_text("\n".join(lines) + "\n")


async def measured(server: str, url: str, config: ModelsBenchConfig) -> ModelsRow:
    """Measure a server that has just started. Raises ClusterError: a model does not answer."""
    async with open_session(keeps_connections=False) as session:
        client = OpenLoopClient(session, url, config.names[0])
        begun_s = monotonic()
        await client.one_by_one(_warm_ups(config), "warm-up", config.start_s)
        say(f"{server}: each model for the first time, {monotonic() - begun_s:.0f} s")
        wakes = await _wakes(server, client, config)
        say(f"{server}: by Zipf's law, {config.streams} at a time, {config.mix_s:g} s")
        mix = await client.run_closed(by_zipf(config), "mix", config.streams, config.mix_s)
    asked = [one for one in mix.outcomes if one.sent_s]
    ended = [one for one in asked if one.end != "unfinished"]
    late = [
        one
        for one in asked
        if one.end == "unfinished" and not one.arrivals_s
        if mix.elapsed_s - one.sent_s >= config.request_s
    ]
    failed = [one for one in (*wakes, *ended) if one.end != "finished"] + late
    return ModelsRow(
        server=server,
        wake_ttft_ms=Percentiles.of([one.ttft_s for one in wakes]),
        mix_tokens_per_s=throughput(asked),
        mix_ttft_ms=Percentiles.of([one.ttft_s for one in ended]),
        mix_e2e_ms=Percentiles.of([one.e2e_s for one in ended]),
        sent=len(wakes) + len(ended) + len(late),
        failed=len(failed),
        errors=dict(Counter(one.error or "no answer in time" for one in failed)),
    )


async def _wakes(server: str, client: OpenLoopClient, config: ModelsBenchConfig) -> list[Outcome]:
    """Ask a model that sleeps after the other, and tell how it goes."""
    outcomes: list[Outcome] = []
    for request in in_turn(config):
        await asyncio.sleep(config.pause_s)
        outcomes += (await client.run([request], "wakes", config.request_s)).outcomes
        if len(outcomes) % _TOLD == 0 or len(outcomes) == config.wakes:
            ttft_ms = Percentiles.of([one.ttft_s for one in outcomes]).text(0)
            say(f"{server}: {len(outcomes)} of {config.wakes} asleep, token 1 after {ttft_ms} ms")
    return outcomes


def _warm_ups(config: ModelsBenchConfig) -> list[TimedRequest]:
    return [_request(config, name, _WARM, number) for number, name in enumerate(config.names)]


def in_turn(config: ModelsBenchConfig) -> list[TimedRequest]:
    """Requests each of which asks the model that has slept for longest."""
    return [
        _request(config, config.names[number % config.models], _WAKES, number)
        for number in range(config.wakes)
    ]


def by_zipf(config: ModelsBenchConfig) -> list[TimedRequest]:
    """The requests of the mix: more than are sent."""
    shares = [1 / rank for rank in range(1, config.models + 1)]
    num_most = math.ceil(config.mix_s * _MOST_A_SECOND)
    names = Random(config.seed).choices(config.names, shares, k=num_most)
    return [_request(config, name, _MIX, number) for number, name in enumerate(names)]


def _request(config: ModelsBenchConfig, model: str, purpose: int, number: int) -> TimedRequest:
    prompt = random_ids(config.prompt_tokens, [config.seed, purpose, number])
    return TimedRequest(0.0, "models", prompt, config.output_tokens, model=model)


def _table(report: ModelsReport, config: ModelsBenchConfig, caption: str) -> Table:
    table = Table(
        title=f"{config.models} models of {config.shape}, {config.awake} awake; prompts of "
        f"{config.prompt_tokens} tokens, answers of {config.output_tokens}; ms are p50/p90/p99",
        caption=caption,
    )
    table.add_column("server")
    columns = ("TTFT of sleeping models ms", "mix: tokens/s", "TTFT ms", "E2E ms", "sent", "failed")
    for column in columns:
        table.add_column(column, justify="right")
    for row in report.rows:
        table.add_row(
            row.server,
            row.wake_ttft_ms.text(0),
            f"{row.mix_tokens_per_s:.1f}",
            row.mix_ttft_ms.text(0),
            row.mix_e2e_ms.text(0),
            str(row.sent),
            str(row.failed),
        )
    return table


def _remarks(report: ModelsReport) -> list[str]:
    said = [f"load average at the beginning: {report.load_average:.1f}"]
    for row in report.rows:
        said += [f"{row.server}, {count} times: {text}" for text, count in row.errors.items()]
    return said
