"""How one Megatron parameter holds one or several Hugging Face tensors, cut over tensor-parallel ranks.

A layout is a pair of exact inverses: `cut` makes a rank's parameter of whole tensors, `join` makes the whole tensors
of all ranks' parameters. Both only move bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from relax.megatron.checkpoint import Architecture


class Layout(ABC):
    """`dim` is the dimension of the Megatron parameter that is cut; None: every rank holds the same."""

    dim: int | None = 0

    @abstractmethod
    def cut(self, whole: Sequence[Tensor], arch: Architecture, rank: int, ranks: int) -> Tensor:
        """Rank `rank`'s parameter."""

    @abstractmethod
    def join(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        """The whole tensors, in the order `cut` took them."""


class Replicated(Layout):
    """Norms: the same on every rank."""

    dim = None

    def cut(self, whole: Sequence[Tensor], arch: Architecture, rank: int, ranks: int) -> Tensor:
        return whole[0]

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [shards[0]]


class Columns(Layout):
    """A projection back to the hidden size: its input dimension is cut."""

    dim = 1

    def cut(self, whole: Sequence[Tensor], arch: Architecture, rank: int, ranks: int) -> Tensor:
        return whole[0].chunk(ranks, 1)[rank]

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards), 1)]


class Gated(Layout):
    """Gate and up projection: each rank holds its rows of the gate, then its rows of the up projection."""

    def cut(self, whole: Sequence[Tensor], arch: Architecture, rank: int, ranks: int) -> Tensor:
        return torch.cat([part.chunk(ranks)[rank] for part in whole])

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]


class QueryGroups(Layout):
    """Query, key and value projection (or bias): rows of one query group after another, [its queries, key, value]."""

    def cut(self, whole: Sequence[Tensor], arch: Architecture, rank: int, ranks: int) -> Tensor:
        groups = [part.reshape(arch.query_groups, -1, *part.shape[1:]) for part in whole]
        fused = torch.cat(groups, 1)
        return fused.reshape(-1, *fused.shape[2:]).chunk(ranks)[rank]

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        fused = torch.cat(list(shards))
        tail, queries = fused.shape[1:], arch.heads // arch.query_groups
        groups = fused.reshape(arch.query_groups, (queries + 2) * arch.head_dim, *tail)
        parts = groups.split([queries * arch.head_dim, arch.head_dim, arch.head_dim], 1)
        return [part.reshape(-1, *tail) for part in parts]


class Vocabulary(Layout):
    """Embedding and output rows: padded with zero rows until every rank has the same number."""

    def cut(self, whole: Sequence[Tensor], arch: Architecture, rank: int, ranks: int) -> Tensor:
        rows = -(-arch.vocab // ranks)
        part = whole[0][rank * rows : (rank + 1) * rows]
        missing = rows - len(part)
        return torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) if missing else part

    def join(self, shards: Sequence[Tensor], arch: Architecture) -> list[Tensor]:
        return [torch.cat(list(shards))[: arch.vocab]]
