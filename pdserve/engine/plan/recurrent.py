"""What mixes tokens in a layer with a state (`models/recurrent.py`).

`recurrent_in` makes of each group its query, its key, values and their gates, and then betas and
decays. `mixer_out` takes the heads' values. A rank has some of the groups. Of the convolution it
has all, since files have queries, keys and values of all groups apart.
"""

from __future__ import annotations

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.plan.forms import WeightForm, fitting_form
from pdserve.engine.plan.matrix import Matrices, Matrix, Part, mixer_out
from pdserve.engine.plan.norm import Norm
from pdserve.engine.ranks.shard import Shard


class RecurrentMixer:
    """Of one layer, as one rank has it."""

    def __init__(
        self,
        config: ModelConfig,
        shape: RecurrentShape,
        index: int,
        shard: Shard,
        form: WeightForm,
    ) -> None:
        self._layer = f"model.layers.{index}."
        self._hidden = range(config.hidden_size)
        self._shape = shape
        self._groups = shard.groups(config)
        self._form = form

    def vectors(self) -> dict[str, Norm]:
        """The convolution, what decays depend on, and the norm of a head's result."""
        shape, block = self._shape, f"{self._layer}linear_attn."
        values = self._of_groups(shape.group_size)
        own, stored = (slice(values.start, values.stop),), (shape.channels, 1, shape.kernel)
        taps = shape.channels * shape.kernel
        return {
            "convolution": Norm(f"{block}conv1d.weight", taps, is_wide=True, stored=stored),
            "decay": Norm(f"{block}A_log", len(values), is_wide=True, cut=own),
            "decay_bias": Norm(f"{block}dt_bias", len(values), is_wide=True, cut=own),
            "value_norm": Norm(f"{block}norm.weight", shape.value_dim, is_wide=True),
        }

    def matrices(self) -> Matrices:
        """The products before and behind the state."""
        shape, layer = self._shape, self._layer
        width = shape.group_channels + shape.group_size * shape.value_dim
        inputs = (
            Part(f"{layer}linear_attn.in_proj_qkvz", self._of_groups(width)),
            Part(f"{layer}linear_attn.in_proj_ba", self._of_groups(2 * shape.group_size)),
        )
        of_hidden = fitting_form(self._form, len(self._hidden))
        values = self._of_groups(shape.group_size * shape.value_dim)
        return {
            "recurrent_in": Matrix(f"{layer}recurrent_in", inputs, self._hidden, of_hidden),
            **mixer_out(layer, "linear_attn.out_proj", self._hidden, values, self._form),
        }

    def _of_groups(self, size: int) -> range:
        """What the rank's groups have of so much each, of all groups'."""
        return range(self._groups.start * size, self._groups.stop * size)
