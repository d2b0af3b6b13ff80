"""Which part of a model a rank has. No torch here.

A pipeline stage has some layers. Among the tensor-parallel ranks of a stage, query heads, groups of
heads with a state, the inner width of the MLP or of every expert, and the vocabulary are divided;
KV heads are divided, or with more ranks than heads, replicated on consecutive ranks
(`KvLayout.shard`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.ranks.sizes import Parallelism
from pdserve.kv import KvDtype
from pdserve.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of some."""

    rank: int = 0  # of its stage
    num_ranks: int = 1  # likewise
    stage: int = 0
    num_stages: int = 1

    @classmethod
    def of_rank(cls, rank: int, parallelism: Parallelism) -> Shard:
        """What rank `rank` of a node has. The ranks of a stage follow each other."""
        stage, own = divmod(rank, parallelism.tensor)
        return cls(own, parallelism.tensor, stage, parallelism.pipeline)

    @property
    def is_whole(self) -> bool:
        """Whether there are no other ranks."""
        return self.num_ranks == self.num_stages == 1

    @property
    def is_first_stage(self) -> bool:
        """Whether it has the embedding."""
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether it has the final norm and the output matrix."""
        return self.stage == self.num_stages - 1

    def layers(self, config: ModelConfig) -> range:
        """The layers of the model that this stage has. Their numbers differ by at most one."""
        first, end = (
            stage * config.num_layers // self.num_stages for stage in (self.stage, self.stage + 1)
        )
        return range(first, end)

    def share(self, total: int) -> slice:
        """This rank's part of `total` things in a row. The parts differ by at most one."""
        return slice(self.rank * total // self.num_ranks, (self.rank + 1) * total // self.num_ranks)

    def kv_heads(self, config: ModelConfig) -> slice:
        """The KV heads of the model that this rank has."""
        layout = config.kv_layout(1, KvDtype.FLOAT32).shard(self.rank, self.num_ranks)
        return slice(layout.first_kv_head, layout.end_kv_head)

    def groups(self, config: ModelConfig) -> slice:
        """The groups of the model's layers with a state that this rank has; none without any."""
        return self.share(0 if config.recurrent is None else config.recurrent.num_groups)

    def of(self, config: ModelConfig) -> ModelConfig:
        """The layers as this rank computes them. Their number and vocabulary are the model's."""
        heads, kv_heads = self.share(config.num_heads), self.kv_heads(config)
        experts = config.experts
        if experts is not None:
            experts = replace(
                experts,
                intermediate_size=self._width(experts.intermediate_size),
                shared_size=self._width(experts.shared_size),
            )
        return replace(
            config,
            num_heads=heads.stop - heads.start,
            num_kv_heads=kv_heads.stop - kv_heads.start,
            intermediate_size=self._width(config.intermediate_size),
            experts=experts,
        )

    def _width(self, total: int) -> int:
        return (self.rank + 1) * total // self.num_ranks - self.rank * total // self.num_ranks


WHOLE = Shard()


def check_ranks(config: ModelConfig, parallelism: Parallelism) -> None:
    """Check that a model can be divided.

    Raises:
        ConfigError: the number of heads, or of groups with a state, is no multiple of the ranks; or
            neither number, of KV heads and of ranks, divides the other; or there is less than one
            thing a rank or stage.
    """
    num_ranks = parallelism.tensor
    if parallelism.pipeline > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel {parallelism.pipeline}: the model has {config.num_layers} layers"
        )
    heads, kv_heads = config.num_heads, config.num_kv_heads
    least = min(config.intermediate_size, config.vocab_size)
    if config.experts is not None:
        least = min(least, *config.inner_widths)
    groups = 0 if config.recurrent is None else config.recurrent.num_groups
    fits = [
        n
        for n in range(1, min(heads, least) + 1)
        if heads % n == groups % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)
    ]
    if num_ranks not in fits:
        with_states = f", and {groups} groups with a state," if groups else ""
        raise ConfigError(
            f"tensor_parallel {num_ranks}: {heads} heads and {kv_heads} KV heads{with_states} can "
            f"be divided among {', '.join(map(str, fits))} ranks"
        )
