"""Service classes as they are written in the configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.lifecycle import Targets
from pdserve.protocol import Slo
from pdserve.settings.config import CoordinatorConfig, RoutingConfig
from pdserve.shared.errors import ConfigError
from pdserve.shared.slo import (
    AUTO,
    DEFAULT_CLASS,
    DEFAULT_CLASSES,
    SloClass,
    as_setting,
    parse_slo_class,
    parse_slo_classes,
)


def test_a_class_in_words() -> None:
    text = "chat-v1.2 ttft=0.5 tpot=0.05 priority=-2 weight=1.5"
    assert parse_slo_class(text) == SloClass(
        name="chat-v1.2", ttft_s=0.5, tpot_s=0.05, priority=-2, weight=1.5
    )
    assert parse_slo_class("  batch ") == SloClass(name="batch")


@pytest.mark.parametrize(
    ("text", "hold_s"),
    [
        ("a ttft=2 tpot=0.1", 1.8),
        ("a ttft=2 tpot=0.1 hold=0.5", 1.0),
        ("a ttft=2 tpot=0.1 hold=0", 0.0),
        ("a ttft=2", 0.0),
        ("a tpot=0.1", 0.0),
    ],
)
def test_token_one_may_be_held_back_to_save_a_tpot(text: str, hold_s: float) -> None:
    assert parse_slo_class(text).hold_s == pytest.approx(hold_s)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "must begin with a name"),
        ("ttft=1", "must begin with a name"),
        ("a/b ttft=1", "must begin with a name"),
        ("x" * 65, "must begin with a name"),
        ("a ttft", "'ttft' must be NAME=NUMBER, with each of ttft, tpot, hold, priority, weight"),
        ("a ttft=", "'ttft=' must be NAME=NUMBER"),
        ("a ttft=soon", "'ttft=soon' must be NAME=NUMBER"),
        ("a ttft=nan", "'ttft=nan' must be NAME=NUMBER"),
        ("a ttft=inf", "'ttft=inf' must be NAME=NUMBER"),
        ("a latency=1", "'latency=1' must be NAME=NUMBER"),
        ("a ttft=1 ttft=2", "'ttft=2' .* at most once"),
        ("a ttft=-1", ">= 0.0 for `ttft_s`"),
        ("a tpot=90000", "<= 86400.0 for `tpot_s`"),
        ("a hold=1.5", "<= 1.0 for `hold`"),
        ("a priority=1.5", "for `priority`"),
        ("a priority=9999", "<= 1000 for `priority`"),
        ("a weight=0", "> 0.0 for `weight`"),
    ],
)
def test_what_is_wrong_with_a_class_is_said(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as error:
        parse_slo_class(text)
    assert f'SLO class "{text}"' in error.value.message


@given(st.text(max_size=40))
def test_any_text_is_a_class_or_a_config_error(text: str) -> None:
    try:
        parsed = parse_slo_class(text)
    except ConfigError:
        return
    assert parsed.name == text.split()[0]
    assert 0 <= parsed.ttft_s <= 86400


def test_classes_of_a_cluster() -> None:
    classes = parse_slo_classes(["low", "high priority=3 ttft=1", "also-high priority=3"], "low")
    assert list(classes.by_name) == ["low", "high", "also-high"]
    assert classes.default == classes.by_name["low"]
    assert classes.highest.name == "high"
    assert classes.lowest.name == "low"


def test_two_classes_of_one_name() -> None:
    with pytest.raises(ConfigError, match="share a name: a, a ttft=1"):
        parse_slo_classes(["a", "a ttft=1"], "a")


def test_a_default_that_is_no_class() -> None:
    with pytest.raises(ConfigError, match='default_class "c" must be one of a, b'):
        parse_slo_classes(["a", "b"], "c")


def test_the_default_configuration_is_one() -> None:
    routing = CoordinatorConfig().routing
    assert routing == RoutingConfig(slo_classes=list(DEFAULT_CLASSES), default_class=DEFAULT_CLASS)
    classes = parse_slo_classes(routing.slo_classes, routing.default_class)
    assert [cls.name for cls in (classes.highest, classes.default, classes.lowest)] == [
        "interactive",
        "standard",
        "batch",
    ]
    promises = [(cls.ttft_s, cls.tpot_s, cls.hold_s) for cls in classes.by_name.values()]
    assert promises == [(0, 0, 0)] * 3, "out of the box nothing is promised, so nothing is refused"


def test_auto_stands_for_the_default_classes() -> None:
    assert parse_slo_classes([AUTO], "batch") == parse_slo_classes(DEFAULT_CLASSES, "batch")
    with pytest.raises(ConfigError, match='"auto" stands for all classes'):
        parse_slo_classes([AUTO, "gold"], "gold")


@pytest.mark.parametrize(
    "text", ["a", "a ttft=26 tpot=0.008 hold=0 priority=-10 weight=100", "a ttft=0.0004 hold=0.5"]
)
def test_a_class_is_written_as_it_is_read(text: str) -> None:
    assert as_setting(parse_slo_class(text)) == text


def test_promises_can_change_while_names_stay() -> None:
    classes = parse_slo_classes(["a", "b priority=1"], "b")
    classes.promise([parse_slo_class("b ttft=2 priority=1")])
    assert classes.default.ttft_s == classes.highest.ttft_s == 2
    assert list(classes.by_name) == ["a", "b"]


def test_a_tenant_pays_for_itself_whichever_classes_it_names():
    alone, acme = Slo(name="standard"), Slo(name="standard", tenant="acme")
    assert (alone.payer, acme.payer) == ("standard", "tenant acme")
    assert Targets.of(acme, now_s=0.0).payer == Slo(name="batch", tenant="acme").payer
