"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec
from aiohttp import web
from msgspec import Meta

from coordinator.adapters.bounds import MAX_NAME_CHARS, not_found
from coordinator.adapters.life import Adapters
from coordinator.api.calls import asked
from coordinator.api.context import RequestTrace
from coordinator.api.openapi.operation import Operation
from coordinator.api.read.ask import Question
from coordinator.api.routes import add_routes, post
from coordinator.tenants import Tenant
from pdserve.shared.errors import PermissionDenied

_MAX_PATH = 4096
AdapterName = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: AdapterName
    lora_path: Annotated[str, Meta(min_length=1, max_length=_MAX_PATH)]  # on each node
    load_inplace: bool = False  # the name may stand for an adapter already
    base_model_name: str | None = None  # of the model that it is for; None: the default one


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: AdapterName
    lora_int_id: int | None = None  # vLLM's; not needed


_ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 417, 503, 504)
OPERATIONS = (
    Operation(
        method="post",
        tag="Models",
        path="/v1/load_lora_adapter",
        name="loadAdapter",
        summary="Load a LoRA adapter on all nodes, and serve it under a name.",
        body=LoadAdapterRequest,
        examples=({"lora_name": "sql", "lora_path": "/models/sql-lora"},),
        media="text/plain",
        errors=_ERRORS,
    ),
    Operation(
        method="post",
        tag="Models",
        path="/v1/unload_lora_adapter",
        name="unloadAdapter",
        summary="Serve a LoRA adapter no longer; what runs with it ends as it began.",
        body=UnloadAdapterRequest,
        examples=({"lora_name": "sql"},),
        media="text/plain",
        errors=_ERRORS,
    ),
)


def add_adapter_routes(
    app: web.Application,
    adapters_of: Callable[[str | None], Adapters],
    adapters_with: Callable[[str], Adapters | None],
) -> None:
    """Add what loads and unloads adapters.

    If API keys are in use, operators may, and tenants that may have adapters of their own.

    Args:
        app: gets the routes.
        adapters_of: those of a model; None: of the default one. Raises ModelNotFound.
        adapters_with: those that a name is among; None: there is none of the name.
    """

    async def load(question: Question) -> web.Response:
        tenant = _loader(question.trace)
        body = await question.body(LoadAdapterRequest)
        adapters = adapters_of(body.base_model_name)
        if not tenant.may_use(body.lora_name):
            raise PermissionDenied(
                f"{tenant.name!r} may not use an adapter named {body.lora_name!r}, only "
                f"{', '.join(tenant.adapters)}"
            )
        await adapters.load(
            body.lora_name,
            body.lora_path,
            tenant.name,
            in_place=body.load_inplace,
            own_only=_changes_own(tenant),
            most=0 if tenant.is_operator else tenant.max_adapters,
        )
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(question: Question) -> web.Response:
        tenant = _loader(question.trace)
        body = await question.body(UnloadAdapterRequest)
        adapters = adapters_with(body.lora_name)
        if adapters is None or not tenant.may_use(body.lora_name):
            raise not_found(body.lora_name)
        owner = tenant.name if _changes_own(tenant) else None
        await adapters.unload(body.lora_name, owner=owner)
        return web.Response(text=f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    own = {"/v1/load_lora_adapter": load, "/v1/unload_lora_adapter": unload}
    add_routes(app, [post(path, asked(each)) for path, each in own.items()], OPERATIONS)


def _loader(trace: RequestTrace) -> Tenant:
    """Return the tenant, if it may load adapters. Raises PermissionDenied."""
    tenant = trace.tenant
    if tenant.name and not (tenant.is_operator or tenant.max_adapters):
        raise PermissionDenied(
            f"{tenant.name!r} may not load adapters: that is for operators, and for tenants with "
            "max_adapters in the key file"
        )
    return tenant


def _changes_own(tenant: Tenant) -> bool:
    """Return whether a tenant may change only the adapters that it has loaded itself."""
    return bool(tenant.name) and not tenant.is_operator
