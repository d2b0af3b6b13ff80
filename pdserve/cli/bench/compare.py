"""`pdserve bench compare`: starts a cluster per mode, and compares their goodput."""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

import pdserve
from pdserve.bench.checkpoint_shapes import SHAPES
from pdserve.bench.compare.comparison import compare
from pdserve.bench.compare.contest import RunRecord
from pdserve.bench.compare.plan import ComparePlan
from pdserve.bench.compare.plot import save_plots
from pdserve.bench.compare.report import CompareReport
from pdserve.bench.compare.stage import Stage
from pdserve.bench.compare.subject import Subject, made_up, replayed
from pdserve.bench.random_checkpoint import write_random_checkpoint
from pdserve.bench.traces import read_trace
from pdserve.cli.bench.compare_clusters import Clusters
from pdserve.cli.bench.compare_config import CompareConfig
from pdserve.cli.bench.compare_table import tables
from pdserve.cli.bench.output import print_json, print_tables, say
from pdserve.cli.doctor.machine import machine_findings
from pdserve.cli.doctor.software import required_packages
from pdserve.cli.exit_codes import FAILED, OK
from pdserve.clock import SystemClock
from pdserve.errors import ConfigError


def run(config: CompareConfig) -> int:
    """Measure, print, and write files; the exit code is 1 if a mode could not be measured.

    Raises:
        PdserveError: nothing could be measured, or the settings contradict each other.
    """
    plan = config.plan  # checks settings, before anything is written
    make_subjects = subject_maker(config)
    conditions = setup(config)
    folder = Path(config.out)
    with ExitStack() as stack:
        stage = _stage(config, plan, folder, stack)
        modes, scenarios = asyncio.run(compare(stage, make_subjects))
    report = CompareReport(modes, scenarios, stage.failures, conditions)
    (folder / "report.json").write_bytes(msgspec.json.encode(report) + b"\n")
    plots = save_plots(report, folder)
    if config.json:
        print_json(report)
    else:
        print_tables(tables(report), [f"plots: {', '.join(map(str, plots))}"])
    sys.stdout.flush()
    return FAILED if stage.failures else OK


def _stage(config: CompareConfig, plan: ComparePlan, folder: Path, stack: ExitStack) -> Stage:
    """The stage whose raw results and logs go to files in `folder`, which `stack` closes.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        requests = stack.enter_context((folder / "requests.jsonl").open("wb"))
        log = stack.enter_context((folder / "processes.log").open("w", buffering=1))
    except OSError as error:
        raise ConfigError(f"--out {config.out}: cannot write there: {error}") from error

    def keep(record: RunRecord) -> None:
        requests.write(msgspec.json.encode(record) + b"\n")

    def tell(text: str) -> None:
        log.write(f"---- {text}\n")
        say(text)

    def on_line(name: str, line: str) -> None:
        log.write(f"{name}: {line}\n")

    model = config.model or _random_weights(config.shape, stack)
    return Stage(
        plan=plan,
        launch=Clusters(config, model, on_line).launch,
        clock=SystemClock(),
        keep=keep,
        tell=tell,
    )


def _random_weights(shape: str, stack: ExitStack) -> str:
    """A checkpoint directory, which `stack` removes."""
    temporary = stack.enter_context(tempfile.TemporaryDirectory(prefix="pdserve-bench-"))
    folder = Path(temporary) / f"random-weights-{shape}"
    return str(write_random_checkpoint(folder, shape=SHAPES[shape]))


def subject_maker(config: CompareConfig) -> Callable[[int], Sequence[Subject]]:
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


def setup(config: CompareConfig) -> dict[str, object]:
    """The conditions of the measurement, for reproducing it. Call before anything is started."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": msgspec.to_builtins(config),
        "model": config.model or {config.shape: SHAPES[config.shape]},
        "machine": {finding.name: finding.detail for finding in machine_findings()},
        "load_average": os.getloadavg()[0],  # over a minute
        "python": platform.python_version(),
        "pdserve": pdserve.__version__,
        "packages": {name: _version(name) for name in required_packages()},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "missing"
