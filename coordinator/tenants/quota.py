"""Rate limits of one tenant: requests and tokens per minute.

A request is charged when it arrives, its prompt when it has been read, and its output when it has
ended: its length is not known before, and charging `max_tokens` would refuse requests that are
within the limit. So requests in flight may overdraw the token bucket, and the next request is
refused until the bucket is refilled.
"""

from __future__ import annotations

import math

from coordinator.tenants.buckets import Bucket
from coordinator.tenants.identity import Tenant
from pdserve.shared.errors import RateLimited


class Quota:
    """The rate limits of one tenant, shared by all its keys.

    Each of `num_shares` coordinators allows an equal part of them.
    """

    def __init__(
        self,
        tenant: Tenant,
        now_s: float,
        owed: tuple[float, float] = (0.0, 0.0),
        model: str = "",
    ) -> None:
        """
        Args:
            owed: the requests and tokens that are missing from full buckets.
            model: the one that the limits are about; empty: all together.
        """
        self._of = f" of {model!r}" if model else ""
        self._tenant = tenant
        self._num_shares = 1
        self._requests = Bucket(tenant.requests_per_minute, now_s)
        self._tokens = Bucket(tenant.tokens_per_minute, now_s)
        self._requests.take(owed[0], now_s)
        self._tokens.take(owed[1], now_s)

    def owed(self, now_s: float) -> tuple[float, float]:
        """Return the requests and tokens that are missing from full buckets."""
        return self._requests.missing(now_s), self._tokens.missing(now_s)

    def follow(self, tenant: Tenant, num_shares: int, now_s: float) -> None:
        """Adopt the tenant's limits, and this coordinator's part, if they have changed."""
        self._tenant, self._num_shares = tenant, num_shares
        requests = -(-tenant.requests_per_minute // num_shares)
        if requests != self._requests.per_minute:
            self._requests = self._requests.resized(requests, now_s)
        tokens = -(-tenant.tokens_per_minute // num_shares)
        if tokens != self._tokens.per_minute:
            self._tokens = self._tokens.resized(tokens, now_s)

    def take_request(self, now_s: float) -> None:
        """Charge one request. Raises RateLimited if a limit is reached."""
        wait_s = max(self._requests.wait_s(1, now_s), self._tokens.wait_s(1, now_s))
        if wait_s > 0:
            of_requests = self._requests.wait_s(1, now_s) > 0
            raise self._limited("requests" if of_requests else "tokens", wait_s)
        self._requests.take(1, now_s)

    def take_tokens(self, num_tokens: int, now_s: float) -> int:
        """Charge the tokens of a prompt; returns how many were charged: none without a limit.

        Raises RateLimited if the limit is reached, or the prompt is larger than the limit itself.
        """
        limit = self._tenant.tokens_per_minute
        if 0 < limit < num_tokens:
            raise RateLimited(
                f"the prompt has {num_tokens} tokens, but {self._tenant.name!r} may use only "
                f"{limit}{self._of} a minute",
                math.inf,
            )
        wait_s = self._tokens.wait_s(num_tokens, now_s)
        if wait_s > 0:
            raise self._limited("tokens", wait_s)
        self._tokens.take(num_tokens, now_s)
        return num_tokens if limit else 0

    def charge(self, num_tokens: int, now_s: float) -> None:
        """Charge output tokens; a negative number returns prompt tokens that were not used."""
        self._tokens.take(num_tokens, now_s)

    def headers(self, now_s: float) -> dict[str, str]:
        """Return OpenAI's x-ratelimit-* headers for the limits that are set.

        What remains is what would, if all coordinators had allowed as much as this one.
        """
        found: dict[str, str] = {}
        limits = self._tenant.requests_per_minute, self._tenant.tokens_per_minute
        buckets = self._requests, self._tokens
        for what, limit, bucket in zip(("requests", "tokens"), limits, buckets, strict=True):
            if limit:
                left = min(limit, self._num_shares * int(bucket.level(now_s)))
                found[f"x-ratelimit-limit-{what}"] = str(limit)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, left))
                found[f"x-ratelimit-reset-{what}"] = format_wait(bucket.full_s(now_s))
        return found

    def _limited(self, what: str, wait_s: float) -> RateLimited:
        tenant = self._tenant
        limit = tenant.requests_per_minute if what == "requests" else tenant.tokens_per_minute
        return RateLimited(
            f"{tenant.name!r} may use {limit} {what}{self._of} a minute; try again in "
            f"{format_wait(wait_s)}",
            wait_s,
        )


def format_wait(seconds: float) -> str:
    """Format a duration as OpenAI does: "250ms", "12s", "1m30s"."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
