"""The read-only endpoints: models, version, health, metrics, status."""

from __future__ import annotations

from typing import Literal

import msgspec
from aiohttp import web

from coordinator.api.answer.bodies import Model, ModelList, json_answer
from coordinator.api.context import ApiContext
from coordinator.api.read.ask import Question
from coordinator.models.cascade import Cascade
from coordinator.models.model import ListedModel
from pdserve import __version__
from pdserve.protocol.status import NodeStatus


class Version(msgspec.Struct):
    """The answer to GET /version."""

    version: str


class Health(msgspec.Struct):
    """The answer to GET /health."""

    status: Literal["ok", "not ready", "draining"]


class Targets(msgspec.Struct):
    """Where Prometheus reads the metrics of a node, and the labels that they get."""

    targets: list[str]
    labels: dict[str, str]


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """The special tokens and chat template that a client needs to write prompts for the model."""

    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    model_max_length: int


_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def list_models(question: Question) -> web.Response:
    """GET /v1/models: list all names of the models that the caller may use."""
    models, trace = question.context.models, question.trace
    shown = [_described(models.find(name, trace.owner), name) for name in models.names(trace.owner)]
    adapters = models.adapters(trace.owner, trace.tenant.may_use)
    shown += [_described(one, one.name) for one in adapters]
    cascades = models.cascades(trace.owner).items()
    return json_answer(ModelList(data=shown + [_of_cascade(one, name) for name, one in cascades]))


async def get_model(question: Question) -> web.Response:
    """GET /v1/models/{model}: describe one name; names may contain slashes."""
    context, trace, name = question.context, question.trace, question.names["model"]
    cascade = context.models.cascade(name, trace.owner)
    if cascade is not None:
        return json_answer(_of_cascade(cascade, name))
    return json_answer(_described(context.listed(name, trace), name))


async def version(context: ApiContext) -> web.Response:
    """GET /version: return pdserve's version."""
    return json_answer(Version(__version__))


async def health(context: ApiContext) -> web.Response:
    """GET /health: status 200 when a request could be served now, else 503."""
    if context.tasks.is_draining:
        return json_answer(Health("draining"), status=503)
    if not context.models.is_ready():
        return json_answer(Health("not ready"), status=503)
    return json_answer(Health("ok"))


async def metrics(context: ApiContext) -> web.Response:
    """GET /metrics: return the metrics in Prometheus' text format."""
    return web.Response(body=await context.metrics(), headers={"Content-Type": _METRICS_TYPE})


async def targets(context: ApiContext) -> web.Response:
    """GET /metrics/targets: return the attached nodes, for Prometheus' http_sd_configs."""
    return json_answer(
        [Targets([node.metrics_address], _labels(node)) for node in context.models.status().nodes]
    )


async def status(context: ApiContext) -> web.Response:
    """GET /status: return the state of the cluster, for people and scripts."""
    return json_answer(context.models.status())


async def tokenizer_info(context: ApiContext) -> web.Response:
    """GET /tokenizer_info: return the special tokens and the chat template."""
    model = await context.models.default.ready()
    named, template = model.tokenizer.named_special_tokens, model.tokenizer.chat_template
    answer = TokenizerInfo(
        bos_token=named.get("bos_token"),
        eos_token=named.get("eos_token"),
        pad_token=named.get("pad_token"),
        unk_token=named.get("unk_token"),
        chat_template=None if template is None else template.source,
        model_max_length=model.max_model_len(),
    )
    return json_answer(answer)


def _labels(node: NodeStatus) -> dict[str, str]:
    of_model = {"model": node.model} if node.model else {}
    return {"node": node.node_id, "role": node.role} | of_model


def _described(model: ListedModel, name: str) -> Model:
    """Return what there is to tell of a model by one of its names."""
    return Model(
        id=name,
        created=model.created,
        root=model.root or name,
        parent=model.parent,
        max_model_len=model.generator.max_model_len,
    )


def _of_cascade(cascade: Cascade, name: str) -> Model:
    return Model(
        id=name,
        created=cascade.created,
        root=name,
        tiers=[tier.name for tier in cascade.tiers],
        needs_whole_answer=cascade.needs_whole_answer,
        external_tiers=[*cascade.endpoints] or msgspec.UNSET,
    )
