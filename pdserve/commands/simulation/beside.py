"""What the event loop of a node does beside its steps: for requests, on the cores of the steps."""

from __future__ import annotations

from pdserve.commands.simulation.events import Action, Events
from pdserve.commands.simulation.host import Host, Service


class BesideSteps:
    """One thing after the other, while steps run and between them."""

    def __init__(self, events: Events, host: Host, node: object) -> None:
        """`node` has joined the host."""
        self._events = events
        self._host = host
        self._node = node
        self._service: Service | None = None  # made when all nodes have joined
        self._until_s = 0.0  # by when all is done, on a host of its own
        self._owed_s = 0.0  # of this, what the next step makes time for

    def do(self, seconds: float, then: Action, *, is_stepping: bool) -> None:
        """Do something that takes so long where nothing else wants the core, and call `then`.

        On a host that is shared it has a part of a core. Steps on another one may be many at a
        time (`stride.py`): there the step that runs is not slowed, but the next one begins later.
        """
        if self._host.is_shared:
            if self._service is None:
                cores = self._host.service_cores(self._node)
                self._service = Service(self._events, self._host, cores)
            self._service.do(seconds, then)
            return
        if is_stepping:
            self._owed_s += seconds
        self._until_s = max(self._until_s, self._events.now_s) + seconds
        self._events.at(self._until_s, then)

    def take_owed_s(self) -> float:
        """Return by how much the step that begins is longer."""
        owed_s, self._owed_s = self._owed_s, 0.0
        return owed_s
