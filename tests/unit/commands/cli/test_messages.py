"""Messages advise only what exists: every flag and setting that one names is of its command."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.commands.cli.main import build_parser
from pdserve.commands.cli.settings_page import COMMANDS
from pdserve.settings.described import settings_of
from pdserve.settings.flags import FlagParser

SOURCE = Path(__file__).parents[4]
PACKAGES = ("coordinator", "prefill_node", "decode_node", "kv_transfer", "pdserve")
# `up` starts coordinators and nodes, so what these say must be right for who typed `up`, too.
PROCESSES = ("coordinator/", "prefill_node/", "decode_node/", "kv_transfer/", "pdserve/engine/",
             "pdserve/node/")  # fmt: skip
STARTED = (("up", "coordinator"), ("up", "prefill", "decode"))  # either is advised
FOREIGN = re.compile(r"ray start --head|.*--ctx-size.*")  # commands of other programs
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
NAMED = re.compile(r"\bpdserve ([a-z]+)(?: [A-Z]+)? --")


def options_of(parser: FlagParser, name: str = "") -> dict[str, set[str]]:
    """Command |-> its options; those of "" are of any command."""
    found: dict[str, set[str]] = {name: set(parser._option_string_actions)}
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for inner, added in action.choices.items():
                found |= options_of(added, f"{name} {inner}".strip())
    return found


def texts_of(path: Path) -> Iterator[str]:
    """The texts of a module that are no documentation, with {} for their values.

    None of a module that names nothing.
    """
    source = path.read_text()
    if not OPTION.search(source) and not SETTING.search(source):
        return
    tree = ast.parse(source)
    parts = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            parts.add(id(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
            )
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts
        ):
            yield node.value


OPTIONS = options_of(build_parser())
SETTINGS = {
    command: {setting.name for setting in settings_of(struct)}
    for command, struct in COMMANDS.items()
}
SECTIONS = {name.partition(".")[0] for names in SETTINGS.values() for name in names if "." in name}
SETTING = re.compile(rf"(?<![\w./-])((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?!\w|\.|/)")
SETTINGS |= {"prefill": SETTINGS["nodes"], "decode": SETTINGS["nodes"]}


def faults(text: str, file: str) -> list[str]:
    """What a message of a file names that no command has which shows it."""
    if " " not in text:
        return []
    text = FOREIGN.sub("", text)
    shown_by = STARTED if file.startswith(PROCESSES) else tuple((name,) for name in OPTIONS)
    if file.startswith("pdserve/node/rank_hosts/"):  # of a node on several hosts, never of `up`
        shown_by = (("prefill", "decode"),)
    if named := NAMED.search(text):
        shown_by = ((named[1],),)
    wrong = [name for name in OPTION.findall(text) if not _is_one(name, OPTIONS, shown_by)]
    return wrong + [name for name in SETTING.findall(text) if not _is_one(name, SETTINGS, shown_by)]


def _is_one(name: str, known: dict[str, set[str]], shown_by: tuple[tuple[str, ...], ...]) -> bool:
    return any(all(name in known.get(c, ()) for c in commands) for commands in shown_by)


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_name_what_exists(package: str) -> None:
    wrong = {}
    for path in sorted((SOURCE / package).rglob("*.py")):
        file = str(path.relative_to(SOURCE))
        for text in texts_of(path):
            if found := faults(text, file):
                wrong[file, text] = found
    assert wrong == {}


def test_what_does_not_exist_is_found() -> None:
    file = "coordinator/api/prompt/chat.py"
    assert faults("name it with --tool-format", file) == ["--tool-format"]
    assert faults("use --set answers.made_up=1", file) == ["answers.made_up"]
    assert faults("use --set answers.tool_format=FORMAT", file) == []
