"""Adapters of a life: what nodes have, and who loads and unloads them when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

from coordinator.adapters.known import last_place
from pdserve.shared.errors import AdapterRefused, PdserveError
from tests.lives.coordinator import CoordinatorProcess
from tests.lives.machine import Machine
from tests.lives.trace import Trace

FILES = {f"/{letter}": letter * 32 for letter in "abc"}  # path |-> digest
INVOCATIONS = {"c" * 32: (7,)}  # of an aLoRA, by digest
DAMAGED = "/damaged"
NAMES = ["one", "two"]
NUM_BYTES = 1000


@dataclass(frozen=True)
class LifeFiles:
    """What was read."""

    digest: str
    num_bytes: int = NUM_BYTES

    @property
    def invocation(self) -> tuple[int, ...]:
        """Tokens from which on it computes."""
        return INVOCATIONS.get(self.digest, ())


class LifeStore:
    """As `pdserve.engine.adapters.store.Adapters`, in a machine's memory."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def load(self, path: Path) -> LifeFiles:
        if (digest := FILES.get(str(path))) is None:
            raise AdapterRefused(f"{path} is damaged")
        self._machine.adapters.add(digest)
        return LifeFiles(digest)

    def unload(self, digest: str) -> None:
        self._machine.adapters.remove(digest)


@dataclass(frozen=True)
class AdapterOrder:
    """What an operator asks for at some time, whether or not it can be done then."""

    at_s: float
    kind: Literal["load", "replace", "unload"]
    name: str
    path: str = ""

    def start(self, coordinator: CoordinatorProcess, trace: Trace) -> None:
        """Ask; runs in the coordinator."""
        coordinator.spawn(self._carry_out(coordinator, trace))

    async def _carry_out(self, coordinator: CoordinatorProcess, trace: Trace) -> None:
        trace.note("operator", self.kind, self.name, self.path)
        try:
            if self.kind == "unload":
                await coordinator.adapters.unload(self.name)
            else:
                in_place = self.kind == "replace"
                await coordinator.adapters.load(self.name, self.path, in_place=in_place)
        except PdserveError as error:
            trace.note("operator", self.name, "is told", error.code, error)
        else:
            trace.note("operator", self.kind, self.name, "is done")


def begins_at(digest: str, prompt: Sequence[int]) -> int:
    """The first position that an adapter computes of a prompt."""
    begin = last_place(INVOCATIONS.get(digest, ()), prompt)
    assert begin is not None, "else the call was refused"
    return begin


def random_orders(
    random: Random, first_s: float, paths: Mapping[str, str], *, is_declared: bool
) -> list[AdapterOrder]:
    """All names are loaded before calls come, or by the settings; then anything may happen."""
    begun = (
        []
        if is_declared
        else [AdapterOrder(first_s - 0.5, "load", name, path) for name, path in paths.items()]
    )
    others = [*FILES, *FILES, DAMAGED]
    return begun + [
        AdapterOrder(
            first_s + random.uniform(0.0, 4.0),
            random.choice(["load", "replace", "unload"]),
            random.choice(NAMES),
            random.choice(others),
        )
        for _ in range(random.randrange(9))
    ]
