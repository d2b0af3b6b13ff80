"""The gated delta rule in plain torch, token by token (`models/recurrent.py`)."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from pdserve.engine.layers import rms_norm
from pdserve.engine.models.parameters import LayerWeights
from pdserve.engine.models.recurrent import CHUNK, RecurrentShape
from pdserve.engine.steps.batch import Batch

_LEAST_SQUARES = 1e-6  # added to those of queries and keys


class RecurrentLayers:
    """Of one model: what comes between the products of a layer with a state."""

    def __init__(self, shape: RecurrentShape, norm_eps: float) -> None:
        self._shape = shape
        self._norm_eps = norm_eps
        self._number = {layer: number for number, layer in enumerate(sorted(shape.layers))}

    def mix(
        self, index: int, layer: LayerWeights, normed: Tensor, batch: Batch, kv_pool: Tensor
    ) -> Tensor:
        """Go on with the states of a step's requests, which are in blocks of the pool.

        Args:
            index: of the layer in the model.
            layer: its weights.
            normed: [num_tokens, hidden_size].
            batch: with its requests' `state_tables`.
            kv_pool: read and written.

        Returns:
            [num_tokens, values_width], dtype of `normed`.
        """
        assert batch.state_tables is not None, "the pool is of a model with states"
        rows = layer.mixer["recurrent_in"](normed)
        made = []
        tables = batch.state_tables
        starts = batch.attention.query_start.tolist()
        lengths = batch.attention.context_lens.tolist()
        for blocks, kept_after, length, (begin, end) in zip(
            tables.blocks, tables.kept_after.tolist(), lengths, pairwise(starts), strict=True
        ):
            own, before, kept = (
                _StateInBlocks(kv_pool, table, self._shape, self._number[index]) for table in blocks
            )
            num_before = length - (end - begin)
            state = before.read(num_before % CHUNK) if num_before else own.zeros()
            for first, last in ((begin, begin + kept_after), (begin + kept_after, end)):
                if first == last:
                    continue
                values, state = self._go_on(layer, rows[first:last].float(), state)
                made.append(values)
                (own if last == end else kept).write(state)
            if kept_after == end - begin:
                kept.write(state)
        return torch.cat(made).to(normed.dtype)

    def _go_on(self, layer: LayerWeights, rows: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One request's rows [num_rows, input_width]; its state as `_StateInBlocks.read` has it."""
        shape = self._shape
        groups, size = shape.num_groups, shape.group_size
        widths = [shape.channels + shape.values_width, 2 * shape.num_values]
        of_heads, betas = torch.split(rows, widths, dim=1)
        widths = [shape.group_channels, size * shape.value_dim]
        channels, gates = torch.split(of_heads.view(len(rows), groups, -1), widths, dim=2)
        num_kept = (shape.kernel - 1) * shape.group_channels
        past, heads = state[:, :num_kept], state[:, num_kept:]
        past = past.view(groups, shape.kernel - 1, -1).transpose(0, 1)
        inputs = torch.cat([past, channels])  # [kernel - 1 + num_rows, num_groups, channels]
        mixed = functional.silu(self._convolved(layer, inputs, len(rows)))
        beta, decay = betas.view(len(rows), groups, 2, size).unbind(2)
        by_head = layer.norms["decay"], layer.norms["decay_bias"]
        rate, bias = (each.view(groups, size) for each in by_head)
        decay = (-rate.exp() * functional.softplus(decay + bias)).exp()
        states = heads.view(groups, size, shape.key_dim, shape.value_dim)
        values = []
        for token, kept, corrected in zip(mixed, decay, beta.sigmoid(), strict=True):
            value, states = _step(shape, token, kept, corrected, states)
            values.append(value)
        normed = rms_norm(torch.stack(values), layer.norms["value_norm"], self._norm_eps)
        gated = normed * functional.silu(gates.reshape_as(normed))
        kept_inputs = inputs[len(rows) :].transpose(0, 1).reshape(groups, -1)
        return gated.flatten(1), torch.cat([kept_inputs, states.reshape(groups, -1)], dim=1)

    def _convolved(self, layer: LayerWeights, inputs: Tensor, num_rows: int) -> Tensor:
        """[kernel - 1 + num_rows, num_groups, channels] -> [num_rows, num_groups, channels]."""
        shape = self._shape
        weight = layer.norms["convolution"].view(-1, shape.kernel)
        dims = [shape.key_dim, shape.key_dim, shape.group_size * shape.value_dim]
        parts = torch.split(weight, [shape.num_groups * dim for dim in dims])
        of_groups = [part.view(shape.num_groups, -1, shape.kernel) for part in parts]
        taps = torch.cat(of_groups, dim=1)  # [num_groups, channels, kernel]
        return sum(
            (inputs[tap : tap + num_rows] * taps[:, :, tap] for tap in range(shape.kernel)),
            start=torch.zeros(()),
        )


