"""Rotary position embedding: frequencies of each variant, and rotation of queries and keys.

Cosines and sines are computed in float32 from float32 frequencies, as the reference does, and only
then rounded to the model's dtype. They are computed for the positions of a step, once for all
layers: a table of all positions would take 64 MiB for a context of 128 Ki tokens and save nothing
that can be measured.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.models.layer_ropes import Ropes
from pdserve.engine.models.rope_config import RopeConfig, RopeType


class Rope:
    """A rotary embedding. A pure function of a token's position, and of whether it is long."""

    def __init__(self, config: RopeConfig | None, head_dim: int, device: torch.device) -> None:
        # Computed on the CPU for any device, so that nodes that exchange KV use equal angles.
        short = inverse_frequencies(config, head_dim)
        long = short
        if config is not None and config.short_len:
            long = inverse_frequencies(config.of_long_requests(), head_dim)
        # [2, head_dim / 2], of requests that are not long, and of long ones
        self.inverse_frequencies = torch.stack([short, long]).to(device)
        self._has_long = long is not short
        self.scale = 1.0 if config is None else config.attention_factor
        self._scales = torch.where(short == 0, 1.0, self.scale).to(device)  # of those turned

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines for the tokens of a step.

        Args:
            positions: [num_tokens] int64, as those of a `Batch`.
            dtype: of the result.

        Returns:
            Two tensors [num_tokens, 1, head_dim / 2]: the same for all heads.
        """
        frequencies = self.inverse_frequencies[0]
        if self._has_long:
            is_long = positions < 0
            positions = torch.where(is_long, -1 - positions, positions)
            frequencies = torch.where(
                is_long[:, None, None], self.inverse_frequencies[1], frequencies
            )
        angles = positions[:, None, None].float() * frequencies
        return (angles.cos() * self._scales).to(dtype), (angles.sin() * self._scales).to(dtype)


Angles: TypeAlias = tuple[Tensor, Tensor]  # as Rope.cos_sin returns them


class LayerRopes:
    """Those of consecutive layers, of which several may have the same."""

    def __init__(self, configs: Ropes, head_dim: int, device: torch.device) -> None:
        distinct = list(dict.fromkeys(configs))
        self.of_layers = [distinct.index(config) for config in configs]  # indices of those below
        self._ropes = [Rope(config, head_dim, device) for config in distinct]

    def angles(self, positions: Tensor, dtype: torch.dtype) -> list[Angles]:
        """Return those of each distinct one. Arguments as for Rope.cos_sin."""
        return [rope.cos_sin(positions, dtype) for rope in self._ropes]

    @property
    def inverse_frequencies(self) -> Tensor:
        """[2, number of distinct ones, head_dim / 2] float32, as those of each."""
        return torch.stack([rope.inverse_frequencies for rope in self._ropes], dim=1)

    @property
    def scales(self) -> list[float]:
        """Factors on cosines and sines, of the same."""
        return [rope.scale for rope in self._ropes]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by its angle.

    Args:
        x: [num_tokens, num_heads, head_dim].
        cos: [num_tokens, 1, head_dim / 2], dtype of x.
        sin: like cos.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous.
    """
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(config: RopeConfig | None, head_dim: int) -> Tensor:
    """Return the radians per position for each pair of dimensions: 0 for those that do not rotate.

    Returns:
        [head_dim / 2] float32 on the CPU.
    """
    if config is None:
        return torch.zeros(head_dim // 2)
    dims = config.rotated_dims(head_dim)
    return functional.pad(_rotated(config, dims), (0, (head_dim - dims) // 2))


def _rotated(config: RopeConfig, head_dim: int) -> Tensor:
    """Of the pairs that are rotated, which are those of `head_dim` dimensions."""
    plain = 1.0 / _wavelengths(config.theta, head_dim)
    match config.rope_type:
        case RopeType.DEFAULT | RopeType.DYNAMIC:  # dynamic: see rope_config
            return plain
        case RopeType.LINEAR:
            return plain / config.factor
        case RopeType.LLAMA3:
            return _llama3(config, plain)
        case RopeType.YARN:
            return _yarn(config, head_dim)
        case RopeType.LONGROPE:
            return 1.0 / (torch.tensor(config.divisors) * _wavelengths(config.theta, head_dim))
        case RopeType.DIVIDED:
            return plain / torch.tensor(config.divisors)


def _wavelengths(theta: float, head_dim: int) -> Tensor:
    """Return the positions per radian of plain rope, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return theta**exponents


def _llama3(config: RopeConfig, plain: Tensor) -> Tensor:
    """Stretch long wavelengths by the factor, keep short ones, and interpolate in between."""
    length = config.original_max_positions
    low, high = config.low_freq_factor, config.high_freq_factor
    wavelength = 2 * math.pi / plain  # positions per turn
    stretched = plain / config.factor
    smooth = (length / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / config.factor + smooth * plain
    result = torch.where(wavelength > length / low, stretched, between)
    return torch.where(wavelength < length / high, plain, result)


def _yarn(config: RopeConfig, head_dim: int) -> Tensor:
    """Interpolate over the dimensions, from frequencies that are kept to stretched ones."""
    wavelengths = _wavelengths(config.theta, head_dim)
    low = _turning_dim(config, head_dim, config.beta_fast)
    high = _turning_dim(config, head_dim, config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _turning_dim(config: RopeConfig, head_dim: int, num_turns: float) -> float:
    """Return the dimension that makes `num_turns` turns over the pretraining context length."""
    wavelength = config.original_max_positions / (num_turns * 2 * math.pi)
    return head_dim * math.log(wavelength) / (2 * math.log(config.theta))
