"""What an operator asks of a coordinator: POST to its /admin endpoints."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from pdserve.commands.cluster.coordinator_http import Trust, key_headers, request
from pdserve.shared.errors import ClusterError, from_code

T = TypeVar("T")


class _Detail(msgspec.Struct, frozen=True):
    message: str
    code: str | None = None


class _Failure(msgspec.Struct, frozen=True):
    error: _Detail


async def post_admin(
    url: str,
    path: str,
    body: dict[str, object],
    *,
    answer: type[T],
    timeout_s: float,
    trust: Trust = True,
) -> T:
    """Return the answer of the coordinator at `url`.

    Raises:
        PdserveError: no answer in time, or what the coordinator says of it.
    """
    code, content = await request(
        "POST", url, path, timeout_s=timeout_s, headers=key_headers(), body=body, trust=trust
    )
    try:
        if code == 200:
            return msgspec.json.decode(content, type=answer)
        failure = msgspec.json.decode(content, type=_Failure).error
    except msgspec.DecodeError as error:
        raise ClusterError(
            f"{url}{path} answers {code}, but not in a coordinator's form: {error}"
        ) from error
    raise from_code(failure.code or "cluster_error", failure.message)
