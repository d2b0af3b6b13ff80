"""Plans of models whose files are what they were."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.node.start import known_plans
from pdserve.node.start.draft import plan_models
from pdserve.node.start.known_plans import KnownPlans
from pdserve.protocol import NodeRole
from pdserve.settings.config import EngineConfig, NodeConfig, WeightsConfig
from pdserve.shared.errors import ModelError
from tests.checkpoints import make_checkpoint

D, P = NodeRole.DECODE, NodeRole.PREFILL


def test_a_plan_is_made_again_when_a_file_or_a_setting_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[NodeRole] = []

    def planned(config: NodeConfig, role: NodeRole) -> object:
        made.append(role)
        return plan_models(config, role)

    monkeypatch.setattr(known_plans, "plan_models", planned)
    path, plans = make_checkpoint(tmp_path / "one", "llama"), KnownPlans()
    engine = EngineConfig(device="cpu", kernels="portable", kv_memory="8MiB")
    config = NodeConfig(checkpoint=WeightsConfig(model=str(path)), engine=engine)
    first = plans.of(config, D)
    assert plans.of(config, D) is first
    assert plans.of(config, P).checkpoint == first.checkpoint
    assert made == [D, P], "each role has weights of its own, perhaps"
    short = replace(config, engine=replace(engine, max_model_len=32))
    assert plans.of(short, D).max_model_len == 32
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(values | {"rms_norm_eps": 1e-3}))
    changed = plans.of(config, D)
    assert changed.checkpoint.revision != first.checkpoint.revision
    assert plans.of(config, D) is changed
    (path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="holds neither"):
        plans.of(config, D)
