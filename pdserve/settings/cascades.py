"""Cascades: names of a models file that stand for several models, the cheaper ones asked first.

[cascades.auto]
tiers = [
    { model = "small", escalate = { mean_logprob = -0.7, grammar = true } },
    { model = "large" },
]
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.settings.struct import ConfigStruct
from pdserve.shared.entry_points import PolicyKind
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.near import nearest

# Each makes a `coordinator.models.cascade.Hook`. Only coordinators need the package.
ESCALATIONS: Final = PolicyKind("hook", "pdserve.escalations", ())
_Tokens = Annotated[int, Meta(ge=0, le=2**20)]
_Logprob = Annotated[float, Meta(le=0)]


class Escalation(ConfigStruct, frozen=True):
    """When the next tier is asked instead. Of several answers, the least certain one decides."""

    mean_logprob: _Logprob | None = None  # lower: its tokens are improbable on average
    min_logprob: _Logprob | None = None  # lower: one of its tokens is improbable
    margin: Annotated[float, Meta(ge=0)] | None = None  # lower: likeliest token beyond the second
    first_tokens: _Tokens = 0  # that these three look at; 0: all, so that the answer waits for them
    max_tokens: _Tokens | None = None  # it is longer
    grammar: bool = False  # it has to match a grammar, and ended before it did
    tool: bool = False  # tools were offered, and it calls none
    classifier: str = ""  # a file of `pdserve route`: asked beforehand, whether this tier is at all
    hook: str = ""  # of an installed package, which says so: see `ESCALATIONS`

    @property
    def judges_confidence(self) -> bool:
        """Whether log-probabilities are needed."""
        return any(r is not None for r in (self.mean_logprob, self.min_logprob, self.margin))

    @property
    def judges_answers(self) -> bool:
        """Whether it has a rule for what the tier has answered."""
        others = self.max_tokens is not None or self.grammar or self.tool or self.hook
        return bool(self.judges_confidence or others)

    @property
    def is_never(self) -> bool:
        """Whether it has no rule."""
        return not (self.judges_answers or self.classifier)

    @property
    def needs_whole_answer(self) -> bool:
        """Whether nothing of an answer can be shown before all of it is there."""
        is_late = self.judges_confidence and not self.first_tokens
        is_counted = self.max_tokens is not None
        return is_late or is_counted or self.grammar or self.tool or bool(self.hook)


class Tier(ConfigStruct, frozen=True):
    """One of a cascade's models; exactly one of the first three says which."""

    model: str = ""  # a name in the same file
    adapter: str = ""  # of one of its models
    external: str = ""  # an endpoint of the same file
    escalate: Escalation | None = None  # None: of the last one

    @property
    def name(self) -> str:
        """What a call would name to have it alone."""
        return self.model or self.adapter or self.external


class RegisteredCascade(ConfigStruct, frozen=True):
    """One `[cascades.NAME]`."""

    tiers: Annotated[list[Tier], Meta(min_length=2, max_length=8)]
    aliases: list[str] = msgspec.field(default_factory=list)
    tenants: list[str] = msgspec.field(default_factory=list)  # who may use it; empty: all

    @property
    def hooks(self) -> set[str]:
        """The names of hooks that its rules ask."""
        return {tier.escalate.hook for tier in self.tiers if tier.escalate and tier.escalate.hook}

    @property
    def needs_whole_answer(self) -> bool:
        """Whether an answer comes only once it is complete, unless it is the last tier's."""
        return any(tier.escalate and tier.escalate.needs_whole_answer for tier in self.tiers)


def check_cascades(
    cascades: Mapping[str, RegisteredCascade],
    models: Collection[str],
    names: Collection[str],
    external: Collection[str] = (),
) -> None:
    """Check what cascades say of tiers.

    Args:
        models: the file's models, by each of their names.
        names: those of cascades.
        external: those of endpoints elsewhere.

    Raises ConfigError.
    """
    for name, cascade in cascades.items():
        for number, problem in _problems(cascade, models, names, external):
            raise ConfigError(f"cascades.{name}: tier {number}: {problem}")


def _problems(
    cascade: RegisteredCascade,
    models: Collection[str],
    names: Collection[str],
    external: Collection[str],
) -> Iterator[tuple[int, str]]:
    seen: set[str] = set()
    for number, tier in enumerate(cascade.tiers, 1):
        if sum(map(bool, (tier.model, tier.adapter, tier.external))) != 1:
            yield number, "give one of 'model', 'adapter' and 'external'"
        if tier.model in names:
            yield number, f"{tier.model!r} is a cascade itself: a tier is one model"
        if tier.model and tier.model not in models:
            yield number, f"there is no model {tier.model!r}{nearest(tier.model, models)}"
        if tier.external and tier.external not in external:
            known = nearest(tier.external, external)
            yield number, f"there is no [external.{tier.external}]{known}"
        if tier.name in seen:
            yield number, f"{tier.name!r} is a tier before already"
        seen.add(tier.name)
        is_last = number == len(cascade.tiers)
        if tier.external and not is_last:
            yield number, "only the last one can be 'external': nobody here judges its answers"
        if is_last and tier.escalate is not None:
            yield number, "the last one cannot 'escalate': nobody is left to ask"
        if not is_last and (tier.escalate is None or tier.escalate.is_never):
            yield number, "'escalate' has to say when the next one is asked"
