"""Renders the Helm chart by Helm itself, against an API server that says yes to everything.

Helm's library renders only what it installs, so it is given a cluster that is none.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[1] / "deploy" / "helm" / "pdserve"

# Kinds that the chart has, by the API's group and version: (plural, kind).
KINDS = {
    "v1": [
        ("configmaps", "ConfigMap"),
        ("services", "Service"),
        ("secrets", "Secret"),
        ("persistentvolumeclaims", "PersistentVolumeClaim"),
    ],
    "apps/v1": [("deployments", "Deployment"), ("statefulsets", "StatefulSet")],
    "policy/v1": [("poddisruptionbudgets", "PodDisruptionBudget")],
    "networking.k8s.io/v1": [("networkpolicies", "NetworkPolicy")],
    "leaderworkerset.x-k8s.io/v1": [("leaderworkersets", "LeaderWorkerSet")],
    "keda.sh/v1alpha1": [("scaledobjects", "ScaledObject")],
    "monitoring.coreos.com/v1": [
        ("podmonitors", "PodMonitor"),
        ("prometheusrules", "PrometheusRule"),
    ],
    "inference.networking.k8s.io/v1": [("inferencepools", "InferencePool")],
}

Document = dict[str, Any]


def _resources(group_version: str) -> Document:
    return {
        "kind": "APIResourceList",
        "groupVersion": group_version,
        "resources": [
            {
                "name": plural,
                "singularName": kind.lower(),
                "namespaced": True,
                "kind": kind,
                "verbs": ["get", "list", "create", "patch", "update", "delete"],
            }
            for plural, kind in KINDS[group_version]
        ],
    }


def _groups() -> Document:
    groups = []
    for group_version in KINDS:
        name, _, version = group_version.rpartition("/")
        if name:
            served = {"groupVersion": group_version, "version": version}
            groups.append({"name": name, "versions": [served], "preferredVersion": served})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


class _Api(BaseHTTPRequestHandler):
    """Has nothing, and takes everything."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        group_version = path.removeprefix("apis/").removeprefix("api/")
        if path == "version":
            self._answer(200, {"major": "1", "minor": "33", "gitVersion": "v1.33.0"})
        elif path == "api":
            self._answer(200, {"kind": "APIVersions", "versions": ["v1"]})
        elif path == "apis":
            self._answer(200, _groups())
        elif group_version in KINDS:
            self._answer(200, _resources(group_version))
        elif path.endswith("/secrets"):
            self._answer(200, {"kind": "SecretList", "apiVersion": "v1", "items": []})
        else:
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            self._answer(404, {**status, "reason": "NotFound", "code": 404})

    def do_POST(self) -> None:
        self._send_back(201)

    def do_PUT(self) -> None:
        self._send_back(200)

    def do_PATCH(self) -> None:
        self._send_back(200)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _send_back(self, status: int) -> None:
        """Helm's own notes come as protobuf."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        self._write(status, content, self.headers["Content-Type"])

    def _answer(self, status: int, body: Document) -> None:
        self._write(status, json.dumps(body).encode(), "application/json")

    def _write(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    # Helm sends all documents at once, and who finds no place tries again after a second.
    request_queue_size = 64


class Renderer:
    """Renders the chart with any values."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig

    def render(self, values: Document | None = None, release: str = "test") -> list[Document]:
        """The documents of a release. Raises what Helm raises."""
        released = self._install(values, release)
        documents = yaml.load_all(released["manifest"], yaml.CSafeLoader)
        return [document for document in documents if document]

    def notes(self, values: Document | None = None, release: str = "test") -> str:
        """What who installs it is told."""
        told = self._install(values, release)["info"]["notes"]
        assert isinstance(told, str)
        return told

    def _install(self, values: Document | None, release: str) -> Document:
        import helm_sdkpy

        configuration = helm_sdkpy.Configuration("default", str(self._kubeconfig))
        install = helm_sdkpy.Install(configuration).run
        released: Document = asyncio.run(install(release, str(CHART), values or {}, wait=False))
        return released


@contextmanager
def renderer(folder: Path) -> Iterator[Renderer]:
    """A renderer, whose kubeconfig is in `folder`."""
    with _Server(("127.0.0.1", 0), _Api) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            kubeconfig = folder / "kubeconfig"
            context = {"cluster": "none", "user": "nobody"}
            server_url = f"http://127.0.0.1:{server.server_address[1]}"
            config = {
                "apiVersion": "v1",
                "kind": "Config",
                "clusters": [{"name": "none", "cluster": {"server": server_url}}],
                "users": [{"name": "nobody", "user": {}}],
                "contexts": [{"name": "none", "context": context}],
                "current-context": "none",
            }
            kubeconfig.write_text(yaml.safe_dump(config))
            yield Renderer(kubeconfig)
        finally:
            server.shutdown()
            thread.join()
