"""`pdserve bench step`: runs a model in this process, and compares step times with their floor."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec

from pdserve.bench.checkpoints.named import checkpoint_of
from pdserve.bench.output import print_json, print_tables
from pdserve.bench.step.cases import with_room
from pdserve.bench.step.config import StepBenchConfig
from pdserve.bench.step.floor import Rates, StepWork
from pdserve.bench.step.measurement import (
    YARDSTICK,
    Best,
    MachineRates,
    Observed,
    StepBenchReport,
    Threads,
    bench_row,
    best_product,
    best_read,
    observe,
)
from pdserve.bench.step.model_bench import StepBench, largest_cache_bytes
from pdserve.bench.step.neighbours import BusyProcesses
from pdserve.bench.step.table import neighbour_table, step_remarks, step_table
from pdserve.errors import ConfigError
from pdserve.node.memory.meminfo import available_bytes
from pdserve.node.start.cores import processor_name
from pdserve.node.start.model import WARMUP_TOKENS, NodeModel, plan_model, use_cores
from pdserve.process.exit_codes import OK
from pdserve.settings.config import CheckpointConfig, NodeConfig
from pdserve.settings.values import parse_bytes

AUTO_KV_BYTES = 10 << 30


def run(config: StepBenchConfig, setup: dict[str, object]) -> int:
    """Measure and print; the exit code.

    Raises:
        PdserveError: the model cannot be used, or the settings leave nothing to measure.
    """
    report = _measure(config)
    if config.json:
        print_json(report, setup)
    else:
        tables = [step_table(report)]
        if config.beside:
            tables.append(neighbour_table(report.rows))
        print_tables(tables, step_remarks(report))
    return OK


def _measure(config: StepBenchConfig) -> StepBenchReport:
    grid, load_average = config.grid, os.getloadavg()[0]
    kv_bytes = _kv_bytes(config.engine.kv_memory)
    engine = msgspec.structs.replace(config.engine, kv_memory=str(kv_bytes))
    node = NodeConfig(checkpoint=CheckpointConfig(model=checkpoint_of(config.shape)), engine=engine)
    cores = use_cores(engine)
    model = plan_model(node)
    if model.device.type != "cpu":
        raise ConfigError("steps are compared with a CPU's limits, so this needs --device cpu")
    cases, skipped = with_room(grid.cases(), model.layout, model.max_model_len, kv_bytes)
    if not cases:
        raise ConfigError(f"there is not enough room for any of these steps: {skipped[0].reason}")
    most_blocks = max(case.num_blocks(model.layout) for case in cases)
    model = replace(model, num_blocks=max(most_blocks, model.layout.blocks_for(WARMUP_TOKENS)))
    threads = Threads(cores.num_threads, len(os.sched_getaffinity(0)))
    with (
        closing(StepBench(model, threads.num_threads, cores)) as bench,
        BusyProcesses(config.beside, sorted(os.sched_getaffinity(0))) as neighbours,
    ):
        beside = neighbours if config.beside else None
        observed = observe(cases, _work(model), bench, config.seconds, neighbours=beside)
    read, product = best_read(observed, largest_cache_bytes()), best_product(observed)
    rates = Rates(read.rate, product.rate)
    return StepBenchReport(
        rows=[bench_row(config.shape, _weights(model), seen, rates, threads) for seen in observed],
        skipped=skipped,
        machine=_machine(
            observed, read, product, bench, load_average, str(model.kernels), threads.num_threads
        ),
    )


def _kv_bytes(kv_memory: str) -> int:
    """Bytes for KV; auto: half of the available memory, up to AUTO_KV_BYTES."""
    if kv_memory != "auto":
        return parse_bytes(kv_memory)
    return min(available_bytes() // 2, AUTO_KV_BYTES)


def _weights(model: NodeModel) -> str:
    """The type of the weights."""
    return model.layout.dtype if model.quantization == "none" else model.quantization


def _work(model: NodeModel) -> StepWork:
    return StepWork(model.config, model.layout.dtype, is_int8=model.quantization == "int8")


def _machine(
    observed: Sequence[Observed],
    read: Best,
    product: Best,
    bench: StepBench,
    load_average: float,
    kernels: str,
    num_threads: int,
) -> MachineRates:
    beside = [rates for seen in observed for rates in seen.beside]
    num_rows, num_in, num_out = bench.product_shape
    yardstick = f"torch linear {num_rows}x{num_in}x{num_out}"
    return MachineRates(
        read_gb_per_s=read.rate / 1e9,
        read_seen_in=read.seen_in,
        product_gflop_per_s=product.rate / 1e9,
        product_seen_in=yardstick if product.seen_in == YARDSTICK else product.seen_in,
        yardstick_read_gb_per_s=statistics.median(r.bytes_per_s for r in beside) / 1e9,
        yardstick_product_gflop_per_s=statistics.median(r.flops_per_s for r in beside) / 1e9,
        threads=num_threads,
        processor=processor_name(Path("/proc/cpuinfo").read_text()),
        kernels=kernels,
        load_average=load_average,
    )
