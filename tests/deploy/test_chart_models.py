"""The Helm chart with a models file: each model has the nodes that `pdserve up` gives it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("helm_sdkpy", reason="`make env-test` could not install Helm")
pytest.importorskip("kubernetes_validate", reason="as Helm")

import helm_sdkpy

from pdserve.settings.config import CoordinatorConfig, NodeConfig
from pdserve.settings.models import node_of_model, read_models
from tests.deploy.test_chart import SCALED, chart, check, config_of, pod_of, template_of
from tests.matrix import matrix
from tools.chart import Document, Renderer

__all__ = ["chart"]  # a fixture
MODELS = """
shared = { prefill = 1, decode = 3 }
[models.small]
source = "org/small"
aliases = ["gpt"]
[models."Org/Large-3.1"]
source = "/models/large"
min = { decode = 2 }
[models."Org/Large-3.2"]
source = "/models/larger"
min = { decode = 1 }
[models.shared]
source = "org/on-demand"
min = {}
"""


@pytest.mark.parametrize("mode", matrix(["disaggregated", "colocated"], 1))
def test_each_model_has_its_nodes_and_others_are_shared(
    chart: Renderer, mode: str, tmp_path: Path
) -> None:
    documents = chart.render({"models": MODELS, "mode": mode})
    for document in documents:
        check(json.dumps(document))
    path = tmp_path / "models.toml"
    (file,) = (d for d in documents if d["kind"] == "ConfigMap")
    path.write_text(file["data"][path.name])
    begin: Counter[tuple[str, str]] = Counter()
    sets = [d for d in documents if d["kind"] == "Deployment"]
    for document in sets:
        part = document["metadata"]["labels"]["app.kubernetes.io/component"]
        node = config_of(part, document)
        assert isinstance(node, NodeConfig)
        mounted(document, node.models)
        name = node_of_model(NodeConfig(models=str(path), checkpoint=node.checkpoint)).name
        begin[part, name] += document["spec"]["replicas"]
    kinds = ("decode",) if mode == "colocated" else ("prefill", "decode")
    planned = ((kind, node.model) for kind in kinds for node in read_models(str(path)).nodes(kind))
    assert begin == Counter(planned)
    (coordinators,) = (d for d in documents if d["kind"] == "StatefulSet")
    coordinator = config_of("coordinator", coordinators)
    assert isinstance(coordinator, CoordinatorConfig)
    mounted(coordinators, coordinator.models)
    for pods in (template_of(document)["metadata"]["labels"] for document in sets):
        for kind in ("Deployment", "PodDisruptionBudget"):  # Kubernetes evicts no pod that has two
            of_kind = (d["spec"]["selector"]["matchLabels"] for d in documents if d["kind"] == kind)
            assert sum(labels.items() <= pods.items() for labels in of_kind) == 1


def mounted(document: Document, path: str) -> None:
    """Check that its container has the models file there, and is replaced with it."""
    (container,) = pod_of(document)["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(document)["volumes"]}
    volume = volumes[mounts[str(Path(path).parent)]]
    assert volume["configMap"] == {"name": "test-models-file"}
    assert template_of(document)["metadata"]["annotations"].keys() == {"pdserve/models-file"}


WRONG: dict[str, tuple[Document, str]] = {
    "its path": ({"models": "models.toml"}, "give a file's text, by --set-file models=models.toml"),
    "no model": ({"models": "shared = { decode = 1 }"}, r"has at least one \[models.NAME\]"),
    "a model beside it": ({"model": {"name": "org/m"}}, "model.name: the models file says"),
    "numbers of nodes in two places": (
        {"decode": {"autoscaling": SCALED}},
        "decode.autoscaling.enabled: the models file says",
    ),
    "a node on standby": ({"standby": {"replicas": 1}}, "standby.replicas: the models file says"),
    "nodes of several hosts": ({"decode": {"hosts": 2}}, "decode.hosts: 2: a node of a models"),
    "shared GPUs": ({"decode": {"device": "cuda"}}, "shared.decode: nodes on GPUs, .* stay with"),
    "several models at once": (
        {"models": MODELS.replace("shared = { ", "shared = { at_once = 2, ", 1)},
        "shared.at_once: a pod has one model",
    ),
}


@pytest.mark.parametrize("name", matrix(WRONG, 1))
def test_what_contradicts_a_models_file_is_refused_by_name(chart: Renderer, name: str) -> None:
    values, said = WRONG[name]
    with pytest.raises(helm_sdkpy.InstallError, match=said):
        chart.render({"models": MODELS} | values)
