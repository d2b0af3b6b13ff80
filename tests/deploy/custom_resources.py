"""Schemas of the custom resources that the chart has: what their documentation lists, no more."""

from __future__ import annotations

from typing import Any


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_STRING = {"type": "string"}
_NUMBER = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": _STRING}
_METADATA = _object("name", name=_STRING, labels=_STRINGS)
_POLICY = _object(
    "type",
    "value",
    "periodSeconds",
    type={"enum": ["Pods", "Percent"]},
    value=_NUMBER,
    periodSeconds={"type": "integer", "minimum": 1, "maximum": 1800},
)
_RULES = _object(
    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
    policies={"type": "array", "items": _POLICY},
)
_TRIGGER = _object(
    "type",
    "metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=_object(
        "serverAddress",
        "query",
        "threshold",
        serverAddress={"type": "string", "format": "uri", "pattern": "^https?://"},
        query=_STRING,
        threshold={"type": "string", "pattern": "^[0-9.]+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
_SCALED_OBJECT = _object(
    "scaleTargetRef",
    "triggers",
    scaleTargetRef=_object("name", name=_STRING, kind=_STRING, apiVersion=_STRING),
    minReplicaCount=_NUMBER,
    maxReplicaCount=_NUMBER,
    pollingInterval=_NUMBER,
    cooldownPeriod=_NUMBER,
    fallback=_object(
        "failureThreshold",
        "replicas",
        failureThreshold=_NUMBER,
        replicas=_NUMBER,
        behavior={
            "enum": [
                "static",
                "currentReplicas",
                "currentReplicasIfHigher",
                "currentReplicasIfLower",
            ]
        },
    ),
    advanced=_object(
        horizontalPodAutoscalerConfig=_object(
            name=_STRING, behavior=_object(scaleDown=_RULES, scaleUp=_RULES)
        )
    ),
    triggers={"type": "array", "minItems": 1, "items": _TRIGGER},
)
_KEY_OF_SECRET = _object("name", "key", name=_STRING, key=_STRING)
_ENDPOINT = _object(
    "port",
    port=_STRING,
    path=_STRING,
    authorization=_object(credentials=_KEY_OF_SECRET),
    interval={"type": "string", "pattern": "^[0-9]+(ms|s|m|h)$"},
    scheme={"enum": ["http", "https"]},
    tlsConfig=_object(
        insecureSkipVerify={"type": "boolean"},
        serverName=_STRING,
        ca=_object(secret=_KEY_OF_SECRET),
        cert=_object(secret=_KEY_OF_SECRET),
        keySecret=_KEY_OF_SECRET,
    ),
    relabelings={
        "type": "array",
        "items": _object(
            sourceLabels={"type": "array", "items": _STRING},
            targetLabel=_STRING,
            replacement=_STRING,
        ),
    },
)
_POD_MONITOR = _object(
    "selector",
    "podMetricsEndpoints",
    selector=_object(matchLabels=_STRINGS),
    podMetricsEndpoints={"type": "array", "minItems": 1, "items": _ENDPOINT},
)
_DURATION = {"type": "string", "pattern": "^([0-9]+(ms|[smhdwy]))+$"}
_RULE = _object(
    "expr",
    record=_STRING,
    alert=_STRING,
    expr=_STRING,
    labels=_STRINGS,
    annotations=_STRINGS,
    keep_firing_for=_DURATION,
    **{"for": _DURATION},
)
_PROMETHEUS_RULE = _object(
    "groups",
    groups={
        "type": "array",
        "items": _object(
            "name",
            name=_STRING,
            interval=_DURATION,
            rules={"type": "array", "minItems": 1, "items": _RULE},
        ),
    },
)
_PORT = _object("number", number={"type": "integer", "minimum": 1, "maximum": 65535})
_INFERENCE_POOL = _object(
    "selector",
    "targetPorts",
    "endpointPickerRef",
    selector=_object("matchLabels", matchLabels=_STRINGS),
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": _PORT},
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef=_object(
        "name",
        group=_STRING,
        kind=_STRING,
        name={"type": "string", "minLength": 1},
        port=_PORT,
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)

_POD_TEMPLATE = _object("metadata", "spec", metadata=_object(labels=_STRINGS), spec={})
_LEADER_WORKER_SET = _object(
    "leaderWorkerTemplate",
    replicas=_NUMBER,
    rolloutStrategy=_object(
        type={"const": "RollingUpdate"},
        rollingUpdateConfiguration=_object(maxUnavailable=_NUMBER, maxSurge=_NUMBER),
    ),
    startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
    leaderWorkerTemplate=_object(
        "workerTemplate",
        size={"type": "integer", "minimum": 1},
        restartPolicy={"enum": ["None", "Default", "RecreateGroupOnPodRestart"]},
        leaderTemplate=_POD_TEMPLATE,
        workerTemplate=_POD_TEMPLATE,
    ),
)


def _resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    return _object(
        *("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=_METADATA,
        spec=spec,
    )


SCHEMAS = {
    "InferencePool": _resource("inference.networking.k8s.io/v1", "InferencePool", _INFERENCE_POOL),
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet", _LEADER_WORKER_SET
    ),
    "ScaledObject": _resource("keda.sh/v1alpha1", "ScaledObject", _SCALED_OBJECT),
    "PrometheusRule": _resource("monitoring.coreos.com/v1", "PrometheusRule", _PROMETHEUS_RULE),
    "PodMonitor": _resource("monitoring.coreos.com/v1", "PodMonitor", _POD_MONITOR),
}
