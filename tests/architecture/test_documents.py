"""The documents say only what holds: their commands parse, and what they name exists."""

from __future__ import annotations

import re
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from coordinator.tenants.key_book import parse_key_file
from pdserve.commands.cli.main import build_parser
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.file import load_config
from pdserve.settings.flags import config_from
from pdserve.shared.slo import DEFAULT_CLASS, DEFAULT_CLASSES, parse_slo_classes
from tests.architecture.repository import ROOT, native_files, python_files

DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS.append(ROOT / "examples/README.md")
TEXT = "\n".join(path.read_text() for path in DOCUMENTS)
SHELL = "\n".join(re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL)).replace("\\\n", " ")
TARGETS = sorted(set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, re.MULTILINE)))
COMMANDS = sorted(set(re.findall(r"^(?:[A-Z_]+=\S+ )*(pdserve .*)", SHELL, re.MULTILINE)))
MODULES = sorted(set(re.findall(r"python -m ([\w.]+)", TEXT)))
CONFIGS: dict[str, type[Any]] = {
    "up": ClusterConfig,
    "coordinator": CoordinatorConfig,
    "prefill": NodeConfig,
    "decode": NodeConfig,
}
PATH = re.compile(r"(?<![\w./:-])((?:[\w.-]+/)+[\w-][\w.-]*\.[a-z]{1,5})\b")
MOST_COLUMNS = 100


def _name(document: Path) -> str:
    return str(document.relative_to(ROOT))


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=_name)


def test_there_is_something_to_check() -> None:
    assert len(DOCUMENTS) >= 5
    assert len(COMMANDS) >= 25
    assert len(TARGETS) >= 5
    assert MODULES


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_parses(line: str) -> None:
    arguments = build_parser().parse_args(shlex.split(line, comments=True)[1:])
    assert arguments.command is not None
    kind = CONFIGS.get(arguments.command)
    if kind is not None and not arguments.config:  # a file of the reader's
        config_from(kind, arguments)


@pytest.mark.parametrize("target", TARGETS)
def test_a_make_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_is_run_exists(module: str) -> None:
    assert find_spec(module) is not None


@each_document
def test_files_that_are_named_exist(document: Path) -> None:
    text = re.sub(r"\w+://\S+", "", document.read_text())
    files = [f"/{path.relative_to(ROOT)}" for path in python_files() + native_files()]

    def exists(path: str) -> bool:  # also when it is told from inside a package
        if path.startswith("keys/"):  # what `pdserve certs keys` makes
            return True
        places = (ROOT / path, document.parent / path)
        return any(map(Path.exists, places)) or any(file.endswith(f"/{path}") for file in files)

    assert [path for path in PATH.findall(text) if not exists(path)] == []


@each_document
def test_links_lead_somewhere(document: Path) -> None:
    def leads_somewhere(link: str) -> bool:
        name, _, anchor = link.partition("#")
        target = document.parent / name if name else document
        return target.is_file() and (not anchor or anchor in _anchors(target))

    links = re.findall(r"\]\((?!\w+://)([^)\s]+)\)", document.read_text())
    assert [link for link in links if not leads_somewhere(link)] == []


def _anchors(document: Path) -> list[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", document.read_text(), re.MULTILINE)
    return [re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings]


@each_document
def test_lines_are_wrapped(document: Path) -> None:
    lines = document.read_text().splitlines()
    assert [x for x in lines if len(x) > MOST_COLUMNS and not x.startswith("|")] == []


@each_document
def test_tables_are_whole(document: Path) -> None:
    """Rows behind an empty line are none of the table: they are shown as text with bars."""
    paragraphs = re.split(r"\n{2,}", document.read_text())
    tables = [text for text in paragraphs if text.startswith("|")]
    assert [text for text in tables if not re.match(r"\|.*\n\|[-| ]+\n", text)] == []


def _toml(name: str) -> str:
    """The example that begins with its file's name."""
    (text,) = re.findall(rf"```toml\n(# {re.escape(name)}\n.*?)```", TEXT, re.DOTALL)
    return str(text)


def test_the_example_of_keys_is_a_key_file() -> None:
    classes = parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS)
    owners = parse_key_file(_toml("keys.toml"), classes.by_name)
    assert sorted(tenant.name for tenant in owners.values()) == ["acme", "nightly"]


def test_the_example_of_a_node_is_a_node_config(tmp_path: Path) -> None:
    file = tmp_path / "decode.toml"
    file.write_text(_toml("B: decode.toml"))
    config = load_config(NodeConfig, file, {})
    assert config.coordinators == ["10.0.0.1:8001"]
    assert (config.advertise or config.host, config.kv_port) == ("10.0.0.2", 8012)
