"""Processes of another protocol in a cluster of this one: what one version apart does to the other.

They are of this build, but for the number that they say and for what later builds add: fields that
are unknown here, and kinds of messages. What earlier builds lack, they lack themselves
(`test_upgraded.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.status import fetch_status
from pdserve.protocol.version import PROTOCOL
from pdserve.shared.errors import ClusterError
from pdserve.wire.convert import Envelope
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, poll, read_gauges, running
from tests.cluster.forked import ForkedChild
from tests.faults.test_upgraded import KERNELS, LOSSES

OWN = ("pdserve", "kv_transfer", "coordinator", "prefill_node", "decode_node")
LATER = bytes([0xC2, 0x3E, 3]) + b"new"  # field 1000
LENGTHS = (5, 40)
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def speak(protocol: int) -> None:
    """Have this process be one of a build that speaks another protocol, if it is a later one."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in OWN and hasattr(module, "PROTOCOL"):
            module.PROTOCOL = protocol  # type: ignore[attr-defined]
    if protocol > PROTOCOL:
        Envelope.add = _add_with_more  # type: ignore[method-assign]


_add = Envelope.add


def _add_with_more(self: Envelope[Any], message: msgspec.Struct, proto: Any) -> None:
    """As `Envelope.add`, with a field that only this build knows, and a message."""
    _add(self, message, proto)
    last = proto.messages[-1]
    getattr(last, last.WhichOneof("body")).MergeFromString(LATER)
    proto.messages.add().MergeFromString(LATER)


class Mixed(ForkedChild):
    """A process of which `other` says the command if it speaks another protocol, and which."""

    other: tuple[str, int]

    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        who, protocol = self.other
        return partial(speak, protocol) if words[0] == who else None


def mixed(who: str, protocol: int) -> type[Mixed]:
    return type("Mixed", (Mixed,), {"other": (who, protocol)})


async def answers(checkpoint: Path, who: str, protocol: int) -> tuple[list[list[int]], list[str]]:
    """What a cluster says in which `who` speaks this protocol, and who was sent what he left out.

    Nothing may be lost or computed again.
    """
    config = fleet_config(checkpoint, engine={"kernels": KERNELS})
    fleet = Fleet(config, make_child=mixed(who, protocol))
    async with running(fleet), Client(fleet.url) as client:
        outputs = [(await client.complete(make_prompt(60), n)).tokens for n in LENGTHS]
        for name, address in (await fleet.metrics_addresses()).items():
            gauges = await read_gauges(address)
            assert {what: gauges[what] for what in LOSSES} == dict.fromkeys(LOSSES, 0), name
    told = [name for name, line in fleet.lines if "of a kind that this one does" in line]
    return outputs, told


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def usual(tiny_checkpoint: Path) -> list[list[int]]:
    """What a cluster of one build says."""
    outputs, told = await answers(tiny_checkpoint, COORDINATOR, PROTOCOL)
    assert not told
    assert [len(tokens) for tokens in outputs] == [*LENGTHS]
    return outputs


@pytest.mark.parametrize("apart", [1, -1])
@pytest.mark.parametrize("who", [COORDINATOR, "prefill", "decode"])
async def test_what_a_later_build_adds_is_left_out(
    who: str, apart: int, tiny_checkpoint: Path, usual: list[list[int]]
) -> None:
    """Each end of each stream in turn; the answers are those of a cluster of one build."""
    outputs, told = await answers(tiny_checkpoint, who, PROTOCOL + apart)
    assert outputs == usual
    assert bool(told) == (apart > 0), told


@pytest.mark.parametrize("apart", [2, -2])
async def test_who_is_too_far_away_is_told_who_is_to_be_upgraded(
    apart: int, tiny_checkpoint: Path
) -> None:
    fleet = Fleet(
        fleet_config(tiny_checkpoint, decode=1), make_child=mixed("decode", PROTOCOL + apart)
    )
    why = ""

    async def look() -> bool:
        nonlocal why
        try:
            absent = (await fetch_status(fleet.url)).coordinator.absent
        except ClusterError:  # it does not listen yet
            return False
        why = next((node.reason for node in absent if node.node_id == "decode-0"), "")
        return bool(why)

    try:
        await fleet.spawn()
        await poll(look, 90.0, lambda: "decode-0 is not refused")
    finally:
        await fleet.kill()
    older = "decode-0" if apart < 0 else "this process"
    assert f"decode-0 speaks protocol {PROTOCOL + apart}" in why
    assert f"upgrade {older}" in why
