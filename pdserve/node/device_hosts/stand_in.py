"""Has the ranks of a later host compute the steps that the first host sends: it stands for that."""

from __future__ import annotations

import threading
from typing import Final

from pdserve import _native
from pdserve.engine.ranks.processes import RankProcesses, wait_ready
from pdserve.engine.ranks.step_memory import StepMemory
from pdserve.node.device_hosts.agent_thread import AgentThread
from pdserve.node.device_hosts.messages import DeviceHostStep, HostResult
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.shared.errors import NodeSick, PeerLost

_LOOK_S: Final = 0.1  # how often it looks whether a part of this host is lost, between steps


class DeviceStandIn:
    """The hosts before, among the processes of this one."""

    def __init__(
        self,
        stream: HostStream,
        processes: RankProcesses,
        hidden_size: int,
        vocab_size: int,
        agent: AgentThread | None,
    ) -> None:
        """Compute for the node.

        Args:
            stream: to it.
            processes: the ranks of this host.
            hidden_size, vocab_size: of the model.
            agent: of the KV here; None: no KV moves.
        """
        self._stream = stream
        self._agent = agent
        self._processes = processes
        self._steps = StepMemory(processes.memory, 0, processes.stages)
        self._sizes = hidden_size, vocab_size
        self._node_has_ended = False

    def run(self, *, has_states: bool) -> None:
        """Compute steps until the node has ended; with `has_states`, their states are made here.

        Raises:
            PeerLost: it has.
            NodeSick, RanksLost: a rank of this host has, or its agent.
        """
        group = self._steps.group
        threading.Thread(target=self._give_up_with_node, daemon=True).start()
        try:
            group.say_ready()
            wait_ready(group, lambda: None, self._processes)
            while True:
                self._await_step()
                group.begin_step()
                group.end_step()
                states = self._steps.states(*self._sizes).numpy()
                if not has_states:
                    states = states[:0]
                self._stream.send(HostResult(len(states)), states)
        except (_native.RanksLost, NodeSick) as error:
            if self._node_has_ended:  # and the ranks here with it
                raise PeerLost("it closed the connection") from error
            raise

    def _await_step(self) -> None:
        """Receive the next step's memory."""
        stream = self._stream
        while stream.is_silent(_LOOK_S):
            if self._processes.lost:
                raise _native.RanksLost(self._processes.lost)
            if self._agent is not None and self._agent.failed:
                raise NodeSick(self._agent.failed)
        head = stream.receive(DeviceHostStep)
        stream.receive_array(self._steps.step_to_be(head.num_bytes).numpy())
        if self._agent is not None:
            self._agent.wait_bumps(head.num_bumps)

    def _give_up_with_node(self) -> None:
        """Notice its end also while ranks compute, which may wait for it for ever."""
        self._stream.wait_hung_up()
        self._node_has_ended = True
        self._steps.group.give_up()
