"""All tenants of a coordinator: who a key belongs to, and what its calls cost it."""

from __future__ import annotations

import time
from dataclasses import dataclass

from coordinator.tenants.identity import ANYBODY, Tenant
from coordinator.tenants.key_book import KeyBook
from coordinator.tenants.keys import key_id
from coordinator.tenants.ledger import HOUR_S, Account, Amounts, Ledger
from coordinator.tenants.quota import Quota
from pdserve.clock import Clock
from pdserve.errors import Unauthorized


@dataclass(slots=True)
class Admitted:
    """One call that its tenant may make. `end` it, whatever becomes of it."""

    tenant: Tenant
    key_id: str
    quota: Quota | None  # None: without limits
    num_charged: int = 0  # tokens of its prompt


class Tenants:
    """Tells callers apart. Without keys, everybody is `ANYBODY`."""

    def __init__(self, keys: KeyBook | None, ledger: Ledger | None, model: str, clock: Clock):
        self._keys = keys
        self._ledger = ledger
        self._model = model
        self._clock = clock
        self._quotas: dict[str, Quota] = {}  # by tenant

    def identify(self, key: str | None) -> Admitted:
        """Whose call this is.

        Raises:
            Unauthorized: no key, or nobody's.
        """
        if self._keys is None:
            return Admitted(ANYBODY, "", None)
        if key is None:
            raise Unauthorized("an API key is needed: send it as 'Authorization: Bearer KEY'")
        owner = self._keys.owner(key)
        if owner is None:
            raise Unauthorized("the API key is nobody's here")
        tenant, key_hash = owner
        return Admitted(tenant, key_id(key_hash), self._quota(tenant))

    def begin(self, admitted: Admitted) -> None:
        """It begins. Raises RateLimited."""
        if admitted.quota is not None:
            admitted.quota.take_request(self._clock.now())

    def take_prompt(self, admitted: Admitted, num_tokens: int) -> None:
        """Its prompt has been read. Raises RateLimited."""
        if admitted.quota is not None:
            admitted.quota.take_tokens(num_tokens, self._clock.now())
            admitted.num_charged = num_tokens

    def headers(self, admitted: Admitted) -> dict[str, str]:
        """What its tenant is told of its limits."""
        return {} if admitted.quota is None else admitted.quota.headers(self._clock.now())

    def end(self, admitted: Admitted, used: Amounts) -> None:
        """It is over; `used` is what it came to."""
        if admitted.quota is not None:
            spent = used.prompt_tokens + used.output_tokens
            admitted.quota.charge(spent - admitted.num_charged, self._clock.now())
        if self._ledger is not None:
            hour = int(time.time()) // HOUR_S
            account = Account(hour, admitted.tenant.name, admitted.key_id, self._model)
            self._ledger.add(account, used)

    def close(self) -> None:
        """Write down what is not written yet."""
        if self._ledger is not None:
            self._ledger.close()

    def _quota(self, tenant: Tenant) -> Quota | None:
        if not (tenant.requests_per_minute or tenant.tokens_per_minute):
            self._quotas.pop(tenant.name, None)
            return None
        now_s = self._clock.now()
        quota = self._quotas.get(tenant.name)
        if quota is None:
            quota = self._quotas[tenant.name] = Quota(tenant, now_s)
        quota.follow(tenant, now_s)
        return quota
