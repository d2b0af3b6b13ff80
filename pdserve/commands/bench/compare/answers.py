"""Whether servers that compute alike give the same answers, so that they differ in time alone.

Requests are greedy, so an answer depends on its prompt and on the formats that a server has
declared: its `system_fingerprint`, which names the revision of the model and the program. All modes
and policies of pdserve have one. Servers without, or with another one, are held against nobody.

Answers of measured runs are compared by their texts, since token ids would cost servers time that
they need not take otherwise; those of warm-ups also by their ids.
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

    def add(self, run: str, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
        """Compare what servers answered to the same requests, in a run of this name."""
        if len(outcomes) < 2:
            return
        by_format: dict[str, list[str]] = {}
        for server, said in outcomes.items():
            formats = sorted({outcome.format for outcome in said if outcome.digest})
            if len(formats) > 1:
                self.num_different += 1
                self._tell(f"{server} had {len(formats)} formats in {run}: {', '.join(formats)}")
            elif formats:
                by_format.setdefault(formats[0], []).append(server)
        for fingerprint, servers in by_format.items():
            if len(servers) > 1 and fingerprint:
                self._compare(run, {server: outcomes[server] for server in servers})
            else:
                self.alone += [server for server in servers if server not in self.alone]

    def _compare(self, run: str, runs: Mapping[str, Sequence[Outcome]]) -> None:
        for index, outcomes in enumerate(zip(*runs.values(), strict=True)):
            first: tuple[str, Outcome] | None = None
            for server, outcome in zip(runs, outcomes, strict=True):
                if not outcome.digest:
                    continue  # it was refused, or broke off
                if first is None:
                    first = server, outcome
                    continue
                self.num_compared += 1
                if outcome.digest != first[1].digest:
                    self._differ(run, index, server, outcome, *first)

    def _differ(
        self,
        run: str,
        index: int,
        server: str,
        outcome: Outcome,
        other: str,
        others: Outcome,
    ) -> None:
        self.num_different += 1
        self._tell(
            f"request {index} of {run} ({outcome.num_prompt} prompt tokens, "
            f"{outcome.num_output} to answer): {server} on {_where(outcome)} gave "
            f"{_which(outcome)}, {other} on {_where(others)} {_which(others)}"
        )

    def _tell(self, difference: str) -> None:
        if len(self.differences) < _MOST_TOLD:
            self.differences.append(difference)

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


def run_at(rate: float) -> str:
    """Return the name of a run."""
    return f"the run at {rate:.3g}/s"


def _which(outcome: Outcome) -> str:
    is_cut = outcome.num_received != outcome.num_output
    return outcome.digest + (f" ({outcome.num_received} tokens)" if is_cut else "")


def _where(outcome: Outcome) -> str:
    nodes = [node for node in (outcome.prefill_node, outcome.decode_node) if node]
    return " and ".join(nodes) or "nodes unknown"
