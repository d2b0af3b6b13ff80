"""What kind of node this is: what its measurements are measurements of."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from pdserve.engine.plan.forms import ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.plan.sizes import packed_bytes, weight_bytes
from pdserve.measured.calibration import ModelShape, NodeLimits
from pdserve.measured.samples import NodeKind
from pdserve.node.start.cores import processor_name
from pdserve.node.start.model import NodeModel
from pdserve.settings.config import EngineConfig


def kind_of(model: NodeModel, engine: EngineConfig) -> NodeKind:
    """Describe a node with this model."""
    layout, form = model.layout, model.form
    return NodeKind(
        device=device_name(model.device),
        device_type="cuda" if model.device.type == "cuda" else "cpu",
        cpus=torch.get_num_threads(),
        host_cores=os.cpu_count() or 1,
        model=model.checkpoint.model_id,
        shape=ModelShape(
            layers=layout.num_layers,
            hidden=model.config.hidden_size,
            kv_heads=len(layout.heads),
            head_dim=layout.head_dim,
            vocab=model.config.vocab_size,
            dtype=layout.dtype,
            block_size=layout.block_size,
            weight_bytes=_weight_bytes(model),
            is_latent=layout.is_latent,
            windows=layout.windows,
            state_bytes=layout.state_bytes,
        ),
        limits=NodeLimits(
            num_blocks=model.num_whole_blocks,
            token_budget=engine.token_budget,
            max_batch_size=engine.max_batch_size,
            max_model_len=model.max_model_len,
        ),
        tensor_parallel=model.share.parallelism.tensor,
        pipeline_parallel=model.share.parallelism.pipeline,
        quantisation=form.name if form.is_quantised else "",
    )


def _weight_bytes(model: NodeModel) -> int:
    """As loaded; of quantised ones in proportion to bfloat16, since scales are negligible."""
    form, own = model.form, model.plan()
    if own.coded or form.coding is not None:
        return packed_bytes(own, model.activations)
    if not form.is_quantised:
        return weight_bytes(own, model.activations)
    plan = ModelPlan.of(model.config)
    return weight_bytes(plan, ActivationDtype.BFLOAT16) * form.bits // plan.form.bits


def device_name(device: torch.device) -> str:
    """Return the processor's or GPU's name, as people know it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        return processor_name(Path("/proc/cpuinfo").read_text())
    except OSError:
        return platform.processor() or platform.machine()
