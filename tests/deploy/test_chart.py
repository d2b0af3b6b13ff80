"""The Helm chart: whatever values it takes become what Kubernetes and pdserve understand."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from msgspec.structs import replace

pytest.importorskip("helm_sdkpy", reason="`make env-test` could not install Helm")
pytest.importorskip("kubernetes_validate", reason="as Helm")

import helm_sdkpy
import kubernetes_validate

from pdserve.commands.cli.main import build_parser
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.commands.cluster.placement import gpus_of_node
from pdserve.settings.config import ONE_POOL, CoordinatorConfig, NodeConfig
from pdserve.settings.flags import FlagParser, config_from
from pdserve.settings.rank_host import RankHostConfig
from pdserve.shared.process.certificates import CA_FILE, CERT_FILE, KEY_FILE, role_name
from tests.deploy.custom_resources import SCHEMAS
from tests.matrix import matrix
from tests.operations.promql import DASHBOARDS, alerts, panels, recorded, rules
from tools import kustomize
from tools.chart import Document, Renderer, renderer

KUBERNETES = "1.33"
NODES_POLICY = ("NetworkPolicy", "test-nodes")
SCALED: Document = {"enabled": True, "prometheus": "http://prometheus.monitoring:9090"}

VALUES: dict[str, Document] = {
    "the defaults": {},
    "one coordinator": {"coordinator": {"replicas": 1}},
    "five coordinators": {"coordinator": {"replicas": 5}},
    "other ports": {
        "coordinator": {"port": 80, "grpcPort": 9001},
        "prefill": {"port": 9002, "metricsPort": 9003, "kvPort": 9010},
        "decode": {"port": 9004, "metricsPort": 9005, "kvPort": 9020},
    },
    "colocated": {"mode": "colocated", "decode": {"replicas": 4}},
    "multiplexed": {"mode": "multiplexed"},
    "adaptive": {"mode": "adaptive"},
    "pools of two sizes": {"prefill": {"replicas": 3}, "decode": {"replicas": 8}},
    "an empty pool": {"prefill": {"replicas": 0}},
    "GPUs": {
        "prefill": {"device": "cuda", "tensorParallel": 2, "pipelineParallel": 3},
        "decode": {"device": "cuda", "tensorParallel": 4},
    },
    "GPUs with RDMA": {
        "prefill": {"device": "cuda", "rdma": "rdma/hca", "sharedMemory": "16Gi"},
        "decode": {"device": "cuda", "rdma": "rdma/hca", "sharedMemory": "16Gi"},
    },
    "a model of the hub": {
        "model": {"name": "org/model", "revision": "v1", "servedName": "m", "tokenSecret": "hub"}
    },
    "a shared cache": {"model": {"cache": {"size": "200Gi", "storageClass": "nfs"}}},
    "a cache that is there": {"model": {"name": "/models/m", "cache": {"existingClaim": "models"}}},
    "tenants": {"auth": {"keyFileSecret": "tenants"}},
    "a key of one's own": {"auth": {"apiKeySecret": "key"}},
    "HTTPS": {"auth": {"httpsSecret": "api"}, "podMonitor": {"enabled": True}},
    "mTLS": {
        "auth": {
            "coordinatorTlsSecret": "for-coordinators",
            "nodeTlsSecret": "for-nodes",
            "monitorTlsSecret": "for-prometheus",
        },
        "podMonitor": {"enabled": True},
    },
    "a join token of one's own": {"auth": {"joinTokenSecret": "join"}},
    "no storage": {"coordinator": {"storage": ""}, "prefill": {"sharedMemory": ""}},
    "a storage class": {"coordinator": {"storage": "10Gi", "storageClass": "fast"}},
    "a shared database": {
        "coordinator": {
            "storeUrl": "postgresql://pdserve@db.example/answers",
            "storePasswordSecret": "db",
        }
    },
    "settings": {
        "coordinator": {
            "settings": {
                "routing.max_waiting": 2048,
                "routing.rebalance": True,
                "routing.slo_classes": ["fast ttft=0.5 tpot=0.05 priority=1", "slow"],
                "routing.default_class": "slow",
            }
        },
        "prefill": {
            "settings": {"engine.token_budget": 8192, "policy.prefill_policy": "sjf-aging"}
        },
        "decode": {
            "settings": {"engine.max_batch_size": 256, "engine.kv_memory": "16GiB"},
            "resources": {"limits": {"memory": "24Gi"}},
        },
    },
    "pools that grow": {
        "prefill": {"autoscaling": SCALED},
        "decode": {"replicas": 2, "autoscaling": SCALED | {"min": 2, "max": 32}},
    },
    "nodes of several hosts": {
        "model": {"name": "/models/m"},
        "auth": {"coordinatorTlsSecret": "for-coordinators", "nodeTlsSecret": "for-nodes"},
        "decode": {
            "hosts": 3,
            "tensorParallel": 2,
            "replicas": 2,
            "rankPort": 7200,
            "autoscaling": SCALED,
        },
    },
    "hosts with GPUs": {
        "prefill": {"hosts": 2, "device": "cuda", "tensorParallel": 4},
        "decode": {"hosts": 2, "device": "cuda", "tensorParallel": 16, "pipelineParallel": 1},
    },
    "a node on standby": {
        "decode": {"autoscaling": SCALED},
        "standby": {"replicas": 1},
        "podMonitor": {"enabled": True},
    },
    "a node of several hosts on standby": {"decode": {"hosts": 2}, "standby": {"replicas": 1}},
    "behind a gateway": {"inferencePool": {"enabled": True, "endpointPicker": "picker"}},
    "scraped": {"podMonitor": {"enabled": True, "labels": {"team": "serving"}, "interval": "5s"}},
    "an open network": {"networkPolicy": {"enabled": False}},
    "known clients": {
        "networkPolicy": {"clients": [{"namespaceSelector": {"matchLabels": {"team": "apps"}}}]}
    },
    "placed": {
        pool: {
            "nodeSelector": {"kind": pool},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "affinity": {"podAntiAffinity": {}},
        }
        for pool in ("coordinator", "prefill", "decode")
    },
    "a load balancer": {
        "coordinator": {"service": {"type": "LoadBalancer", "annotations": {"internal": "true"}}}
    },
    "an image of one's own": {
        "image": {
            "repository": "registry.example/pdserve",
            "tag": "0.1.0-cuda",
            "pullPolicy": "Always",
            "pullSecrets": [{"name": "registry"}],
        }
    },
}


# Values of which each makes documents that the others do not have.
TELLING = {
    "the defaults",
    "GPUs with RDMA",
    "mTLS",
    "settings",
    "pools that grow",
    "nodes of several hosts",
}


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Renderer]:
    with renderer(tmp_path_factory.mktemp("helm")) as made:
        yield made


def template_of(document: Document) -> Document:
    spec: Document = document["spec"]
    template: Document = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
    return template


def pod_of(document: Document) -> Document:
    pod: Document = template_of(document)["spec"]
    return pod


def workloads(documents: Sequence[Document]) -> dict[str, Document]:
    """By component: coordinator, prefill, decode, standby."""
    return {
        document["metadata"]["labels"]["app.kubernetes.io/component"]: document
        for document in documents
        if document["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet")
    }


@cache
def parser() -> FlagParser:
    return build_parser()


def config_of(component: str, document: Document) -> CoordinatorConfig | NodeConfig:
    """What pdserve makes of its command line, with Kubernetes' variables put in."""
    (container,) = pod_of(document)["containers"]
    values = {"POD_NAME": f"test-{component}-0", "POD_IP": "10.0.0.7"}
    arguments = [
        re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], argument)
        for argument in container["args"]
    ]
    assert arguments[0] == ("decode" if component == "standby" else component)
    config: type[Any] = CoordinatorConfig if component == "coordinator" else NodeConfig
    found = config_from(config, parser().parse_args(arguments))
    assert not isinstance(found, ClusterConfig)
    return found


