"""What packed weights depend on: it names their file, which is read for nothing else."""

from __future__ import annotations

import hashlib
import json

import torch

from pdserve.engine.native.packed_file import CODES_FORMAT, FORMAT
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.ranks.shard import WHOLE
from pdserve.model_files.checkpoint import Checkpoint
from pdserve.model_files.identity import weight_header


def packed_name(checkpoint: Checkpoint, plan: ModelPlan, dtype: torch.dtype) -> str:
    """Return what people may call a plan's packed weights; `dtype`: of activations."""
    shard, form = plan.shard, plan.form
    name = f"{checkpoint.model_id}-{str(dtype).removeprefix('torch.')}"
    if form.is_quantised:
        name += f"-{form.name}"
    if plan.coded:
        name += "-as-stored"
    if plan.part_name:
        name += f"-{plan.part_name}"
    if shard.num_ranks > 1:
        name += f"-rank{shard.rank}of{shard.num_ranks}"
    if shard.num_stages > 1:
        name += f"-stage{shard.stage}of{shard.num_stages}"
    return name


def packed_identity(checkpoint: Checkpoint, plan: ModelPlan, dtype: torch.dtype) -> str:
    """Return a string of everything that they depend on.

    A file is identified by its header, size and modification time. The rest of its content is
    covered by the revision, which samples it.
    """
    stamps = []
    for file in checkpoint.weight_files():
        stat = file.stat()
        stamps.append([file.name, stat.st_size, stat.st_mtime_ns, _digest(weight_header(file))])
    facts: list[object] = [
        FORMAT,
        str(dtype),
        plan.form.name,
        checkpoint.revision,
        plan.config.ties_embeddings,
        stamps,
    ]
    if plan.part_name:
        facts.append(plan.part_name)
    if (shard := plan.shard) != WHOLE:
        facts.append([shard.rank, shard.num_ranks, shard.stage, shard.num_stages])
    if plan.form.is_quantised or plan.coded:
        facts.append(f"codes {CODES_FORMAT}")
    if plan.form.coding is not None:
        facts.append(repr(plan.form.coding))
    if plan.coded:
        facts.append({name: repr(form.coding) for name, form in plan.coded.items()})
    return json.dumps(facts)


def _digest(header: bytes) -> str:
    return hashlib.blake2b(header, digest_size=16).hexdigest()
