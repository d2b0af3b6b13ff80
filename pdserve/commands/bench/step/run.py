"""`pdserve bench step`: runs a model in this process, and compares step times with their floor."""

from __future__ import annotations

import os
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from pdserve.commands.bench.checkpoints.named import checkpoint_of
from pdserve.commands.bench.output import print_json, print_tables
from pdserve.commands.bench.step.cases import with_room
from pdserve.commands.bench.step.config import StepBenchConfig
from pdserve.commands.bench.step.floor import Rates, StepWork
from pdserve.commands.bench.step.measurement import (
    Computing,
    StepBenchReport,
    Threads,
    bench_row,
    best_product,
    best_read,
    machine_rates,
    observe,
)
from pdserve.commands.bench.step.model_bench import StepBench
from pdserve.commands.bench.step.neighbours import BusyProcesses
from pdserve.commands.bench.step.table import neighbour_table, step_remarks, step_table
from pdserve.commands.bench.step.yardsticks import CpuYardsticks, GpuYardsticks, Yardsticks
from pdserve.engine.cuda.stopwatch import CudaStopwatch
from pdserve.engine.layers import torch_dtype
from pdserve.node.memory.meminfo import available_bytes
from pdserve.node.start.cores import processor_name
from pdserve.node.start.model import WARMUP_TOKENS, NodeModel, plan_model, use_cores
from pdserve.settings.config import CheckpointConfig, EngineConfig, NodeConfig
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK

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
    engine = msgspec.structs.replace(config.engine, kv_memory=_kv_memory(config.engine))
    node = NodeConfig(checkpoint=CheckpointConfig(model=checkpoint_of(config.shape)), engine=engine)
    cores = use_cores(engine)
    model = plan_model(node)
    if config.beside and model.device.type != "cpu":
        raise ConfigError(f"--beside takes cores from steps, and these are {model.device}'s")
    kv_bytes = model.num_blocks * model.layout.block_bytes
    cases, skipped = with_room(grid.cases(), model.layout, model.max_model_len, kv_bytes)
    if not cases:
        raise ConfigError(f"there is not enough room for any of these steps: {skipped[0].reason}")
    most_blocks = max(case.num_blocks(model.layout) for case in cases)
    least = model.layout.blocks_for(WARMUP_TOKENS) + model.layout.state_blocks
    model = replace(model, num_blocks=max(most_blocks, least))
    threads = Threads(cores.num_threads, len(os.sched_getaffinity(0)))
    yardsticks = yardsticks_of(model, threads.num_threads)
    with (
        closing(StepBench(model, cores, yardsticks)) as bench,
        BusyProcesses(config.beside, sorted(os.sched_getaffinity(0))) as neighbours,
    ):
        beside = neighbours if config.beside else None
        observed = observe(cases, _work(model), bench, config.seconds, neighbours=beside)
    read, product = best_read(observed, yardsticks.cache_bytes), best_product(observed)
    rates = Rates(read.rate, product.rate)
    return StepBenchReport(
        rows=[bench_row(config.shape, _weights(model), seen, rates, threads) for seen in observed],
        skipped=skipped,
        machine=machine_rates(
            observed,
            read,
            product,
            yardsticks.product_shape,
            computing_on(model, threads.num_threads),
            load_average,
        ),
    )


def _kv_memory(engine: EngineConfig) -> str:
    """The size of the pool; auto: on a CPU half of the available memory, up to AUTO_KV_BYTES."""
    on_gpu = engine.device.startswith("cuda") or (
        engine.device == "auto" and torch.cuda.is_available()
    )
    if engine.kv_memory != "auto" or on_gpu:
        return engine.kv_memory
    return str(min(available_bytes() // 2, AUTO_KV_BYTES))


def yardsticks_of(model: NodeModel, num_threads: int) -> Yardsticks:
    """The yardsticks of what computes the model, whose product is that of its gate and up."""
    hidden, inner = model.config.hidden_size, max(model.config.inner_widths)
    width, dtype = (hidden, 2 * inner), torch_dtype(model.activations)
    if model.device.type == "cpu":
        return CpuYardsticks(width, dtype, num_threads)
    return GpuYardsticks(
        width,
        dtype,
        model.device,
        CudaStopwatch(model.device),
        num_devices=model.share.num_ranks,
        cache_bytes=torch.cuda.get_device_properties(model.device).L2_cache_size,
    )


def computing_on(model: NodeModel, num_threads: int) -> Computing:
    """What computes the model."""
    if model.device.type == "cpu":
        processor = processor_name(Path("/proc/cpuinfo").read_text())
        return Computing(processor, num_threads, str(model.kernels))
    name, number = torch.cuda.get_device_name(model.device), model.share.num_ranks
    graphs = "CUDA graphs" if model.has_graphs else "no CUDA graphs"
    attention = f"{model.attention} attention, {graphs}"
    return Computing(f"{number} x {name}" if number > 1 else name, 0, attention)


def _weights(model: NodeModel) -> str:
    """The type of the weights."""
    return model.form.name


def _work(model: NodeModel) -> StepWork:
    return StepWork(model.plan(), model.activations, model.layout.dtype)
