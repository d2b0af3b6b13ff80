"""The `pdserve` command: what it can be told, and one clear line when something is wrong."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pdserve
from pdserve.cli.bench_config import (
    HandoverConfig,
    OverheadConfig,
    PerfModelConfig,
    RouterBenchConfig,
    TransferConfig,
)
from pdserve.cli.bench_gateway_config import CoordinatorBenchConfig
from pdserve.cli.bench_speed_config import ServeBenchConfig, StepBenchConfig
from pdserve.cli.cluster_config import ClusterConfig
from pdserve.cli.compare_config import CompareConfig
from pdserve.cli.demo_config import DemoConfig
from pdserve.cli.exit_codes import FORCED, OK, exit_code_of
from pdserve.cli.flags import FlagParser, add_flags, config_from
from pdserve.cli.parent_death import die_with_parent
from pdserve.config import ConfigStruct, CoordinatorConfig, NodeConfig
from pdserve.errors import PdserveError
from pdserve.protocol import NodeRole

Command = Callable[[argparse.Namespace], int]
C = TypeVar("C", bound=ConfigStruct)

_LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    arguments = build_parser().parse_args(argv)
    command: Command = arguments.command
    try:
        return command(arguments)
    except PdserveError as error:
        message = " ".join(str(error).split())
        print(f"pdserve {arguments.name}: error: {message}", file=sys.stderr)
        return exit_code_of(error)
    except KeyboardInterrupt:
        return FORCED


def build_parser() -> FlagParser:
    """All commands and their flags."""
    parser = FlagParser(prog="pdserve", description=pdserve.__doc__)
    parser.add_argument("--version", action="version", version=f"pdserve {pdserve.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=FlagParser)

    def add(name: str, text: str, command: Command) -> FlagParser:
        added = commands.add_parser(name, help=text, description=f"pdserve {name}: {text}")
        added.set_defaults(command=command, name=name)
        return added

    add_flags(add("up", "run a whole cluster on this machine", _up), ClusterConfig)
    _add_process_flags(add("coordinator", "run one coordinator", _coordinator), CoordinatorConfig)
    _add_process_flags(add("prefill", "run one prefill node", _prefill), NodeConfig)
    _add_process_flags(add("decode", "run one decode node", _decode), NodeConfig)
    _add_status_flags(add("status", "show a running cluster", _status))
    _add_role_flags(add("role", "have a node work for the other pool", _role))
    _add_key_flags(add("key", "make an API key for a tenant", _key))
    _add_usage_flags(add("usage", "show what tenants have used", _usage))
    doctor = add("doctor", "show what this machine offers, and what is missing", _doctor)
    doctor.add_argument("--json", action="store_true", help="for programs")
    bench = commands.add_parser("bench", help="measure")
    benches = bench.add_subparsers(metavar="WHAT", required=True, parser_class=FlagParser)
    overhead = benches.add_parser("overhead", help="what a decode step costs besides the model")
    overhead.set_defaults(command=_bench_overhead, name="bench overhead")
    add_flags(overhead, OverheadConfig)
    handover = benches.add_parser("handover", help="what passing a request on costs")
    handover.set_defaults(command=_bench_handover, name="bench handover")
    add_flags(handover, HandoverConfig)
    transfer = benches.add_parser("transfer", help="how fast KV moves, beside a plain memcpy")
    transfer.set_defaults(command=_bench_transfer, name="bench transfer")
    add_flags(transfer, TransferConfig)
    compare = benches.add_parser("compare", help="goodput of the modes, on the same requests")
    compare.set_defaults(command=_bench_compare, name="bench compare")
    add_flags(compare, CompareConfig)
    perf_model = benches.add_parser("perf-model", help="how well predicted step times fit")
    perf_model.set_defaults(command=_bench_perf_model, name="bench perf-model")
    add_flags(perf_model, PerfModelConfig)
    router = benches.add_parser("router", help="what choosing nodes costs among very many")
    router.set_defaults(command=_bench_router, name="bench router")
    add_flags(router, RouterBenchConfig)
    step = benches.add_parser("step", help="the engine's steps beside the machine's limits")
    step.set_defaults(command=_bench_step, name="bench step")
    add_flags(step, StepBenchConfig)
    serve = benches.add_parser("serve", help="any servers of completions under the same load")
    serve.set_defaults(command=_bench_serve, name="bench serve")
    add_flags(serve, ServeBenchConfig)
    coordinator = benches.add_parser("coordinator", help="what a request and a token cost there")
    coordinator.set_defaults(command=_bench_coordinator, name="bench coordinator")
    add_flags(coordinator, CoordinatorBenchConfig)
    _add_simulated_nodes(benches.add_parser("simulated-nodes"))
    _add_transfer_end(benches.add_parser("transfer-end"))
    demo = add("demo", "start a cluster, ask the demo model something, stop the cluster", _demo)
    add_flags(demo, DemoConfig)
    return parser


def _add_process_flags(parser: FlagParser, struct: type[ConfigStruct]) -> None:
    add_flags(parser, struct)
    # How a supervisor starts its children; nothing for people.
    parser.add_argument("--die-with-parent", type=int, help=argparse.SUPPRESS)


def _add_url_flag(parser: FlagParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the coordinator (default: %(default)s)"
    )


def _add_role_flags(parser: FlagParser) -> None:
    parser.add_argument("node", metavar="NODE", help="its id, as pdserve status shows it")
    parser.add_argument("role", choices=["prefill", "decode"], help="the pool to work for")
    _add_url_flag(parser)
    parser.add_argument(
        "--timeout", type=float, default=10.0, help="seconds to wait (default: %(default)g)"
    )
    parser.add_argument("--force", action="store_true", help="even if its pool is empty then")


def _add_key_flags(parser: FlagParser) -> None:
    parser.add_argument("tenant", metavar="TENANT", help="its name in the key file")


def _add_usage_flags(parser: FlagParser) -> None:
    parser.add_argument("path", metavar="FILE", type=Path, help="the coordinator's --usage-db")
    kinds = ["tenant", "key", "model", "day", "hour"]
    parser.add_argument("--by", choices=kinds, default="tenant", help="(default: %(default)s)")
    parser.add_argument("--tenant", default="", help="this one's only")
    parser.add_argument("--since", default="", metavar="DATE", help="UTC, as 2026-01-31")
    parser.add_argument("--json", action="store_true", help="for programs")


def _add_status_flags(parser: FlagParser) -> None:
    _add_url_flag(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--once", action="store_true", help="one look (the default)")
    kind.add_argument("--watch", action="store_true", help="go on looking until Ctrl-C")
    kind.add_argument("--json", action="store_true", help="one look, for programs")


def _add_transfer_end(parser: FlagParser) -> None:
    """One process of `pdserve bench transfer`; nothing for people, so without help."""
    parser.set_defaults(command=_bench_transfer_end, name="bench transfer-end")
    parser.add_argument("role", choices=["exporter", "puller"])
    for flag in ("--fd", "--num-blocks", "--block-bytes", "--die-with-parent"):
        parser.add_argument(flag, type=int, required=True)
    parser.add_argument("--commit", action="store_true")


def _add_simulated_nodes(parser: FlagParser) -> None:
    """The other process of `pdserve bench coordinator`; nothing for people, so without help."""
    parser.set_defaults(command=_bench_simulated_nodes, name="bench simulated-nodes")
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--model-id", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--die-with-parent", type=int, required=True)


# ---- commands: each loads only what it needs ----------------------------------------------------


def _up(arguments: argparse.Namespace) -> int:
    from pdserve.cli import up

    return up.run(config_from(ClusterConfig, arguments))


def _coordinator(arguments: argparse.Namespace) -> int:
    config = _process_config(arguments, CoordinatorConfig)
    from coordinator.main import run

    run(config)
    return OK


def _prefill(arguments: argparse.Namespace) -> int:
    return _node(arguments, NodeRole.PREFILL)


def _decode(arguments: argparse.Namespace) -> int:
    return _node(arguments, NodeRole.DECODE)


def _node(arguments: argparse.Namespace, role: NodeRole) -> int:
    config = _process_config(arguments, NodeConfig)
    from pdserve.node.prefetch import prefetch_weights

    prefetch_weights(config)
    from pdserve.cli import node

    node.run(config, role)
    return OK


def _process_config(arguments: argparse.Namespace, struct: type[C]) -> C:
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    logging.basicConfig(level=logging.INFO, format=_LOG_FORMAT, stream=sys.stderr)
    return config_from(struct, arguments)


def _status(arguments: argparse.Namespace) -> int:
    from pdserve.cli import status

    return status.run(arguments.url, watch=arguments.watch, as_json=arguments.json)


def _role(arguments: argparse.Namespace) -> int:
    from pdserve.cli import role

    return role.run(
        arguments.url,
        arguments.node,
        arguments.role,
        timeout_s=arguments.timeout,
        force=arguments.force,
    )


def _key(arguments: argparse.Namespace) -> int:
    from pdserve.cli import key

    return key.run(arguments.tenant)


def _usage(arguments: argparse.Namespace) -> int:
    from pdserve.cli import usage

    return usage.run(
        arguments.path,
        arguments.by,
        tenant=arguments.tenant,
        since=arguments.since,
        as_json=arguments.json,
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from pdserve.cli import doctor

    return doctor.run(as_json=arguments.json)


def _bench_overhead(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench

    return bench.run(config_from(OverheadConfig, arguments))


def _bench_handover(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_handover

    return bench_handover.run(config_from(HandoverConfig, arguments))


def _bench_transfer(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_transfer

    return bench_transfer.run(config_from(TransferConfig, arguments))


def _bench_compare(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_compare

    return bench_compare.run(config_from(CompareConfig, arguments))


def _bench_perf_model(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_perf_model

    return bench_perf_model.run(config_from(PerfModelConfig, arguments))


def _bench_router(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_router

    return bench_router.run(config_from(RouterBenchConfig, arguments))


def _bench_step(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_step

    return bench_step.run(config_from(StepBenchConfig, arguments))


def _bench_serve(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_serve

    return bench_serve.run(config_from(ServeBenchConfig, arguments))


def _bench_coordinator(arguments: argparse.Namespace) -> int:
    from pdserve.cli import bench_coordinator

    return bench_coordinator.run(config_from(CoordinatorBenchConfig, arguments))


def _bench_simulated_nodes(arguments: argparse.Namespace) -> int:
    die_with_parent(arguments.die_with_parent)
    from pdserve.cli import simulated_nodes

    simulated_nodes.run(
        simulated_nodes.NodesPlan(
            arguments.coordinator, arguments.port, arguments.model_id, arguments.step_ms
        )
    )
    return OK


def _bench_transfer_end(arguments: argparse.Namespace) -> int:
    die_with_parent(arguments.die_with_parent)
    from pdserve.bench.transfer_ends import run_end

    with socket.socket(fileno=arguments.fd) as sock:
        run_end(
            arguments.role,
            sock,
            arguments.num_blocks,
            arguments.block_bytes,
            commit=arguments.commit,
        )
    return OK


def _demo(arguments: argparse.Namespace) -> int:
    from pdserve.cli import demo

    return demo.run(config_from(DemoConfig, arguments))
