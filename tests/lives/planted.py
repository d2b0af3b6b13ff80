"""Bugs to plant in the product: each is one place in its text, changed.

One is not among them: that a former attempt is not fenced is hardly ever seen, as it says the same.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from coordinator.adapters.known import KnownAdapters, Version
from coordinator.adapters.life import Adapters
from coordinator.nodes.registry import Member
from coordinator.requests import legs
from coordinator.requests.departures import Departures
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.resumes import Resumes
from coordinator.requests.running import RunningRequest
from decode_node.arrival import Arrival
from decode_node.intake import Intake
from kv_transfer.strand_pull import StrandPull
from pdserve.engine.core import EngineCore
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.node.adapters import NodeAdapters
from pdserve.node.legs import Legs
from pdserve.node.prefixes.fetch import PrefixFetcher
from pdserve.node.services import Services
from pdserve.node.sessions.session import Session
from pdserve.protocol import Prompt
from prefill_node.handoffs import Handoffs
from prefill_node.service import PrefillNode


@dataclass(frozen=True)
class Bug:
    """`text` of a method, or property, becomes `instead`."""

    owner: Any  # class or module
    method: str
    text: str
    instead: str
    seeds: int = 0  # within which it is found; 0: it takes more than the suite has lives for
    also: Bug | None = None  # what else has to be wrong, as it would be noticed there


_NOT_LOADED = 'raise AdapterNotLoaded("a node has not loaded the adapter: try again shortly")'
BUGS = {
    "what was emitted becomes prompt": Bug(
        legs, "_decode_leg", "prompt=request.prompt", "prompt=request.context", 40
    ),
    "a withdrawn leg is not cancelled": Bug(
        RunningRequest, "interrupt", "self._tell_nodes(dispatch, reason)", "pass"
    ),
    "a cancelled leg goes on": Bug(
        RunningRequest, "end", "self._tell_nodes(self.dispatch, error.message)", "pass", 40
    ),
    "a sibling that waits by itself is sent with the others": Bug(
        RunningRequest,
        "siblings_to_begin",
        "sibling._has_ended or sibling.waits_to_resume",
        "sibling._has_ended",
    ),
    "a stream that moves is not taken from its node": Bug(
        Dispatcher, "move", "self.withdraw(running, _MOVES)", "pass"
    ),
    "a stream that is taken over ends untold": Bug(
        PrefillNode, "add_tokens", "is_taken_over=True", "is_taken_over=False"
    ),
    "who fails at once again is sent at once": Bug(
        Resumes, "interrupted", "self._back_off(trouble)", "pass"
    ),
    "streams of lost nodes are forgotten": Bug(
        Departures,
        "_interrupt",
        "dispatch.decode is member or needs_prefill",
        "needs_prefill",
        40,
    ),
    "a lost coordinator's legs go on": Bug(
        Services, "coordinator_lost", "self.legs.of(link)", "()"
    ),
    "a cancelled fetch keeps its blocks": Bug(
        PrefixFetcher,
        "_fetch",
        "self._pool.release(block_ids)",
        "asyncio.current_task().cancelling() or self._pool.release(block_ids)",
    ),
    "an arrival that fails keeps its blocks": Bug(
        Arrival, "release", "self._pool.release(self.block_table, self._num_passed)", "pass"
    ),
    "a subscription is not settled": Bug(
        Session,
        "subscribed",
        "self.settle(subscription_id, was_pulled=subscription.was_pulled)",
        "pass",
        40,
    ),
    "a handoff that nobody follows any more has no lease": Bug(
        Handoffs, "unsubscribe", "self._start_lease(request_id, handoff)", "pass"
    ),
    "layers are announced too early": Bug(
        Handoffs, "layers_done", "num_layers, self", "self._num_layers, self"
    ),
    "corrupt KV is believed": Bug(StrandPull, "_read", "if ticket.sums", "if False"),
    "an adopted request lacks its last token": Bug(
        Intake, "_receive", "record.num_tokens\n", "record.num_tokens - 1\n", 40
    ),
    "blocks are cached before they are full": Bug(
        EngineCore,
        "_publish_full_blocks",
        "full = pool.full_blocks(num_tokens",
        "full = pool.blocks_for(num_tokens",
        40,
    ),
    "freed blocks keep their generation": Bug(
        BlockPool, "release", "self._bump_generations(freed)", "pass"
    ),
    "an adapter's name gets the model's own tokens": Bug(
        Version, "adapt", "adapter=self.digest", 'adapter=""', 40
    ),
    "an adapter is unneeded before its last stream has ended": Bug(
        KnownAdapters, "take_unneeded", " and not self._uses(d)", "", 120
    ),
    "an adapter that legs have leaves for another": Bug(
        NodeAdapters, "_idle", "if not self._legs.has_adapter(digest)", "if True", 40
    ),
    "an adapter leaves while a step has it": Bug(
        NodeAdapters, "_free", "await self._steps_done()", "pass", 240
    ),
    "a leg is taken without its adapter": Bug(NodeAdapters, "use", _NOT_LOADED, "return"),
    "a node is a candidate before it has verified an adapter": Bug(
        NodeAdapters,
        "told",
        "sorted(self._loaded)",
        '[letter * 32 for letter in "abc"]',
        40,
        also=Bug(NodeAdapters, "use", _NOT_LOADED, "return"),
    ),
    "a name that is being loaded gets the model's own tokens": Bug(
        Adapters,
        "find",
        'raise NoNodeAvailable(f"the adapter {name!r} is not loaded yet: try again shortly")',
        "from coordinator.adapters.known import Version as V; return V(name, *[''] * 5)",
        40,
        also=Bug(Adapters, "begin", "self.known.of_digest(version.digest) is None", "False"),
    ),
    "an aLoRA's blocks are those of the model": Bug(
        Prompt, "_chain", "_turned(parent, self._turn)", "parent", 160
    ),
    "an aLoRA computes what is before its invocation": Bug(
        Version, "adapt", "adapted_from=begin", "adapted_from=0", 40
    ),
    "nodes without an adapter get its requests": Bug(
        Member, "serves", "needs.adapter in self.adapters", "True", 40
    ),
    "a prefix with an adapter is that of the model": Bug(
        Prompt, "root", "self.adapter.encode()", 'b""', 40
    ),
    "a token is sent twice": Bug(
        Legs, "add_tokens", "batch.indices.append(index)", "batch.indices.append(index - 1)", 20
    ),
}


@contextmanager
def planted(bug: Bug) -> Iterator[None]:
    """Have this bug while the context lasts."""
    with _planted(bug), nullcontext() if bug.also is None else _planted(bug.also):
        yield


@contextmanager
def _planted(bug: Bug) -> Iterator[None]:
    found = inspect.getattr_static(bug.owner, bug.method)
    is_property = isinstance(found, property)
    function: Callable[..., Any] = found.fget if is_property else found
    function = inspect.unwrap(function)
    text = textwrap.dedent(inspect.getsource(function))
    assert text.count(bug.text) == 1, f"{bug.owner.__name__}.{bug.method} has changed:\n{text}"
    code = "from __future__ import annotations\n" + text.replace(bug.text, bug.instead)
    names: dict[str, Any] = {}
    exec(compile(code, "planted", "exec"), function.__globals__, names)
    with patch.object(bug.owner, bug.method, names[bug.method]):
        yield
