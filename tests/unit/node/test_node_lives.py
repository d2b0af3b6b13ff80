"""What a node goes on as when a life of it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest

from pdserve.node import lives
from pdserve.node.runtime import Planned
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from pdserve.shared.errors import ConfigError, ModelError

D = NodeRole.DECODE


class Lives:
    """Lives in the order of `asked`; models that cannot be planned, or loaded."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, planless: str = "", damaged: Sequence[str] = ()
    ) -> None:
        self.lived: list[str] = []
        self.asked: list[str] = []
        self._planless = planless
        self._damaged = damaged
        monkeypatch.setattr(lives, "plan", self._plan)
        monkeypatch.setattr(lives, "live", self._live)
        monkeypatch.setattr(lives, "freeze_loaded_objects", lambda: None)

    async def run(self, first: str, *asked: str) -> None:
        self.asked = [*asked, ""]
        await lives._lives(self._planned(first), NodeConfig(), MagicMock(), MagicMock())

    def _planned(self, name: str) -> Planned:
        return Planned(NodeConfig(), D, MagicMock(), name=name, may_become=["other"])

    def _plan(self, config: NodeConfig, *_: object, has_woken: bool) -> Planned:
        assert has_woken
        name = config.checkpoint.model
        if name == self._planless:
            raise ConfigError(f"models.{name} is pinned to other files")
        return self._planned(str(name))

    async def _live(self, planned: Planned, *_: object) -> tuple[str, NodeRole]:
        self.lived.append(planned.name)
        if planned.name in self._damaged:
            raise ModelError(f"{planned.name} lacks a tensor")
        return self.asked.pop(0), D


async def test_a_model_that_cannot_be_planned_or_loaded_leaves_the_node_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Lives(monkeypatch, planless="pinned", damaged=["damaged"])
    await node.run("a", "pinned", "b", "damaged", "a")
    assert node.lived == ["a", "a", "b", "damaged", "b", "a"]
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == [
        "cannot become a node of pinned, and is one of a again: models.pinned is pinned to other "
        "files",
        "cannot become a node of damaged, and is one of b again: damaged lacks a tensor",
    ]


async def test_what_cannot_be_served_at_first_or_again_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ModelError, match="damaged lacks a tensor"):
        await Lives(monkeypatch, damaged=["damaged"]).run("damaged")
    node = Lives(monkeypatch)
    lived = node.lived

    async def live(planned: Planned, *rest: object) -> tuple[str, NodeRole]:
        node._damaged = ["a", "b"] if lived else []
        return await node._live(planned, *rest)

    monkeypatch.setattr(lives, "live", live)
    with pytest.raises(ModelError, match="a lacks a tensor"):
        await node.run("a", "b")
    assert lived == ["a", "b", "a"]
