"""Policies and routers of other packages: chosen by name, and named where they are at fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.routing.policies import make_policy
from decode_node.policies import make_decode_policy
from pdserve.engine.prompts import make_prompt_order
from pdserve.measured.perf_model import PerfModel
from pdserve.settings.config import EngineConfig, PolicyConfig, RoutingConfig
from pdserve.settings.file import load_config
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError
from tests.architecture.repository import ROOT
from tests.installed import install

MODULE = """
def works(): return Router()
def needs_more(one, two): ...
def no_router(): return 3
class Router:
    def pick(self, candidates): return 0
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `installed` puts packages, which Python finds."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path


def installed(packages: Path, package: str = "theirs", **routers: str) -> None:
    """A package of these routers."""
    project = packages / package
    project.mkdir()
    (project / f"{package}.py").write_text(MODULE)
    rows = "".join(f'{name} = "{value}"\n' for name, value in routers.items())
    (project / "pyproject.toml").write_text(
        f'[project]\nname = "{package}"\nversion = "1.2"\n'
        f'[project.entry-points."pdserve.routers"]\n{rows}'
    )
    install(project, packages / "site")


def test_the_example_s_policies_are_chosen_by_name(packages: Path) -> None:
    install(ROOT / "examples/own_policy", packages / "site")
    config = PolicyConfig(prefill_policy="newest-first", decode_policy="small-batch")
    clock = ManualClock()
    order = make_prompt_order(config.prefill_policy, PerfModel(), clock, 512)
    decode = make_decode_policy(config, EngineConfig(), PerfModel(), clock)
    router = make_policy(RoutingConfig(router="long-last").router)
    made = [type(each).__name__ for each in (order.rule, decode, router)]
    assert made == ["NewestFirst", "SmallBatch", "LongLast"]


@pytest.mark.parametrize(
    ("section", "field", "known"),
    [
        ("policy", "prefill_policy", "fcfs-budget, sjf-aging, edf-slack, buckets, laps"),
        ("policy", "decode_policy", "max-batch, tpot-cap, slack-batch, static, shortest-remaining"),
        ("routing", "router", "ppd, prfaas, stickiest"),
    ],
)
def test_an_unknown_name_is_refused_with_those_there_are(
    packages: Path, section: str, field: str, known: str
) -> None:
    installed(packages, stickiest="theirs:works")
    struct = PolicyConfig if section == "policy" else RoutingConfig
    with pytest.raises(ConfigError, match=f"there is no .*'nope'; there are .*{known}"):
        load_config(struct, None, {field: "nope"})


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("nowhere:Router", "ModuleNotFoundError"),
        ("theirs:nothing", "AttributeError"),
        ("theirs:needs_more", "TypeError"),
        (
            "theirs:no_router",
            "makes a int, which has not all methods of .*candidates.RoutingPolicy",
        ),
    ],
)
def test_a_broken_one_names_its_package(packages: Path, value: str, fault: str) -> None:
    installed(packages, broken=value)
    with pytest.raises(ConfigError, match=f"router 'broken' of the package theirs 1.2 .*{fault}"):
        make_policy(RoutingConfig(router="broken").router)


def test_two_packages_cannot_share_a_name(packages: Path) -> None:
    installed(packages, twice="theirs:works")
    installed(packages, "others", twice="others:works")
    with pytest.raises(ValueError, match=r"'twice', of others 1.2 and theirs 1.2: remove one"):
        RoutingConfig(router="twice")


def test_ours_are_not_replaced_unawares(packages: Path) -> None:
    installed(packages, **{"random": "theirs:works"})
    assert type(make_policy("random")).__module__ == "coordinator.routing.policies.plain"
