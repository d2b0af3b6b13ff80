"""The `pdserve` command: its subcommands and flags; an error is one line and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import select
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, TypeVar

import pdserve
from pdserve.commands.cli.command_flags import (
    CONFIGS,
    add_batch_flags,
    add_certs_flags,
    add_config_commands,
    add_doctor_flags,
    add_inspect_flags,
    add_key_flags,
    add_models_flags,
    add_process_flags,
    add_record_flags,
    add_role_flags,
    add_route_flags,
    add_status_flags,
    add_store_flags,
    add_url_flag,
    add_usage_flags,
)
from pdserve.commands.cli.log import log_to
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.protocol import NodeRole
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.flags import FlagParser, add_flags, config_from
from pdserve.settings.rank_host import RankHostConfig
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.errors import PdserveError
from pdserve.shared.process.collector import pause_collector
from pdserve.shared.process.exit_codes import FAILED, FORCED, OK, exit_code_of
from pdserve.shared.process.limited_child import die_with_parent
from pdserve.shared.process.patient_log import PatientLog
from pdserve.shared.process.signals import hear_ctrl_c

if TYPE_CHECKING:
    from pdserve.commands.cluster.coordinator_http import Trust

_STDERR: Final = 2
SERVING: Final = ("up", "coordinator", "prefill", "decode", "rank")

Command = Callable[[argparse.Namespace], int]
C = TypeVar("C", bound=ConfigStruct)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    hear_ctrl_c()
    try:
        try:
            return _run(argv)
        finally:
            if sys.stdout is not None:  # as it is when who starts this has closed it
                sys.stdout.flush()
    except BrokenPipeError:
        if not _reader_has_left():
            raise
        _write_no_more()
        return OK
    except KeyboardInterrupt:
        return FORCED
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _write_no_more()
        print(f"pdserve: error: {error}", file=sys.stderr)
        return FAILED


def _write_no_more() -> None:
    """Else what is left in the buffer fails again when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_left() -> bool:
    """Whether who reads our output has seen enough, as `head` has."""
    stdout = select.poll()
    stdout.register(sys.stdout.fileno(), 0)  # errors alone, which are always told
    return bool(stdout.poll(0))


