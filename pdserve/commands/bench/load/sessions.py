"""Conversations and agents: requests that wait for the answer to the one before, and extend it.

All begin with the same system prompt. Each turn's prompt is the one before, its answer, and what
the user (or a tool) adds after a time to think, so prefixes grow, and a slow server gets its
requests later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from pdserve.commands.bench.load.scenarios import MODEL_LEN, Lengths, draw
from pdserve.commands.bench.load.traces import TraceRow
from pdserve.shared.errors import ConfigError

_BLOCK = 64  # tokens
_SHARED, _OWN = 0, 1 << 20  # ids of blocks: of the system prompt, and from where a session's are
_SESSION = 1 << 10  # most blocks of one session
_APART_S = 10.0  # between two sessions; only relative times matter


@dataclass(frozen=True, slots=True)
class ClientSessions:
    """Sessions of several turns."""

    name: str
    shows: str  # its purpose, in one line
    system: int  # tokens, the same for all sessions
    turns: Lengths
    added: Lengths  # tokens, by the user or a tool in each turn
    output: Lengths
    think_ms: Lengths
    ttft_scale: float  # as of a Scenario
    tpot_scale: float

    def rows(
        self, count: int, max_model_len: int, length_scale: float, seed: int
    ) -> list[TraceRow]:
        """Return `count` requests or a few more, in order of the times at which sessions begin.

        Raises:
            ConfigError: the first turn does not fit the model.
        """
        factor = min(1.0, max_model_len / MODEL_LEN) * length_scale
        if (self.system + self.added.most + self.output.most) * factor > max_model_len:
            raise ConfigError(
                f"length_scale {length_scale:g}: a first turn of {self.name} does not fit a "
                f"model of {max_model_len} tokens"
            )
        rng, rows, session, at_s = np.random.default_rng(seed), list[TraceRow](), 0, 0.0
        while len(rows) < count:
            at_s += float(rng.exponential(_APART_S))
            rows += self._session(session, at_s, len(rows), max_model_len, factor, rng)
            session += 1
        return rows

    def _session(
        self, session: int, at_s: float, first: int, longest: int, factor: float,
        rng: np.random.Generator,
    ) -> Iterator[TraceRow]:  # fmt: skip
        """Yield the turns of one session, until the model cannot take the next one."""
        added, output = self.added.scaled(factor), self.output.scaled(factor)
        num_shared = max(1, round(self.system * factor / _BLOCK))
        num_prompt, think_s = num_shared * _BLOCK, 0.0
        for turn in range(draw(self.turns, rng)):
            num_prompt += draw(added, rng)
            num_output = draw(output, rng)
            if num_prompt + num_output > longest:
                return
            num_own = -(-num_prompt // _BLOCK) - num_shared
            own = _OWN + session * _SESSION
            yield TraceRow(
                at_s,
                num_prompt,
                num_output,
                (*range(_SHARED, num_shared), *range(own, own + num_own)),
                _BLOCK,
                "later turn" if turn else "first turn",
                first + turn - 1 if turn else None,
                think_s,
            )
            num_prompt += num_output
            think_s = draw(self.think_ms, rng) / 1e3


SESSIONS: Final[dict[str, ClientSessions]] = {
    "chats": ClientSessions(
        name="chats",
        shows="conversations of some turns, each after the answer to the one before",
        system=256,
        turns=Lengths(4, 0.6, 1, 16),
        added=Lengths(60, 0.8, 8, 600),
        output=Lengths(120, 0.6, 16, 500),
        think_ms=Lengths(3000, 0.8, 500, 20000),
        ttft_scale=5.0,
        tpot_scale=3.0,
    ),
    "agents": ClientSessions(
        name="agents",
        shows="agents: many turns, long results of tools, short answers, no pauses",
        system=1536,
        turns=Lengths(8, 0.5, 2, 30),
        added=Lengths(250, 1.0, 20, 2000),
        output=Lengths(40, 0.6, 8, 200),
        think_ms=Lengths(300, 1.0, 20, 5000),
        ttft_scale=5.0,
        tpot_scale=3.0,
    ),
}
