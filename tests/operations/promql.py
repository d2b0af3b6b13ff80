"""The queries of rules and dashboards, and what they name; no parser of PromQL, which tests have
in promtool and Prometheus themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from tests.architecture.repository import ROOT

PROMETHEUS = ROOT / "deploy/prometheus"
DASHBOARDS = sorted((ROOT / "deploy/grafana").glob("*.json"))
_NAME = re.compile(r"\b((?:pdserve|process)[\w:]*|up)\b(?:\{([^}]*)\})?")
_GROUPED = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")


@dataclass(frozen=True)
class Query:
    """One expression, and where it stands."""

    where: str
    text: str
    shown: frozenset[str] = field(default_factory=frozenset)  # labels that its legend shows

    def selectors(self) -> list[tuple[str, set[str]]]:
        """Each sample that is named, with the labels that are asked of it."""
        text = re.sub(r'"[^"]*"', '""', _GROUPED.sub("", self.text))
        return [(name, set(_LABEL.findall(labels or ""))) for name, labels in _NAME.findall(text)]

    def groups(self) -> set[str]:
        """The labels that results are grouped by, or shown by."""
        listed = ",".join(_GROUPED.findall(self.text)).split(",")
        return ({label.strip() for label in listed} | self.shown) - {"", "le"}


def rules(file: str) -> list[dict[str, Any]]:
    """All rules of a file in deploy/prometheus."""
    groups = yaml.safe_load((PROMETHEUS / file).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> list[Query]:
    return [Query(rule["record"], rule["expr"]) for rule in rules("recording.yml")]


def alerts() -> list[Query]:
    return [
        Query(rule["alert"], rule["expr"], _in_text(rule["annotations"]["summary"]))
        for rule in rules("alerts.yml")
    ]


def panels() -> Iterator[Query]:
    """The queries of all dashboards."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                shown = _in_text(target.get("legendFormat", ""))
                yield Query(f"{path.stem}: {panel['title']}", target["expr"], shown)


def _in_text(text: str) -> frozenset[str]:
    """The labels that a template names: {{node}}, or {{ $labels.node }}."""
    return frozenset(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", text))
