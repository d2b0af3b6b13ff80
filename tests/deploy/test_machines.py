"""The systemd units and the image: what they start exists, and stops in time."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from pdserve.commands.cli.main import build_parser
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from tests.architecture.repository import ROOT

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").iterdir())
ROLES = {
    "pdserve-coordinator.service": ["coordinator"],
    "pdserve-node@.service": ["prefill", "decode"],
}


def section(unit: Path, name: str) -> configparser.SectionProxy:
    parser = configparser.ConfigParser(interpolation=None, strict=True)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(unit)
    return parser[name]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_what_there_is_and_let_it_drain(unit: Path, tmp_path: Path) -> None:
    service = section(unit, "Service")
    for role in ROLES[unit.name]:
        program, *arguments = shlex.split(service["ExecStart"].replace("%i", role))
        assert Path(program).name == "pdserve"
        settings = tmp_path / f"{role}.toml"
        settings.touch()
        arguments[arguments.index("--config") + 1] = str(settings)
        assert build_parser().parse_args(arguments)
    drain_s = max(CoordinatorConfig().timeouts.drain_s, NodeConfig().timeouts.drain_s)
    assert int(service["TimeoutStopSec"]) >= drain_s + 10
    assert service["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_are_what_systemd_understands(unit: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if unit.name.partition("@")[0] in line]
    assert [line for line in told if "is not executable" not in line] == []


def test_the_image_starts_commands_that_exist() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    words = {
        name: json.loads(match)
        for name, match in re.findall(r"^(?:HEALTHCHECK.*)?(ENTRYPOINT|CMD) (\[.*\])$", text, re.M)
    }
    assert build_parser().parse_args(words["CMD"])
    (health,) = re.findall(r"HEALTHCHECK.* CMD (\[.*\])", text)
    program, *arguments = json.loads(health)
    assert [program] == words["ENTRYPOINT"] == ["pdserve"]
    assert build_parser().parse_args(arguments)


def test_the_lock_has_what_pdserve_needs() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=!\[ ]", line)[0].lower() for line in project["dependencies"]}
    lines = (DEPLOY / "requirements.lock").read_text().splitlines()
    locked = {line.partition("==")[0].replace("_", "-") for line in lines if "==" in line}
    assert {name.replace("_", "-") for name in needed} <= locked
