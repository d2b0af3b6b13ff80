"""Settings of drafts: tokens that are guessed, and computed several a step."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from pdserve.settings.struct import ConfigStruct

SourceName = Literal["text", "prediction", "answers", "grammar", "model"]
SOURCES: Final[tuple[SourceName, ...]] = get_args(SourceName)


class SpeculationConfig(ConfigStruct, frozen=True):
    """Whether steps compute several tokens of a stream, and who guesses them."""

    mode: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto: several tokens a step where they can be guessed; the "
            "answers stay the same",
            extra={"flag": "speculation_mode"},
        ),
    ] = "auto"
    sources: Annotated[
        list[SourceName],
        Meta(
            description="who guesses: the stream's own text, its client, former answers to its "
            "tenant, what a grammar forces, a smaller model; empty: all",
            extra={"flag": "speculation_sources"},
        ),
    ] = msgspec.field(default_factory=list)
    model: Annotated[
        str,
        Meta(
            description="smaller model of the same vocabulary, or an EAGLE-3 head of the model, as "
            "checkpoint.model; mtp: the checkpoint's own layers; empty: those, if it has any, and "
            "the demo model has a smaller one",
            extra={"flag": "speculation_model"},
        ),
    ] = ""

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if there is no model that guesses."""
        if "model" in self.sources and not self.model:
            raise ValueError("speculation.sources names model: say which, in speculation.model")
        if self.model and "model" not in (self.sources or SOURCES):
            raise ValueError("speculation.model is given, and speculation.sources leaves model out")


def asks(speculation: SpeculationConfig, source: SourceName) -> bool:
    """Whether this source may guess."""
    return speculation.mode == "auto" and source in (speculation.sources or SOURCES)


def draft_model(speculation: SpeculationConfig) -> str:
    """The model that guesses; empty: none does."""
    return speculation.model if asks(speculation, "model") else ""


def no_drafts(speculation: SpeculationConfig, *, has_states: bool = False) -> str:
    """Return why steps compute one token of a stream; empty: they may do several."""
    if speculation.mode == "off":
        return "speculation.mode is off"
    return "the model has states, which wrong drafts would change for good" if has_states else ""
