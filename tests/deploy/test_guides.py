"""The Helm commands of the guides, one after the other, as the chart renders them."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("helm_sdkpy", reason="`make env-test` could not install Helm")
pytest.importorskip("kubernetes_validate", reason="as Helm")

from pdserve.commands.cli.main import build_parser
from pdserve.settings.config import CoordinatorConfig
from tests.architecture.repository import ROOT
from tests.deploy.test_chart import VALUES, chart, check, config_of, pod_of, workloads
from tests.matrix import matrix
from tools.chart import CHART, Document, Renderer

__all__ = ["chart"]  # a fixture
GUIDES = ("docs/DEPLOYING.md", "docs/OPERATING.md")
OPTIONS = {"--values": 1, "--set": 1, "--reuse-values": 0}


def merged(base: Any, other: Any) -> Any:
    """As Helm merges values: objects by their keys, all else is replaced."""
    if not (isinstance(base, dict) and isinstance(other, dict)):
        return other
    return {**base, **{key: merged(base.get(key), value) for key, value in other.items()}}


def files_of(guide: str) -> dict[str, Document]:
    """The YAML files that a guide shows, by the names in their first lines."""
    blocks = re.findall(r"```yaml\n# ([\w-]+\.yaml)(.*?)```", guide, re.DOTALL)
    return {name: yaml.safe_load("#" + text) for name, text in blocks}


def commands_of(guide: str) -> list[list[str]]:
    lines = [line for line in guide.splitlines() if line.startswith("helm ")]
    return [shlex.split(line, comments=True) for line in lines]


class Releases:
    """What all commands so far have come to, by release."""

    def __init__(self, files: dict[str, Document]) -> None:
        self._files = files
        self.values: dict[str, Document] = {}

    def run(self, command: list[str]) -> str:
        """Do what a command says; return the name of its release."""
        verb, release, folder, *options = command[1:]
        assert verb in ("install", "upgrade")
        assert ROOT / folder == CHART
        values: Document = {}
        if "--reuse-values" in options:
            values = self.values[release]
        while options:
            name = options.pop(0)
            assert name in OPTIONS, name
            if name == "--values":
                values = merged(values, self._files[options.pop(0)])
            elif name == "--set":
                path, value = options.pop(0).split("=")
                for key in reversed(path.split(".")):
                    value = {key: value}  # type: ignore[assignment]
                values = merged(values, value)
        self.values[release] = values
        return release


def shown(chart: Renderer, values: Document) -> dict[str, Document]:
    """The workloads of what is rendered, all of which Kubernetes and pdserve understand."""
    documents = chart.render(values)
    for document in documents:
        check(json.dumps(document))
    parts = workloads(documents)
    for part, document in parts.items():
        config_of(part, document)
    return parts


@pytest.mark.parametrize("path", matrix(GUIDES, 1))
def test_every_step_is_rendered(chart: Renderer, path: str) -> None:
    deploying, guide = (Path(ROOT / name).read_text() for name in (GUIDES[0], path))
    releases = Releases(files_of(deploying) | files_of(guide))
    if path != GUIDES[0]:  # it goes on with what was installed there
        for command in commands_of(deploying):
            releases.run(command)
    commands = commands_of(guide)
    assert commands
    for command in commands:
        assert {"coordinator", "prefill", "decode"} == set(
            shown(chart, releases.values[releases.run(command)])
        )


def test_a_rollout_changes_shares_first_and_nodes_then(chart: Renderer) -> None:
    deploying, guide = (Path(ROOT / name).read_text() for name in GUIDES)
    releases = Releases(files_of(deploying) | files_of(guide))
    for command in commands_of(deploying):
        releases.run(command)
    installed = shown(chart, releases.values["llama"])
    names = map(releases.run, commands_of(guide))
    steps = [installed, *(shown(chart, releases.values[name]) for name in names)]
    before, let_in, rolled, alone = steps
    configs = [config_of("coordinator", step["coordinator"]) for step in steps]
    shares = [c.routing.revision_shares for c in configs if isinstance(c, CoordinatorConfig)]
    (old, new) = (name.partition("=")[0] for name in shares[1])
    assert shares == [[], [f"{old}=1", f"{new}=0"], [f"{old}=1", f"{new}=0"], [f"{new}=1"]]
    for pool in ("prefill", "decode"):
        assert let_in[pool] == before[pool], "its nodes go on"
        assert rolled[pool] != let_in[pool]
        assert alone[pool] == rolled[pool]
        assert config_of(pool, before[pool]).checkpoint.revision.startswith(old)
    for part, document in alone.items():
        assert config_of(part, document).checkpoint.revision.startswith(new)


def test_the_image_of_the_guide_is_that_of_the_chart(chart: Renderer) -> None:
    guide = (ROOT / GUIDES[0]).read_text()
    for document in workloads(chart.render()).values():
        (container,) = pod_of(document)["containers"]
        assert f" -t {container['image']} ." in guide


@pytest.mark.parametrize("name", ["the defaults", "tenants", "HTTPS"])
def test_who_installs_it_is_told_how_to_look_at_it(chart: Renderer, name: str) -> None:
    notes = chart.notes(VALUES[name])
    coordinator = workloads(chart.render(VALUES[name]))["coordinator"]
    config = config_of("coordinator", coordinator)
    assert isinstance(config, CoordinatorConfig)
    (script,) = re.findall(r"exec test-coordinator-0 -- sh -c '(.*)'", notes)
    (token,) = re.findall(r"PDSERVE_API_KEY=\$\(cat (\S+)\) pdserve status", script)
    assert token == config.access.metrics_token_file
    words = shlex.split(script)
    arguments = build_parser().parse_args(words[words.index("status") :])
    scheme = "https" if config.access.https_dir else "http"
    assert re.fullmatch(rf"{scheme}://[\w.]+:{config.port}", arguments.url), arguments.url
