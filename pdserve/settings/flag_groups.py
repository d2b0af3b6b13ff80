"""Which settings of a process are flags, by what a user wants. The others are in docs/SETTINGS.md.

What is not here is set in the file or with `--set`: it matters to few, or once per installation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Groups = Mapping[str, tuple[str, ...]]  # heading |-> names of fields

CLUSTER: Final[Groups] = {
    "pools": ("prefill", "decode", "mode", "rebalance", "autoscale"),
    "model": (
        "model",
        "models",
        "served_model_name",
        "adapters",
        "dtype",
        "quantization",
        "kv_dtype",
        "max_model_len",
    ),
    "network": ("on", "host", "port"),
    "promises": ("slo_classes", "admission"),
    "access": ("key_file",),
    "performance": ("device", "threads", "kv_memory"),
}

COORDINATOR: Final[Groups] = {
    "pools": ("mode", "router", "rebalance"),
    "model": (
        "model",
        "models",
        "revision",
        "served_model_name",
        "adapters",
        "tool_format",
        "split_reasoning",
    ),
    "network": ("host", "port", "grpc_host", "grpc_port"),
    "promises and limits": (
        "slo_classes",
        "admission",
        "max_inflight",
        "max_waiting",
    ),
    "access": ("key_file", "cors_origins", "page"),
    "performance": ("cpus",),
}

NODE: Final[Groups] = {
    "cluster": ("node_id", "coordinators"),
    "model": (
        "model",
        "models",
        "revision",
        "dtype",
        "quantization",
        "kv_dtype",
        "wire_dtype",
        "max_model_len",
    ),
    "network": ("host", "port", "metrics_port", "transports"),
    "scheduling": ("max_batch_size", "token_budget"),
    "performance": (
        "device",
        "threads",
        "tensor_parallel",
        "rank_hosts",
        "cpus",
        "kv_memory",
    ),
}

DEMO: Final[Groups] = {
    "questions": ("prompt", "max_tokens", "deadline_s"),
    "model": ("model", "dtype", "quantization", "kv_dtype"),
    "performance": ("device", "threads", "cpus", "kv_memory"),
}
