"""The flags of commands that are not those of a config struct, or not only."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.flags import FlagParser, add_flags
from pdserve.settings.struct import ConfigStruct
from pdserve.shared.hints.urls import check_url

CONFIGS: Final[Mapping[str, type[ConfigStruct]]] = {
    "up": ClusterConfig,
    "coordinator": CoordinatorConfig,
    "prefill": NodeConfig,
    "decode": NodeConfig,
}


def add_process_flags(parser: FlagParser, struct: type[ConfigStruct]) -> None:
    """Flags of a process that a supervisor may start."""
    add_flags(parser, struct)
    # Set by the supervisor that starts this process; not meant for users.
    parser.add_argument("--die-with-parent", type=int, help=argparse.SUPPRESS)


def add_config_commands(parser: FlagParser) -> None:
    """`pdserve config COMMAND`, with the flags of that command."""
    parser.set_defaults(shown="up", config=None)
    commands = parser.add_subparsers(
        metavar="COMMAND",
        parser_class=FlagParser,
        help="up (the default), coordinator, prefill or decode, with its flags",
    )
    for name, struct in CONFIGS.items():
        shown = parser.commands[name] = commands.add_parser(name)
        shown.set_defaults(shown=name)
        add_flags(shown, struct)


def _url(text: str) -> str:
    try:
        return check_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_url_flag(parser: FlagParser) -> None:
    """`--url` of a coordinator, and `--ca` for it."""
    parser.add_argument(
        "--url",
        type=_url,
        default="http://127.0.0.1:8000",
        help="address of the coordinator (default: %(default)s)",
    )
    _add_ca_flag(parser)


def _add_ca_flag(parser: FlagParser) -> None:
    parser.add_argument(
        "--ca",
        type=Path,
        metavar="FILE",
        help="certificate of the CA of an https:// coordinator (default: what this machine trusts)",
    )


def add_role_flags(parser: FlagParser) -> None:
    """Flags of `pdserve role`."""
    parser.add_argument("node", metavar="NODE", help="node id, as shown by pdserve status")
    parser.add_argument("role", choices=["prefill", "decode"], help="the pool to move it to")
    add_url_flag(parser)
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="how long to wait for the node to change (default: %(default)g)",
    )
    parser.add_argument(
        "--force", action="store_true", help="even if this leaves its old pool empty"
    )


def add_inspect_flags(parser: FlagParser) -> None:
    """Flags of `pdserve inspect`."""
    parser.add_argument("model", metavar="MODEL", help="what `pdserve up --model` would be given")
    parser.add_argument("--revision", help="hub branch, tag or commit")


def add_models_flags(parser: FlagParser) -> None:
    """Of `pdserve models`."""
    parser.add_argument("file", metavar="FILE", help="TOML file, as of --models")
    parser.add_argument(
        "action",
        nargs="?",
        default="list",
        choices=("list", "add", "remove", "pin", "unpin"),
        help="add NAME SOURCE [KEY=VALUE ...]; of the others, NAME; default: list",
    )
    parser.add_argument("words", metavar="WORD", nargs="*", help="what that takes")


def add_route_flags(parser: FlagParser) -> None:
    """Of `pdserve route`."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=FlagParser)
    text = "fit a classifier that says when a cascade's first tier would be asked in vain"
    train = parser.commands["train"] = commands.add_parser("train", help=text, description=text)
    train.set_defaults(action="train")
    text = "judge one on other outcomes"
    evaluate = commands.add_parser("evaluate", help=text, description=text)
    parser.commands["evaluate"] = evaluate
    evaluate.set_defaults(action="evaluate")
    evaluate.add_argument("file", metavar="FILE", type=Path, help="the classifier")
    for command in (train, evaluate):
        command.add_argument(
            "outcomes",
            metavar="TRACE",
            type=Path,
            help="JSON lines: what became of each prompt (pdserve/measured/routes.py)",
        )
    train.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        default=Path("route.json"),
        help="where it is written, and beside it a plot of its curve (default: %(default)s)",
    )


def add_key_flags(parser: FlagParser) -> None:
    """Flags of `pdserve key`."""
    parser.add_argument("tenant", metavar="TENANT", help="name of the tenant in the key file")


def add_certs_flags(parser: FlagParser) -> None:
    """Flags of `pdserve certs`."""
    parser.add_argument(
        "directory", metavar="DIR", type=Path, help="has, or gets, the CA; and a directory per role"
    )
    parser.add_argument(
        "--role",
        choices=["coordinator", "node", "monitor"],
        required=True,
        help="what the certificate's owner may be; a monitor only reads nodes' metrics",
    )
    parser.add_argument(
        "--host",
        action="append",
        default=[],
        help="name or IP address that the certificate is for too; may be repeated",
    )
    parser.add_argument(
        "--days", type=int, default=90, help="how long it is valid (default: %(default)s)"
    )


def add_store_flags(parser: FlagParser) -> None:
    """Flags of `pdserve store`."""
    parser.add_argument(
        "where", metavar="STORE", help="a folder or address: the setting prefix.kv_store of nodes"
    )
    parser.add_argument(
        "--erase", metavar="TENANT", help='a tenant or cache group; "": of requests without a key'
    )


def add_doctor_flags(parser: FlagParser) -> None:
    """Flags of `pdserve doctor`."""
    parser.add_argument(
        "--cluster",
        nargs="+",
        type=_url,
        metavar="URL",
        help="check the cluster of these coordinators, such as http://127.0.0.1:8000; without it, "
        "this machine's hardware, kernels, transports and packages are checked",
    )
    _add_ca_flag(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_usage_flags(parser: FlagParser) -> None:
    """Flags of `pdserve usage`."""
    parser.add_argument("path", metavar="FILE", type=Path, help="the coordinator's access.usage_db")
    kinds = ["tenant", "key", "model", "day", "hour"]
    parser.add_argument(
        "--by", choices=kinds, default="tenant", help="group (default: %(default)s)"
    )
    parser.add_argument("--tenant", default="", help="only this tenant")
    parser.add_argument(
        "--since", default="", metavar="DATE", help="from this UTC date on: 2026-01-31"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_record_flags(parser: FlagParser) -> None:
    """Flags of `pdserve record`."""
    parser.add_argument("output", metavar="FILE", type=Path, help="file to write; a new one")
    add_url_flag(parser)
    parser.add_argument(
        "--for-s", type=float, default=0.0, metavar="SECONDS", help="how long; 0: until Ctrl-C"
    )


def add_batch_flags(parser: FlagParser) -> None:
    """Flags of `pdserve batch`."""
    parser.add_argument("action", choices=["run"], help="what to do with the file")
    parser.add_argument("file", metavar="FILE", type=Path, help="requests, one a line")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="file to write; a new one (default: FILE with .answers.jsonl)",
    )
    add_url_flag(parser)


def add_status_flags(parser: FlagParser) -> None:
    """Flags of `pdserve status`."""
    add_url_flag(parser)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--once", action="store_true", help="print the status once (the default)")
    kind.add_argument("--watch", action="store_true", help="refresh it until Ctrl-C")
    kind.add_argument("--json", action="store_true", help="print JSON")
