"""A call: one request of a user, as a simulation knows it."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.protocol import Prompt, Slo

MOST_OUTPUT = 2048  # tokens
NO_PROMISE = Slo()


@dataclass(frozen=True, slots=True)
class Call:
    """One request of a user."""

    call_id: str
    at_s: float
    prompt: Prompt  # its tokens may be those of a `KnownPrompt`
    num_output: int
    slo: Slo = NO_PROMISE
    most_output: int = MOST_OUTPUT  # the user's limit; schedulers do not know `num_output`,
    is_exact: bool = False  # unless the user wants just so many, and says so
    kind: str = ""
    after: str = ""  # id of the call whose end it waits for; empty: none
    think_s: float = 0.0  # from that end until it arrives

    @property
    def max_tokens(self) -> int:
        """The most output tokens that the schedulers must expect."""
        return self.num_output if self.is_exact else max(self.num_output, self.most_output)
