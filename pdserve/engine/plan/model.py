"""The plan of a model, or of what one rank has of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.plan.forms import BFLOAT16, WeightForm, fitting_form
from pdserve.engine.plan.layer import LayerPlan, layer_plan
from pdserve.engine.plan.matrix import Matrix, Part, TensorRows
from pdserve.engine.plan.norm import Norm
from pdserve.engine.ranks.shard import WHOLE, Shard
from pdserve.kv import KvDtype, Plane
from pdserve.model_files.coding import Coding
from pdserve.shared.errors import ConfigError

EMBEDDING: Final = "model.embed_tokens"


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """All weights of one rank. A pipeline stage has its own layers, and the ends that it is at."""

    config: ModelConfig  # of the whole model
    shard: Shard
    form: WeightForm  # of matrices, but for routers and for what is coded
    embedding: Part | None  # rows of the rank's tokens; in the first stage
    layers: tuple[LayerPlan, ...]
    final_norm: Norm | None  # in the last stage, as is lm_head
    lm_head: Matrix | None  # of the embedding's tensor if they are tied
    table: Matrix | None = None  # the embedding, if it is coded: lm_head itself if they are tied

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        shard: Shard = WHOLE,
        form: WeightForm = BFLOAT16,
        codings: Mapping[str, Coding] | None = None,
    ) -> ModelPlan:
        """Plan what a rank has of a model.

        Args:
            config: of the whole model.
            shard: the rank.
            form: of matrices.
            codings: of tensors in the checkpoint, to be kept so.

        Raises:
            ConfigError: it would share scales of a matrix with another rank.
        """
        own, hidden = shard.share(config.vocab_size), config.hidden_size
        tokens, is_last = range(own.start, own.stop), shard.is_last_stage
        output = Part(EMBEDDING if config.ties_embeddings else "lm_head", tokens)
        head = fitting_form(form, hidden, is_head=True)
        norm = Norm(
            "model.norm.weight",
            hidden,
            offset=config.norm_offset,
            is_wide=config.has_wide_norms,
        )
        plan = cls(
            config,
            shard,
            form,
            Part(EMBEDDING, tokens) if shard.is_first_stage else None,
            tuple(layer_plan(config, index, shard, form) for index in shard.layers(config)),
            norm if is_last else None,
            Matrix("lm_head", (output,), range(hidden), head) if is_last else None,
        )
        if codings:
            plan = plan._coded(codings)
        for matrix in plan.matrices:
            column, rows = matrix.columns.start, [part.rows.start for part in matrix.parts]
            if not all(matrix.form.can_cut(row, column) for row in rows):
                raise ConfigError(
                    f"tensor_parallel {shard.num_ranks}: {matrix.name} cannot be divided so, as "
                    f"{form.name} has a scale for each {form.group} rows and columns"
                )
        return plan

    def _coded(self, codings: Mapping[str, Coding]) -> ModelPlan:
        head = None if self.lm_head is None else self.lm_head.coded(codings)
        table, part = None, self.embedding
        if part is not None and part.weight in codings:
            own = Matrix(part.name, (part,), range(self.config.hidden_size), self.form)
            table = head if head is not None and head.parts == own.parts else own.coded(codings)
        layers = tuple(layer.coded(codings) for layer in self.layers)
        return replace(self, layers=layers, lm_head=head, table=table)

    @property
    def norms(self) -> list[Norm]:
        """All norms, and other vectors, in the order of packed files."""
        norms = [norm for layer in self.layers for norm in layer.vectors]
        return norms if self.final_norm is None else [*norms, self.final_norm]

    @property
    def matrices(self) -> list[Matrix]:
        """All matrices, in the order of packed files."""
        matrices = [matrix for layer in self.layers for matrix in layer.all_matrices]
        return matrices if self.lm_head is None else [*matrices, self.lm_head]

    @property
    def coded(self) -> dict[str, WeightForm]:
        """Matrix |-> form, for those that are kept as the checkpoint has them."""
        every = self.matrices if self.table is None else [self.table, *self.matrices]
        return {each.name: each.form for each in every if each.form.keeps_stored}

    @property
    def part_name(self) -> str:
        """What people may call it, if it is a part of a checkpoint besides the model."""
        return ""

    def whole(self) -> ModelPlan:
        """The plan of all ranks' weights together."""
        return ModelPlan.of(self.config)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Tensor name |-> shape, for all of the whole model."""
        whole, config = self.whole(), self.config
        assert whole.embedding is not None, "it has the first stage"
        shapes: dict[str, tuple[int, ...]] = {norm.tensor: norm.shape for norm in whole.norms}
        shapes[whole.embedding.weight] = (config.vocab_size, config.hidden_size)
        for matrix in whole.matrices:
            for part in matrix.parts:
                shapes[part.weight] = (len(part.rows), matrix.num_in)
                if matrix.has_bias:
                    shapes[part.bias] = (len(part.rows),)
        return shapes

    def ignored(self) -> tuple[str, ...]:
        """How the names of tensors begin that files may have besides."""
        first, config = self.config.num_layers, self.config
        further = range(first, first + config.num_further_layers)
        head = ("lm_head.weight",) if config.ties_embeddings else ()
        mtp = ("mtp.",) if self.config.recurrent is not None else ()
        return (*head, *mtp, *(f"model.layers.{layer}." for layer in further))

    def within(self) -> dict[str, TensorRows]:
        """Tensor name |-> where it is, for those that files have in tensors of another form."""
        whole = self.whole()
        places = {n.tensor: TensorRows(n.tensor, 0, n.order) for n in whole.norms if n.order}
        for matrix in whole.matrices:
            for part in matrix.parts:
                if (rows := part.within) is not None:
                    places[part.weight] = replace(rows, name=f"{rows.name}.weight")
                    places[part.bias] = replace(rows, name=f"{rows.name}.bias")
        return places

    def planes(self, dtype: KvDtype) -> tuple[Plane, ...]:
        """What a token's KV costs on this rank."""
        shard = self.shard
        layouts = self.config.kv_layout(1, dtype).parts(shard.num_ranks, shard.num_stages)
        return layouts[shard.stage * shard.num_ranks + shard.rank].planes
