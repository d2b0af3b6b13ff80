"""docs/SETTINGS.md has every setting, and is what the code makes."""

import re

import pytest

from pdserve.commands.cli.settings_page import markdown
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.described import settings_of
from tests.architecture.repository import ROOT

_PAGE = ROOT / "docs" / "SETTINGS.md"
_TABLES = re.findall(r"^## .*: (.*)\n\n((?:\|.*\n)+)", _PAGE.read_text(), re.MULTILINE)
# Who reads it, and the cells: name, type, default, what it does.
ROWS = [
    (readers.split(", "), line.replace("**", "").strip("|").strip(" ").split(" | "))
    for readers, table in _TABLES
    for line in table.splitlines()[2:]
]


def test_the_page_is_made_from_the_code():
    command = "python -m pdserve.commands.cli.settings_page > docs/SETTINGS.md"
    assert _PAGE.read_text() == markdown(), command


@pytest.mark.parametrize(
    ("command", "struct"),
    [("up", ClusterConfig), ("coordinator", CoordinatorConfig), ("nodes", NodeConfig)],
)
def test_every_setting_of_a_command_is_there_once_with_its_meaning(command, struct):
    rows = [row for readers, row in ROWS if command in readers]
    read = {row[0]: row for row in rows}
    settings = {f"`{setting.name}`": setting for setting in settings_of(struct)}
    assert sorted(row[0] for row in rows) == sorted(settings)
    for name, row in read.items():
        assert row[3] == settings[name].description.replace("<", "&lt;")


def test_times_sizes_and_tokens_have_units():
    unit = {row[0]: row[2].rpartition(" ")[2] for _, row in ROWS}  # behind the default
    assert unit["`timeouts.lease_s`"] == "seconds"
    assert unit["`engine.kv_memory`"] == unit["`handoff.announce_bytes`"] == "bytes"
    assert unit["`engine.token_budget`"] == "tokens"
    seconds = [name for name in unit if name.endswith("_s`")]
    assert {unit[name] for name in seconds} == {"seconds"}
