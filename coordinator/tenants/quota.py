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
from pdserve.errors import RateLimited


class Quota:
    """The rate limits of one tenant, shared by all its keys."""

    def __init__(self, tenant: Tenant, now_s: float) -> None:
        self._name = tenant.name
        self._requests = Bucket(tenant.requests_per_minute, now_s)
        self._tokens = Bucket(tenant.tokens_per_minute, now_s)

    def follow(self, tenant: Tenant, now_s: float) -> None:
        """Adopt the tenant's limits if they have changed."""
        if tenant.requests_per_minute != self._requests.per_minute:
            self._requests = self._requests.resized(tenant.requests_per_minute, now_s)
        if tenant.tokens_per_minute != self._tokens.per_minute:
            self._tokens = self._tokens.resized(tenant.tokens_per_minute, now_s)

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
        limit = self._tokens.per_minute
        if 0 < limit < num_tokens:
            raise RateLimited(
                f"the prompt has {num_tokens} tokens, but {self._name!r} may use only {limit} a "
                "minute",
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
        """Return OpenAI's x-ratelimit-* headers for the limits that are set."""
        found: dict[str, str] = {}
        for what, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket.per_minute:
                found[f"x-ratelimit-limit-{what}"] = str(bucket.per_minute)
                found[f"x-ratelimit-remaining-{what}"] = str(max(0, int(bucket.level(now_s))))
                found[f"x-ratelimit-reset-{what}"] = format_wait(bucket.full_s(now_s))
        return found

    def _limited(self, what: str, wait_s: float) -> RateLimited:
        bucket = self._requests if what == "requests" else self._tokens
        return RateLimited(
            f"{self._name!r} may use {bucket.per_minute} {what} a minute; "
            f"try again in {format_wait(wait_s)}",
            wait_s,
        )


def format_wait(seconds: float) -> str:
    """Format a duration as OpenAI does: "250ms", "12s", "1m30s"."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
