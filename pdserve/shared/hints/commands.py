"""Commands and flags that other servers have, and what is right here."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from typing import Final

# A word that is no command |-> the command that is meant, and what it does.
_COMMANDS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("serve", "server", "start", "launch", "run", "deploy", "api-server"),
        ("up", "--model MODEL serves a model"),
    ),
    **dict.fromkeys(("pull", "download", "load"), ("up", "--model MODEL downloads it first")),
    **dict.fromkeys(
        ("chat", "complete", "generate", "ask"), ("up", "serves a model, and prints a request")
    ),
    **dict.fromkeys(("stop", "kill", "down"), ("up", "runs in the foreground: Ctrl-C stops it")),
    **dict.fromkeys(("ps", "list", "ls", "nodes", "top", "info"), ("status", "shows a cluster")),
    **dict.fromkeys(
        ("benchmark", "perf", "load-test"), ("bench", "serve measures servers under load")
    ),
    **dict.fromkeys(("node", "worker"), ("decode", "and pdserve prefill run one node each")),
    **dict.fromkeys(("router", "proxy", "controller"), ("coordinator", "runs a coordinator")),
    **dict.fromkeys(("settings", "env", "show-config"), ("config", "shows every setting")),
    **dict.fromkeys(("keys", "keygen", "token"), ("key", "TENANT makes an API key")),
    **dict.fromkeys(("cert", "tls", "mtls"), ("certs", "makes certificates")),
    **dict.fromkeys(("check", "diagnose"), ("doctor", "checks this machine or a cluster")),
}
# A flag of other servers, without its dashes |-> the setting that means the same.
SETTINGS: Final[Mapping[str, str]] = {
    "alias": "served_model_name",
    "allowed-origins": "cors_origins",
    "api-server-port": "port",
    "bind": "host",
    "chunked-prefill-size": "token_budget",
    "c": "max_model_len",
    "context-length": "max_model_len",
    "ctx-size": "max_model_len",
    "data-type": "dtype",
    "dist-init-addr": "coordinators",
    "enable-prefix-caching": "prefix_cache",
    "enforce-eager": "cuda_graphs",
    "gpu-memory-utilization": "kv_utilization",
    "hostname": "host",
    "kv-cache-memory": "kv_memory",
    "kv-cache-memory-bytes": "kv_memory",
    "listen": "host",
    "m": "model",
    "max-batch-total-tokens": "token_budget",
    "max-concurrent-requests": "max_inflight",
    "max-input-length": "max_model_len",
    "max-model-length": "max_model_len",
    "max-num-batched-tokens": "token_budget",
    "max-num-seqs": "max_batch_size",
    "max-running-requests": "max_batch_size",
    "max-seq-len": "max_model_len",
    "max-total-tokens": "max_model_len",
    "mem-fraction-static": "kv_utilization",
    "model-id": "model",
    "model-path": "model",
    "n-gpu-layers": "device",
    "num-threads": "threads",
    "p": "port",
    "pipeline-parallel-size": "pipeline_parallel",
    "pp": "pipeline_parallel",
    "pp-size": "pipeline_parallel",
    "quant": "quantization",
    "quantize": "quantization",
    "reasoning-parser": "split_reasoning",
    "schedule-policy": "prefill_policy",
    "served-model": "served_model_name",
    "ssl-certfile": "https_dir",
    "ssl-keyfile": "https_dir",
    "t": "threads",
    "tensor-parallel-size": "tensor_parallel",
    "tool-call-parser": "tool_format",
    "tp": "tensor_parallel",
    "tp-size": "tensor_parallel",
}
_WORDS: Final[Mapping[str, str]] = {  # likewise, for what is no setting
    "api-key": "PDSERVE_API_KEY in the environment is the key, or --key-file has several",
    "trust-remote-code": "no code of checkpoints is run",
    "daemon": "pdserve runs in the foreground: systemd units are in deploy/systemd",
    "detach": "pdserve runs in the foreground: systemd units are in deploy/systemd",
    "verbose": "the log says all that there is",
    "debug": "the log says all that there is",
    "workers": "a cluster has as many nodes as --prefill and --decode say",
    "data-parallel-size": "a cluster has as many nodes as --prefill and --decode say",
    "dp": "a cluster has as many nodes as --prefill and --decode say",
    "speculative-config": "there is no speculative decoding",
    "enable-lora": "adapters are not served: merge one into its model",
    "lora-modules": "adapters are not served: merge one into its model",
    "enable-auto-tool-choice": "tools need no flag: --set answers.tool_format names the format",
}


def command_instead(word: str, known: Collection[str]) -> str:
    """What to do instead of a command that does not exist."""
    folded = word.lower().replace("_", "-")
    meant, does = _COMMANDS.get(folded, ("", ""))
    if meant in known:
        return f"pdserve {meant} {does}"
    near = difflib.get_close_matches(folded, known, n=1)
    return f"did you mean `{near[0]}`?" if near else f"there are {', '.join(known)}"


def meant_setting(flag: str) -> str:
    """The setting that a flag of another server stands for, such as "max_model_len"; or nothing."""
    return SETTINGS.get(_bare(flag), "")


def flag_instead(flag: str, flags: Iterable[str]) -> str:
    """What to do instead of a flag that does not exist; nothing if nothing is near."""
    if said := _WORDS.get(_bare(flag)):
        return said
    near = difflib.get_close_matches(flag, [*flags], n=3, cutoff=0.7)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _bare(flag: str) -> str:
    return flag.lstrip("-").lower().replace("_", "-")
