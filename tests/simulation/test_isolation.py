"""Tenant isolation: neither cached-token counts nor latencies reveal other tenants' prompts."""

import pytest

from coordinator.tenants import Tenant
from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.outcome import Outcome
from pdserve.protocol import Prompt
from pdserve.settings.config import Mode, PolicyConfig
from tests.simulation.scenarios import fleet

PROMPT = [7] * 3000  # takes a third of a second to compute, and almost none if cached
SAME_S = 1e-4  # nodes learn a little from every step
NODES: dict[Mode, tuple[int, int]] = {
    "disaggregated": (2, 2),
    "colocated": (0, 3),
    "adaptive": (2, 2),
}


def asked(tenant: Tenant, at_s: float, salt: str = "") -> Call:
    return Call(
        f"{tenant.name}-{at_s}",
        at_s,
        Prompt(PROMPT, tenant.cache_salt(salt)),
        5,
    )


def outcomes(mode: Mode, *calls: Call) -> list[Outcome]:
    return fleet(*NODES[mode], mode, calls, PolicyConfig()).score.outcomes


@pytest.mark.parametrize("mode", NODES)
def test_nobody_can_tell_what_another_tenant_has_asked(mode: Mode) -> None:
    acme, friend = Tenant(name="acme"), Tenant(name="friend", cache_group="acme")
    spy, namesake = Tenant(name="spy"), Tenant(name="a")
    (alone,) = outcomes(mode, asked(spy, 40.0))
    known = [asked(acme, 0.0), asked(acme, 10.0), asked(friend, 20.0)]
    spied = [asked(spy, 40.0), asked(namesake, 50.0, "cme"), asked(acme, 60.0, "mine")]
    first, again, friends, *others = outcomes(mode, *known, *spied)
    assert first.num_cached_tokens == 0
    for hit in (again, friends):
        assert hit.num_cached_tokens > 0.9 * len(PROMPT)
        assert hit.ttft_s < 0.5 * first.ttft_s
    for other in others:
        assert other.num_cached_tokens == 0
        for seen_s, alone_s in zip(other.token_times_s, alone.token_times_s, strict=True):
            since_s = seen_s - other.call.at_s
            assert since_s == pytest.approx(alone_s - alone.call.at_s, abs=SAME_S)
