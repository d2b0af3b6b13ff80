"""Which ranks of a node are on which of its hosts. No torch here."""

from __future__ import annotations

import msgspec

from pdserve.engine.models.config import ModelConfig
from pdserve.engine.ranks.shard import Shard
from pdserve.engine.ranks.sizes import Parallelism


class HostShare(msgspec.Struct, frozen=True):
    """What one host of a node has of it: as many ranks as each of the others, one after another.

    Of its processes, those that compute come after one that stands for the hosts before, if there
    are any. On CPUs each host has whole stages, and one more process stands for the host after it.
    """

    parallelism: Parallelism = Parallelism()
    num_before: int = 0  # ranks of the hosts before
    later_hosts: tuple[str, ...] = ()  # addresses, in the order of their ranks

    @property
    def num_ranks(self) -> int:
        """Ranks of this host that compute."""
        return (self.parallelism.num_ranks - self.num_before) // (1 + len(self.later_hosts))

    @property
    def ranks(self) -> range:
        """Which ones of the node they are."""
        return range(self.num_before, self.num_before + self.num_ranks)

    @property
    def first_rank(self) -> int:
        """The first one of them, among the processes of this host."""
        return 1 if self.num_before else 0

    @property
    def stages(self) -> tuple[int, ...]:
        """On CPUs: processes of each stage here, those that stand for other hosts included."""
        own = (self.parallelism.tensor,) * (self.num_ranks // self.parallelism.tensor)
        return (1,) * self.first_rank + own + (1,) * bool(self.later_hosts)

    @property
    def is_alone(self) -> bool:
        """Whether there are no other ranks, here or elsewhere."""
        return self.parallelism.num_ranks == 1

    @property
    def has_all(self) -> bool:
        """Whether there are no other hosts."""
        return self.num_ranks == self.parallelism.num_ranks

    def shard(self, rank: int) -> Shard:
        """What a process of this host has of the model."""
        return Shard.of_rank(self.num_before + rank - self.first_rank, self.parallelism)

    def first_layer(self, config: ModelConfig) -> int:
        """On CPUs: the first layer of this host's pool, which has all behind it, too."""
        return self.shard(self.first_rank).layers(config).start

    def next(self) -> HostShare:
        """The share of the first of the later hosts."""
        before = self.num_before + self.num_ranks
        return HostShare(self.parallelism, before, self.later_hosts[1:])


WHOLE_NODE = HostShare()
