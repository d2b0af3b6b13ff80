"""How a model's tokens are sampled where a request does not say: as its files recommend.

The keys are those that other servers read. `do_sample` is none of them: in many files it stands
beside a temperature, and clients that want the likeliest tokens ask for temperature 0.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from pdserve.model_files.checkpoint import Checkpoint
from pdserve.shared.errors import ModelError

FILE: Final = "generation_config.json"
_PREFIX: Final = "general.sampling."
_GGUF_KEYS: Final = {  # that are named otherwise
    "temperature": "temp",
    "repetition_penalty": "penalty_repeat",
}


class SamplingDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bounds are those of requests."""

    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, lt=2**31)] = 0  # 0 and -1: off
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] = 1.0

    def described(self) -> str:
        """Return what differs from sampling by the plain distribution."""
        changed: dict[str, float] = msgspec.to_builtins(self)
        return ", ".join(f"{name} {value:g}" for name, value in changed.items())


PLAIN: Final = SamplingDefaults()


def sampling_defaults(checkpoint: Checkpoint) -> SamplingDefaults:
    """Return what generation_config.json recommends, or a GGUF file.

    Raises:
        ModelError: a value is none that a request could have; says which.
    """
    names = SamplingDefaults.__struct_fields__
    if (model := checkpoint.gguf) is None:
        where, keys = checkpoint.path / FILE, {name: name for name in names}
        values: Any = checkpoint.read_json(FILE) or {}
    else:
        where, values = model.path, model.values
        keys = {name: _PREFIX + _GGUF_KEYS.get(name, name) for name in names}
    found = {name: values[key] for name, key in keys.items() if values.get(key) is not None}
    for name, value in found.items():
        try:
            msgspec.convert({name: value}, SamplingDefaults)
        except msgspec.ValidationError as error:
            why = str(error).partition(" - ")[0]
            raise ModelError(f"{where}: {keys[name]} is {repr(value)[:64]}: {why}") from error
    return msgspec.convert(found, SamplingDefaults)
