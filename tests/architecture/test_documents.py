"""README and ARCHITECTURE say only what holds: their commands parse, their targets exist."""

from __future__ import annotations

import re
import shlex

import pytest

from coordinator.tenants.key_book import parse_key_file
from pdserve.cli.config_file import load_config
from pdserve.cli.main import build_parser
from pdserve.config import NodeConfig
from pdserve.slo import DEFAULT_CLASS, DEFAULT_CLASSES, parse_slo_classes
from tests.architecture.repository import ROOT

README = (ROOT / "README.md").read_text()
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
TARGETS = sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)))
COMMANDS = re.findall(r"^pdserve .*", SHELL, re.MULTILINE)


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_in_the_readme_parses(line: str) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    assert build_parser().parse_args(arguments).command is not None


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_in_the_readme_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _toml(name: str) -> str:
    """The example that begins with its file's name."""
    (text,) = re.findall(rf"```toml\n(# {re.escape(name)}\n.*?)```", README, re.DOTALL)
    return str(text)


def test_the_keys_in_the_readme_are_a_key_file() -> None:
    classes = parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS)
    owners = parse_key_file(_toml("keys.toml"), classes.by_name)
    assert sorted(tenant.name for tenant in owners.values()) == ["acme", "nightly"]


def test_the_toml_in_the_readme_is_a_node_config(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "decode.toml"
    file.write_text(_toml("decode.toml"))
    config = load_config(NodeConfig, file, {})
    assert config.coordinators == ["10.0.0.1:8001"]
    assert config.engine.max_batch_size == 32
