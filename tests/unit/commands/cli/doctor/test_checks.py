"""What `pdserve doctor --cluster` finds in a status, check by check."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pdserve.findings import checks
from pdserve.findings.certificates import certificate_findings, https_findings
from pdserve.findings.coordinators import agreement_findings
from pdserve.findings.finding import Finding, Level
from pdserve.protocol import DraftState, LinkState
from pdserve.protocol.status import (
    AbsentNode,
    AdapterStatus,
    ClusterStatus,
    CoordinatorStatus,
    FailingPeer,
    RecentCalls,
    WaitingClass,
)
from tests.unit.commands.cli.doctor.statuses import (
    HEALTHY,
    LOST,
    NODES,
    OTHER,
    PROCESS,
    URL,
    cluster,
)

NOW = 1_800_000_000.0
DAY_S = 86_400.0


def findings(status: ClusterStatus) -> list[Finding]:
    return checks.findings(status, NOW)


def only(status: ClusterStatus) -> Finding:
    """The only finding that is not ok."""
    (found,) = (finding for finding in findings(status) if finding.level is not Level.OK)
    assert found.advice
    return found


def test_a_healthy_cluster_is_ok() -> None:
    found = findings(cluster())
    assert {finding.level for finding in found} == {Level.OK}
    assert len({finding.check for finding in found}) == 12, "each check tells that all is well"
    told = " ".join(finding.what for finding in found)
    assert "in use: shm" in told
    assert "pdserve 0.1.0; 1 revision" in told


def test_what_weights_are_packed_as_is_told() -> None:
    told = [f.what for f in findings(cluster(prefill_1={"weights": "Q8_0 as 8 bits by 32"}))]
    assert "Q8_0 as 8 bits by 32 (prefill-1)" in told


def test_it_is_told_what_is_guessed_and_why_nothing_is() -> None:
    told = [f.what for f in findings(cluster()) if f.check == "drafts"]
    assert told == ["nothing has been guessed yet"]
    guessed = {"drafts": [DraftState("text", 40, 30), DraftState("answers", 0, 0)]}
    silent = {"no_drafts": "speculation.mode is off"}
    both = cluster(decode_0=guessed, decode_1=silent, prefill_0=silent)
    told = [f.what for f in findings(both) if f.check == "drafts"]
    assert told == [
        "decode-1: a token a step, as speculation.mode is off",
        "decode-0 has guessed 40 tokens by text (75% right)",
    ]


def test_adapters_are_named_with_what_nodes_lack_them_for() -> None:
    adapters = [
        AdapterStatus(name="sql", digest="a" * 32, nodes=["prefill-0"], refusals={"decode-0": "x"}),
        AdapterStatus(name="poems", refusals={"": "rank 0"}),
    ]
    told = [f for f in findings(cluster(replace(PROCESS, adapters=adapters))) if f.advice]
    assert [(f.level, f.what) for f in told if f.check == "adapters"] == [
        (Level.WARNING, "decode-0 is without sql: x"),
        (Level.PROBLEM, "poems, of the settings, is not served: rank 0"),
    ]
    all_told = [f.what for f in findings(cluster(replace(PROCESS, adapters=adapters)))]
    assert "1 of 2 are on nodes: sql" in all_told


def test_an_older_coordinator_that_tells_less_is_no_problem() -> None:
    assert all(f.level is not Level.PROBLEM for f in findings(cluster(CoordinatorStatus())))


SAME_HOST = LinkState("prefill-0", "tcp", "shm: prefill-0 cannot: no permission")
BROKE = LinkState("prefill-0", "tcp", "shm: another host; ucx: broke: connection reset")
OTHER_HOST = LinkState("prefill-0", "tcp", "shm: another host; ucx: no RDMA device, and so on")
REFUSED = AbsentNode(node_id="decode-8", absence="refused", reason="model 'x'", since_s=1.0)


@pytest.mark.parametrize(
    ("level", "told", "advice", "status"),
    [
        # versions
        (
            Level.WARNING,
            "0.1.0 (decode-0, decode-1, prefill-0 and the coordinator); 0.2.0 (prefill-1)",
            "one at a time",
            cluster(prefill_1={"program_version": "0.2.0"}),
        ),
        (
            Level.WARNING,
            "4f0c+d1 (decode-0, decode-1 and prefill-0); 4f0c+d2 (prefill-1); the checkpoint is "
            "the same, but not the quantization or the kernels (engine.kernels)",
            "pdserve revisions",
            cluster(prefill_1={"revision": "4f0c+d2"}),
        ),
        (
            Level.WARNING,
            "revision d81a has a share, but no node",
            "pdserve revisions",
            cluster(replace(PROCESS, revision_shares={"4f0c": 0.9, "d81a": 0.1})),
        ),
        # clocks
        (
            Level.WARNING,
            "the clock of decode-1 is 2.5 s ahead of the coordinator's",
            "NTP",
            cluster(decode_1={"clock_offset_ms": 2500.0}),
        ),
        (
            Level.PROBLEM,
            "the clock of decode-1 is 400.0 s behind the coordinator's",
            "certificates",
            cluster(decode_1={"clock_offset_ms": -400e3}),
        ),
        # transports and pairs
        (
            Level.WARNING,
            "decode-0 pulls from prefill-0 by tcp and not by shm: prefill-0 cannot: no permission",
            "pdserve doctor",
            cluster(decode_0={"links": [SAME_HOST]}),
        ),
        (
            Level.WARNING,
            "decode-0 pulls from prefill-0 by tcp and not by ucx: broke: connection reset",
            "pdserve doctor",
            cluster(decode_0={"links": [BROKE]}),
        ),
        (
            Level.WARNING,
            "prefill-1 offers only tcp for KV, others offer shm too",
            "`transports`",
            cluster(prefill_1={"transports": ["tcp"]}),
        ),
        (
            Level.PROBLEM,
            "prefill-1 shares no KV transport with any decode node: it has shm and tcp, they have "
            "shm and tcp",
            "same `transports`",
            cluster(prefill_1={"is_alone": True}),
        ),
        (
            Level.PROBLEM,
            "decode-0 gets no KV from prefill-0 (peer_lost, 3 in a row, tried again in 4 s)",
            "reaches 10.0.0.2:5000",
            cluster(
                prefill_0={"failing": [FailingPeer("decode-0", "peer_lost", 3, 3.6)]},
                decode_0={"failing": [FailingPeer("prefill-0", "peer_lost", 3, 3.6)]},
            ),
        ),
        # nodes
        (
            Level.PROBLEM,
            "decode-1 is sick, and about to end: rank_lost: rank 1 has ended",
            "out-of-memory killer",
            cluster(decode_1={"state": "sick", "reason": "rank_lost: rank 1 has ended"}),
        ),
        (
            Level.WARNING,
            "decode-1 is loading (40%)",
            "wait",
            cluster(decode_1={"state": "loading", "loading_progress": 0.4}),
        ),
        (
            Level.PROBLEM,
            "decode-7 was lost 12 s ago, without a drain: its stream broke",
            "SIGKILL",
            cluster(replace(PROCESS, absent=[LOST])),
        ),
        (
            Level.WARNING,
            "decode-7 was lost 900 s ago",
            "forgotten within an hour",
            cluster(replace(PROCESS, absent=[replace(LOST, since_s=900)])),
        ),
        (
            Level.PROBLEM,
            "decode-8 is refused: model 'x'",
            "tries again",
            cluster(replace(PROCESS, absent=[REFUSED])),
        ),
        # pools
        (
            Level.PROBLEM,
            "no decode node is ready (decode-0 is draining, decode-1 is draining)",
            "pdserve role NODE decode",
            cluster(
                status={"ready": False},
                decode_0={"state": "draining"},
                decode_1={"state": "draining"},
            ),
        ),
        (
            Level.PROBLEM,
            "no request can be served, though",
            "see kv-links",
            cluster(status={"ready": False}),
        ),
        (
            Level.PROBLEM,
            "no node is ready",
            "start one",
            cluster(status={"ready": False, "mode": "adaptive", "nodes": []}),
        ),
        # load
        (
            Level.WARNING,
            "4 requests wait in line, the first for 25 s",
            "add nodes",
            cluster(status={"waiting": 4, "waiting_by_class": [WaitingClass("batch", 4, 1, 25.0)]}),
        ),
        (
            Level.PROBLEM,
            "the line of 25 is full",
            "add nodes",
            cluster(
                status={"waiting": 25, "coordinators": 2},
                **{name.replace("-", "_"): {"coordinators": 2} for name in NODES},
            ),
        ),
        (
            Level.WARNING,
            "all 100 requests that max_inflight allows run",
            "raise max_inflight",
            cluster(status={"inflight": 100}),
        ),
        (
            Level.WARNING,
            "no decode node has a free place: 5 requests wait there for one",
            "pdserve role NODE decode",
            cluster(decode_0={"waiting_requests": 2}, decode_1={"waiting_requests": 3}),
        ),
        (
            Level.WARNING,
            "a new prompt waits 11 s at the best prefill node",
            "pdserve role NODE prefill",
            cluster(prefill_0={"predicted_queue_ms": 11e3}, prefill_1={"predicted_queue_ms": 12e3}),
        ),
        (
            Level.WARNING,
            "98% of the decode pool's KV blocks are in use",
            "--kv-memory",
            cluster(decode_0={"free_blocks": 4}, decode_1={"free_blocks": 0}),
        ),
        (
            Level.WARNING,
            "97% of the prefill pool's KV blocks are in use",
            "see kv-links",
            cluster(prefill_0={"free_blocks": 3}, prefill_1={"free_blocks": 3}),
        ),
        # calls
        (
            Level.WARNING,
            "7 of 500 calls of the last minute were refused (rate_limit_exceeded)",
            "requests_per_minute",
            cluster(
                replace(
                    PROCESS, recent_calls=RecentCalls(calls=500, refused={"rate_limit_exceeded": 7})
                )
            ),
        ),
        (
            Level.PROBLEM,
            "6 of 500 calls of the last minute failed: 4 with node_lost, 2 with internal_error",
            "PdserveRequestsFail",
            cluster(
                replace(
                    PROCESS,
                    recent_calls=RecentCalls(
                        calls=500, failed={"node_lost": 4, "internal_error": 2}
                    ),
                )
            ),
        ),
        # speed
        (
            Level.WARNING,
            "steps of decode-1 take 2.3 times as long as it measured at its start",
            "temperature",
            cluster(decode_1={"decode_ratio": 2.34}),
        ),
        (
            Level.WARNING,
            "decode-1 took 9 ms for a step as it started, the fastest of its pool 4 ms",
            "profile",
            cluster(decode_1={"profiled_step_ms": 9.0}),
        ),
        (
            Level.WARNING,
            "the event loop of prefill-0 was late by 0.7 s",
            "a core of its own",
            cluster(prefill_0={"event_loop_lag_ms": 700.0}),
        ),
        # coordinators
        (
            Level.WARNING,
            "decode-0 is attached to 1 of 2",
            "`coordinators`",
            cluster(
                status={"coordinators": 2},
                prefill_0={"coordinators": 2},
                prefill_1={"coordinators": 2},
                decode_1={"coordinators": 2},
            ),
        ),
        (
            Level.WARNING,
            "nodes name different leaders",
            "attach every node",
            cluster(prefill_0={"leader": "c"}, decode_0={"leader": "d"}),
        ),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(
    level: Level, told: str, advice: str, status: ClusterStatus
) -> None:
    found = only(status)
    assert found.level is level
    assert told in found.what
    assert advice in found.advice


def test_a_slower_transport_between_hosts_is_no_fault() -> None:
    status = cluster(decode_0={"links": [OTHER_HOST]})
    assert {finding.level for finding in findings(status)} == {Level.OK}


def test_a_node_that_is_hardly_used_is_not_called_slow() -> None:
    idle = cluster(decode_1={"decode_ratio": 3.0, "running_requests": 0})
    assert {finding.level for finding in findings(idle)} == {Level.OK}


def test_the_coordinators_own_clock_is_told_where_all_nodes_differ_from_it() -> None:
    offsets = {name.replace("-", "_"): {"clock_offset_ms": -5e3} for name in NODES}
    told = "the clock of the coordinator is 5.0 s ahead of most nodes'"
    assert told in only(cluster(**offsets)).what


@pytest.mark.parametrize(
    ("days", "level", "told"),
    [
        (-2.0, Level.PROBLEM, "ended 2.0 days ago"),
        (1.0, Level.PROBLEM, "ends in 1.0 days"),
        (10.0, Level.WARNING, "ends in 10.0 days"),
        (None, Level.WARNING, "is not known"),
        (60.0, Level.OK, "all last for 60 days or more"),
    ],
)
def test_certificates_that_end_are_told(days: float | None, level: Level, told: str) -> None:
    ends_at = 0.0 if days is None else NOW + days * DAY_S
    nodes = [replace(n, certificate_ends_at=NOW + 90 * DAY_S) for n in NODES.values()]
    nodes[2] = replace(nodes[2], certificate_ends_at=ends_at)
    process = replace(PROCESS, has_tls=True, certificate_ends_at=NOW + 90 * DAY_S)
    (found,) = certificate_findings(replace(HEALTHY, nodes=nodes, coordinator=process), NOW)
    assert found.level is level
    assert told in found.what


def test_the_certificate_that_clients_are_shown_is_told_when_it_ends_soon() -> None:
    (found,) = https_findings({URL: NOW + DAY_S, OTHER: NOW + 90 * DAY_S}, NOW)
    assert found.level is Level.PROBLEM
    assert found.what == f"the certificate of HTTPS at {URL} ends in 1.0 days"


def test_coordinators_that_disagree_are_told() -> None:
    one = cluster(replace(PROCESS, revision_shares={"4f0c": 1.0}))
    other = cluster(replace(PROCESS, revision_shares={"4f0c": 0.5, "d81a": 0.5}))
    (found,) = agreement_findings({URL: one, OTHER: other})
    assert found.level is Level.PROBLEM
    assert "different shares of the revisions" in found.what
    (found,) = agreement_findings({URL: one, OTHER: replace(one, nodes=one.nodes[1:])})
    assert found.what == f"{OTHER} does not have prefill-0, which another coordinator has"
    assert [f.what for f in agreement_findings({URL: one, OTHER: one})] == ["all 2 agree"]


def test_coordinators_that_were_not_asked_are_told() -> None:
    (found,) = agreement_findings({URL: cluster(status={"coordinators": 3})})
    assert (found.level, found.what) == (Level.OK, "1 of 3 coordinators were asked")
