"""Config of `pdserve kv`. Light to import."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from msgspec import Meta

from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import ConfigStruct, Count, Size

_FLAGS: Final[Groups] = {
    "model": ("model", "dtype", "kv_dtype", "max_model_len", "context", "draft"),
    "devices": ("device_memory", "devices", "pipeline_parallel", "kv_utilization"),
    "node": ("block_size", "token_budget", "max_batch_size"),
    "answer": ("json",),
}


class KvConfig(ConfigStruct, frozen=True):
    """A model, devices, and how long requests are."""

    flag_groups = _FLAGS

    model: Annotated[
        str, Meta(description=f"checkpoint directory, hub id, or a shape: {', '.join(SHAPES)}")
    ] = "8b"
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"], Meta(description="of weights and KV")
    ] = "bfloat16"
    kv_dtype: Annotated[
        Literal["auto", "int8", "fp8"], Meta(description="how KV is stored; auto: as dtype")
    ] = "auto"
    max_model_len: Annotated[
        int, Meta(ge=0, description="most tokens of a request; 0: the model's own limit")
    ] = 0
    context: Annotated[Count, Meta(description="tokens of a usual request, output included")] = 8192
    draft: Annotated[
        str, Meta(description="what guesses tokens on CPUs, as speculation.model; empty: nothing")
    ] = ""
    device_memory: Annotated[Size, Meta(description="of each device")] = "80GB"
    devices: Annotated[Count, Meta(description="devices that share a model")] = 1
    pipeline_parallel: Annotated[
        Count, Meta(description="stages, which share out the layers and the devices")
    ] = 1
    kv_utilization: Annotated[
        float, Meta(gt=0, le=1, description="share of a device's memory that a node may take")
    ] = 0.9
    block_size: Annotated[Count, Meta(description="tokens of a KV block")] = 16
    token_budget: Annotated[Count, Meta(description="tokens of the largest step")] = 8192
    max_batch_size: Annotated[Count, Meta(description="requests of the largest step")] = 256
    json: Annotated[bool, Meta(description="print JSON")] = False