def _run(argv: Sequence[str] | None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = serving_parser() if words and words[0] in SERVING else build_parser()
    arguments = parser.parse_args(words)
    command: Command = arguments.command
    try:
        return command(arguments)
    except PdserveError as error:
        message = " ".join(str(error).split())
        print(f"pdserve {arguments.name}: error: {message}", file=sys.stderr)
        return exit_code_of(error)


def serving_parser() -> FlagParser:
    """The commands that serve: they start sooner without what others would load."""
    parser = FlagParser(prog="pdserve", description=pdserve.__doc__)
    _add_serving(_adder(parser))
    for added in parser.commands.values():
        added.whole = build_parser  # to say whose a flag is that is not theirs
    return parser


@cache
def build_parser() -> FlagParser:
    """All commands and their flags; made once, which takes a tenth of a second."""
    from pdserve.commands.cli.bench import add_benches
    from pdserve.commands.cli.demo_config import DemoConfig
    from pdserve.commands.cli.kv_config import KvConfig
    from pdserve.commands.simulation.calibrate.config import CalibrateConfig
    from pdserve.commands.simulation.plan.config import PlanConfig
    from pdserve.commands.simulation.simulate.config import SimulateConfig

    parser = FlagParser(prog="pdserve", description=pdserve.__doc__)
    parser.add_argument("--version", action="version", version=f"pdserve {pdserve.__version__}")
    add = _adder(parser)
    _add_serving(add)
    add_config_commands(
        add("config", "show the settings of a command, and where each comes from", _config)
    )
    add_status_flags(add("status", "show the nodes and the load of a running cluster", _status))
    add_role_flags(add("role", "move a node to the other pool", _role))
    add_models_flags(add("models", "list, add, remove or pin the models of a file", _models))
    revisions = add("revisions", "show or share out which revisions of the model serve", _revisions)
    revisions.add_argument(
        "shares",
        metavar="REVISION=SHARE",
        nargs="*",
        help="first characters of a revision, and its share of the conversations; none: only show",
    )
    add_url_flag(revisions)
    add_key_flags(add("key", "create an API key for a tenant", _key))
    add_certs_flags(add("certs", "make or renew certificates for mTLS between processes", _certs))
    add_store_flags(
        add("store", "list what a prefix store has of each tenant, or erase it", _store)
    )
    add_usage_flags(add("usage", "report the usage of each tenant", _usage))
    add_doctor_flags(add("doctor", "check this machine, or a running cluster", _doctor))
    add_inspect_flags(
        add("inspect", "say what a model's files are, and whether they are served", _inspect)
    )
    add_record_flags(
        add("record", "write a live cluster's requests as a trace, without their text", _record)
    )
    add_route_flags(add("route", "fit or judge a classifier for a cascade", _route))
    add_batch_flags(add("batch", "have the lines of a file answered", _batch))
    add_flags(
        add("calibrate", "measure what steps and pulls of live nodes take", _calibrate),
        CalibrateConfig,
    )
    add_flags(
        add("simulate", "predict what a cluster does with a load, by simulation", _simulate),
        SimulateConfig,
    )
    add_flags(add("plan", "find the cheapest cluster for a load, by simulation", _plan), PlanConfig)
    add_flags(add("kv", "compute how many requests fit on given devices", _kv), KvConfig)
    add_benches(add("bench", "run a benchmark"))
    demo = add("demo", "start a cluster, ask the demo model some questions, stop it again", _demo)
    add_flags(demo, DemoConfig)
    for added in parser.commands.values():
        added.whole = lambda: parser
    return parser


def _adder(parser: FlagParser) -> Callable[..., FlagParser]:
    """Return what adds a command by its name, what it does, and its function, if it is one."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=FlagParser)

    def add(name: str, text: str, command: Command | None = None) -> FlagParser:
        added = commands.add_parser(name, help=text, description=f"pdserve {name}: {text}")
        parser.commands[name] = added
        if command is not None:
            added.set_defaults(command=command, name=name)
        return added

    return add


def _add_serving(add: Callable[..., FlagParser]) -> None:
    add_flags(add("up", "run a cluster on this machine until Ctrl-C", _up), ClusterConfig)
    add_process_flags(add("coordinator", "run one coordinator", _coordinator), CoordinatorConfig)
    add_process_flags(add("prefill", "run one prefill node", _prefill), NodeConfig)
    add_process_flags(add("decode", "run one decode node", _decode), NodeConfig)
    add_process_flags(
        add("rank", "run a further host of a node that has several", _rank), RankHostConfig
    )


# ---- commands; each imports only what it needs --------------------------------------------------


def _up(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import up

    return up.run(config_from(ClusterConfig, arguments))


def _coordinator(arguments: argparse.Namespace) -> int:
    config = _process_config(arguments, CoordinatorConfig)
    if config.cpus:
        from pdserve.commands.cluster.placement import usable_cores

        os.sched_setaffinity(0, usable_cores(config.cpus))
    pause_collector()
    from coordinator.main import run  # here, because imports may start threads

    run(config)
    return OK


def _prefill(arguments: argparse.Namespace) -> int:
    return _node(arguments, NodeRole.PREFILL)


def _decode(arguments: argparse.Namespace) -> int:
    return _node(arguments, NodeRole.DECODE)


def _rank(arguments: argparse.Namespace) -> int:
    config = _process_config(arguments, RankHostConfig)
    from pdserve.node.rank_hosts import server

    server.run(config)
    return OK


def _node(arguments: argparse.Namespace, role: NodeRole) -> int:
    config = _process_config(arguments, NodeConfig)
    pause_collector()
    from pdserve.node.start.prefetch import prefetch_weights
    from pdserve.settings.models import node_of_model

    prefetch_weights(node_of_model(config).config)
    from pdserve.commands.cli import node

    node.run(config, role)
    return OK


def _process_config(arguments: argparse.Namespace, struct: type[C]) -> C:
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what it reports, our log says in our words
    log_to(PatientLog(_STDERR))
    return config_from(struct, arguments)


def _config(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import show_config

    return show_config.run(arguments.shown, CONFIGS[arguments.shown], arguments)


def _trust(arguments: argparse.Namespace) -> Trust:
    from pdserve.commands.cluster.coordinator_http import trust_in

    return trust_in(arguments.ca)


def _status(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.running import status

    return status.run(
        arguments.url, _trust(arguments), watch=arguments.watch, as_json=arguments.json
    )


def _role(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.running import role

    return role.run(
        arguments.url,
        arguments.node,
        arguments.role,
        _trust(arguments),
        timeout_s=arguments.timeout_s,
        force=arguments.force,
    )


def _revisions(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.running import revisions

    return revisions.run(arguments.url, arguments.shares, _trust(arguments))


def _models(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import models

    return models.run(arguments.file, arguments.action, arguments.words)


def _key(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import key

    return key.run(arguments.tenant)


def _certs(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import certs

    return certs.run(arguments.directory, arguments.role, arguments.host, arguments.days)


def _store(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import store

    return store.run(arguments.where, arguments.erase)


def _usage(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.running import usage

    return usage.run(
        arguments.path,
        arguments.by,
        tenant=arguments.tenant,
        since=arguments.since,
        as_json=arguments.json,
    )


def _inspect(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import inspect_model

    return inspect_model.run(arguments.model, arguments.revision)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.cluster:
        from pdserve.commands.cli.doctor.cluster import command as cluster_doctor

        return cluster_doctor.run(arguments.cluster, _trust(arguments), as_json=arguments.json)
    from pdserve.commands.cli.doctor import command as doctor

    return doctor.run(as_json=arguments.json)


def _record(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.running import record

    return record.run(arguments.url, arguments.output, arguments.for_s, _trust(arguments))


def _route(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.routes import command

    if arguments.action == "train":
        return command.train(arguments.outcomes, arguments.output)
    return command.evaluate(arguments.file, arguments.outcomes)


def _batch(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.running import batch

    return batch.run(arguments.url, arguments.file, arguments.output, _trust(arguments))


def _calibrate(arguments: argparse.Namespace) -> int:
    from pdserve.commands.simulation.calibrate.config import CalibrateConfig

    config = config_from(CalibrateConfig, arguments)
    from pdserve.commands.cli.conditions import conditions
    from pdserve.commands.simulation.calibrate import run as calibrate

    return calibrate.run(config, conditions(config))


def _simulate(arguments: argparse.Namespace) -> int:
    from pdserve.commands.simulation.simulate.config import SimulateConfig

    config = config_from(SimulateConfig, arguments)
    from pdserve.commands.cli.conditions import conditions
    from pdserve.commands.simulation.simulate import run as simulate

    return simulate.run(config, conditions(config))


def _plan(arguments: argparse.Namespace) -> int:
    from pdserve.commands.simulation.plan.config import PlanConfig

    config = config_from(PlanConfig, arguments)
    from pdserve.commands.cli.conditions import conditions
    from pdserve.commands.simulation.plan import run as plan

    return plan.run(config, conditions(config))


def _kv(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli.kv_config import KvConfig

    config = config_from(KvConfig, arguments)
    from pdserve.commands.cli import kv
    from pdserve.commands.cli.conditions import conditions

    return kv.run(config, conditions(config))


def _demo(arguments: argparse.Namespace) -> int:
    from pdserve.commands.cli import demo
    from pdserve.commands.cli.demo_config import DemoConfig

    return demo.run(config_from(DemoConfig, arguments))
