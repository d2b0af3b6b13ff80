"""Whether servers that compute alike give the same answers, so that they differ in time alone.

Requests are greedy, so an answer depends on its prompt and on the formats that a server has
declared: its `system_fingerprint`, which names the revision of the model and the program. All modes
and policies of pdserve have one. Servers without, or with another one, are held against nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from pdserve.commands.bench.load.outcome import Outcome

_MOST_TOLD: Final = 5  # differences that are told one by one


class Answers(msgspec.Struct):
    """What was compared in one scenario."""

    num_compared: int = 0  # answers that another server gave, too
    num_different: int = 0  # of these
    differences: list[str] = []  # where; the first ones
    alone: list[str] = []  # servers with formats of their own, if any were compared

    def add(self, rate: float, runs: Mapping[str, Sequence[Outcome]]) -> None:
        """Compare runs of the same requests, by server."""
        if len(runs) < 2:
            return
        by_format: dict[str, list[str]] = {}
        for server, outcomes in runs.items():
            formats = {outcome.format for outcome in outcomes if outcome.digest}
            if formats:
                by_format.setdefault(",".join(sorted(formats)), []).append(server)
        for fingerprint, servers in by_format.items():
            if len(servers) > 1 and fingerprint:
                self._compare(rate, {server: runs[server] for server in servers})
            else:
                self.alone += [server for server in servers if server not in self.alone]

    def _compare(self, rate: float, runs: Mapping[str, Sequence[Outcome]]) -> None:
        for index, outcomes in enumerate(zip(*runs.values(), strict=True)):
            first: tuple[str, Outcome] | None = None
            for server, outcome in zip(runs, outcomes, strict=True):
                if not outcome.digest:
                    continue  # it was refused, or did not end
                if first is None:
                    first = server, outcome
                    continue
                self.num_compared += 1
                if outcome.digest != first[1].digest:
                    self._differ(rate, index, server, outcome, *first)

    def _differ(
        self,
        rate: float,
        index: int,
        server: str,
        outcome: Outcome,
        other: str,
        others: Outcome,
    ) -> None:
        self.num_different += 1
        if len(self.differences) < _MOST_TOLD:
            self.differences.append(
                f"request {index} of the run at {rate:.3g}/s ({outcome.num_prompt} prompt tokens, "
                f"{outcome.num_output} to answer): {server} on {_where(outcome)} gave "
                f"{outcome.digest}, {other} on {_where(others)} {others.digest}"
            )

    @property
    def text(self) -> str:
        """For people; empty if nothing was compared."""
        if self.num_different:
            found = f"{self.num_different} of {self.num_compared} answers differ, and must not"
            return f"{found}: {'; '.join(self.differences)}"
        if not self.num_compared:
            return ""
        said = f"{self.num_compared} answers were compared, and are the same"
        return f"{said}; {', '.join(self.alone)} not among them" if self.alone else said


def _where(outcome: Outcome) -> str:
    nodes = [node for node in (outcome.prefill_node, outcome.decode_node) if node]
    return " and ".join(nodes) or "nodes unknown"
