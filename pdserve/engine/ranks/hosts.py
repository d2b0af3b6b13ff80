"""Which stages of a node are on which of its hosts. No torch here."""

from __future__ import annotations

import msgspec

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.ranks.sizes import Parallelism


class HostShare(msgspec.Struct, frozen=True):
    """What one host of a node has of it: as many stages as each of the others, one after another.

    Its ranks are those that compute, after one that stands for the host before it, if there is one,
    and before one that stands for the host after it.
    """

    parallelism: Parallelism = Parallelism()
    first_stage: int = 0
    later_hosts: tuple[str, ...] = ()  # addresses, in the order of their stages

    @property
    def num_stages(self) -> int:
        """Stages of this host."""
        return (self.parallelism.pipeline - self.first_stage) // (1 + len(self.later_hosts))

    @property
    def num_ranks(self) -> int:
        """Ranks of this host that compute."""
        return self.num_stages * self.parallelism.tensor

    @property
    def first_rank(self) -> int:
        """The first one of them."""
        return 1 if self.first_stage else 0

    @property
    def stages(self) -> tuple[int, ...]:
        """How many ranks each stage has here, those that stand for other hosts included."""
        own = (self.parallelism.tensor,) * self.num_stages
        return (1,) * self.first_rank + own + (1,) * bool(self.later_hosts)

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks, here or elsewhere."""
        return self.parallelism.num_ranks == 1

    def shard(self, rank: int) -> Shard:
        """What a rank of this host has of the model."""
        before = self.first_stage * self.parallelism.tensor
        return Shard.of_rank(before + rank - self.first_rank, self.parallelism)

    def first_layer(self, config: ModelConfig) -> int:
        """The first layer of the model that this host's pool has; it has all behind it, too."""
        return self.shard(self.first_rank).layers(config).start

    def next(self) -> HostShare:
        """The share of the first of the later hosts."""
        return HostShare(self.parallelism, self.first_stage + self.num_stages, self.later_hosts[1:])


WHOLE_NODE = HostShare()
