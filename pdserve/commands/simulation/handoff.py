"""The handoff of a request to a decode node: announced, admitted, pulled, adopted.

As in `decode_node/intake.py`: KV is announced chunk after chunk. Once there is room on the decode
node, it is pulled while the rest of the prompt is computed. A pull takes `fixed + bytes / rate`;
pulls of different requests do not slow each other down. The real policy decides who has room.
"""

from __future__ import annotations

from functools import partial

from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.engine.request import Request


class RoomLine:
    """Handoffs that wait for room on one decode node; `decode_node.room` without its tasks."""

    def __init__(self, node: Node, events: Events) -> None:
        self._node = node
        self._events = events
        self._waiting: dict[Request, Handoff] = {}
        node.pool.on_release(self._released)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def _is_line(self) -> bool:
        """Whether anybody can be first."""
        return bool(self._waiting or self._node.core.queues.waiting)

    def join(self, handoff: Handoff) -> None:
        """Add a handoff to the line."""
        self._node.sync()
        self._waiting[handoff.request] = handoff
        self._node.core.queues.claims.append(handoff.request)
        self.offer()
        self._node.blocks_taken()

    def _released(self) -> None:
        if self._is_line:
            self._events.soon(self.offer)
        else:
            self._node.wake()

    def offer(self) -> None:
        """Admit the first handoffs in line, as long as there are a place and blocks for them."""
        core, policy = self._node.core, self._node.decode_policy
        queues = core.queues
        while self._is_line and (request := policy.first(queues)) in self._waiting:
            assert request is not None
            if not policy.has_place(queues.beside(request), request):
                return
            num_passed = core.pool.num_passed(request.num_tokens)
            num_tokens = request.num_tokens + 1
            reserved = core.reserve(num_tokens, request.block_hashes, request, num_passed)
            if reserved is None:
                return
            request.num_passed = num_passed
            request.state_blocks = core.pool.allocate(core.pool.state_blocks)
            request.block_table, num_reused = reserved
            queues.claims.remove(request)
            queues.arriving.add(request)
            self._waiting.pop(request).let_in(num_reused)
        self._node.wake()  # a prompt may have waited behind the handoffs


class Handoff:
    """The handoff of one request. `request` is what the decode node will run."""

    def __init__(
        self,
        prefilled: Request,
        adopted: Request,
        source: Node,
        target: Node,
        room: RoomLine,
        events: Events,
    ) -> None:
        if source.machine.quantisation != target.machine.quantisation:  # weights by role
            adopted.num_by_prefill = adopted.num_prompt_tokens
        self.request = adopted
        self._prefilled = prefilled
        self._source = source
        self._target = target
        self._room = room
        self._events = events
        self._num_announced = 0  # tokens
        self._num_pulled = 0  # tokens, including those being pulled
        self._num_reused = 0  # of them, that were there
        self._pulled_s = 0.0  # when these tokens have arrived
        self._has_room = False
        self._is_published = False
        self._held: list[int] = []
        self._num_bare = 0

    def announce(self) -> None:
        """Announce a chunk of the prompt that was computed."""
        is_first = self._num_announced == 0
        self._num_announced = self._prefilled.num_computed_tokens
        if is_first:
            self.request.block_hashes = list(self._prefilled.block_hashes)
            self._room.join(self)
        elif self._has_room:
            self._pull()

    def publish(self) -> None:
        """Publish that the prompt is computed; its KV is held until it is pulled."""
        self._held = list(self._prefilled.block_table)
        self._num_bare = self._prefilled.num_passed
        self._source.pin(self._held, self._num_bare)
        self.request.lifecycle.prefill_end_s = self._events.now_s
        self.announce()
        self._room.offer()  # its rank may have changed
        self._is_published = True
        self._settle()

    def let_in(self, num_reused: int) -> None:
        """Start pulling: there is room, and the KV of `num_reused` blocks is there already."""
        self._has_room = True
        now_s = self._events.now_s
        self.request.lifecycle.room_wait = (now_s, now_s)
        self._num_reused = min(self._target.pool.tokens_in(num_reused), self._num_announced)
        self._num_pulled = self._num_reused
        self._pull()
        self._settle()

    def _pull(self) -> None:
        num_tokens = self._num_announced - self._num_pulled
        self._num_pulled = self._num_announced
        machine = self._source.machine
        num_bytes = machine.pulled_bytes(num_tokens, self.request.num_tokens)
        seconds = machine.transfer.fixed_s + num_bytes / machine.transfer.bytes_per_s
        seconds *= self._source.scatter.draw("pull")
        self._pulled_s = max(self._pulled_s, self._events.now_s) + seconds

    def _settle(self) -> None:
        if self._is_published and self._has_room:
            told_s = (
                max(self._pulled_s, self._events.now_s) + self._target.machine.overheads.handoff_s
            )
            adopt = partial(
                self._target.take_over, self._num_pulled - self._num_reused, self._arrive
            )
            self._events.at(told_s, adopt)

    def _arrive(self) -> None:
        self._source.unpin(self._held, self._num_bare)
        request = self.request
        request.output_token_ids = list(self._prefilled.output_token_ids)
        request.num_computed_tokens = request.num_prompt_tokens
        request.lifecycle.adopted_s = self._events.now_s
        self._target.adopt(request)
