"""`pdserve doctor --cluster`: whom it asks, what it prints, and its exit code."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from pdserve.commands.cli.doctor.cluster import command
from pdserve.commands.cli.main import main
from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.findings.finding import Level, names, problem, warning
from pdserve.protocol.status import ClusterStatus
from pdserve.shared.errors import ClusterError
from tests.unit.commands.cli.doctor.statuses import LOST, OTHER, PROCESS, URL, cluster


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, ClusterStatus]:
    """What coordinators answer by URL; others are silent."""
    known: dict[str, ClusterStatus] = {}

    async def fetch(url: str, *, trust: Trust) -> ClusterStatus:
        if url not in known:
            raise ClusterError(f"no answer from {url}")
        return known[url]

    monkeypatch.setattr(command, "fetch_status", fetch)
    return known


async def test_what_all_coordinators_tell_is_told_once(answers: dict[str, ClusterStatus]) -> None:
    lost = replace(PROCESS, absent=[LOST])
    answers |= {URL: cluster(lost), OTHER: cluster(lost, decode_0={"clock_offset_ms": 5e3})}
    found = [f for f in await command.diagnose([URL, OTHER]) if f.level is not Level.OK]
    assert [(f.check, f.coordinator) for f in found] == [("nodes", ""), ("clocks", OTHER)]


def test_a_silent_coordinator_is_a_problem(
    answers: dict[str, ClusterStatus], capsys: pytest.CaptureFixture[str]
) -> None:
    answers[URL] = cluster()
    assert main(["doctor", "--cluster", URL, OTHER]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert first.startswith(f"problem  coordinators  no answer from {OTHER} -> ")
    assert all(line.startswith("ok ") for line in others)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (cluster(), 0),
        (cluster(decode_1={"clock_offset_ms": 5e3}), 0),
        (cluster(replace(PROCESS, absent=[LOST])), 1),
    ],
)
def test_the_exit_code_tells_whether_there_is_a_problem(
    status: ClusterStatus,
    code: int,
    answers: dict[str, ClusterStatus],
    capsys: pytest.CaptureFixture[str],
) -> None:
    answers[URL] = status
    assert main(["doctor", "--json", "--cluster", URL]) == code
    levels = [finding["level"] for finding in json.loads(capsys.readouterr().out)]
    assert levels == sorted(levels, key=["problem", "warning", "ok"].index), "the worst first"


def test_a_line_says_what_is_so_and_what_to_do() -> None:
    found = [problem("a", "b", "c"), warning("d", "e", "f")]
    assert [command.line(finding).plain for finding in found] == [
        "problem  a             b -> c",
        "warning  d             e -> f",
    ]
    assert names(["b", "a", "c"]) == "a, b and c"
