"""What kind of node this is: what its measurements are measurements of."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from pdserve.engine.kv.cache import TORCH_DTYPES
from pdserve.measured.calibration import ModelShape, NodeLimits
from pdserve.measured.samples import NodeKind
from pdserve.node.memory.device_budget import weight_bytes
from pdserve.node.start.cores import processor_name
from pdserve.node.start.model import NodeModel
from pdserve.settings.config import EngineConfig

_INT8 = 0.5  # of the bytes in bfloat16; the scales are negligible


def kind_of(model: NodeModel, engine: EngineConfig) -> NodeKind:
    """Describe a node with this model."""
    layout, dtype = model.layout, TORCH_DTYPES[model.layout.dtype]
    quantised = model.quantization != "none"
    as_loaded = weight_bytes(model.config, torch.bfloat16 if quantised else dtype)
    return NodeKind(
        device=device_name(model.device),
        device_type="cuda" if model.device.type == "cuda" else "cpu",
        cpus=torch.get_num_threads(),
        host_cores=os.cpu_count() or 1,
        model=model.checkpoint.model_id,
        shape=ModelShape(
            layers=layout.num_layers,
            hidden=model.config.hidden_size,
            kv_heads=layout.num_kv_heads,
            head_dim=layout.head_dim,
            vocab=model.config.vocab_size,
            dtype=layout.dtype,
            block_size=layout.block_size,
            weight_bytes=int(as_loaded * _INT8) if quantised else as_loaded,
        ),
        limits=NodeLimits(
            num_blocks=model.num_blocks,
            token_budget=engine.token_budget,
            max_batch_size=engine.max_batch_size,
            max_model_len=model.max_model_len,
        ),
        tensor_parallel=model.share.parallelism.tensor,
        pipeline_parallel=model.share.parallelism.pipeline,
        quantisation=model.quantization if quantised else "",
    )


def device_name(device: torch.device) -> str:
    """Return the processor's or GPU's name, as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        return processor_name(Path("/proc/cpuinfo").read_text())
    except OSError:
        return platform.processor() or platform.machine()
