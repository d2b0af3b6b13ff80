"""The promises that loads are judged by, as settings of several commands. Light to import."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Scale = Annotated[float, Meta(ge=0)]
TtftPromise = Annotated[
    float, Meta(ge=0, description="TTFT promise; 0: a multiple of an idle cluster's")
]
TpotPromise = Annotated[
    float, Meta(ge=0, description="TPOT promise; 0: a multiple of an idle cluster's")
]