def _step(
    shape: RecurrentShape, token: Tensor, decay: Tensor, beta: Tensor, states: Tensor
) -> tuple[Tensor, Tensor]:
    """One token, group by group; returns what heads make of it, and their states."""
    widths = [shape.key_dim, shape.key_dim, shape.group_size * shape.value_dim]
    query, key, value = torch.split(token, widths, dim=1)
    query, key = (_normalised(each)[:, None, :, None] for each in (query, key))
    value = value.view(shape.num_groups, shape.group_size, 1, shape.value_dim)
    states = states * decay[:, :, None, None]
    known = (states * key).sum(dim=2, keepdim=True)
    states = states + key * ((value - known) * beta[:, :, None, None])
    return (states * (query * shape.key_dim**-0.5)).sum(dim=2), states


def _normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(dim=-1, keepdim=True) + _LEAST_SQUARES)


class _StateInBlocks:
    """A request's state in one layer: bytes of its blocks, one behind the other."""

    def __init__(self, pool: Tensor, table: Tensor, shape: RecurrentShape, number: int) -> None:
        self._shape = shape
        blocks = pool.view(torch.uint8).view(len(pool), -1)
        first, end = number * shape.layer_bytes, (number + 1) * shape.layer_bytes
        size = blocks.shape[1]
        self._blocks = blocks
        self._table = table[first // size : -(-end // size)].long()
        self._within = slice(first % size, first % size + shape.layer_bytes)

    def zeros(self) -> Tensor:
        """Before the first token: as `read`."""
        return torch.zeros(self._shape.num_groups, self._num_whole, device=self._blocks.device)

    def read(self, num_beside: int) -> Tensor:
        """Inputs and matrices: [num_groups, numbers] float32.

        Matrices take in what so many tokens of a chunk have added, if the native decoder keeps it
        beside them.
        """
        shape, groups = self._shape, self._shape.num_groups
        found = self._blocks[self._table].flatten()[self._within].clone()
        numbers = found.view(torch.float32).view(groups, -1)
        whole, beside = numbers[:, : self._num_whole], numbers[:, self._num_whole :]
        if not num_beside:
            return whole
        of_keys, of_values = CHUNK * shape.key_dim, CHUNK * shape.group_size * shape.value_dim
        keys, deltas, shares = torch.split(
            beside, [of_keys, of_values, shape.group_size * (CHUNK + 1)], dim=1
        )
        keys = keys.view(groups, CHUNK, shape.key_dim)[:, :num_beside]
        deltas = deltas.view(groups, shape.group_size, CHUNK, -1)[:, :, :num_beside]
        shares = shares.view(groups, shape.group_size, CHUNK + 1)
        added = torch.einsum("gsc,gck,gscv->gskv", shares[:, :, :num_beside], keys, deltas)
        inputs, matrices = torch.split(
            whole, [self._num_whole - shape.matrix_numbers, shape.matrix_numbers], dim=1
        )
        matrices = matrices.view_as(added) * shares[:, :, CHUNK, None, None] + added
        return torch.cat([inputs, matrices.reshape(groups, -1)], dim=1)

    def write(self, state: Tensor) -> None:
        """Keep it, with nothing beside its matrices."""
        shape, groups = self._shape, self._shape.num_groups
        beside = torch.zeros(groups, shape.group_state - self._num_whole, device=state.device)
        beside[:, -shape.group_size * (CHUNK + 1) :].view(groups, -1, CHUNK + 1)[:, :, CHUNK] = 1.0
        content = self._blocks[self._table].flatten()
        whole = torch.cat([state, beside], dim=1)
        content[self._within] = whole.view(torch.uint8).flatten()
        self._blocks[self._table] = content.view(len(self._table), -1)

    @property
    def _num_whole(self) -> int:
        """Numbers of a group's inputs and matrices."""
        shape = self._shape
        return (shape.kernel - 1) * shape.group_channels + shape.matrix_numbers
