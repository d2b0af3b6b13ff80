"""What a checkpoint's files say about its embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.models.embedding import EmbeddingModel, embedding_model
from pdserve.model_files.checkpoint import Checkpoint, resolve_checkpoint
from pdserve.settings.answers import PoolingName
from pdserve.shared.errors import InvalidRequest, ModelError
from pdserve.shared.pooling import Pooling
from tests.checkpoints import make_checkpoint
from tests.gguf_files import as_gguf

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}


def checkpoint(folder: Path, modules: Any = None, pooling: Any = None, **config: Any) -> Checkpoint:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8} | config))
    if modules is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return Checkpoint(path=folder, model_id="m", revision="r")


def test_a_causal_model_is_pooled_last_and_normalised(tmp_path: Path) -> None:
    assert embedding_model(checkpoint(tmp_path)) == EmbeddingModel(Pooling.LAST, True)


@pytest.mark.parametrize(
    ("pooling", "modules", "wanted", "expected"),
    [
        ({"pooling_mode_lasttoken": True}, [POOLING, NORMALIZE], "auto", (Pooling.LAST, True)),
        ({"pooling_mode_mean_tokens": True}, [POOLING, NORMALIZE], "auto", (Pooling.MEAN, True)),
        ({"pooling_mode_cls_token": True}, [POOLING], "auto", (Pooling.FIRST, False)),
        ({"pooling_mode": "mean"}, [POOLING], "auto", (Pooling.MEAN, False)),
        ({"pooling_mode_max_tokens": True}, [POOLING], "mean", (Pooling.MEAN, False)),
        (None, [], "cls", (Pooling.FIRST, True)),
    ],
)
def test_modules_and_flag_say_how_to_pool(
    tmp_path: Path,
    pooling: Any,
    modules: list[Any],
    wanted: PoolingName,
    expected: tuple[Pooling, bool],
) -> None:
    made = checkpoint(tmp_path, [TRANSFORMER, *modules] if modules else None, pooling)
    found = embedding_model(made, wanted)
    assert (found.pooling, found.is_normalised, found.refusal) == (*expected, "")


@pytest.mark.parametrize(
    ("modules", "pooling", "why"),
    [
        ([TRANSFORMER, POOLING, DENSE], {"pooling_mode_mean_tokens": True}, "with Dense"),
        ([TRANSFORMER, POOLING], {"pooling_mode_max_tokens": True}, "pools by max"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls and mean",
        ),
        ([TRANSFORMER, POOLING], {}, "pools by none"),
    ],
)
def test_what_is_not_served_is_refused_when_asked_for(
    tmp_path: Path, modules: Any, pooling: Any, why: str
) -> None:
    model = embedding_model(checkpoint(tmp_path, modules, pooling))
    with pytest.raises(InvalidRequest, match=why):
        model.check(None)


@pytest.mark.parametrize(
    ("modules", "config", "why"),
    [
        ({"0": TRANSFORMER}, {}, "list of modules"),
        ([POOLING], {}, "not there"),
        ([POOLING | {"path": "../elsewhere"}], {}, "outside"),
        (None, {"is_matryoshka": True, "hidden_size": None}, "hidden_size"),
        (None, {"matryoshka_dimensions": [4, 9]}, "from 1 to 8"),
    ],
)
def test_damaged_files(tmp_path: Path, modules: Any, config: Any, why: str) -> None:
    with pytest.raises(ModelError, match=why):
        embedding_model(checkpoint(tmp_path, modules, **config))


def test_which_dimensions_may_be_asked_for(tmp_path: Path) -> None:
    plain = EmbeddingModel()
    plain.check(None)
    with pytest.raises(InvalidRequest, match="Matryoshka"):
        plain.check(8)
    some = embedding_model(checkpoint(tmp_path, matryoshka_dimensions=[4, 2]))
    assert some.dimensions == (2, 4)
    some.check(2)
    with pytest.raises(InvalidRequest, match="2, 4"):
        some.check(3)
    every = embedding_model(checkpoint(tmp_path, is_matryoshka=True))
    every.check(3)
    with pytest.raises(InvalidRequest, match="have 8"):
        every.check(9)


def test_embeddings_are_cut_and_then_normalised() -> None:
    pooled = np.array([3.0, 4.0, 12.0], "<f4").tobytes()
    assert EmbeddingModel().finished(pooled, 2).tolist() == pytest.approx([0.6, 0.8])
    assert EmbeddingModel(is_normalised=False).finished(pooled, None).tolist() == [3, 4, 12]
    assert EmbeddingModel().finished(bytes(12), None).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "expected", "why"),
    [
        (None, Pooling.LAST, ""),
        (1, Pooling.MEAN, ""),
        (2, Pooling.FIRST, ""),
        (4, Pooling.LAST, "4"),
    ],
)
def test_a_gguf_file_says_how_to_pool(
    kind: int | None, expected: Pooling, why: object, tmp_path: Path
) -> None:
    file, made = tmp_path / "m.gguf", make_checkpoint(tmp_path / "made", "llama")

    def extra(writer: Any) -> None:
        if kind is not None:
            writer.add_uint32("llama.pooling_type", kind)

    as_gguf(made, file, lambda name: "F16", extra=extra)
    found = embedding_model(resolve_checkpoint(str(file)))
    assert found.pooling is expected
    assert found.refusal.startswith(f"this model's pooling_type is {why};" if why else "")
    assert bool(found.refusal) == bool(why)
