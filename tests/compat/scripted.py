"""Modules of `recsys.compat` that `tests.fuzz.scripts` draws."""

from __future__ import annotations

from torch import Tensor, nn

from recsys.compat.modules import PositionWeightedProcessor
from recsys.compat.towers import EmbeddingTower
from recsys.sparse import KeyedTensor

processor = PositionWeightedProcessor


class Pooled(nn.Module):
    """The part of a tower after its embeddings."""

    def forward(self, pooled: KeyedTensor) -> Tensor:
        """The embeddings as they are."""
        return pooled.values()


def tower(pooled: nn.Module) -> nn.Module:
    """A tower over a pooled module."""
    return EmbeddingTower(pooled, Pooled())
