"""Whatever can be set for a process is read by that process."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from typing import Any, get_args, get_origin

import msgspec
import pytest

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.plan import Machine, plan_cluster
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import Setting, settings_of
from pdserve.settings.struct import ConfigStruct
from tests.architecture.repository import PACKAGES, ROOT, tree_of


def test_a_coordinator_reads_all_its_settings() -> None:
    assert unread(CoordinatorConfig, "coordinator.main") == []


def test_a_node_reads_all_its_settings() -> None:
    assert unread(NodeConfig, "pdserve.commands.cli.node") == []


def test_up_reads_its_own_settings() -> None:
    own = [flag for flag in settings_of(ClusterConfig) if len(flag.path) == 1]
    unread_by_it = unread(ClusterConfig, "pdserve.commands.cli.up")
    assert [flag.name for flag in own if flag.name in unread_by_it] == []


SECTIONS = [flag for flag in settings_of(ClusterConfig) if len(flag.path) > 1]
PLACED = [
    "engine.cpus",
    "engine.device",
    "engine.kv_utilization",
]  # each node gets its own share of these


@pytest.mark.parametrize("flag", SECTIONS, ids=lambda flag: flag.name)
def test_up_passes_the_others_on(flag: Setting) -> None:
    if flag.name in PLACED:
        return
    given = another_value(flag)
    section, name = flag.path
    config = msgspec.convert({section: {name: given}}, ClusterConfig)
    processes = plan_cluster(config, 8000, 8001, Machine([0, 1]))
    reached = [getattr(getattr(p.config, section, None), name, None) for p in processes]
    assert given in reached


OF_A_FORM = {  # of those that are texts: other policies may be installed
    "policy.prefill_policy": "fcfs-budget",
    "policy.decode_policy": "max-batch",
    "routing.router": "least-loaded",
    "routing.revision_shares": ["4f0c=1"],
    "routing.price": ["decode=2"],
    "handoff.links": ["* * delay=1"],
    "speculation.sources": ["text"],
    "checkpoint.adapters": ["sql=/models/sql"],
    "engine.rank_hosts": ["10.0.0.2:7100"],
}


def another_value(flag: Setting) -> Any:
    """A valid value that is not the default."""
    if flag.name in OF_A_FORM:
        return OF_A_FORM[flag.name]
    if get_origin(flag.kind) is not list and (choices := get_args(flag.kind)):
        return next(choice for choice in choices if choice != flag.default)
    if flag.kind is bool:
        return not flag.default
    if flag.kind in (int, float):
        return flag.default + flag.kind(1) if flag.default >= 1 else flag.kind(flag.default * 1.5)
    return ["1"] if flag.is_list else "1"


# ---- what the modules of a process read ----------------------------------------------------------


def unread(struct: type[ConfigStruct], entry: str) -> list[str]:
    """The settings that nothing reads in the modules that `entry` and the command itself load.

    `config.timeouts.lease_s` is read where `X.lease_s` is, and X is called `timeouts` or `config`.
    """
    read = {pair for module in loaded_by(entry) for pair in attributes(module)}
    read |= attributes("pdserve.commands.cli.main") | own_attributes(struct)
    return [
        flag.name
        for flag in settings_of(struct)
        if not {(owner, flag.path[-1]) for owner in (*flag.path[-2:-1], "config")} & read
    ]


def loaded_by(entry: str) -> set[str]:
    """The modules of the product that a module imports, also indirectly."""
    loaded: set[str] = set()
    found = (
        [entry, "pdserve.node.start.prefetch"] if entry == "pdserve.commands.cli.node" else [entry]
    )
    while found:
        module = found.pop()
        if module not in loaded and is_module(module):
            loaded.add(module)
            found += imports(module)
    return loaded


def tree_of_module(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    return tree_of(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))


@cache
def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    is_ours = name.partition(".")[0] in PACKAGES
    return is_ours and ((path / "__init__.py").is_file() or path.with_suffix(".py").is_file())


@cache
def imports(module: str) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree_of_module(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


@cache
def attributes(module: str) -> set[tuple[str, str]]:
    """(what it is called, attribute) of every attribute that is read."""
    return set(reads(tree_of_module(module)))


def own_attributes(struct: type[ConfigStruct]) -> set[tuple[str, str]]:
    """What a config's properties read of it."""
    body = tree_of_module(struct.__module__).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    (own,) = (node for node in classes if node.name == struct.__name__)
    return {("config", name) for owner, name in reads(own) if owner == "self"}


def reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
            yield name.lstrip("_"), node.attr
