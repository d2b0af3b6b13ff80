"""Rules, dashboards, runbook and documents name only what the processes expose.

Whoever renames a metric or a label finds here what would have gone dead.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.architecture.repository import ROOT
from tests.operations.exposed import OF_NODES, OF_TARGETS, exposed
from tests.operations.promql import (
    DASHBOARDS,
    PROMETHEUS,
    Query,
    alerts,
    panels,
    recorded,
    rules,
)

RUNBOOK = (ROOT / "docs/RUNBOOK.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUERIES = [*recorded(), *alerts(), *panels()]
SUFFIXES = ("", "_total", "_bucket", "_sum", "_count")
_SUFFIX = r"_(total|bucket|sum|count)$"


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """What processes expose, and what the rules record: that has the labels it is grouped by."""
    known = asyncio.run(exposed())
    for query in recorded():
        known[query.where] = query.groups() | OF_TARGETS
    return known


def test_there_is_something_to_check() -> None:
    assert len(DASHBOARDS) == 2
    assert len(recorded()) >= 8
    assert len(alerts()) >= 15
    assert len(list(panels())) >= 60
    found = Query("x", 'sum by (le, a) (rate(pdserve_b_bucket{c="d{e", f!~"g"}[5m]))', frozenset())
    assert found.selectors() == [("pdserve_b_bucket", {"c", "f"})]
    assert found.groups() == {"a"}


def test_queries_name_what_there_is(samples: dict[str, set[str]]) -> None:
    assert [problem for query in QUERIES for problem in problems(query, samples)] == []


def problems(query: Query, samples: dict[str, set[str]]) -> Iterator[str]:
    """What a query asks for that nothing exposes."""
    labels: set[str] = set()
    for name, asked in query.selectors():
        if name not in samples:
            yield f"{query.where}: nothing exposes {name}"
        elif not asked <= samples[name]:
            yield f"{query.where}: {name} has no label {asked - samples[name]}"
        else:
            labels |= samples[name]
    if not query.groups() <= labels:
        yield f"{query.where}: nothing has the labels {query.groups() - labels}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pdserve_steps", "nothing exposes pdserve_steps"),
        ('pdserve_steps_total{slo="x"}', "pdserve_steps_total has no label {'slo'}"),
        ("sum by (reason) (pdserve_steps_total)", "nothing has the labels {'reason'}"),
        ("sum by (node) (pdserve_steps_total)", ""),
    ],
)
def test_a_dead_query_is_found(text: str, said: str, samples: dict[str, set[str]]) -> None:
    found = [problem.removeprefix("x: ") for problem in problems(Query("x", text), samples)]
    assert found == [said] * bool(said)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_name_what_there_is(document: Path, samples: dict[str, set[str]]) -> None:
    found = re.findall(r"\b(pdserve_\w+[a-z])(?:\{([\w, ]*)\})?", document.read_text())
    for name, labels in found:
        known = [samples[f"{name}{suffix}"] for suffix in SUFFIXES if f"{name}{suffix}" in samples]
        assert known, f"nothing exposes {name}"
        assert {label.strip() for label in labels.split(",") if label} <= set.union(*known), name


def test_whatever_is_exposed_is_shown(samples: dict[str, set[str]]) -> None:
    """By a panel, a rule or a document: a figure that nobody looks at is not worth its scrape."""
    texts = [query.text for query in QUERIES] + [document.read_text() for document in DOCUMENTS]
    named = set(re.findall(r"\bpdserve_\w+[a-z]\b", "\n".join(texts)))
    stems = {re.sub(_SUFFIX, "", name) for name in named}
    exposed_here = {name for name in samples if name.startswith("pdserve_")}
    assert {name for name in exposed_here if re.sub(_SUFFIX, "", name) not in stems} == set()


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    names = [rule["alert"] for rule in rules("alerts.yml")]
    assert re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE) == names
    for rule in rules("alerts.yml"):
        assert rule["annotations"]["runbook"] == f"docs/RUNBOOK.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_the_labels_of_targets_are_those_that_the_example_gives() -> None:
    """`job` by its name, `node` and `role` by the coordinator."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in config["scrape_configs"]}
    named = set(re.findall(r'job="([\w-]+)"', "\n".join(query.text for query in QUERIES)))
    assert named == jobs == {"pdserve-coordinator", "pdserve-node"}
    assert config["scrape_configs"][1]["http_sd_configs"][0]["url"].endswith("/metrics/targets")
    assert {"node", "role"} == OF_NODES  # as in test_information.py


def test_the_example_loads_all_rules() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    assert sorted(config["rule_files"]) == ["alerts.yml", "recording.yml"]
