"""Precision by role: prefill nodes may have other weights than decode nodes.

It is declared for the cluster: each node is told both, and the pair of them is the revision. The
KV of a prompt is made by prefill nodes, and that of its answer by decode nodes; so tokens depend on
the pair, and not on which nodes there are. Nodes of one role compute alike (`NodeHello.arithmetic`)
and never change their pool.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import structs

from pdserve.engine.plan.forms import ActivationDtype, form_of
from pdserve.protocol import NodeRole
from pdserve.settings.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Precision:
    """What the roles of a cluster compute with, where that differs."""

    role: NodeRole  # of the node whose model it is
    prefill: str  # names of forms
    decode: str

    @property
    def name(self) -> str:
        """The pair, as a part of the revision."""
        return f"{self.prefill}-prefill+{self.decode}-decode"


def engine_of(engine: EngineConfig, role: NodeRole) -> EngineConfig:
    """Return the settings of a node of this role."""
    if role is not NodeRole.PREFILL or not engine.is_by_role:
        return engine
    return structs.replace(engine, quantization=engine.prefill_quantization)


def precision_of(
    engine: EngineConfig, role: NodeRole, activations: ActivationDtype
) -> Precision | None:
    """Return what the roles of the cluster compute with; None: with the same."""
    if not engine.is_by_role:
        return None
    prefill, decode = engine_of(engine, NodeRole.PREFILL), engine
    return Precision(
        role,
        form_of(prefill.quantization, activations).name,
        form_of(decode.quantization, activations).name,
    )
