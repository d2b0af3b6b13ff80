"""`pdserve revisions`: shows or changes which revisions of the model serve side by side."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.commands.cluster.admin import post_admin
from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.commands.cluster.status import fetch_status
from pdserve.settings.values import parse_shares
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.exit_codes import OK

_TIMEOUT_S = 10.0


class _Answer(msgspec.Struct, frozen=True):
    shares: dict[str, float]
    attached: list[str]


def run(url: str, shares: Sequence[str], trust: Trust = True) -> int:
    """Set the shares, each "REVISION=SHARE", if there are any, and print a table; the exit code.

    Raises:
        PdserveError: no answer, a share that cannot be read, or the coordinator refuses them.
    """
    try:
        parsed = parse_shares(shares)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return asyncio.run(_run(url, parsed or None, trust))


async def _run(url: str, shares: Mapping[str, float] | None, trust: Trust) -> int:
    body: dict[str, object] = {} if shares is None else {"shares": shares}
    answer = await post_admin(
        url, "/admin/revisions", body, answer=_Answer, timeout_s=_TIMEOUT_S, trust=trust
    )
    nodes = Counter(node.revision for node in (await fetch_status(url, trust=trust)).nodes)
    print("\n".join(table(answer.shares, nodes)))
    return OK


def table(shares: Mapping[str, float], nodes: Mapping[str, int]) -> list[str]:
    """One line for each revision that has nodes or a share."""
    named = {r: name for r in nodes for name in shares if r.startswith(name)}
    missing = [name for name in shares if name not in named.values()]
    width = max(map(len, [*nodes, *missing, "revision"]))
    lines = [f"{'revision':{width}}  nodes  share"]
    for revision in [*sorted(nodes), *missing]:
        share = shares.get(named.get(revision, revision))
        told = "all" if not shares else "none" if share is None else f"{share:g}"
        lines.append(f"{revision:{width}}  {nodes.get(revision, 0):5}  {told:>5}")
    return lines
