"""All tenants of a coordinator: identifies callers, and charges their calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from coordinator.tenants.identity import ANYBODY, Tenant
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.keys import key_id
from coordinator.tenants.ledger import HOUR_S, Account, Amounts, Ledger, Owed
from coordinator.tenants.quota import Quota
from pdserve.shared.clock import Clock
from pdserve.shared.errors import RateLimited, Unauthorized


@dataclass(slots=True)
class Admitted:
    """One call of an identified tenant. It must be ended (`Tenants.end`), whatever its outcome."""

    tenant: Tenant
    key_id: str
    quota: Quota | None  # None: unlimited
    num_charged: int = 0  # prompt tokens charged so far
    num_charged_of_model: int = 0  # of these, against the limit of the model that is asked


class Tenants:
    """Identifies callers by key. Without keys, every caller is `ANYBODY`."""

    def __init__(
        self,
        keys: KeyBook | None,
        ledger: Ledger | None,
        model: str,
        clock: Clock,
        since_1970: Callable[[], float] = time.time,
    ) -> None:
        """`since_1970` returns seconds, which the next process can read."""
        self._keys = keys
        self._ledger = ledger
        self._model = model
        self._clock = clock
        self._since_1970 = since_1970
        self._quotas: dict[str, Quota] = {}  # by tenant, and by tenant/model
        self._num_shares = 1

    @property
    def need_keys(self) -> bool:
        """Whether callers need a key."""
        return self._keys is not None

    def identify(self, key: str | None) -> Admitted:
        """Identify the tenant of a call by its key.

        Raises:
            Unauthorized: there is no key, or the key is unknown.
        """
        if self._keys is None:
            return Admitted(ANYBODY, "", None)
        if key is None:
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
        owner = self._keys.owner(key)
        if owner is None:
            raise Unauthorized("this API key is unknown here")
        tenant, key_hash = owner
        return Admitted(tenant, key_id(key_hash), self._quota(tenant))

    def know(self, key_hash: str) -> bool:
        """Return whether this is the hash of a tenant's key."""
        return self._keys is not None and self._keys.has(key_hash)

    def stand_in(self, owner: str, key_id: str) -> Admitted | None:
        """Return the caller of a call that is made again for a tenant; None if it is gone."""
        if self._keys is None:
            return None if owner else Admitted(ANYBODY, "", None)
        tenant = self._keys.tenant(owner)
        return None if tenant is None else Admitted(tenant, key_id, self._quota(tenant))

    def begin(self, admitted: Admitted) -> None:
        """Charge the start of a call. Raises RateLimited."""
        if admitted.quota is not None:
            admitted.quota.take_request(self._clock.now())
            self._owe(admitted.tenant.name, admitted.quota)

    def take_prompt(self, admitted: Admitted, num_tokens: int, model: str = "") -> None:
        """Charge the prompt of a call for a model; empty: the first. Raises RateLimited."""
        now_s, of_model = self._clock.now(), self._quota_of(admitted.tenant, model)
        if of_model is not None:
            admitted.num_charged_of_model = of_model.take_tokens(num_tokens, now_s)
            self._owe(self._key(admitted.tenant, model), of_model)
        if admitted.quota is not None:
            try:
                admitted.num_charged = admitted.quota.take_tokens(num_tokens, now_s)
            except RateLimited:
                if of_model is not None:
                    of_model.charge(-admitted.num_charged_of_model, now_s)
                    admitted.num_charged_of_model = 0
                raise
            self._owe(admitted.tenant.name, admitted.quota)

    def share(self, num_coordinators: int) -> None:
        """From now on allow a part of the quotas: so many coordinators do the same."""
        self._num_shares = num_coordinators

    def headers(self, admitted: Admitted) -> dict[str, str]:
        """Return the rate limit headers for the call's tenant."""
        return {} if admitted.quota is None else admitted.quota.headers(self._clock.now())

    def end(self, admitted: Admitted, used: Amounts, model: str = "") -> None:
        """Charge the rest of a finished call, and record its usage of a model; empty: the first."""
        spent, now_s = used.prompt_tokens + used.output_tokens, self._clock.now()
        if admitted.quota is not None:
            admitted.quota.charge(spent - admitted.num_charged, now_s)
            self._owe(admitted.tenant.name, admitted.quota)
        if (of_model := self._quota_of(admitted.tenant, model)) is not None:
            of_model.charge(spent - admitted.num_charged_of_model, now_s)
            self._owe(self._key(admitted.tenant, model), of_model)
        admitted.num_charged = admitted.num_charged_of_model = 0  # a further tier has its own
        if self._ledger is not None:
            hour = int(self._since_1970()) // HOUR_S
            account = Account(hour, admitted.tenant.name, admitted.key_id, model or self._model)
            self._ledger.add(account, used)

    def close(self) -> None:
        """Write pending usage and close the ledger."""
        if self._ledger is not None:
            self._ledger.close()

    def _quota(self, tenant: Tenant) -> Quota | None:
        if not (tenant.requests_per_minute or tenant.tokens_per_minute):
            self._quotas.pop(tenant.name, None)
            return None
        return self._followed(tenant.name, tenant)

    def _quota_of(self, tenant: Tenant, model: str) -> Quota | None:
        """Return the tenant's limit of one model; None: it has none."""
        key, limit = (
            self._key(tenant, model),
            tenant.model_tokens_per_minute.get(model or self._model, 0),
        )
        if not limit:
            self._quotas.pop(key, None)
            return None
        limited = replace(tenant, requests_per_minute=0, tokens_per_minute=limit)
        return self._followed(key, limited, model or self._model)

    def _key(self, tenant: Tenant, model: str) -> str:
        return f"{tenant.name}/{model or self._model}"  # no tenant's name has a slash

    def _followed(self, key: str, tenant: Tenant, model: str = "") -> Quota:
        """Return the quota of this key, with the limits that the tenant has now."""
        now_s = self._clock.now()
        quota = self._quotas.get(key)
        if quota is None:
            quota = self._quotas[key] = self._begun(key, tenant, now_s, model)
        quota.follow(tenant, self._num_shares, now_s)
        return quota

    def _begun(self, key: str, tenant: Tenant, now_s: float, model: str) -> Quota:
        """Return the quota as the coordinator before left it, refilled since then."""
        owed = None if self._ledger is None else self._ledger.owed(key)
        if owed is None:
            return Quota(tenant, now_s, model=model)
        since_s = max(0.0, self._since_1970() - owed.at_s)
        return Quota(tenant, now_s - since_s, (owed.requests, owed.tokens), model)

    def _owe(self, key: str, quota: Quota) -> None:
        if self._ledger is not None:
            owed = quota.owed(self._clock.now())
            self._ledger.owe(key, Owed(*owed, at_s=self._since_1970()))
