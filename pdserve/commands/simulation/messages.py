"""What client and coordinator do for calls: requests on their way in, tokens on their way out.

Each is one event loop. On a host of its own the coordinator gets an answer's tokens all at once,
when it ends: steps need not be looked at one by one then (`stride.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.commands.simulation.events import Action
from pdserve.commands.simulation.host import Service, Task
from pdserve.measured.calibration import ServiceTimes


@dataclass(slots=True)
class Server:
    """A service, and what it takes for what passes through it."""

    service: Service
    times: ServiceTimes
    _steps: Task | None = None  # the newest that hands on tokens

    def request(self, num_prompt: int, then: Action) -> None:
        """Take a request in."""
        times = self.times
        self.service.do(times.request_s + times.prompt_token_s * num_prompt, then)

    def step(self, num_tokens: int, then: Action) -> None:
        """Hand on the tokens of a step; with those of others, if they wait for their turn.

        An event loop that is behind finds several messages at once: each round costs it as much as
        one step, whatever there is to read.
        """
        token_s = num_tokens * self.times.token_s
        waiting = self._steps
        if waiting is not None and waiting.began_s is None:
            waiting.seconds += token_s
            waiting.thens.append(then)
        else:
            self._steps = self.service.do(self.times.step_s + token_s, then)

    def answer(self, num_tokens: int, batch: int) -> None:
        """Hand on a whole answer, which shared each of its steps with so many others."""
        times = self.times
        self.service.do(num_tokens * (times.token_s + times.step_s / batch), _nothing)


@dataclass(frozen=True, slots=True)
class Messages:
    """The processes between users and nodes; None: it takes no time."""

    coordinator: Server | None = None
    client: Server | None = None  # where it is on the nodes' host, with all requests

    @property
    def busy_s(self) -> dict[str, float]:
        """Service |-> for how long it has had something to do."""
        servers = {"coordinator": self.coordinator, "client": self.client}
        return {name: of.service.busy_s for name, of in servers.items() if of is not None}

    def send(self, num_prompt: int, then: Action) -> None:
        """Have the client send a request."""
        if self.client is None:
            then()
        else:
            self.client.request(num_prompt, then)

    def accept(self, num_prompt: int, then: Action) -> None:
        """Have the coordinator take a request in."""
        if self.coordinator is None:
            then()
        else:
            self.coordinator.request(num_prompt, then)

    def tell(self, num_tokens: int, then: Action) -> None:
        """Hand on the tokens of a step to the client; `then`: it has them."""
        coordinator, client = self.coordinator, self.client
        assert coordinator is not None, "the client is behind it"
        assert client is not None, "others have tokens at once"
        coordinator.step(num_tokens, lambda: client.step(num_tokens, then))

    def told(self, num_tokens: int, batch: int) -> None:
        """Note that an answer has ended, which shared steps with so many others."""
        if self.coordinator is not None and self.client is None:
            self.coordinator.answer(num_tokens, batch)


def _nothing() -> None:
    """Nobody waits for it."""