@cache  # most documents are the same whatever the values, and reading the schemas takes long
def check(text: str) -> None:
    """Fail unless Kubernetes, or the operator that it is for, understands the document."""
    document = json.loads(text)
    if (schema := SCHEMAS.get(document["kind"])) is not None:
        jsonschema.validate(document, schema)
    else:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", matrix(VALUES, TELLING))
def test_everything_is_what_kubernetes_and_pdserve_understand(chart: Renderer, name: str) -> None:
    documents = chart.render(VALUES[name])
    for document in documents:
        check(json.dumps(document))
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(set(names)) == len(names)
    found = {part: config_of(part, document) for part, document in workloads(documents).items()}
    mode = VALUES[name].get("mode", "disaggregated")
    sets = {"prefill": mode not in ONE_POOL, "standby": "standby" in VALUES[name]}
    assert set(found) == {"coordinator", "decode"} | {part for part in sets if sets[part]}
    node = found["decode"]
    assert isinstance(node, NodeConfig)
    assert node.multiplexed is (mode == "multiplexed")


@pytest.mark.parametrize("name", ["the defaults", "other ports", "five coordinators"])
def test_the_parts_find_each_other(chart: Renderer, name: str) -> None:
    documents = chart.render(VALUES[name])
    parts = workloads(documents)
    coordinator = config_of("coordinator", parts["coordinator"])
    assert isinstance(coordinator, CoordinatorConfig)
    service = parts["coordinator"]["spec"]["serviceName"]
    (headless,) = (d for d in documents if d["spec" if "spec" in d else "data"].get("clusterIP"))
    assert headless["metadata"]["name"] == service
    assert headless["spec"]["publishNotReadyAddresses"], "without nodes none would ever be ready"
    for pool in ("prefill", "decode"):
        node = config_of(pool, parts[pool])
        assert isinstance(node, NodeConfig)
        assert node.coordinators == [f"{service}:{coordinator.grpc_port}"], "a name for all"
        (container,) = pod_of(parts[pool])["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"grpc": node.port, "metrics": node.metrics_port, "kv": node.kv_port}
        assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "metrics"}
        assert node.host == "10.0.0.7"


