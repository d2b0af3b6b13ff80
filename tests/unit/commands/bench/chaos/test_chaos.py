"""The checker of `pdserve bench chaos` finds what is planted, and nothing else; and its relay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import msgspec
import pytest

from pdserve.commands.bench.chaos.calls import KINDS, make_call
from pdserve.commands.bench.chaos.clients import HeardStream
from pdserve.commands.bench.chaos.config import ChaosConfig
from pdserve.commands.bench.chaos.faults import FAULTS, NEEDS_HOSTS, NOT_IN, STOP_ENGINE
from pdserve.commands.bench.chaos.histories import HUNG, LOST, WRONG, Excuses, gap_s, judge
from pdserve.commands.bench.chaos.measurement import Watch, _held
from pdserve.commands.bench.chaos.relay import Relay
from pdserve.commands.bench.chaos.run import cluster_config, kinds_of
from pdserve.protocol.status import ClusterStatus, NodeStatus, RoleName
from pdserve.settings.config import ONE_POOL, EngineConfig
from pdserve.shared.errors import ConfigError


def heard() -> HeardStream:
    return HeardStream(
        kind="greedy",
        number=1,
        began_s=10.0,
        ended_s=12.0,
        status=200,
        answers={0: "once upon a time"},
        finish_reasons={0: ["length"]},
        completion_tokens=4,
        num_ends=1,
        heard_s=[10.5, 11.0, 11.5, 12.0],
    )


def test_nothing_is_found_where_nothing_is_wrong() -> None:
    assert judge(heard(), heard(), Excuses()) == []


PLANTED: dict[str, tuple[Callable[[HeardStream], None], str]] = {
    "another token": (lambda h: h.answers.update({0: "once upon a tree"}), WRONG),
    "a doubled token": (lambda h: h.answers.update({0: "once upon upon a time"}), WRONG),
    "a missing end of the text": (lambda h: h.answers.update({0: "once upon a"}), WRONG),
    "no last event": (lambda h: setattr(h, "num_ends", 0), WRONG),
    "two last events": (lambda h: setattr(h, "num_ends", 2), WRONG),
    "two ends of a choice": (lambda h: h.finish_reasons.update({0: ["length"] * 2}), WRONG),
    "200 and nothing": (lambda h: h.answers.clear(), WRONG),
    "wrong usage": (lambda h: setattr(h, "completion_tokens", 5), WRONG),
    "a choice too many": (lambda h: h.answers.update({1: "who are you"}), WRONG),
    "an error": (lambda h: setattr(h, "error", "node_lost: gone"), LOST),
    "silence": (lambda h: setattr(h, "heard_s", [10.5, 15.6, 16.0]), HUNG),
    "no end": (lambda h: setattr(h, "error", "no end"), HUNG),
    "a refusal without a reason": (lambda h: refused(h), LOST),
}


def refused(h: HeardStream) -> None:
    h.status, h.error, h.answers, h.finish_reasons = 503, "no_node_available: none", {}, {}
    h.num_ends, h.completion_tokens = 0, None


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    plant, kind = PLANTED[name]
    bad = heard()
    plant(bad)
    assert kind in {found for found, _ in judge(bad, heard(), Excuses())}


def test_an_outage_excuses_silence_and_refusals_but_no_loss() -> None:
    silent, turned_away, lost = heard(), heard(), heard()
    silent.heard_s = [10.5, 16.0, 17.0]
    refused(turned_away)
    lost.error = "node_lost: gone"
    outages = Excuses(outages=[(11.0, 15.0)])
    assert judge(silent, heard(), outages) == []
    assert judge(turned_away, heard(), outages) == []
    assert {kind for kind, _ in judge(lost, heard(), outages)} == {LOST}


def test_a_dead_coordinator_ends_calls_without_a_key_and_no_others() -> None:
    broken = heard()
    broken.error, broken.is_broken, broken.num_ends = "ServerDisconnectedError", True, 0
    deaths = [(11.5, 13.0)]
    dead, empty = Excuses(deaths=deaths), Excuses(outages=deaths)
    assert judge(broken, heard(), dead) == []
    assert {kind for kind, _ in judge(broken, heard(), empty)} == {LOST}
    broken.is_keyed = True
    assert {kind for kind, _ in judge(broken, heard(), dead)} == {LOST}


def test_who_was_not_let_in_has_lost_nothing() -> None:
    shut_out = heard()
    shut_out.error, shut_out.is_broken = "ClientOSError", True
    excuses = Excuses(no_descriptors=[(9.0, 13.0)])
    assert {kind for kind, _ in judge(shut_out, heard(), excuses)} == {LOST}, "it had begun"
    shut_out.heard_s = []
    assert judge(shut_out, heard(), excuses) == []
    assert {kind for kind, _ in judge(shut_out, heard(), Excuses())} == {LOST}


def test_what_cannot_be_stored_is_excused_by_a_full_disk_alone() -> None:
    refused = heard()
    refused.error, refused.status = "store_unavailable: full", 503
    assert judge(refused, heard(), Excuses(full_disks=[(9.0, 13.0)])) == []
    other = Excuses(outages=[(9.0, 13.0)], deaths=[(9.0, 13.0)])
    assert {kind for kind, _ in judge(refused, heard(), other)} == {LOST}


def test_an_adapter_may_be_missing_while_it_is_unloaded_and_at_no_other_time() -> None:
    missing, base = heard(), heard()
    missing.status, missing.error = 404, "model_not_found: no adapter"
    missing.answers, missing.finish_reasons, missing.num_ends = {}, {}, 0
    absent = Excuses(absent=[(9.0, 11.0)])
    assert judge(missing, heard(), absent) == []
    assert {kind for kind, _ in judge(missing, heard(), Excuses(absent=[(13.0, 14.0)]))} == {LOST}
    base.answers = {0: "what the model says"}
    assert {kind for kind, _ in judge(base, heard(), absent)} == {WRONG}


def test_a_client_that_leaves_has_the_beginning() -> None:
    left = heard()
    left.has_left, left.num_ends, left.finish_reasons, left.completion_tokens = True, 0, {}, None
    left.answers = {0: "once upon"}
    assert judge(left, heard(), Excuses()) == []
    left.answers = {0: "twice"}
    assert {kind for kind, _ in judge(left, heard(), Excuses())} == {WRONG}


def test_a_gap_belongs_to_the_fault_before_it() -> None:
    assert gap_s(heard(), 11.1, 20.0) == pytest.approx(0.5)
    assert gap_s(heard(), 13.0, 20.0) is None
    assert gap_s(heard(), 9.0, 10.2) is None


def test_calls_are_the_same_whenever_they_are_made() -> None:
    for kind in KINDS:
        assert make_call(kind, 1, ["m"]) == make_call(kind, 1, ["m"])
        assert make_call(kind, 1, ["m"]) != make_call(kind, 2, ["m"])
        assert make_call(kind, 1, ["m", "a"]).body["model"] == "a"


def test_kinds_of_faults_fit_the_mode() -> None:
    assert kinds_of(ChaosConfig(), 3) == list(FAULTS)
    for mode, left_out in NOT_IN.items():
        assert set(FAULTS) - set(kinds_of(ChaosConfig(mode=mode), 3)) == left_out
    assert set(FAULTS) - set(kinds_of(ChaosConfig(), 2)) == {"part-nodes", "part-host"}
    assert set(FAULTS) - set(kinds_of(ChaosConfig(), 0)) == set(NEEDS_HOSTS)
    assert STOP_ENGINE not in kinds_of(ChaosConfig(), 3, {STOP_ENGINE})
    with pytest.raises(ConfigError, match='"rain" is none of kill-decode'):
        kinds_of(ChaosConfig(only=["rain"]), 3)
    with pytest.raises(ConfigError, match="part-nodes: not in mode disaggregated with these nodes"):
        kinds_of(ChaosConfig(only=["part-nodes"]), 2)
    with pytest.raises(ConfigError, match="flip: not in mode multiplexed"):
        kinds_of(ChaosConfig(only=["flip"], mode="multiplexed"), 3)


def test_modes_with_one_pool_have_no_prefill_nodes() -> None:
    for mode in ONE_POOL:
        assert cluster_config(ChaosConfig(mode=mode), "memory").num_prefill == 0
    alone = EngineConfig(tensor_parallel=2)
    with pytest.raises(ConfigError, match="tensor_parallel: not in mode multiplexed"):
        cluster_config(ChaosConfig(mode="multiplexed", engine=alone), "memory")


def node(name: str, role: RoleName, state: str = "ready", **fields: int) -> NodeStatus:
    numbers = dict.fromkeys(
        ("cached_blocks", "pinned_blocks", "queued_tokens", "running_requests", "waiting_requests"),
        0,
    )
    return NodeStatus(
        node_id=name,
        role=role,
        state=state,  # type: ignore[arg-type]
        loading_progress=1.0,
        incarnation="1",
        session_address="",
        metrics_address="",
        step_time_ms=0.0,
        **{"num_blocks": 9, "free_blocks": 9, **numbers, **fields},
    )


def status(*nodes: NodeStatus, inflight: int = 0) -> ClusterStatus:
    return ClusterStatus(
        model="m", mode="disaggregated", ready=True, inflight=inflight, nodes=list(nodes)
    )


def test_what_is_held_is_said() -> None:
    p, d = node("p", "prefill"), node("d", "decode")
    assert _held(status(p, d)) == []
    assert _held(status(p, d, inflight=2)) == ["2 requests in flight"]
    (held,) = _held(status(p, msgspec.structs.replace(d, free_blocks=7)))
    assert held == "d holds 2 blocks, 0 pinned, 0 queued tokens, 0 requests"


def test_outages_and_what_was_found() -> None:
    p, d, draining = node("p", "prefill"), node("d", "decode"), node("d", "decode", "draining")
    watch = Watch("disaggregated")
    watch.seen = [(1.0, status(p, d)), (2.0, status(p, draining)), (3.0, None), (4.0, status(p, d))]
    assert watch.outages() == [(1.0, 5.0)]  # it began when it was last seen well, or after
    assert watch.found_s(["d"], 1.5, 9.0) == 0.5
    assert watch.found_s(["d"], 1.5, 1.9) is None
    assert watch.found_s(["p"], 0.0, 9.0) is None


async def test_the_relay_passes_holds_up_and_cuts() -> None:
    echoed = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(100):
                writer.write(data)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        echoed.set()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with Relay(lambda: f"{host}:{port}") as relay, asyncio.timeout(30):
        relay_host, _, relay_port = relay.address.rpartition(":")
        reader, writer = await asyncio.open_connection(relay_host, int(relay_port))
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        relay.swallow(True)
        writer.write(b"there")
        coming = asyncio.create_task(reader.readexactly(5))
        done, _ = await asyncio.wait((coming,), timeout=0.05)
        assert not done
        relay.swallow(False)
        assert await coming == b"there"
        relay.cut()
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await reader.readexactly(1)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        await echoed.wait()
    server.close()
