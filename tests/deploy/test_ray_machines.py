"""deploy/ray: what Ray itself understands, and starts with commands that there are."""

from __future__ import annotations

import re
import tomllib

import pytest
import yaml

from tests.architecture.repository import ROOT

pytest.importorskip("ray", reason="the ray extra is not installed")
from ray.autoscaler._private.util import prepare_config, validate_config

MACHINES = ROOT / "deploy/ray/cluster.yaml"


def test_ray_understands_the_machines() -> None:
    config = yaml.safe_load(MACHINES.read_text())
    validate_config(prepare_config(config))
    with pytest.raises(Exception, match="min_worker"):
        validate_config(prepare_config(config | {"min_worker": 2}))


def test_what_is_installed_is_an_extra_that_has_ray() -> None:
    (extra,) = re.findall(r"pip install '/opt/pdserve/source\[(\w+)\]'", MACHINES.read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any(need.startswith("ray") for need in project["optional-dependencies"][extra])
