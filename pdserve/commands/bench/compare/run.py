"""`pdserve bench compare`: starts a cluster per mode, and compares their goodput."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from pdserve.commands.bench.checkpoints.named import gguf_of
from pdserve.commands.bench.checkpoints.random_checkpoint import write_random_checkpoint
from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.compare.cases import CompareCase, made_up, replayed
from pdserve.commands.bench.compare.clusters import Clusters
from pdserve.commands.bench.compare.comparison import MakeCases, compare
from pdserve.commands.bench.compare.config import CompareConfig, ComparePlan
from pdserve.commands.bench.compare.contestants import Contestants
from pdserve.commands.bench.compare.progress import Progress, announcement
from pdserve.commands.bench.compare.recompute import REPORT, REQUESTS, read_results, recomputed
from pdserve.commands.bench.compare.report import CompareReport
from pdserve.commands.bench.compare.runner import Experiment, RunRecord
from pdserve.commands.bench.compare.shown.table import tables
from pdserve.commands.bench.load.traces import read_trace
from pdserve.commands.bench.output import print_json, print_tables, say
from pdserve.commands.bench.serve.backend import Backend
from pdserve.commands.cluster.placement import count_gpus
from pdserve.shared.clock import SystemClock
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK

Compare = Callable[[Experiment, MakeCases, CompareReport], Coroutine[Any, Any, None]]


def run(config: CompareConfig, setup: dict[str, object]) -> int:
    """Measure by `compare`, and tell; see `run_with`."""
    return run_with(config, setup, compare)


def run_with(config: CompareConfig, setup: dict[str, object], compare: Compare) -> int:
    """Measure, print, and write files; the exit code is 1 if a mode could not be measured,
    or has not given the answers that another one gave.

    Ctrl-C ends it early, as an error does: what was measured is reported.

    Raises:
        PdserveError: nothing could be measured, or the settings contradict each other, or an error
            in the middle of it.
    """
    if config.from_:
        return _again(config)
    plan = config.plan  # checks settings, before anything is written
    make_cases = case_maker(config)
    model = config.model or {config.shape: SHAPES[config.shape]}
    report, exit_code = CompareReport([], [], {}, {**setup, "model": model}), OK
    folder = _new_folder(config)
    for line in announcement(config, plan, folder, setup.get("load_average")):
        say(line)
    try:
        measure(config, plan, make_cases, folder, report, compare)
    except KeyboardInterrupt:
        if not report.modes:
            raise
        say("interrupted: what was measured until then")
        exit_code = FORCED
    except Exception:
        if report.modes:
            say("an error has ended it: what was measured until then")
            _show(report, folder, as_json=config.json)
        raise
    _show(report, folder, as_json=config.json)
    return exit_code or (OK if report.is_sound else FAILED)


def measure(
    config: CompareConfig,
    plan: ComparePlan,
    make_cases: MakeCases,
    folder: Path,
    report: CompareReport,
    compare: Compare = compare,
) -> None:
    """Measure into `report`, which has what was measured if this raises anything.

    Raw results and logs go to `folder`. Raises as `run_with`, and KeyboardInterrupt.
    """
    with ExitStack() as stack:
        experiment = _experiment(config, plan, folder, stack, report.failures)
        asyncio.run(compare(experiment, make_cases, report))


def _again(config: CompareConfig) -> int:
    """Report what another comparison has measured, in a new folder. Raises ConfigError."""
    folder = _new_folder(config)
    report = recomputed(*read_results(Path(config.from_)))
    folder.mkdir(parents=True, exist_ok=True)
    _show(report, folder, as_json=config.json)
    return OK if report.is_sound else FAILED


def _show(report: CompareReport, folder: Path, *, as_json: bool) -> None:
    """Print the report, and write it to a folder."""
    (folder / REPORT).write_bytes(msgspec.json.encode(report) + b"\n")
    say("drawing plots (the first time, all fonts are listed, which takes some seconds)")
    # With matplotlib, which is not loaded before it is needed.
    from pdserve.commands.bench.compare.shown.page import save_page
    from pdserve.commands.bench.compare.shown.plot import save_plots

    plots = save_plots(report, folder)
    page = save_page(report, folder)
    if as_json:
        print_json(report, report.setup)
    else:
        print_tables(tables(report), [f"report: {page}", f"plots: {', '.join(map(str, plots))}"])
    sys.stdout.flush()


def _new_folder(config: CompareConfig) -> Path:
    """The folder for the results, which has none yet.

    Raises:
        ConfigError: it has.
    """
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%SZ")
    folder = Path(config.out) if config.out else Path("bench-compare") / now
    if (folder / REQUESTS).exists():
        raise ConfigError(
            f"--out {folder}: this directory has the results of another comparison: name a new "
            "one, or remove it"
        )
    return folder


def _experiment(
    config: CompareConfig,
    plan: ComparePlan,
    folder: Path,
    stack: ExitStack,
    failures: dict[str, str],
) -> Experiment:
    """The experiment whose raw results and logs go to files in `folder`, which `stack` closes.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        requests = stack.enter_context((folder / REQUESTS).open("wb"))
        log = stack.enter_context((folder / "processes.log").open("w", buffering=1))
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot write there: {error}") from error

    def keep(record: RunRecord) -> None:
        requests.write(msgspec.json.encode(record) + b"\n")
        requests.flush()  # a run is kept whatever happens to later ones

    progress = stack.enter_context(Progress(plan.budget_s, SystemClock()))

    def tell(text: str) -> None:
        log.write(f"---- {text}\n")
        progress.tell(text)

    def on_line(name: str, line: str) -> None:
        log.write(f"{name}: {line}\n")

    model = config.model or _random_weights(config.shape, stack)
    num_gpus = 0 if config.engine.device == "cpu" else count_gpus()
    clusters = Clusters(config, model, on_line, tell, num_gpus)
    return Experiment(
        plan=plan,
        launch=Contestants(
            config.backends, _places(config.backends, model), clusters.launch
        ).launch,
        clock=SystemClock(),
        keep=keep,
        tell=tell,
        failures=failures,
    )


def _places(backends: Sequence[Backend], model: str) -> dict[str, str]:
    """Values of the names in commands, if needed: a GGUF file is large."""
    places = {"threads": str(len(os.sched_getaffinity(0))), "model": model}
    if any("gguf" in backend.places for backend in backends):
        places["gguf"] = gguf_of(model)
    return places


def _random_weights(shape: str, stack: ExitStack) -> str:
    """A checkpoint directory, which `stack` removes."""
    temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
    folder = Path(temporary) / f"random-weights-{shape}"
    return str(write_random_checkpoint(folder, shape=SHAPES[shape]))


def case_maker(config: CompareConfig) -> Callable[[int], Sequence[CompareCase]]:
    """A function from the model's maximum length to the workloads.

    Raises:
        ConfigError: the trace cannot be read.
    """
    scale, seed = config.length_scale, config.seed
    if not config.trace:
        return lambda longest: [made_up(name, longest, scale, seed) for name in config.scenarios]
    path = Path(config.trace)
    rows = read_trace(path, seed)
    return lambda longest: [replayed(path.stem, rows, longest, scale, seed)]
