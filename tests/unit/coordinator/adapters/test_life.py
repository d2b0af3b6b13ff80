"""Adapters over their lives: never a request where its adapter is not, and no name too early."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.adapters.known import Version
from coordinator.adapters.life import AGAIN_S
from pdserve.protocol import AdapterReport
from pdserve.shared.errors import (
    AdaptersFull,
    InvalidRequest,
    ItemNotFound,
    MalformedMessage,
    ModelNotFound,
    NodeLost,
    NoNodeAvailable,
    PermissionDenied,
)
from tests.fakes.members import output
from tests.unit.coordinator.adapters.played import (
    DECODE,
    FILES,
    PREFILL,
    PlayedCluster,
    PlayedNode,
    settle,
)

A, B = FILES["/a"], FILES["/b"]


@pytest.fixture
async def cluster() -> PlayedCluster:
    return PlayedCluster()


async def loaded(cluster: PlayedCluster, name: str = "sql", path: str = "/a") -> Version:
    return await cluster.adapters.load(name, path)


class SlowTable:
    """A table that answers with what it had when it was asked."""

    is_shared = True

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.answers.set()
        self._rows: dict[str, Version] = {}

    async def all(self) -> list[Version]:
        rows = list(self._rows.values())
        await self.answers.wait()
        return rows

    async def put(self, version: Version, *, in_place: bool, own_only: bool) -> bool:
        self._rows[version.name] = version
        return True

    async def drop(self, name: str) -> None:
        del self._rows[name]


def adapters_of(*nodes: PlayedNode) -> list[str]:
    return [leg.prompt.adapter for node in nodes for leg in node.legs]


# ---- load ----------------------------------------------------------------------------------------


async def test_both_legs_name_the_adapter_and_the_models_own_requests_none(
    cluster: PlayedCluster,
) -> None:
    prefill, decode = cluster.pair()
    version = await loaded(cluster)
    assert (version.digest, cluster.adapters.find("sql")) == (A, version)
    running = cluster.start(version)
    assert adapters_of(prefill, decode) == [A, A]
    cluster.say(prefill, "r", 0, 1)
    cluster.say(decode, "r", 1, 4)
    assert await output(running) == [100, 101, 102, 103]
    cluster.start(None, "base").cancel("the test is over")
    assert adapters_of(prefill, decode) == [A, "", A, ""]


async def test_a_name_is_there_only_once_all_ready_nodes_have_answered(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    slow = cluster.join("d2", DECODE, waits=True)
    loading = asyncio.create_task(loaded(cluster))
    await settle()
    assert cluster.adapters.find("sql") is None
    slow.carry_out()
    assert await loading == cluster.adapters.find("sql")


async def test_a_node_that_dies_between_load_and_list_leaves_no_name(
    cluster: PlayedCluster,
) -> None:
    prefill = cluster.join("p", PREFILL)
    decode = cluster.join("d", DECODE, waits=True)
    loading = asyncio.create_task(loaded(cluster))
    await settle()
    assert prefill.has == [A]
    cluster.leave(decode)
    with pytest.raises(NoNodeAvailable, match="d is gone"):
        await loading
    await settle()
    assert cluster.adapters.find("sql") is None
    assert prefill.has == []


async def test_one_that_left_for_others_before_all_had_answered_is_verified_nevertheless(
    cluster: PlayedCluster,
) -> None:
    prefill = cluster.join("p", PREFILL)
    decode = cluster.join("d", DECODE, waits=True)
    loading = asyncio.create_task(loaded(cluster))
    await settle()
    prefill.has.clear()
    prefill.report()
    decode.carry_out()
    version = await loading
    running = cluster.start(version, wait_s=5.0)
    await settle()
    assert adapters_of(prefill, decode) == [A, A]
    running.cancel("the test is over")


async def test_one_of_several_nodes_that_dies_meanwhile_is_no_hindrance(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    other = cluster.join("d2", DECODE, waits=True)
    loading = asyncio.create_task(loaded(cluster))
    await settle()
    cluster.leave(other)
    assert (await loading).digest == A


async def test_an_adapter_that_cannot_be_used_is_refused_with_the_nodes_words(
    cluster: PlayedCluster,
) -> None:
    prefill, decode = cluster.pair()
    prefill.errors["/a"] = decode.errors["/a"] = ("adapter_refused", "rank 0 in q_proj")
    with pytest.raises(InvalidRequest, match="rank 0 in q_proj") as refused:
        await loaded(cluster)
    assert refused.value.param == "lora_path"
    prefill.errors["/a"] = decode.errors["/a"] = ("item_not_found", "there is no folder /a")
    with pytest.raises(ItemNotFound, match="no folder"):
        await loaded(cluster)
    assert len(cluster.adapters.known) == 0


async def test_nodes_with_different_files_serve_neither(cluster: PlayedCluster) -> None:
    prefill, decode = cluster.pair()
    decode.files = {"/a": B}
    with pytest.raises(InvalidRequest, match=f"different adapters.*{A}, {B}"):
        await loaded(cluster)
    await settle()
    assert prefill.has == decode.has == []


@pytest.mark.parametrize("name", ["m", "", "a\nb", "x" * 257])
async def test_what_cannot_be_a_name(cluster: PlayedCluster, name: str) -> None:
    cluster.pair()
    with pytest.raises(InvalidRequest) as refused:
        await cluster.adapters.load(name, "/a")
    assert refused.value.param == "lora_name"


async def test_bounds_of_a_tenant(cluster: PlayedCluster) -> None:
    cluster.pair()
    await cluster.adapters.load("one", "/a", "acme", most=1)
    await cluster.adapters.load("one", "/b", "acme", in_place=True, most=1)
    with pytest.raises(AdaptersFull, match="'acme' has loaded 1 adapters and may have 1"):
        await cluster.adapters.load("two", "/a", "acme", most=1)
    await cluster.adapters.load("two", "/a", "other", most=1)


async def test_bounds_of_a_tenant_hold_for_what_is_loaded_at_the_same_time(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    loads = [cluster.adapters.load(name, "/a", "acme", most=1) for name in ("one", "two")]
    first, second = await asyncio.gather(*loads, return_exceptions=True)
    assert isinstance(first, Version)
    assert isinstance(second, AdaptersFull)
    await cluster.adapters.unload("one")
    await cluster.adapters.load("two", "/a", "acme", most=1)


async def test_a_tenant_takes_no_name_over_that_another_has_just_loaded(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    theirs, taken = await asyncio.gather(
        cluster.adapters.load("sql", "/a", "acme"),
        cluster.adapters.load("sql", "/b", "other", in_place=True, own_only=True),
        return_exceptions=True,
    )
    assert cluster.adapters.find("sql") == theirs
    assert isinstance(taken, PermissionDenied)
    with pytest.raises(PermissionDenied):
        await cluster.adapters.unload("sql", owner="other")
    await cluster.adapters.load("sql", "/b", "acme", in_place=True, own_only=True)
    await cluster.adapters.unload("sql", owner="acme")


async def test_two_loads_of_one_name_are_one_after_the_other(cluster: PlayedCluster) -> None:
    cluster.pair()
    first, second = await asyncio.gather(
        loaded(cluster), loaded(cluster, path="/b"), return_exceptions=True
    )
    assert isinstance(first, Version)
    assert isinstance(second, InvalidRequest)
    assert "already been loaded" in second.message


async def test_a_load_goes_on_whose_caller_has_left(cluster: PlayedCluster) -> None:
    cluster.join("p", PREFILL)
    decode = cluster.join("d", DECODE, waits=True)
    loading = asyncio.create_task(loaded(cluster))
    await settle()
    loading.cancel()
    decode.carry_out()
    await settle()
    assert cluster.adapters.find("sql") is not None


# ---- nodes that come and go ----------------------------------------------------------------------


async def test_a_node_that_joins_later_is_no_candidate_before_it_has_the_adapter(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    version = await loaded(cluster)
    first = cluster.start(version, "first")
    late = cluster.join("d2", DECODE, waits=True)
    for number in range(3):
        cluster.start(version, f"r{number}").cancel("it was sent")
    await settle()
    assert [(order.path, order.digest) for order in late.orders] == [("/a", A)]
    assert late.legs == []
    late.carry_out()
    for number in range(3, 6):
        cluster.start(version, f"r{number}")
    assert set(adapters_of(late)) == {A}
    first.cancel("the test is over")


async def test_a_stream_resumes_only_where_its_adapter_is(cluster: PlayedCluster) -> None:
    prefill, decode = cluster.pair()
    version = await loaded(cluster)
    running = cluster.start(version)
    cluster.say(prefill, "r", 0, 1)
    cluster.say(decode, "r", 1, 2)
    late = cluster.join("d2", DECODE, waits=True)
    cluster.leave(decode)
    await settle()
    assert late.legs == []
    late.carry_out()
    await settle()
    assert adapters_of(late) == [A]
    cluster.say(late, "r~1", 2, 4)
    assert await output(running) == [100, 101, 102, 103]


async def test_a_new_node_gets_what_was_used_last_as_many_as_it_keeps(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    first, second = await loaded(cluster, "first"), await loaded(cluster, "second", "/b")
    cluster.start(first).cancel("it was used")
    small = cluster.join("d2", DECODE, most=1)
    await settle()
    assert small.has == [A]
    assert second.digest == B


async def test_a_name_that_is_unloaded_while_a_new_node_loads_it_stays_nowhere(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    await loaded(cluster)
    joined = cluster.join("d2", DECODE, waits=True)
    await settle()
    await cluster.adapters.unload("sql")
    joined.carry_out()
    await settle()
    assert joined.has == []


async def test_nothing_is_kept_of_a_node_that_went_while_it_was_loading(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    await loaded(cluster)
    for path in ("/a", "/b"):
        other = cluster.join("d2", DECODE, waits=True)
        loading = asyncio.create_task(loaded(cluster, "other", path))
        await settle()
        cluster.leave(other)
        await loading
        await settle()
        assert cluster.adapters.failures == {}
        await cluster.adapters.unload("other")


async def test_what_is_read_of_the_database_too_early_takes_no_name_away(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    table = SlowTable()
    await cluster.adapters.follow(table)
    table.answers.clear()
    looking = asyncio.create_task(cluster.adapters.look())
    await settle()
    version = await loaded(cluster)
    table.answers.set()
    await looking
    assert cluster.adapters.find("sql") == version
    table.answers.clear()
    looking = asyncio.create_task(cluster.adapters.look())
    await settle()
    await cluster.adapters.unload("sql")
    table.answers.set()
    await looking
    assert cluster.adapters.find("sql") is None


async def test_an_adapter_of_the_settings_is_loaded_for_all_nodes_that_join_at_once() -> None:
    cluster = PlayedCluster(declared={"sql": "/a"})
    cluster.pair()
    await settle()
    assert cluster.adapters.find("sql") is not None
    assert cluster.adapters.failures == {}


async def test_an_adapter_of_the_settings_is_loaded_once_there_is_a_pair() -> None:
    cluster = PlayedCluster(declared={"sql": "/a"})
    cluster.join("p", PREFILL)
    await settle()
    with pytest.raises(NoNodeAvailable, match="'sql' is not loaded yet"):
        cluster.adapters.find("sql")
    cluster.join("d", DECODE)
    await settle()
    assert cluster.adapters.find("sql") is not None


# ---- cold adapters -------------------------------------------------------------------------------


async def test_a_cold_adapter_is_loaded_for_a_request_that_waits_and_holds_nobody_up(
    cluster: PlayedCluster,
) -> None:
    prefill, decode = cluster.pair()
    version = await loaded(cluster)
    for node in (prefill, decode):
        node.has.clear()
        node.waits = True
        node.report()
    running = cluster.start(version, wait_s=5.0)
    other = cluster.start(None, "base")
    assert adapters_of(prefill, decode) == ["", ""]
    await settle()
    prefill.carry_out()
    decode.carry_out()
    await settle()
    assert adapters_of(prefill, decode) == ["", A, "", A]
    cluster.say(prefill, "r", 0, 1)
    cluster.say(decode, "r", 1, 4)
    assert await output(running) == [100, 101, 102, 103]
    other.cancel("the test is over")


async def test_a_request_whose_adapter_does_not_come_ends_as_its_class_says(
    cluster: PlayedCluster,
) -> None:
    prefill, decode = cluster.pair()
    version = await loaded(cluster)
    for node in (prefill, decode):
        node.has.clear()
        node.waits = True
        node.report()
    with pytest.raises(NoNodeAvailable, match="has loaded the adapter"):
        cluster.start(version)
    running = cluster.start(version, wait_s=0.02)
    cluster.clock.advance(0.03)
    with pytest.raises(NoNodeAvailable, match="has loaded the adapter"):
        await output(running)
    assert prefill.legs == decode.legs == []


async def test_a_node_that_failed_is_asked_again_while_a_request_waits(
    cluster: PlayedCluster,
) -> None:
    prefill, decode = cluster.pair()
    version = await loaded(cluster)
    decode.has.clear()
    decode.report()
    decode.errors["/a"] = ("adapters_full", "all are in use")
    running = cluster.start(version, wait_s=60.0)
    await settle()
    assert cluster.adapters.failures == {("d", "sql"): "d: all are in use"}
    decode.errors.clear()
    cluster.clock.advance(AGAIN_S)
    cluster.adapters.missing(A)
    await settle()
    assert (adapters_of(prefill), cluster.adapters.failures) == ([A], {})
    running.cancel("the test is over")


# ---- other bytes, and the end --------------------------------------------------------------------


async def test_a_stream_keeps_its_version_when_the_name_gets_another(
    cluster: PlayedCluster,
) -> None:
    prefill, decode = cluster.pair()
    old = await loaded(cluster)
    running = cluster.start(old)
    cluster.say(prefill, "r", 0, 1)
    new = await cluster.adapters.load("sql", "/b", in_place=True)
    assert cluster.adapters.find("sql") == new
    second = cluster.join("d2", DECODE)
    await settle()
    assert second.has == [B]
    cluster.leave(decode)
    await settle()
    assert adapters_of(second) == [A]  # it was loaded for the stream that goes on
    cluster.start(new, "next").cancel("it was sent")
    assert {leg.prompt.adapter for leg in second.legs if leg.request_id == "next"} <= {B}
    cluster.say(second, "r~1", 1, 4)
    assert await output(running) == [100, 101, 102, 103]
    cluster.adapters.settle()
    await settle()
    assert (prefill.has, second.has) == ([B], [B])


async def test_unloading_refuses_new_calls_and_lets_streams_end(cluster: PlayedCluster) -> None:
    prefill, decode = cluster.pair()
    version = await loaded(cluster)
    running = cluster.start(version)
    cluster.say(prefill, "r", 0, 1)
    await cluster.adapters.unload("sql")
    assert cluster.adapters.find("sql") is None
    assert decode.has == [A]
    cluster.say(decode, "r", 1, 4)
    assert await output(running) == [100, 101, 102, 103]
    cluster.adapters.settle()
    await settle()
    assert prefill.has == decode.has == []
    with pytest.raises(ModelNotFound):
        cluster.start(version, "too late")
    with pytest.raises(ModelNotFound):
        await cluster.adapters.unload("sql")


async def test_a_call_made_again_under_its_key_gets_the_version_it_began_with(
    cluster: PlayedCluster,
) -> None:
    cluster.pair()
    old = await loaded(cluster)
    assert cluster.adapters.find("sql", b"call") == old
    await cluster.adapters.load("sql", "/b", in_place=True)
    assert cluster.adapters.find("sql", b"call") == old
    assert cluster.adapters.find("sql", b"another") != old
    await cluster.adapters.unload("sql")
    assert cluster.adapters.find("sql", b"call") == old
    cluster.start(old).cancel("it was sent")
    cluster.clock.advance(1e5)
    cluster.adapters.settle()
    assert cluster.adapters.find("sql", b"call") is None


async def test_two_names_of_the_same_bytes_are_one_adapter(cluster: PlayedCluster) -> None:
    prefill, _ = cluster.pair()
    await loaded(cluster, "one")
    two = await loaded(cluster, "two")
    await cluster.adapters.unload("one")
    await settle()
    assert prefill.has == [A]
    cluster.start(two).cancel("it was sent")


def test_a_report_of_what_is_no_digest_is_refused() -> None:
    with pytest.raises(MalformedMessage, match="32 hex digits"):
        AdapterReport(digests=["../etc"]).check()


async def test_an_order_to_a_node_that_is_gone_already_fails_at_once(
    cluster: PlayedCluster,
) -> None:
    _, decode = cluster.pair()
    assert decode.member is not None
    ordered = cluster.orders.load(decode.member, "/a")  # it begins when it is awaited
    cluster.leave(decode)
    with pytest.raises(NodeLost):
        await asyncio.wait_for(ordered, 30)
