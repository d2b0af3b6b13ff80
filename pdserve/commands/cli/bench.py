"""The subcommands of `pdserve bench`, one row each.

`pdserve bench NAME` is `run(config, setup)` of `commands/bench/NAME/run.py`; `setup` are the
conditions of the measurement. It is loaded when the command runs and not before: most benchmarks
need torch, a cluster, or both.
"""

from __future__ import annotations

import argparse
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from pdserve.commands.bench.adapters.config import AdaptersBenchConfig
from pdserve.commands.bench.chaos.config import ChaosConfig
from pdserve.commands.bench.compare.config import CompareConfig
from pdserve.commands.bench.coordinator.config import CoordinatorBenchConfig
from pdserve.commands.bench.drafts.config import DraftsBenchConfig
from pdserve.commands.bench.handoff.config import HandoffBenchConfig
from pdserve.commands.bench.models.config import ModelsBenchConfig
from pdserve.commands.bench.neighbours.config import NeighboursConfig
from pdserve.commands.bench.overhead.config import OverheadConfig
from pdserve.commands.bench.perf_model.config import PerfModelConfig
from pdserve.commands.bench.router.config import RouterBenchConfig
from pdserve.commands.bench.serve.config import ServeBenchConfig
from pdserve.commands.bench.step.config import StepBenchConfig
from pdserve.commands.bench.transfer.config import TransferConfig
from pdserve.commands.simulation.crossover.config import CrossoverConfig
from pdserve.commands.simulation.validate.config import PredictionConfig
from pdserve.settings.flags import FlagParser, add_flags, config_from
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.process.exit_codes import OK
from pdserve.shared.process.limited_child import die_with_parent


@dataclass(frozen=True, slots=True)
class Bench:
    """One benchmark."""

    name: str
    text: str  # for --help
    config: type[ConfigStruct]
    folder: str = ""  # with its `run`; empty: named like itself

    @property
    def module(self) -> str:
        """Where its `run` is."""
        return f"{self.folder or 'pdserve.commands.bench.' + self.name.replace('-', '_')}.run"

    def run(self, arguments: argparse.Namespace) -> int:
        """Run the benchmark; the exit code."""
        config = config_from(self.config, arguments)
        from pdserve.commands.cli.conditions import conditions

        setup = conditions(config)  # before anything is started
        exit_code: int = import_module(self.module).run(config, setup)
        return exit_code


COMPARISONS: Sequence[Bench] = (
    Bench("serve", "throughput and latency of any OpenAI-compatible servers", ServeBenchConfig),
    Bench("compare", "goodput of modes, and of other servers, on the same requests", CompareConfig),
    Bench("models", "what requests to sleeping models wait, beside others", ModelsBenchConfig),
    Bench("neighbours", "what one tenant feels of another, who attacks", NeighboursConfig),
    Bench(
        "prediction",
        "simulations of clusters beside the clusters themselves",
        PredictionConfig,
        folder="pdserve.commands.simulation.validate",
    ),
    Bench(
        "crossover",
        "which mode and which ratio are best, by formats and drafts; predicted and measured",
        CrossoverConfig,
        folder="pdserve.commands.simulation.crossover",
    ),
    Bench("chaos", "what calls feel of nodes that are killed, frozen or cut off", ChaosConfig),
)

INSTRUMENTS: Sequence[Bench] = (  # measure one part of pdserve
    Bench("step", "engine step times beside the hardware's limits", StepBenchConfig),
    Bench("drafts", "tokens a second with drafts, against without", DraftsBenchConfig),
    Bench("adapters", "cost of adapters in a batch, and of cold ones", AdaptersBenchConfig),
    Bench("overhead", "cost of a decode step besides the model", OverheadConfig),
    Bench("transfer", "KV transfer speed, per transport, beside memcpy", TransferConfig),
    Bench(
        "handoff", "latency from the end of prefill to the first decode step", HandoffBenchConfig
    ),
    Bench("coordinator", "coordinator throughput and the TTFT it adds", CoordinatorBenchConfig),
    Bench("router", "cost of a placement decision among many nodes", RouterBenchConfig),
    Bench("perf-model", "accuracy of predicted step times", PerfModelConfig),
)

BENCHES = (*COMPARISONS, *INSTRUMENTS)


def add_benches(parser: FlagParser) -> None:
    """Add every benchmark to `pdserve bench`, and the helper processes that some of them start."""
    commands = parser.add_subparsers(
        title="benchmarks", metavar="WHAT", required=True, parser_class=FlagParser
    )
    for bench in BENCHES:
        name = f"bench {bench.name}"
        # Without `help`, `pdserve bench --help` does not list it among the benchmarks.
        listed: dict[str, Any] = {"help": bench.text} if bench in COMPARISONS else {}
        added = parser.commands[bench.name] = commands.add_parser(
            bench.name, description=f"pdserve {name}: {bench.text}", **listed
        )
        added.set_defaults(command=bench.run, name=name)
        add_flags(added, bench.config)
    lines = [f"    {bench.name:<12} {bench.text}" for bench in INSTRUMENTS]
    parser.epilog = "\n".join(["developers' instruments, each for a part of pdserve:", *lines])
    parser.formatter_class = argparse.RawDescriptionHelpFormatter  # keeps these lines
    for hidden, add in (
        ("simulated-nodes", _add_simulated_nodes),
        ("transfer-end", _add_transfer_end),
    ):
        parser.commands[hidden] = commands.add_parser(hidden, add_help=False)
        add(parser.commands[hidden])


def _add_simulated_nodes(parser: FlagParser) -> None:
    """The nodes' process of `pdserve bench coordinator`."""
    parser.set_defaults(command=_run_simulated_nodes, name="bench simulated-nodes")
    add = partial(parser.add_argument, required=True)
    add("--coordinator")
    add("--model-id")
    add("--port", type=int)
    add("--step-ms", type=float)
    add("--die-with-parent", type=int)


def _run_simulated_nodes(arguments: argparse.Namespace) -> int:
    die_with_parent(arguments.die_with_parent)
    from pdserve.commands.bench.coordinator.simulated_nodes import NodesPlan, run

    run(NodesPlan(arguments.coordinator, arguments.port, arguments.model_id, arguments.step_ms))
    return OK


def _add_transfer_end(parser: FlagParser) -> None:
    """One of the two processes of `pdserve bench transfer`."""
    parser.set_defaults(command=_run_transfer_end, name="bench transfer-end")
    parser.add_argument("role", choices=["exporter", "puller"])
    for flag in ("--fd", "--num-blocks", "--block-bytes", "--die-with-parent"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--tensor-parallel", "--pipeline-parallel"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--commit", action="store_true")


def _run_transfer_end(arguments: argparse.Namespace) -> int:
    die_with_parent(arguments.die_with_parent)
    from pdserve.commands.bench.transfer.ends import PoolPlan, run_end
    from pdserve.engine.ranks.sizes import Parallelism

    plan = PoolPlan(
        num_blocks=arguments.num_blocks,
        block_bytes=arguments.block_bytes,
        device=arguments.device,
        parallelism=Parallelism(arguments.tensor_parallel, arguments.pipeline_parallel),
        commit=arguments.commit,
    )
    with socket.socket(fileno=arguments.fd) as sock:
        run_end(arguments.role, sock, plan)
    return OK
