"""A process that is a node of one model after the other: what it is if it cannot become one."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.node import lives
from pdserve.node.planned import Planned
from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from pdserve.settings.models import NodeOfModel
from pdserve.shared.errors import ConfigError, ModelError

D = NodeRole.DECODE


@pytest.mark.parametrize("fails", ["plan", "load"])
async def test_a_node_says_what_it_could_not_become_and_says_it_once(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    seen = []
    nodes = {name: NodeOfModel(NodeConfig(), name, ("a", "b")) for name in "ab"}

    class Process(lives._Process):
        def plan(
            self, node: NodeOfModel, role: NodeRole, was: Any = None, refused: str = ""
        ) -> Planned:
            if node.name == "b" and fails == "plan":
                raise ModelError("its files are damaged")
            return Planned(node, role, None, was=was, refused=refused)  # type: ignore[arg-type]

    async def live(planned: Planned, *_: Any) -> tuple[str, NodeRole]:
        seen.append((planned.node.name, planned.refused))
        if planned.node.name == "b":
            raise ConfigError("there is no memory")
        return ("b", "a", "")[sum(name == "a" for name, _ in seen) - 1], planned.role

    def find(config: NodeConfig) -> NodeOfModel:
        return nodes[config.checkpoint.model]

    monkeypatch.setattr(lives, "live", live)
    monkeypatch.setattr(lives, "node_of_model", find)
    monkeypatch.setattr(lives, "freeze_loaded_objects", lambda: None)
    process = Process(NodeConfig(), None, None, None)  # type: ignore[arg-type]
    await lives._lives(process, process.plan(nodes["a"], D), None)  # type: ignore[arg-type]
    tried = [] if fails == "plan" else [("b", "")]
    assert seen == [("a", ""), *tried, ("a", "b"), ("a", "")]
