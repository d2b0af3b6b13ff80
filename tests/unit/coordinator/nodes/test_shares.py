"""Coordinators of the same nodes divide what they have together."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator.nodes.registry import Member, Registry, Shares
from pdserve.protocol import NodeRole
from tests.fakes.members import join


def attached_to(registry: Registry, member: Member, number: int) -> None:
    registry.report(member, replace(member.load, num_coordinators=number))


def test_listeners_hear_of_each_change_once() -> None:
    registry, heard = Registry(), list[int]()
    Shares(registry, [heard.append])
    first, second = (join(registry, name, NodeRole.DECODE) for name in "ab")
    attached_to(registry, first, 1)
    attached_to(registry, first, 2)
    attached_to(registry, second, 2)
    assert heard == [2]
    attached_to(registry, first, 1)
    assert heard == [2], "one node has not noticed yet"
    registry.remove(second)
    assert heard == [2, 1]
    registry.remove(first)
    assert registry.num_coordinators == 1


def test_all_nodes_name_the_one_that_leads() -> None:
    registry = Registry()
    assert registry.are_led_by("a"), "there is nobody else"
    first, second = (join(registry, name, NodeRole.DECODE) for name in "de")
    for member in (first, second):
        registry.report(member, replace(member.load, num_coordinators=2, leader="a"))
    assert registry.are_led_by("a")
    assert not registry.are_led_by("b")
    registry.report(second, replace(second.load, leader="b"))
    assert not any(registry.are_led_by(name) for name in "ab"), "they do not agree"
    registry.report(second, replace(second.load, leader=""))
    assert not registry.are_led_by("a"), "it does not say, and has two"
    registry.report(second, replace(second.load, num_coordinators=1))
    assert registry.are_led_by("a")
