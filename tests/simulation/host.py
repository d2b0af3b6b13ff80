"""A host whose nodes share one memory bus.

Decoding reads all weights for few tokens, so two nodes that decode at once each take longer than
either alone. The same holds, to a lesser degree, for a decode step beside a prefill step. Profiles
do not show this, since each node measures itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdserve.perf_model import StepShape


@dataclass(frozen=True, slots=True)
class Sharing:
    """By which factor a step takes longer while another node of the host computes one."""

    decode_beside_decode: float = 1.0
    decode_beside_prompt: float = 1.0
    prompt_beside_any: float = 1.0


@dataclass(slots=True)
class Host:
    """A host, and the steps that its nodes compute at the moment."""

    name: str
    sharing: Sharing = Sharing()
    running: dict[object, StepShape] = field(default_factory=dict)  # by node

    def begin(self, node: object, shape: StepShape) -> float:
        """Begin a step; return the factor on the time that it takes alone.

        The factor is that of the present moment, since steps are short.
        """
        others = list(self.running.values())
        self.running[node] = shape
        if not others:
            return 1.0
        if not shape.is_decode:
            return self.sharing.prompt_beside_any
        if any(other.is_decode for other in others):
            return self.sharing.decode_beside_decode
        return self.sharing.decode_beside_prompt

    def end(self, node: object) -> None:
        """End the node's step."""
        del self.running[node]
