"""The rotary position embedding configured in config.json, in either of its two styles.

transformers 4 wrote `rope_theta` and `rope_scaling` (with `type` or `rope_type`) beside the other
fields; transformers 5 writes one object, `rope_parameters`. No torch here: `engine/rope.py` turns
a RopeConfig into frequencies.

`dynamic` stretches its frequencies as a sequence outgrows max_position_embeddings. The keys of a
prompt's *first* tokens then depend on the prompt's length, so KV blocks could no longer be shared
between prompts with a common prefix. Up to max_position_embeddings it is exactly plain rope, so
such models are served up to that length only.

`longrope` has other frequencies for sequences that outgrow the length of the pretraining. Which
ones a request has is fixed when it is admitted, by the most tokens that it may get: its prompt's
and `max_tokens`. It has them from its first token to its last (`Prompt.is_long`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from pdserve.engine.models.json_fields import JsonFields
from pdserve.shared.errors import ModelError, UnsupportedRope


class RopeType(StrEnum):
    """The supported variants of rotary embedding."""

    DEFAULT = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    YARN = "yarn"
    LONGROPE = "longrope"  # of the Phi family
    DIVIDED = "divided"  # of GGUF files: each inverse frequency by its own number


# The supported keys. Any other key could change the embedding, so it is an error. `finetuned` is
# only informative; attention scales are resolved below.
_KEYS = {
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "finetuned",
    "partial_rotary_factor",
    "rope_type",
    "type",
    "rope_theta",
    "divisors",
    "short_factor",
    "long_factor",
}


_OLD_NAMES = {"su": RopeType.LONGROPE.value, "yarn": RopeType.LONGROPE.value}  # Phi-3's


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Parameters of the rotary embedding; fields that a variant does not use keep defaults."""

    rope_type: RopeType
    theta: float  # base wavelength
    max_model_len: int  # number of positions that it supports
    factor: float = 1.0
    original_max_positions: int = 0  # llama3, yarn: length of the pretraining
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    attention_factor: float = 1.0  # yarn, longrope: factor on cos and sin
    divisors: tuple[float, ...] = ()  # divided, longrope: one for each pair of rotated dimensions
    long_divisors: tuple[float, ...] = ()  # longrope: of requests longer than the pretraining
    rotated_share: float | None = None  # of a head's dimensions; None: as the architecture has it
    is_interleaved: bool = False  # in checkpoints, the two of a pair are neighbours
    score_factor: float = 1.0  # on scores of latent attention: of mscale_all_dim

    @property
    def short_len(self) -> int:
        """Tokens of the longest request that is not a long one; 0: there are no long ones."""
        is_stretched = self.long_divisors and self.max_model_len > self.original_max_positions
        return self.original_max_positions if is_stretched else 0

    def of_long_requests(self) -> RopeConfig:
        """That of long ones, as if it were that of all."""
        return replace(self, divisors=self.long_divisors or self.divisors)

    def rotated_dims(self, head_dim: int) -> int:
        """How many dimensions of a head are rotated."""
        return int(head_dim * (self.rotated_share or 1.0))

    def head_order(self, head_dim: int) -> tuple[int, ...]:
        """Of the rows of a query or key head, in the model's order: which of the checkpoint's.

        In the model, the pairs are those of (i, i + head_dim / 2), and those that are not rotated
        come last. Scores do not depend on the order. (): it is that of the checkpoint.
        """
        dims = self.rotated_dims(head_dim)
        rotated, others = list(range(dims)), list(range(dims, head_dim))
        firsts, seconds = rotated[: dims // 2], rotated[dims // 2 :]
        if self.is_interleaved:
            firsts, seconds = rotated[::2], rotated[1::2]
        half = len(others) // 2
        order = (*firsts, *others[:half], *seconds, *others[half:])
        return () if order == tuple(range(head_dim)) else order


def parse_rope(
    fields: JsonFields, max_positions: int, default_theta: float = 10_000.0
) -> RopeConfig:
    """Read the rotary embedding from the fields of config.json.

    Args:
        fields: config.json.
        max_positions: its max_position_embeddings.
        default_theta: the architecture's.

    Raises:
        UnsupportedRope: the variant or a parameter is not supported.
        ModelError: a parameter is missing or of the wrong type.
    """
    params = fields.nested("rope_scaling" if fields.raw("rope_scaling") else "rope_parameters")
    theta = fields.number("rope_theta", default_theta, above=0.0)
    return rope_of(params, fields, max_positions, theta)


def rope_of(
    params: JsonFields, fields: JsonFields, max_positions: int, default_theta: float
) -> RopeConfig:
    """Read one of several in config.json, of its own parameters. Raises as parse_rope."""
    rope_type = _rope_type(params)
    _refuse_unknown(params)
    theta = params.number("rope_theta", default_theta, above=0.0)
    # If a model states the pretraining length twice, the outer value takes precedence.
    outer = fields if "original_max_position_embeddings" in fields else params
    original = outer.integer("original_max_position_embeddings", max_positions)
    rope = _PARSERS[rope_type](params, theta, max_positions, original)
    if rope_type is not RopeType.DEFAULT:
        all_dim = params.number("mscale_all_dim", 0.0)
        rope = replace(rope, score_factor=_mscale(rope.factor, all_dim) ** 2)
    if "partial_rotary_factor" not in params and "partial_rotary_factor" not in fields:
        return rope
    share = (params if "partial_rotary_factor" in params else fields).number(
        "partial_rotary_factor", above=0.0
    )
    return replace(rope, rotated_share=share)


def _rope_type(params: JsonFields) -> RopeType:
    name = params.text("rope_type", params.text("type", RopeType.DEFAULT.value))
    name = _OLD_NAMES.get(name, name) if "short_factor" in params else name
    try:
        return RopeType(name)
    except ValueError:
        supported = ", ".join(RopeType)
        raise UnsupportedRope(
            f"{params.where}: rope type {name!r} is not supported; supported are {supported}"
        ) from None


def _refuse_unknown(params: JsonFields) -> None:
    unknown = sorted(set(params.keys()) - _KEYS)
    if unknown:
        raise UnsupportedRope(f"{params.where}: {', '.join(unknown)} is not supported")


def _default(_: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    return RopeConfig(RopeType.DEFAULT, theta, max_positions)


def _linear(params: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    factor = _factor(params)
    length = int(max_positions * factor)
    return RopeConfig(RopeType.LINEAR, theta, length, factor=factor)


def _dynamic(params: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    return RopeConfig(RopeType.DYNAMIC, theta, max_positions, factor=_factor(params))


def _llama3(params: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    low, high = params.number("low_freq_factor"), params.number("high_freq_factor")
    if not 0 < low < high:
        raise ModelError(
            f"{params.where}: needs 0 < low_freq_factor < high_freq_factor, but has {low}, {high}"
        )
    return RopeConfig(
        RopeType.LLAMA3,
        theta,
        max_positions,
        factor=_factor(params),
        original_max_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn(params: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    factor = _factor(params, max_positions / original)
    return RopeConfig(
        RopeType.YARN,
        theta,
        int(original * factor),
        factor=factor,
        original_max_positions=original,
        # 0 counts as unset, as in the reference.
        beta_fast=params.number("beta_fast", 0.0) or 32.0,
        beta_slow=params.number("beta_slow", 0.0) or 1.0,
        truncate=params.boolean("truncate", True),
        attention_factor=_yarn_attention_factor(params, factor),
    )


def _divided(params: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    divisors = _numbers(params, "divisors")
    return RopeConfig(RopeType.DIVIDED, theta, max_positions, divisors=divisors)


def _longrope(params: JsonFields, theta: float, max_positions: int, original: int) -> RopeConfig:
    """With factors of sequences up to the length of the pretraining, and of longer ones."""
    short, long = (_numbers(params, key) for key in ("short_factor", "long_factor"))
    if len(short) != len(long):
        raise params.error("long_factor", f"{len(short)} numbers, as short_factor has")
    factor = params.number("factor", max_positions / original, above=0.0)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeConfig(
        RopeType.LONGROPE,
        theta,
        max_positions,
        factor=factor,
        original_max_positions=original,
        attention_factor=params.number("attention_factor", default),
        divisors=short,
        long_divisors=long,
    )


def _numbers(params: JsonFields, key: str) -> tuple[float, ...]:
    numbers = params.raw(key)
    is_list = isinstance(numbers, list) and all(
        isinstance(one, int | float) and not isinstance(one, bool) for one in numbers
    )
    if not is_list or not all(0 < one < math.inf for one in numbers):
        raise params.error(key, "a list of finite numbers above 0")
    return tuple(map(float, numbers))


def _yarn_attention_factor(params: JsonFields, factor: float) -> float:
    """Return the factor on cos and sin, which sharpens attention for longer contexts."""
    if "attention_factor" in params:
        return params.number("attention_factor")
    mscale, all_dim = params.number("mscale", 0.0), params.number("mscale_all_dim", 0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factor(params: JsonFields, default: float | None = None) -> float:
    factor = params.number("factor", default)
    if factor < 1.0:
        raise params.error("factor", "a number of 1 or more")
    return factor


_PARSERS: dict[RopeType, Callable[[JsonFields, float, int, int], RopeConfig]] = {
    RopeType.DEFAULT: _default,
    RopeType.LINEAR: _linear,
    RopeType.DYNAMIC: _dynamic,
    RopeType.LLAMA3: _llama3,
    RopeType.YARN: _yarn,
    RopeType.LONGROPE: _longrope,
    RopeType.DIVIDED: _divided,
}
