"""What coordinators are told of a node's costs, and when."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.measured.perf_model import PerfModel
from pdserve.node.prefixes.cost import PullCosts
from pdserve.node.reports.step_costs import PerfFeed
from pdserve.protocol import PerfReport, StepCosts
from pdserve.settings.config import EngineConfig
from tests.fakes.outbox import RecordingOutbox

COSTS = StepCosts(knot_tokens=[1, 8], knot_s=[0.001, 0.002])


class Told:
    """A feed to one coordinator, which attached before the node was profiled."""

    def __init__(self) -> None:
        self.link = RecordingOutbox()
        self.costs = PullCosts(PerfModel(), token_budget=512)
        engine = EngineConfig(token_budget=512, max_batch_size=64)
        self.feed = PerfFeed([self.link], self.costs, engine)

    @property
    def reports(self) -> list[PerfReport]:
        return [message for message in self.link.sent if isinstance(message, PerfReport)]


@pytest.fixture
def told() -> Told:
    return Told()


def attach(told: Told) -> list[msgspec.Struct]:
    """Another coordinator; what it is told at once."""
    link = RecordingOutbox()
    told.feed.attached(link)
    return link.sent


def test_nothing_is_told_before_it_is_known(told: Told) -> None:
    assert attach(told) == []
    told.costs.observe_pull("tcp", 1 << 20, 0.01)
    assert told.reports == []


def test_costs_are_told_when_known_and_to_whom_attaches_later(told: Told) -> None:
    told.costs.perf.costs = COSTS
    told.feed.tell()
    [report] = told.reports
    assert report == PerfReport(step=COSTS, token_budget=512, max_batch_size=64, transfers=[])
    assert attach(told) == [report]


def test_a_transport_is_told_of_once_it_was_used_and_when_it_changes(told: Told) -> None:
    told.feed.tell()
    for _ in range(50):
        told.costs.observe_pull("tcp", 1 << 20, 0.001)
    num_told = len(told.reports)
    assert 1 < num_told < 10
    assert [costs.transport for costs in told.reports[-1].transfers] == ["tcp"]
    for _ in range(50):
        told.costs.observe_pull("tcp", 1 << 20, 0.001)
    assert len(told.reports) == num_told
    for _ in range(50):
        told.costs.observe_pull("tcp", 1 << 20, 0.010)
    assert len(told.reports) > num_told
    assert attach(told) == told.reports[-1:]
