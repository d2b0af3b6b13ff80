"""The router's benchmark measures what it says, on a small scale."""

from __future__ import annotations

from pdserve.commands.bench.router.run import HIT_SHARES, KINDS, measure_router


def test_a_few_nodes_are_measured_as_well() -> None:
    report = measure_router(
        num_nodes=2, nodes_per_host=1, num_blocks=64, prompt_tokens=[64], decisions=2
    )
    assert len(report.decisions) == len(KINDS) * len(HIT_SHARES)


def test_every_kind_of_decision_is_measured() -> None:
    report = measure_router(
        num_nodes=16, nodes_per_host=4, num_blocks=512, prompt_tokens=[512], decisions=3
    )
    assert [(row.policy, row.mode) for row in report.decisions[:: len(HIT_SHARES)]] == KINDS
    assert all(0 < row.p50_us <= row.p99_us for row in report.decisions)
    assert [row.prompt_tokens for row in report.hashing] == [512]
    assert report.events_per_s > 0
    assert report.bookings_us > 0
