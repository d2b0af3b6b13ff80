"""Follows the guide to two machines in docs/DEPLOYING.md: its files and commands as they are.

A block begins with the machine that it is for: `# A`, `# yours`, or `# A: prefill.toml` for a file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from tests.architecture.repository import ROOT

HEADING = "## From two machines to a cluster\n"
_PORTS = re.compile(r"^\| (\d+)[^|]*\| ([AB, ]+) \|", re.MULTILINE)
_BLOCK = re.compile(r"```(sh|toml)\n# (A|B|yours)(?:: (\S+))?\n(.*?)```", re.DOTALL)


@dataclass(frozen=True)
class File:
    """What a machine is to have in a file."""

    machine: str
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command that a machine is to run."""

    machine: str
    environment: dict[str, str]
    words: list[str]


def text() -> str:
    """The guide."""
    (guide,) = re.findall(
        rf"^{HEADING}(.*?)^## ", (ROOT / "docs/DEPLOYING.md").read_text() + "## ", re.M | re.DOTALL
    )
    assert isinstance(guide, str)
    return guide


def steps() -> Iterator[File | Command]:
    """What there is to do, in the order of the guide."""
    for language, machine, name, block in _BLOCK.findall(text()):
        if language == "toml":
            yield File(machine, name, block)
            continue
        for line in re.findall(r"(?:'[^']*'|[^'\n])+", block.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            program = next(index for index, word in enumerate(words) if "=" not in word)
            environment = dict(word.split("=", 1) for word in words[:program])
            yield Command(machine, environment, words[program:])


def ports(machine: str) -> set[int]:
    """On which this machine listens when all is done."""
    return {int(port) for port, machines in _PORTS.findall(text()) if machine in machines}


def complaint(reason: str) -> str:
    """What a node says that is not let in for this reason."""
    (told,) = re.findall(rf"^\| `([^`]+)`[^|]*\|[^|]*{reason}", text(), re.MULTILINE)
    assert isinstance(told, str)
    return told
