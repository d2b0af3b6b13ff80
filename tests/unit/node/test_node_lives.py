"""What a node goes on as when a life of it has ended."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest

from pdserve.node import lives
from pdserve.node.planned import Planned
from pdserve.node.start.known_plans import KnownPlans
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from pdserve.settings.models import NodeOfModel
from pdserve.shared.errors import ConfigError, ModelError

D = NodeRole.DECODE


class Lives:
    """Lives in the order of `asked`; models that cannot be planned, or loaded."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, planless: str = "", damaged: Sequence[str] = ()
    ) -> None:
        self.lived: list[str] = []
        self.refused: list[str] = []  # what each life says it could not become
        self.removed: list[str] = []  # from the file
        self.asked: list[str] = []
        self._planless = planless
        self._damaged = damaged
        monkeypatch.setattr(lives._Process, "plan", self._plan)
        monkeypatch.setattr(lives, "node_of_model", self._of_model)
        monkeypatch.setattr(lives, "live", self._live)
        monkeypatch.setattr(lives, "freeze_loaded_objects", lambda: None)

    async def run(self, first: str, *asked: str) -> None:
        self.asked = [*asked, ""]
        process = lives._Process(NodeConfig(), MagicMock(), None, KnownPlans())
        node = NodeOfModel(NodeConfig(), first, ["other"])
        await lives._lives(process, self._plan(node, D), MagicMock())

    def _of_model(self, config: NodeConfig) -> NodeOfModel:
        name = str(config.checkpoint.model)
        if name in self.removed:
            raise ConfigError(f"there is no model {name!r}")
        return NodeOfModel(NodeConfig(), name, ["other"])

    def _plan(
        self, node: NodeOfModel, role: NodeRole, was: NodeOfModel | None = None, refused: str = ""
    ) -> Planned:
        if node.name == self._planless:
            raise ConfigError(f"models.{node.name} is pinned to other files")
        return Planned(node, role, MagicMock(), was=was, refused=refused)

    async def _live(self, planned: Planned, *_: object) -> tuple[str, NodeRole]:
        self.lived.append(planned.node.name)
        self.refused.append(planned.refused)
        if planned.node.name in self._damaged:
            raise ModelError(f"{planned.node.name} lacks a tensor")
        return self.asked.pop(0), D


async def test_a_model_that_cannot_be_planned_or_loaded_leaves_the_node_as_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node = Lives(monkeypatch, planless="pinned", damaged=["damaged"])
    await node.run("a", "pinned", "b", "damaged", "a")
    assert node.lived == ["a", "a", "b", "damaged", "b", "a"]
    assert node.refused == ["", "pinned", "", "", "damaged", ""], "each is told once"
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == [
        "cannot become a node of pinned, and is one of a again: models.pinned is pinned to other "
        "files",
        "cannot become a node of damaged, and is one of b again: damaged lacks a tensor",
    ]


async def test_a_file_of_models_that_is_no_more_leaves_the_node_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node = Lives(monkeypatch)
    node.removed = ["a", "b"]
    await node.run("a", "b", "c", "b", "a")
    assert node.lived == ["a", "a", "c", "c", "c"]


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