def test_settings_reach_their_processes(chart: Renderer) -> None:
    parts = workloads(chart.render(VALUES["settings"]))
    coordinator, prefill, decode = (
        config_of(part, parts[part]) for part in ("coordinator", "prefill", "decode")
    )
    assert isinstance(coordinator, CoordinatorConfig)
    assert isinstance(prefill, NodeConfig)
    assert isinstance(decode, NodeConfig)
    assert coordinator.routing.max_waiting == 2048
    assert coordinator.routing.rebalance
    assert coordinator.routing.slo_classes == ["fast ttft=0.5 tpot=0.05 priority=1", "slow"]
    assert prefill.engine.token_budget == 8192
    assert prefill.policy.prefill_policy == "sjf-aging"
    assert decode.engine.max_batch_size == 256
    assert decode.engine.kv_memory == "16GiB"


def test_a_node_asks_for_a_gpu_for_each_of_its_processes(chart: Renderer) -> None:
    parts = workloads(chart.render(VALUES["GPUs"]))
    for pool, tensor, number in (("prefill", 2, 6), ("decode", 4, 4)):
        node = config_of(pool, parts[pool])
        assert isinstance(node, NodeConfig)
        assert (node.engine.device, node.engine.tensor_parallel) == ("cuda", tensor)
        assert gpus_of_node(node.engine) == number
        (container,) = pod_of(parts[pool])["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == number


def test_the_hosts_of_a_node_share_its_gpus_out(chart: Renderer) -> None:
    parts = workloads(chart.render(VALUES["hosts with GPUs"]))
    for pool, ranks, each in (("prefill", (4, 0), 4), ("decode", (16, 1), 8)):
        node = config_of(pool, parts[pool])
        assert isinstance(node, NodeConfig)
        assert (node.engine.tensor_parallel, node.engine.pipeline_parallel) == ranks
        assert len(node.engine.rank_hosts) == 1
        assert gpus_of_node(node.engine) == each
        template = parts[pool]["spec"]["leaderWorkerTemplate"]
        for host in ("leaderTemplate", "workerTemplate"):
            (container,) = template[host]["spec"]["containers"]
            assert container["resources"]["limits"]["nvidia.com/gpu"] == each
            assert "--device=cuda" in container["args"]


def test_processes_of_a_node_on_cpus_need_no_gpu(chart: Renderer) -> None:
    decode = workloads(chart.render({"decode": {"tensorParallel": 2}}))["decode"]
    node = config_of("decode", decode)
    assert isinstance(node, NodeConfig)
    assert (node.engine.device, node.engine.tensor_parallel) == ("cpu", 2)
    (container,) = pod_of(decode)["containers"]
    assert set(container["resources"]["limits"]) == {"memory"}


def test_nothing_is_stopped_before_it_has_drained(chart: Renderer) -> None:
    values = {part: {"drainSeconds": 300} for part in ("coordinator", "prefill", "decode")}
    for part, document in workloads(chart.render(values)).items():
        drain_s = config_of(part, document).timeouts.drain_s
        assert drain_s == 300
        assert pod_of(document)["terminationGracePeriodSeconds"] >= drain_s + 5


def test_pods_have_no_rights_they_do_not_need(chart: Renderer) -> None:
    for document in workloads(chart.render()).values():
        pod = pod_of(document)
        assert pod["securityContext"]["runAsNonRoot"]
        assert not pod["automountServiceAccountToken"]
        for container in pod["containers"]:
            rights = container["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert not rights["allowPrivilegeEscalation"]
            assert rights["capabilities"] == {"drop": ["ALL"]}
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            volumes = {volume["name"] for volume in pod["volumes"]}
            volumes |= {
                c["metadata"]["name"] for c in document["spec"].get("volumeClaimTemplates", [])
            }
            assert mounted == volumes


def test_only_nodes_reach_what_is_not_for_clients(chart: Renderer) -> None:
    policies = {
        document["metadata"]["name"]: document["spec"]
        for document in chart.render(VALUES["known clients"])
        if document["kind"] == "NetworkPolicy"
    }
    public, internal = policies["test-coordinator"]["ingress"]
    assert public["from"] == VALUES["known clients"]["networkPolicy"]["clients"]
    assert internal["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/instance"] == "test"
    assert internal["ports"][0]["port"] == 8001


def test_nodes_join_with_the_token_that_coordinators_want(chart: Renderer) -> None:
    documents = chart.render()
    (secret,) = (d for d in documents if d["metadata"]["name"] == "test-join-token")
    assert len(base64.b64decode(secret["data"]["token"])) == 40
    for part, document in workloads(documents).items():
        token = Path(config_of(part, document).security.join_token_file)
        volumes = {volume["name"]: volume for volume in pod_of(document)["volumes"]}
        (container,) = pod_of(document)["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        mounted = volumes[mounts[str(token.parent)]]
        assert mounted["secret"]["secretName"] == "test-join-token"
        assert token.name in secret["data"]


def test_the_api_speaks_https_with_the_secret_that_is_named(chart: Renderer) -> None:
    documents = chart.render(VALUES["HTTPS"])
    coordinator = workloads(documents)["coordinator"]
    config = config_of("coordinator", coordinator)
    assert isinstance(config, CoordinatorConfig)
    pod = pod_of(coordinator)
    (container,) = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes[mounts[config.access.https_dir]]["secret"] == {"secretName": "api"}
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    assert [probe["httpGet"]["scheme"] for probe in probes] == ["HTTPS"] * 3
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    ends = {end["port"]: end.get("scheme") for end in monitor["spec"]["podMetricsEndpoints"]}
    assert ends == {"http": "https", "metrics": None}, "only with mTLS"


@pytest.mark.parametrize(("values", "secret"), [({}, "test-metrics-token"), ("own", "mine")])
def test_metrics_are_scraped_with_the_token_that_the_coordinator_has(
    chart: Renderer, values: Document | str, secret: str
) -> None:
    own = {"auth": {"metricsTokenSecret": "mine"}} if values == "own" else {}
    documents = chart.render(VALUES["scraped"] | own)
    coordinator = workloads(documents)["coordinator"]
    config = config_of("coordinator", coordinator)
    assert isinstance(config, CoordinatorConfig)
    path = Path(config.access.metrics_token_file)
    (container,) = pod_of(coordinator)["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod_of(coordinator)["volumes"]}
    assert volumes[mounts[str(path.parent)]]["secret"] == {"secretName": secret}
    made = {found["metadata"]["name"]: found for found in documents if found["kind"] == "Secret"}
    assert (secret in made) is (not own)
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    for end in monitor["spec"]["podMetricsEndpoints"]:
        assert end["authorization"]["credentials"] == {"name": secret, "key": path.name}


def test_rules_and_dashboards_come_with_the_targets_that_they_name(chart: Renderer) -> None:
    documents = {document["kind"]: document for document in chart.render(VALUES["scraped"])}
    monitor = documents["PodMonitor"]["spec"]["podMetricsEndpoints"]
    jobs = {
        rule["replacement"]
        for end in monitor
        for rule in end["relabelings"]
        if rule["targetLabel"] == "job"
    }
    queries = [*recorded(), *alerts(), *panels()]
    assert jobs == set(re.findall(r'job="([\w-]+)"', "\n".join(query.text for query in queries)))
    (nodes,) = (end for end in monitor if end["port"] == "metrics")
    assert {rule["targetLabel"] for rule in nodes["relabelings"]} >= {"node", "role"}
    told = [
        rule for group in documents["PrometheusRule"]["spec"]["groups"] for rule in group["rules"]
    ]
    assert told == rules("recording.yml") + rules("alerts.yml")
    shown = documents["ConfigMap"]["data"]
    assert {name: json.loads(text) for name, text in shown.items()} == {
        path.name: json.loads(path.read_text()) for path in DASHBOARDS
    }
    without = chart.render({"podMonitor": {"enabled": True, "rules": False}})
    assert {"PrometheusRule", "ConfigMap"}.isdisjoint(document["kind"] for document in without)


def test_processes_have_the_certificates_of_their_role(chart: Renderer) -> None:
    for part, document in workloads(chart.render(VALUES["mTLS"])).items():
        pod = pod_of(document)
        (container,) = pod["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounted = volumes[mounts[config_of(part, document).security.tls_dir]]["secret"]
        role = "coordinators" if part == "coordinator" else "nodes"
        assert mounted == {"secretName": f"for-{role}"}


def test_nodes_with_certificates_are_probed_without_and_scraped_with_one(chart: Renderer) -> None:
    documents = chart.render(VALUES["mTLS"])
    for pool in ("prefill", "decode"):
        (container,) = pod_of(workloads(documents)[pool])["containers"]
        for probe in ("startupProbe", "readinessProbe"):
            assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    (end,) = (end for end in monitor["spec"]["podMetricsEndpoints"] if end["port"] == "metrics")
    assert (end["scheme"], end["tlsConfig"]["serverName"]) == ("https", role_name("node"))
    files = [end["tlsConfig"]["ca"]["secret"], end["tlsConfig"]["cert"]["secret"]]
    files.append(end["tlsConfig"]["keySecret"])
    assert files == [{"name": "for-prometheus", "key": n} for n in (CA_FILE, CERT_FILE, KEY_FILE)]


def test_a_pool_that_grows_is_not_held_at_its_first_size(chart: Renderer) -> None:
    documents = chart.render(VALUES["pools that grow"])
    parts = workloads(documents)
    assert "replicas" not in parts["decode"]["spec"]
    scaled = [document for document in documents if document["kind"] == "ScaledObject"]
    targets = {document["spec"]["scaleTargetRef"]["name"] for document in scaled}
    assert targets == {parts[pool]["metadata"]["name"] for pool in ("prefill", "decode")}
    assert 'pool="decode",release="test"' in str(scaled)


def test_the_hosts_of_a_node_find_and_trust_each_other(chart: Renderer) -> None:
    documents = chart.render(VALUES["nodes of several hosts"])
    decode = workloads(documents)["decode"]
    template = decode["spec"]["leaderWorkerTemplate"]
    assert template["size"] == 3
    node = config_of("decode", decode)
    assert isinstance(node, NodeConfig)
    set_name = decode["metadata"]["name"]
    hosts = [f"{node.node_id}-{number}.{set_name}:7200" for number in (1, 2)]
    assert node.engine.rank_hosts == hosts, "as the pods of a LeaderWorkerSet are called"
    assert node.engine.tensor_parallel == 2
    for host in ("leaderTemplate", "workerTemplate"):
        pod = template[host]["spec"]
        whole = {"metadata": {"name": "a"}, "spec": pod, "apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    (container,) = template["workerTemplate"]["spec"]["containers"]
    words = [word.replace("$(POD_IP)", "10.0.0.8") for word in container["args"]]
    rank = config_from(RankHostConfig, parser().parse_args(words))
    assert (rank.host, rank.port, rank.checkpoint.model) == ("10.0.0.8", 7200, "/models/m")
    assert rank.security == node.security
    (scaled,) = (document for document in documents if document["kind"] == "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["kind"] == "LeaderWorkerSet"
    policies = [document for document in documents if document["kind"] == "NetworkPolicy"]
    labels = template["workerTemplate"]["metadata"]["labels"]
    assert any(labels["app.kubernetes.io/component"] in str(p["spec"]) for p in policies)


def test_a_node_on_standby_is_a_decode_node_that_waits(chart: Renderer) -> None:
    documents = chart.render(VALUES["a node on standby"])
    parts = workloads(documents)
    standby, decode = config_of("standby", parts["standby"]), config_of("decode", parts["decode"])
    assert isinstance(standby, NodeConfig)
    assert isinstance(decode, NodeConfig)
    assert standby.standby
    assert replace(standby, standby=False, node_id=decode.node_id) == decode
    containers = [pod_of(parts[part])["containers"][0] for part in ("standby", "decode")]
    assert len({json.dumps(container["readinessProbe"]) for container in containers}) == 1
    assert parts["standby"]["spec"]["replicas"] == 1
    (scaled,) = (document for document in documents if document["kind"] == "ScaledObject")
    assert scaled["spec"]["scaleTargetRef"]["name"] == parts["decode"]["metadata"]["name"]


def test_a_node_on_standby_is_reached_as_any_other(chart: Renderer) -> None:
    documents = chart.render(VALUES["a node on standby"])
    standby = workloads(documents)["standby"]
    labels = template_of(standby)["metadata"]["labels"]
    assert standby["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (monitor,) = (document for document in documents if document["kind"] == "PodMonitor")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (policy,) = (d for d in documents if (d["kind"], d["metadata"]["name"]) == NODES_POLICY)
    (among,) = policy["spec"]["podSelector"]["matchExpressions"]
    assert labels[among["key"]] in among["values"]


def test_the_hosts_of_a_node_on_standby_find_each_other(chart: Renderer) -> None:
    parts = workloads(chart.render(VALUES["a node of several hosts on standby"]))
    standby = config_of("standby", parts["standby"])
    assert isinstance(standby, NodeConfig)
    set_name = parts["standby"]["metadata"]["name"]
    assert standby.engine.rank_hosts == [f"{standby.node_id}-1.{set_name}:7100"]


def test_coordinators_of_pools_that_may_be_empty_keep_requests(chart: Renderer) -> None:
    pools = {"decode": {"autoscaling": SCALED | {"min": 0}}}
    config = config_of("coordinator", workloads(chart.render(pools))["coordinator"])
    assert isinstance(config, CoordinatorConfig)
    assert config.routing.sleep_after_s == 300
    for values in ({}, VALUES["pools that grow"]):
        config = config_of("coordinator", workloads(chart.render(values))["coordinator"])
        assert isinstance(config, CoordinatorConfig)
        assert config.routing.sleep_after_s == 0


def test_a_gateway_finds_the_coordinators_and_no_node(chart: Renderer) -> None:
    documents = chart.render(VALUES["behind a gateway"] | {"coordinator": {"port": 8080}})
    (pool,) = (document for document in documents if document["kind"] == "InferencePool")
    wanted = pool["spec"]["selector"]["matchLabels"].items()
    for part, document in workloads(documents).items():
        labels = template_of(document)["metadata"]["labels"]
        assert (wanted <= labels.items()) == (part == "coordinator")
    assert pool["spec"]["targetPorts"] == [{"number": 8080}]
    assert pool["spec"]["endpointPickerRef"]["name"] == "picker"


def test_the_plain_manifests_are_those_of_the_defaults() -> None:
    """And Kubernetes understands them. Keys are files that somebody writes."""
    written = {path.name: path.read_text() for path in kustomize.FOLDER.glob("*.yaml")}
    assert written == kustomize.rendered(), "`make kustomize` writes them anew"
    assert kustomize.SETTINGS.read_text() == kustomize.settings(), "likewise"
    kustomization = yaml.safe_load(written.pop("kustomization.yaml"))
    assert kustomization["resources"] == sorted(written)
    generated = {secret["name"]: secret["files"] for secret in kustomization["secretGenerator"]}
    assert generated == {
        "pdserve-api-key": ["api-key"],
        "pdserve-join-token": ["token"],
        "pdserve-metrics-token": ["metrics-token"],
    }
    for text in written.values():
        kubernetes_validate.validate(yaml.safe_load(text), KUBERNETES, strict=True)
        assert "helm.sh" not in text


WRONG: dict[str, tuple[Document, str]] = {
    "an unknown value": ({"nodes": 3}, "nodes"),
    "a mistyped setting": ({"decode": {"settings": {"Engine": 1}}}, "no setting Engine of a node"),
    "a misspelt setting": (
        {"decode": {"settings": {"engine.max_batchsize": 1}}},
        "no setting engine.max_batchsize .*engine.max_batch_size",
    ),
    "a setting of nodes": (
        {"coordinator": {"settings": {"engine.kv_memory": 1}}},
        "coordinator.settings: there is no setting engine.kv_memory of a coordinator",
    ),
    "a setting without its section": (
        {"decode": {"settings": {"max_batch_size": 1}}},
        "there are engine.max_batch_size",
    ),
    "an unknown mode": ({"mode": "split"}, "mode.*disaggregated"),
    "GPUs that hosts cannot share out": (
        {"decode": {"hosts": 2, "device": "cuda", "tensorParallel": 3, "pipelineParallel": 1}},
        "hosts",
    ),
    "stages in two places": (
        {"decode": {"settings": {"engine.pipeline_parallel": 2}}},
        "engine.pipeline_parallel is set by the chart's value pipelineParallel",
    ),
    "no process": ({"decode": {"tensorParallel": 0}}, "tensorParallel"),
    "a number of GPUs in two places": (
        {"decode": {"device": "cuda", "settings": {"engine.tensor_parallel": 2}}},
        "engine.tensor_parallel is set by the chart's value tensorParallel",
    ),
    "GPUs whose cores are to be split": (
        {"mode": "multiplexed", "decode": {"device": "cuda"}},
        "decode.device: cuda: mode multiplexed splits the cores of a CPU",
    ),
    "several processes whose cores are to be split": (
        {"mode": "multiplexed", "decode": {"tensorParallel": 2}},
        "decode.tensorParallel: 2: in mode multiplexed a node is one process",
    ),
    "stages whose cores are to be split": (
        {"mode": "multiplexed", "decode": {"pipelineParallel": 2}},
        "decode.pipelineParallel: 2: in mode",
    ),
    "hosts whose cores are to be split": (
        {"mode": "multiplexed", "decode": {"hosts": 2}},
        "decode.hosts: 2: in mode",
    ),
    "a mode in two places": (
        {"decode": {"settings": {"multiplexed": True}}},
        "multiplexed is set by the chart's value mode",
    ),
    "no coordinator": ({"coordinator": {"replicas": 0}}, "replicas"),
    "a port that is none": ({"decode": {"port": 70000}}, "port"),
    "two equal ports of a node": (
        {"decode": {"port": 9100}},
        "decode: metricsPort and port are both port 9100: each needs a port of its own",
    ),
    "a port that KV may take": (
        {"prefill": {"metricsPort": 8202}},
        r"prefill: kvPort \+ 2 \(ucx\) and metricsPort are both port 8202",
    ),
    "two equal ports of a coordinator": (
        {"coordinator": {"grpcPort": 8000}},
        "coordinator: grpcPort and port are both port 8000",
    ),
    "a size that is none": (
        {"model": {"cache": {"size": "many"}}},
        "model.cache.size: .*many.* is no quantity: write 8Gi",
    ),
    "memory that is none": (
        {"decode": {"resources": {"limits": {"memory": "lots"}}}},
        "decode.resources.limits.memory: .*lots.* is no quantity",
    ),
    "cores that are none": (
        {"coordinator": {"resources": {"requests": {"cpu": "two"}}}},
        "coordinator.resources.requests.cpu: .*two.* is no quantity",
    ),
    "more memory than the limit": (
        {"decode": {"resources": {"requests": {"memory": "9Gi"}}}},
        "decode.resources: the request of memory, 9Gi, is more than the limit, 8Gi",
    ),
    "more KV than memory": (
        {"decode": {"settings": {"engine.kv_memory": "16GiB"}}},
        "decode: engine.kv_memory 16GiB does not fit into resources.limits.memory 8Gi",
    ),
    "certificates for nodes only": (
        {"auth": {"nodeTlsSecret": "for-nodes"}},
        "coordinatorTlsSecret and nodeTlsSecret belong together",
    ),
    "nodes with certificates, and Prometheus with none": (
        VALUES["mTLS"] | {"auth": VALUES["nodes of several hosts"]["auth"]},
        "auth.monitorTlsSecret",
    ),
    "a token instead of a Secret": (
        {"auth": {"joinTokenSecret": "my secret token"}},
        "auth.joinTokenSecret: .*is no name of an object.* itself goes into a Secret",
    ),
    "a hub's token instead of a Secret": (
        {"model": {"tokenSecret": "hf_ABC"}},
        "model.tokenSecret: .*is no name of an object",
    ),
    "a model with a blank": ({"model": {"name": "org/my model"}}, "model.name: .* has a blank"),
    "no image": ({"image": {"repository": ""}}, "image.repository: name the image"),
    "a database with a password": (
        {"coordinator": {"storeUrl": "postgresql://a:b@c/d"}},
        "must be postgresql://USER@HOST/DATABASE, without a password",
    ),
    "a gateway without a picker": (
        {"inferencePool": {"enabled": True}},
        "inferencePool.endpointPicker: name the service",
    ),
    "scaling without metrics": (
        {"decode": {"autoscaling": {"enabled": True}}},
        "decode.autoscaling.prometheus: .* must be the URL of the Prometheus",
    ),
    "less at most than at least": (
        {"decode": {"autoscaling": SCALED | {"min": 9, "max": 2}}},
        "decode.autoscaling: min 9 is more than max 2",
    ),
}


_NUMBERS = ("no process", "no coordinator")  # out of range: the schema says of what


@pytest.mark.parametrize("name", matrix(WRONG, 4))
def test_wrong_values_are_refused_by_name(chart: Renderer, name: str) -> None:
    values, said = WRONG[name]
    with pytest.raises(helm_sdkpy.InstallError, match=said) as info:
        chart.render(values)
    for bad in ("minLength", "oneOf", "got 0", "does not match pattern", "false schema"):
        assert bad not in str(info.value) or name in _NUMBERS
