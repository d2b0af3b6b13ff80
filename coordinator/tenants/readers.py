"""Who may read the state of a cluster: /status, /metrics, and what nodes tell of themselves."""

from __future__ import annotations

from collections.abc import Collection

from coordinator.tenants.tenants import Tenants
from pdserve.settings.access import hash_key
from pdserve.shared.errors import Unauthorized


class Readers:
    """By default, where callers need a key or there is a token for readers: who shows one."""

    def __init__(
        self,
        tenants: Tenants,
        token: str = "",
        supervisor_token: str = "",
        *,
        anybody: bool = False,
    ) -> None:
        """
        Args:
            tenants: whose keys may read.
            token: that of who scrapes; empty: there is none.
            supervisor_token: that of who has started this process; empty: nobody in particular.
            anybody: may read, whatever there is.
        """
        self._tenants = tenants
        self._hashes: Collection[str] = {
            hash_key(known) for known in (token, supervisor_token) if known
        }
        self._is_open = anybody or not (token or tenants.need_keys)

    def may_read(self, key_hash: str) -> bool:
        """Return whether who shows the key or token of this hash may; empty: who shows none."""
        return self._is_open or key_hash in self._hashes or self._tenants.know(key_hash)

    def check(self, shown: str | None) -> None:
        """Check who shows this. Raises Unauthorized."""
        if not self.may_read("" if shown is None else hash_key(shown)):
            raise Unauthorized(
                "an API key or the token of access.metrics_token_file is needed to read the state "
                "of this cluster: send it as 'Authorization: Bearer' (commands send "
                "PDSERVE_API_KEY), or let anybody read it with access.readers"
            )
