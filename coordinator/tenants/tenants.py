"""All tenants of a coordinator: identifies callers, and charges their calls."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from coordinator.tenants.identity import ANYBODY, Tenant
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.keys import key_id
from coordinator.tenants.ledger import HOUR_S, Account, Amounts, Ledger, Owed
from coordinator.tenants.quota import Quota
from pdserve.shared.clock import Clock
from pdserve.shared.errors import Unauthorized


@dataclass(slots=True)
class Admitted:
    """One call of an identified tenant. It must be ended (`Tenants.end`), whatever its outcome."""

    tenant: Tenant
    key_id: str
    quota: Quota | None  # None: unlimited
    num_charged: int = 0  # prompt tokens charged so far


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
        self._quotas: dict[str, Quota] = {}  # by tenant
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
            self._owe(admitted.tenant, admitted.quota)

    def take_prompt(self, admitted: Admitted, num_tokens: int) -> None:
        """Charge the prompt of a call. Raises RateLimited."""
        if admitted.quota is not None:
            now_s = self._clock.now()
            admitted.num_charged = admitted.quota.take_tokens(num_tokens, now_s)
            self._owe(admitted.tenant, admitted.quota)

    def share(self, num_coordinators: int) -> None:
        """From now on allow a part of the quotas: so many coordinators do the same."""
        self._num_shares = num_coordinators

    def headers(self, admitted: Admitted) -> dict[str, str]:
        """Return the rate limit headers for the call's tenant."""
        return {} if admitted.quota is None else admitted.quota.headers(self._clock.now())

    def end(self, admitted: Admitted, used: Amounts, model: str = "") -> None:
        """Charge the rest of a finished call, and record its usage of a model; empty: the first."""
        if admitted.quota is not None:
            spent = used.prompt_tokens + used.output_tokens
            admitted.quota.charge(spent - admitted.num_charged, self._clock.now())
            self._owe(admitted.tenant, admitted.quota)
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
        now_s = self._clock.now()
        quota = self._quotas.get(tenant.name)
        if quota is None:
            quota = self._quotas[tenant.name] = self._begun(tenant, now_s)
        quota.follow(tenant, self._num_shares, now_s)
        return quota

    def _begun(self, tenant: Tenant, now_s: float) -> Quota:
        """Return the quota as the coordinator before left it, refilled since then."""
        owed = None if self._ledger is None else self._ledger.owed(tenant.name)
        if owed is None:
            return Quota(tenant, now_s)
        since_s = max(0.0, self._since_1970() - owed.at_s)
        return Quota(tenant, now_s - since_s, (owed.requests, owed.tokens))

    def _owe(self, tenant: Tenant, quota: Quota) -> None:
        if self._ledger is not None:
            owed = quota.owed(self._clock.now())
            self._ledger.owe(tenant.name, Owed(*owed, at_s=self._since_1970()))
