"""`pdserve doctor --cluster`: asks coordinators, checks what they tell, and says what to do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from pdserve.commands.cli.doctor.cluster.https import https_end
from pdserve.commands.cluster.coordinator_http import Trust
from pdserve.commands.cluster.status import fetch_status
from pdserve.findings.certificates import https_findings
from pdserve.findings.checks import findings, worst_first
from pdserve.findings.coordinators import agreement_findings
from pdserve.findings.finding import Finding, Level, problem
from pdserve.protocol.status import ClusterStatus
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.exit_codes import FAILED, OK

_STYLES = {Level.PROBLEM: "bold red", Level.WARNING: "yellow", Level.OK: "green"}


def run(urls: Sequence[str], trust: Trust = True, *, as_json: bool) -> int:
    """Check the cluster of these coordinators and print it; the exit code is 1 for a problem."""
    told = asyncio.run(diagnose(urls, trust))
    if as_json:
        print(json.dumps(msgspec.to_builtins(told), indent=2))
    else:
        console = Console()
        for found in told:
            console.print(line(found), soft_wrap=True)
    return FAILED if any(found.level is Level.PROBLEM for found in told) else OK


async def diagnose(urls: Sequence[str], trust: Trust = True) -> list[Finding]:
    """Ask every coordinator once; the worst findings come first."""
    asked = await asyncio.gather(*(_ask(url, trust) for url in urls))
    told = dict(zip(urls, asked, strict=True))
    found = [answer for answer in told.values() if isinstance(answer, Finding)]
    answers = {url: answer for url, answer in told.items() if isinstance(answer, _Answer)}
    if answers:
        statuses = {url: answer.status for url, answer in answers.items()}
        https = {url: answer.https_end for url, answer in answers.items() if answer.https_end}
        found += [*_checked(statuses), *agreement_findings(statuses)]
        found += https_findings(https, time.time())
    return worst_first(found)


def line(found: Finding) -> Text:
    """One line: how bad, what is checked, what is so, and what to do."""
    where = f"{found.coordinator}: " if found.coordinator else ""
    text = Text.assemble(
        (f"{found.level:9}", _STYLES[found.level]), f"{found.check:13} {where}{found.what}"
    )
    return text.append(f" -> {found.advice}", "bold") if found.advice else text


class _Answer(msgspec.Struct, frozen=True):
    """What a coordinator tells, and shows."""

    status: ClusterStatus
    https_end: float | None  # of its certificate, in seconds since 1970; None: it speaks HTTP


async def _ask(url: str, trust: Trust) -> _Answer | Finding:
    try:
        return _Answer(await fetch_status(url, trust=trust), await https_end(url, trust))
    except ClusterError as error:
        advice = (
            "if /health does not answer on its own machine either, look at the end of its log and "
            "at its exit code, and start it again; nodes dial again by themselves"
        )
        return problem("coordinators", str(error), advice)


def _checked(answers: Mapping[str, ClusterStatus]) -> Iterator[Finding]:
    """Yield what each coordinator tells; what all of them tell, once."""
    told = {url: findings(status, time.time()) for url, status in answers.items()}
    common = set.intersection(*map(set, told.values())) if told else set()
    for index, (url, ones) in enumerate(told.items()):
        for found in ones:
            if found not in common:
                yield replace(found, coordinator=url)
            elif index == 0:
                yield found
