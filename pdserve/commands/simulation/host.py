"""A host whose nodes share one memory bus, and cores with each other and with what is in front.

Profiles do not show what nodes cost each other, since each node measures itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from pdserve.commands.cluster.placement import assign_cores
from pdserve.measured.calibration import Sharing
from pdserve.measured.perf_model import StepShape


class _Step(NamedTuple):
    """A step that runs."""

    shape: StepShape
    front_cores: float  # cores' worth of work that its tokens are for coordinator and clients


def front_work_s(sharing: Sharing, num_sampled: int, num_prompts: int) -> float:
    """Return the CPU time that a step's tokens are for the coordinator and clients.

    That of requests is counted with their first token.
    """
    if not num_sampled:
        return 0.0
    tokens_s = sharing.front_step_s + sharing.front_token_s * num_sampled
    return tokens_s + sharing.front_request_s * num_prompts


@dataclass(slots=True)
class Host:
    """A host, its nodes, and the steps that these compute at the moment."""

    name: str
    sharing: Sharing = field(default_factory=Sharing)
    threads: int = 1  # that a node computes with
    running: dict[object, _Step] = field(default_factory=dict)  # by loop
    _cores: dict[object, list[int]] = field(default_factory=dict)  # of each loop's threads
    # loop |-> whose threads it computes with: its own, or those of all loops of its node
    _owners: dict[object, object] = field(default_factory=dict)

    @property
    def is_shared(self) -> bool:
        """Whether a step here depends on what other nodes do."""
        return self.sharing != Sharing()

    def join(self, node: object, owner: object = None) -> None:
        """Add a node, or one of its loops, in the order in which a cluster is started.

        Args:
            node: which computes one step at a time.
            owner: is the same for loops each of which computes on the cores of all of them.
        """
        self._owners[node] = node if owner is None else owner
        nodes = [*self._cores, node]
        shares = assign_cores(len(nodes), range(self.sharing.cores or len(nodes)))
        threads = [share[: self.threads] for share in shares]
        self._cores = dict(zip(nodes, threads, strict=True))

    def begin(self, node: object, shape: StepShape, num_prompts: int, seconds: float) -> float:
        """Begin a step; return the factor on the time that it takes alone.

        The factor is that of the present moment, since steps are short.

        Args:
            node: one that has joined.
            shape: of the step.
            num_prompts: whose last chunk is in it.
            seconds: that it takes alone.
        """
        others = [step.shape for step in self.running.values()]
        front_s = front_work_s(self.sharing, shape.num_sampled, num_prompts)
        self.running[node] = _Step(shape, front_s / seconds)
        return self._waits_for_bus(shape, others) * self._waits_for_cores(node)

    def _waits_for_bus(self, shape: StepShape, others: Sequence[StepShape]) -> float:
        if not others:
            return 1.0
        sharing = self.sharing
        if any(other.is_decode for other in others):
            return sharing.decode_beside_decode if shape.is_decode else sharing.prompt_beside_decode
        return sharing.decode_beside_prompt if shape.is_decode else sharing.prompt_beside_prompt

    def _waits_for_cores(self, node: object) -> float:
        """Return for how many threads' worth of work its threads' cores have to make time.

        A node's threads stay on their cores; a step has those of all loops of its node. What is in
        front runs where there is room, and so on cores that compute nothing, as far as there are
        any.
        """
        if not self.sharing.cores:
            return 1.0
        used = [0.0] * self.sharing.cores
        running = {self._owners[other] for other in self.running}
        for other, cores in self._cores.items():
            if self._owners[other] not in running:
                continue
            for core in cores:
                used[core] += self.threads / len(cores)
        num_busy = sum(share > 0 for share in used)
        front = sum(step.front_cores for step in self.running.values())
        in_front = max(0.0, front - (len(used) - num_busy)) / num_busy
        return max(1.0, fmean(used[core] for core in self._cores[node]) + in_front)

    def end(self, node: object) -> None:
        """End the node's step."""
        del self.running[node]
