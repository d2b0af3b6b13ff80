"""What mixes tokens in a layer with a state (`models/recurrent.py`), of a model that is whole.

`recurrent_in` makes of each group its query, its key, values and their gates, and then betas and
decays. `mixer_out` takes the heads' values.
"""

from __future__ import annotations

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.models.recurrent import RecurrentShape
from pdserve.engine.plan.forms import WeightForm, fitting_form
from pdserve.engine.plan.matrix import Matrices, Matrix, Part, mixer_out
from pdserve.engine.plan.norm import Norm


def recurrent_vectors(shape: RecurrentShape, index: int) -> dict[str, Norm]:
    """The convolution, what decays depend on, and the norm of a head's result."""
    block = f"model.layers.{index}.linear_attn."

    def wide(tensor: str, *shape: int) -> Norm:
        size = 1
        for each in shape:
            size *= each
        return Norm(f"{block}{tensor}", size, is_wide=True, stored=shape)

    return {
        "convolution": wide("conv1d.weight", shape.channels, 1, shape.kernel),
        "decay": wide("A_log", shape.num_values),
        "decay_bias": wide("dt_bias", shape.num_values),
        "value_norm": wide("norm.weight", shape.value_dim),
    }


def recurrent_mixer(
    config: ModelConfig, shape: RecurrentShape, index: int, form: WeightForm
) -> Matrices:
    """The products before and behind the state."""
    layer, hidden = f"model.layers.{index}.", range(config.hidden_size)
    of_heads, values = shape.channels + shape.values_width, range(shape.values_width)
    inputs = (
        Part(f"{layer}linear_attn.in_proj_qkvz", range(of_heads)),
        Part(f"{layer}linear_attn.in_proj_ba", range(2 * shape.num_values)),
    )
    of_hidden = fitting_form(form, len(hidden))
    return {
        "recurrent_in": Matrix(f"{layer}recurrent_in", inputs, hidden, of_hidden),
        **mixer_out(layer, "linear_attn.out_proj", hidden, values, form),
    }
