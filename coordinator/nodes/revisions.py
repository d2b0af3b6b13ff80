"""Two revisions of a model behind one endpoint, for a rollout: which nodes join, and who gets what.

A revision is what KV depends on: the weights, as quantized, and the arithmetic of the kernels. All
nodes serve the same one, unless shares name several, each by the first characters of its name.
Then each conversation goes to one of those that can serve now, in proportion to their shares: all
of its turns, as long as the shares stay. A request stays with its revision, and KV never moves from
one to the other. Where no node of its revision is left, it is computed again by another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from zlib import crc32

from coordinator.generation import GenerationRequest
from coordinator.nodes.registry import Registry
from pdserve.kv import KvLayout
from pdserve.protocol import NodeHello
from pdserve.settings.config import Mode
from pdserve.shared.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)
# KvLayout.model_shape
_MODEL_SHAPE = ("layers", "KV heads", "head_dim", "dtype", "attention", "state", "wire dtype")
_HASHES = 1 << 32


class Revisions:
    """The revisions that one coordinator serves."""

    def __init__(
        self,
        registry: Registry,
        can_serve: Callable[[str, str], bool],
        shares: Mapping[str, float],
        mode: Mode = "disaggregated",
    ) -> None:
        """
        Args:
            registry: the nodes.
            can_serve: whether there are ready nodes of a revision, with an adapter or "", in all
                pools that are needed.
            shares: by the first characters of a revision; their sum is the whole. Empty: there is
                one revision, that of the first node.
            mode: of the cluster; nodes may have weights by role where each prompt has a prefill
                node.
        """
        self._registry = registry
        self._can_serve = can_serve
        self._mode = mode
        self.shares: dict[str, float] = dict(shares)

    @property
    def attached(self) -> list[str]:
        """The revisions of all members, sorted."""
        return sorted({member.hello.revision for member in self._registry})

    def share(self, revision: str) -> float | None:
        """Return the share of a revision; None: it is not named, or no shares are given."""
        return max(
            (share for prefix, share in self.shares.items() if revision.startswith(prefix)),
            default=None,
        )

    def set(self, shares: Mapping[str, float]) -> None:
        """Share conversations in another way from now on; what runs stays where it is.

        Raises:
            InvalidRequest: nodes are attached of several revisions, one of which is not named.
        """
        unnamed = [r for r in self.attached if not any(r.startswith(name) for name in shares)]
        if unnamed and len(self.attached) > 1:
            raise InvalidRequest(
                f"nodes of revision {unnamed[0]!r} are attached: give it a share, which may be 0, "
                "or stop them first",
                "shares",
            )
        self.shares = dict(shares)
        log.info("shares of the revisions: %s", self.shares or "none")

    def check(self, hello: NodeHello) -> None:
        """Check that a node's revision is served, and that it can exchange KV with its equals.

        Raises:
            ConfigError: it would be another revision than that of all others, or its KV differs, or
                what it computes; or its weights are by role, and the mode is not.
        """
        if hello.arithmetic and self._mode != "disaggregated":
            raise ConfigError(
                f"{hello.node_id} has weights by role (engine.prefill_quantization), and nodes of "
                f"mode {self._mode} compute prompts and answers: give all nodes one quantization, "
                "or the coordinator mode disaggregated"
            )
        others = [m.hello for m in self._registry if m.node_id != hello.node_id]
        for other in others:
            if other.revision == hello.revision:
                _check_layout(hello, other)
                _check_arithmetic(hello, other)
            elif self.share(hello.revision) is None:
                raise ConfigError(
                    f"{hello.node_id} serves revision {hello.revision!r} of {hello.model_id!r}, "
                    f"{other.node_id} revision {other.revision!r}: {_cause(hello, other)}; "
                    "to serve both side by side, give each a share (pdserve revisions)"
                )

    def choose(self, request: GenerationRequest) -> str:
        """Return the revision that a new request is for; empty: any."""
        if not self.shares:
            return ""
        adapter = request.prompt.adapter
        served = [(r, self.share(r) or 0.0) for r in self.attached if self._can_serve(r, adapter)]
        whole = sum(share for _, share in served)
        if whole == 0:
            return ""  # better served by what has no share than by nobody
        point = whole * _point(request)
        for revision, share in served:
            point -= share
            if point < 0:
                return revision
        return served[-1][0]


def _point(request: GenerationRequest) -> float:
    """The same number of [0, 1) for all turns of a conversation, at each coordinator."""
    if request.conversation is None:
        return crc32(request.request_id.encode()) / _HASHES
    return request.conversation / _HASHES


def _cause(hello: NodeHello, other: NodeHello) -> str:
    """Why two nodes have different revisions."""
    own, others = hello.layout.dtype, other.layout.dtype
    if own != others:
        return f"KV is {own} and {others} (then give both the same --kv-dtype and --dtype)"
    own_codes, codes = (each.layout.rounded_to or "nothing" for each in (hello, other))
    if own_codes != codes:
        return f"KV is rounded to {own_codes} and {codes} (then give both one engine.wire_dtype)"
    if bool(hello.arithmetic) != bool(other.arithmetic):
        return "one has weights by role (then give both the same engine.prefill_quantization)"
    return (
        "their weights differ, or the arithmetic of their kernels (then give all of them the same "
        "engine.kernels)"
    )


def _check_layout(hello: NodeHello, other: NodeHello) -> None:
    own, others = hello.layout, other.layout
    if own.model_shape != others.model_shape:
        raise ConfigError(
            f"{hello.node_id} has KV of ({own.describe()}), {other.node_id} of "
            f"({others.describe()}): {_advice(own, others)}"
        )
    if own.state_bytes and own.block_size != others.block_size:
        raise ConfigError(
            f"{hello.node_id} has blocks of {own.block_size} tokens, {other.node_id} of "
            f"{others.block_size}, and states are passed on in whole blocks: give both the same "
            "engine.block_size"
        )


def _check_arithmetic(hello: NodeHello, other: NodeHello) -> None:
    """Raises ConfigError: nodes with weights by role have one role, and compute differently."""
    if hello.role is other.role and hello.arithmetic != other.arithmetic:
        raise ConfigError(
            f"{hello.node_id} computes as {hello.arithmetic}, {other.node_id} as "
            f"{other.arithmetic}, and both are {hello.role.name.lower()} nodes: give all of them "
            "the same engine.kernels"
        )


def _advice(one: KvLayout, other: KvLayout) -> str:
    """What differs between the model shapes of two layouts, and how both get the same."""
    pairs = zip(_MODEL_SHAPE, one.model_shape, other.model_shape, strict=True)
    differing = [name for name, a, b in pairs if a != b]
    if differing == ["dtype"]:
        return "start both with the same --dtype and --kv-dtype"
    if differing == ["wire dtype"]:
        return "start both with the same engine.wire_dtype"
    return f"they differ in {', '.join(differing)}: start both with the same checkpoint"
