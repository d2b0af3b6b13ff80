"""Service terms of a call: its service class, priority, time-out and cache salt.

The body's `slo_class` or the header `X-SLO-Class` names the service class. Otherwise OpenAI's
`service_tier` selects one: "priority", by its newer names "fast" and "ultrafast", the class with
the highest priority, "flex" the one with the lowest. All other calls get their tenant's default
class, or the cluster's. vLLM's `priority` is relative to the priority of the class.
`X-Request-Timeout` is in seconds from receipt to the end of the answer; a call that is not complete
by then is aborted everywhere. Without the header, the operator's default deadline applies, if there
is one. The cluster's own limit applies as well.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec

from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.read.fields import CallFields
from coordinator.api.read.idempotency import KeyedCall, draw
from coordinator.tenants import Tenant
from coordinator.tenants.identity import ANYBODY
from coordinator.text.threads import Asker
from coordinator.tracing.call_span import CallSpan
from pdserve.protocol import Prompt, Slo
from pdserve.shared.errors import DeadlineExceeded, InvalidRequest, PermissionDenied
from pdserve.shared.slo import ServiceClasses, SloClass

CLASS_HEADER = "X-SLO-Class"
TIMEOUT_HEADER = "X-Request-Timeout"
TERMS_HEADERS = (CLASS_HEADER, TIMEOUT_HEADER)
_EXACT: Final = 8  # priorities up to it are taken as they are
_LARGEST: Final = 1024  # and those beyond this one are alike
_HIGHEST, _LOWEST = ("priority", "fast", "ultrafast"), "flex"  # service tiers with an effect


class ServiceTerms(msgspec.Struct, frozen=True):
    """The service terms of one call. Times are seconds of the API's clock."""

    slo: Slo
    received_s: float
    timeout_s: float  # from receipt; 0 = none
    payer: str = ""  # whose turn it takes before it runs
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    keyed: KeyedCall | None = None
    span: CallSpan | None = None  # None: the call is not recorded
    wait_s: float = 0.0  # for which it waits if a pool has no node for it
    tier: str = "default"  # the service tier that it has

    @property
    def asker(self) -> Asker:
        """For whom the call's texts are tokenised."""
        return Asker(self.payer, until(self.timeout_s, self.received_s))

    def prompt(self, token_ids: list[int]) -> Prompt:
        """Return the prompt of these tokens, whose KV is shared as the terms allow."""
        return Prompt(token_ids, self.cache_salt)

    def draw(self, *what: str | int) -> int:
        """Return a number of 128 bits; the same again if the call is made again under its key."""
        return draw(self.keyed, *what)

    def waited_s(self, now_s: float) -> float:
        """Return the seconds since receipt."""
        return now_s - self.received_s

    def deadline_s(self, now_s: float) -> float:
        """Return the seconds left until the time-out; 0 = no time-out. Raises DeadlineExceeded."""
        if not self.timeout_s:
            return 0.0
        left_s = self.timeout_s - self.waited_s(now_s)
        if left_s <= 0:
            raise DeadlineExceeded(
                f"the request's time-out of {self.timeout_s:g} s passed before it could begin"
            )
        return left_s


def service_terms(
    fields: CallFields,
    headers: Mapping[str, str],
    context: ApiContext,
    trace: RequestTrace,
) -> ServiceTerms:
    """Return the terms of a call whose body has just been read, and set the SLO of its trace.

    Raises InvalidRequest, or PermissionDenied for a class that the tenant may not use.
    """
    tenant = ANYBODY if trace.caller is None else trace.caller.tenant
    cls = _service_class(fields, headers, context.classes, tenant)
    most = _most(cls, context.classes, tenant)
    has_all = cls.priority <= most.priority and cls.weight <= most.weight
    is_of_tier = has_all and cls is _class_of_tier(fields, context.classes)
    trace.slo = Slo(
        name=cls.name,
        tenant=tenant.name,
        priority=min(cls.priority - _step(fields.priority or 0), most.priority),
        weight=min(cls.weight, most.weight) * tenant.weight,
        ttft_s=cls.ttft_s,
        hold_s=cls.hold_s,
        tpot_s=cls.tpot_s,
    )
    timeout_s = timeout_of(headers, context)
    cache_salt = tenant.cache_salt(fields.cache_salt or "")
    return ServiceTerms(
        trace.slo,
        trace.received_s,
        timeout_s,
        trace.payer,
        cache_salt,
        trace.keyed,
        trace.span,
        cls.wait_s,
        (is_of_tier and fields.service_tier) or "default",
    )


class _Most(NamedTuple):
    """What a request has of its class at most."""

    priority: int
    weight: float


def _most(cls: SloClass, classes: ServiceClasses, tenant: Tenant) -> _Most:
    """Return the highest priority that the tenant may have, and its class's weight at most.

    Whoever names classes in the key file means their precedence. Without, it is the default
    class's, unless the caller is an operator, or there are no keys.
    """
    if tenant.classes:
        own = [classes.by_name[name].priority for name in tenant.classes if name in classes.by_name]
        return _Most(max([cls.priority, *own]), cls.weight)
    if tenant.is_operator or not tenant.name:
        return _Most(classes.highest.priority, cls.weight)
    usual = classes.by_name.get(tenant.default_class, classes.default)
    return _Most(usual.priority, usual.weight)


def _step(priority: int) -> int:
    """Return a client's `priority` as one of few numbers, in the same order."""
    size = abs(priority)
    if size > _EXACT:
        size = min(_LARGEST, 1 << (size - 1).bit_length())
    return size if priority >= 0 else -size


def _service_class(
    fields: CallFields, headers: Mapping[str, str], classes: ServiceClasses, tenant: Tenant
) -> SloClass:
    cls = _asked_class(fields, headers, classes)
    if cls is None:
        return classes.by_name.get(tenant.default_class, classes.default)
    if tenant.classes and cls.name not in tenant.classes:
        may = ", ".join(tenant.classes)
        raise PermissionDenied(f"{tenant.name!r} may not use class {cls.name!r}, only {may}")
    return cls


def _asked_class(
    fields: CallFields, headers: Mapping[str, str], classes: ServiceClasses
) -> SloClass | None:
    for name, where in ((fields.slo_class, "slo_class"), (headers.get(CLASS_HEADER), CLASS_HEADER)):
        if name is None:
            continue
        if name not in classes.by_name:
            known = ", ".join(classes.by_name)
            raise InvalidRequest(
                f"{where!r} is {name[:64]!r}, but the service classes are {known}", where
            )
        return classes.by_name[name]
    return _class_of_tier(fields, classes)


def _class_of_tier(fields: CallFields, classes: ServiceClasses) -> SloClass | None:
    """Return the class that the call's service tier stands for; None: it has none."""
    if fields.service_tier in _HIGHEST:
        return classes.highest
    return classes.lowest if fields.service_tier == _LOWEST else None


def timeout_of(headers: Mapping[str, str], context: ApiContext) -> float:
    """Return the seconds from receipt that a call may take; 0: any. Raises InvalidRequest."""
    return _timeout_s(headers) or context.config.deadline_s


def until(timeout_s: float, received_s: float) -> float:
    """Return when a call gives up, of time.monotonic."""
    return received_s + timeout_s if timeout_s else math.inf


def _timeout_s(headers: Mapping[str, str]) -> float:
    """Return the client's time-out, or 0 if it set none. Raises InvalidRequest."""
    text = headers.get(TIMEOUT_HEADER)
    if text is None:
        return 0.0
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s < math.inf:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER!r} is {text[:64]!r}, but must be a number of seconds above 0",
            TIMEOUT_HEADER,
        )
    return timeout_s
