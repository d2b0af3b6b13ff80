"""The draft model of a node, beside its model: planned, compared, loaded, profiled."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from msgspec import structs

from pdserve.demo_model import DRAFT_PATH
from pdserve.engine.drafts.heads.eagle3 import Eagle3Config, Eagle3Head, HeadPlan, parse_eagle3
from pdserve.engine.drafts.heads.head import BLOCK_TOKENS, Head
from pdserve.engine.drafts.heads.mtp import MtpHead, MtpPlan
from pdserve.engine.drafts.model.draft_model import DraftModel
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.sizes import packed_bytes, weight_bytes
from pdserve.engine.weights.codings import further_layers
from pdserve.kv import KvDtype
from pdserve.kv.need import blocks_for
from pdserve.measured.perf_model import GUESS, PerfModel
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.model_files.same_vocabulary import check_same_vocabulary
from pdserve.node.memory.device_budget import step_bytes
from pdserve.node.memory.draft_share import MTP, share_of_drafts
from pdserve.node.profiling.costs import step_costs
from pdserve.node.start.model import NodeModel, load_runner, packed_cache, plan_model
from pdserve.protocol import NodeRole, StepCosts
from pdserve.settings.config import NodeConfig, WeightsConfig
from pdserve.settings.speculation import asks, draft_model
from pdserve.shared.errors import ConfigError, ModelError, PdserveError

log = logging.getLogger(__name__)


def plan_models(config: NodeConfig, role: NodeRole = NodeRole.DECODE) -> NodeModel:
    """Plan the model, and the draft model if one is named: their KV shares `kv_memory`.

    Raises:
        ConfigError, ModelError: as plan_model; or the draft model cannot guess for the model.
        KvBudgetTooSmall: as plan_model.
    """
    model = plan_model(config, role)
    named = draft_model(config.speculation)
    is_demo = not config.checkpoint.model and model.device.type == "cpu"
    if not named and is_demo and asks(config.speculation, "model"):
        named = str(DRAFT_PATH)
    if not named and asks(config.speculation, "model") and _mtp_obstacle(model) is None:
        named = MTP
    if not named:
        return model
    num_bytes = model.num_blocks * model.layout.block_bytes
    kv_bytes = share_of_drafts(num_bytes, named, model.config)
    draft = plan_draft(named, config, model, kv_bytes)
    left_bytes = num_bytes - _bytes_of(draft, config, model)
    num_blocks = model.layout.blocks_in_budget(left_bytes, model.max_model_len)
    log.info("beside the KV of drafts, %d blocks are left", num_blocks)
    return replace(model, num_blocks=num_blocks, draft=draft)


def plan_draft(
    named: str, config: NodeConfig, model: NodeModel, kv_bytes: int
) -> NodeModel | HeadPlan | MtpPlan:
    """Plan the draft model, or head; this process computes it alone, where rank 0 computes.

    Raises:
        ConfigError: it cannot guess for the model.
    """
    try:
        if named == MTP:
            return _plan_mtp(model, kv_bytes)
        checkpoint = resolve_checkpoint(named, None)
        if (values := checkpoint.config()).get("speculators_model_type"):
            return _plan_head(checkpoint, parse_eagle3(values, named), model, kv_bytes)
        check_same_vocabulary(model.checkpoint.path, checkpoint.path)
        longest = min(model.max_model_len, load_model_config(checkpoint).max_model_len)
        log.info("draft model: %s", named)
        alone = structs.replace(
            config.engine,
            device=str(model.device),
            tensor_parallel=1,
            pipeline_parallel=1,
            rank_hosts=[],
            kv_memory=str(kv_bytes),
            max_model_len=longest,
            quantization=model.form.quantization,
            prefill_quantization="same",
        )
        weights = WeightsConfig(model=named)
        return plan_model(structs.replace(config, checkpoint=weights, engine=alone))
    except PdserveError as error:
        raise ConfigError(f"speculation.model {named}: {error}") from error


def _bytes_of(draft: NodeModel | HeadPlan | MtpPlan, config: NodeConfig, model: NodeModel) -> int:
    """What drafts take of the memory that the model's KV would have.

    On a GPU whose memory is shared out here, that is also their weights and their largest step. All
    ranks' GPUs have equally much, so that of rank 0 decides.
    """
    block_bytes = draft.layout.block_bytes if isinstance(draft, NodeModel) else draft.block_bytes
    num_bytes = draft.num_blocks * block_bytes
    if model.device.type == "cpu":
        return num_bytes
    if config.engine.kv_memory == "auto" and isinstance(draft, NodeModel):
        num_bytes += weight_bytes(draft.plan(), draft.activations) + step_bytes(
            draft.config, draft.activations, draft.worst_step, has_graphs=draft.has_graphs
        )
    elif config.engine.kv_memory == "auto" and isinstance(draft, HeadPlan):
        num_bytes += draft.config.fixed_bytes(draft.dtype)
    return num_bytes * model.share.parallelism.num_ranks


def _plan_head(
    checkpoint: Checkpoint, head: Eagle3Config, model: NodeModel, kv_bytes: int
) -> HeadPlan:
    """Plan a head, which computes as the model does on GPUs, and in float32 on CPUs.

    Its name says what rows it goes on from, so it does not depend on that.
    """
    plan = HeadPlan(checkpoint.path, head, name=f"eagle3-1:{checkpoint.revision}")
    plan.check_model(model.config)
    if model.device.type != "cpu":
        if model.share.parallelism.pipeline > 1 and not model.share.has_all:
            raise ModelError("on GPUs no head has the rows of stages on several hosts (rank_hosts)")
        plan = replace(plan, device=model.device, dtype=model.activations)
    num_blocks = _num_blocks(model, Eagle3Head.most_tokens, kv_bytes, plan.block_bytes)
    return replace(plan, num_blocks=num_blocks)


def _plan_mtp(model: NodeModel, kv_bytes: int) -> MtpPlan:
    """Plan the checkpoint's own layers, whose KV is each that of one of the model's."""
    if (obstacle := _mtp_obstacle(model)) is not None:
        raise ModelError(obstacle)
    layers = further_layers(model.checkpoint, model.config, model.form)
    layout = layers[0].config.kv_layout(BLOCK_TOKENS, KvDtype(model.activations))
    log.info("drafts by %s of the checkpoint", ", ".join(layer.part_name for layer in layers))
    plan = MtpPlan(
        checkpoint=model.checkpoint,
        layers=layers,
        activations=model.activations,
        layout=layout,
        num_blocks=0,
        most_tokens=model.max_model_len,
        kernels="" if model.kernels is None else model.kernels.variant,
    )
    return replace(
        plan, num_blocks=_num_blocks(model, model.max_model_len, kv_bytes, plan.block_bytes)
    )


def _mtp_obstacle(model: NodeModel) -> str | None:
    """Why the checkpoint predicts no further tokens for this node; None: it does."""
    if model.device.type != "cpu":
        return "layers that predict further tokens are computed on CPUs"
    if not further_layers(model.checkpoint, model.config, model.form):
        return "the checkpoint has no layer that predicts further tokens (num_nextn_predict_layers)"
    return None


def _num_blocks(model: NodeModel, most_tokens: int, kv_bytes: int, block_bytes: int) -> int:
    """Blocks for as many streams as a step has, or as many as there is memory for."""
    most = model.worst_step.num_requests * blocks_for(most_tokens, BLOCK_TOKENS)
    if kv_bytes < block_bytes:
        raise ModelError(
            f"of kv_memory its KV has {kv_bytes} bytes, and needs {block_bytes} at least: raise "
            "kv_memory"
        )
    return min(most, kv_bytes // block_bytes)


def load_draft(
    model: NodeModel,
    draft: NodeModel | HeadPlan | MtpPlan,
    config: NodeConfig,
    check_wanted: Callable[[], None],
) -> DraftModel | Head:
    """Load and profile the draft model, in the thread that will compute it.

    `check_wanted` is called now and then, and may raise to abandon this.

    Raises:
        ModelError: its weights cannot be used.
    """
    if isinstance(draft, HeadPlan):
        return Eagle3Head.load(draft)
    cache = packed_cache(config.engine)
    if isinstance(draft, MtpPlan):
        return MtpHead.load(draft, cache, lambda _: check_wanted())
    runner = load_runner(draft, None, lambda _: check_wanted(), cache)
    costs = step_costs(config.profile, config.engine, draft, runner, check_wanted).costs
    if costs is GUESS:
        sizes = [packed_bytes(each.plan(), each.activations) for each in (draft, model)]
        costs = _scaled(GUESS, sizes[0] / sizes[1])
    return DraftModel(
        runner=runner,
        pool=BlockPool(
            draft.num_blocks,
            draft.layout.block_size,
            prefix_cache=False,
            companions=runner.kv_cache.companions,
        ),
        block_bytes=draft.layout.block_bytes,
        perf=PerfModel(costs),
        vocab_size=min(model.config.vocab_size, draft.config.vocab_size),
        max_model_len=draft.max_model_len,
    )


def _scaled(costs: StepCosts, factor: float) -> StepCosts:
    """The costs of a model that is smaller by this factor, as long as both are guesses."""
    return structs.replace(costs, knot_s=[factor * seconds for seconds in costs.knot_s])
