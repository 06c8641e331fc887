"""Towers for TorchScript, with named arguments instead of `*args`. Shapes: `B` samples."""

import inspect
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn

from recsys.sparse import KeyedJaggedTensor


class _TowerOfOne(nn.Module):
    """A tower whose embedding module takes one batch."""

    def __init__(self, embedding: nn.Module, interaction: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.interaction = interaction

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        output: torch.Tensor = self.interaction(self.embedding(features))
        return output


class _TowerOfTwo(_TowerOfOne):
    """A tower whose embedding module takes an unweighted and a weighted batch."""

    def forward(  # type: ignore[override]
        self, features: KeyedJaggedTensor, weighted_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        output: torch.Tensor = self.interaction(self.embedding(features, weighted_features))
        return output


def scripted_tower(embedding: nn.Module, interaction: nn.Module) -> nn.Module:
    """Convert a tower for TorchScript.

    Args:
        embedding: Takes one KeyedJaggedTensor, or an unweighted and a weighted one.
        interaction: Maps the output of `embedding` to `[B, columns]`.

    Raises:
        TypeError: `embedding` takes another number of arguments.
    """
    taken = list(inspect.signature(embedding.forward).parameters)
    if len(taken) not in (1, 2):
        raise TypeError(
            "TorchScript compiles towers whose embedding module takes one batch, or an unweighted "
            f"and a weighted batch; received {type(embedding).__name__}, which takes {taken}."
        )
    return (_TowerOfOne, _TowerOfTwo)[len(taken) - 1](embedding, interaction)


class _Reader(nn.Module):
    """A tower with the arguments of a collection of towers.

    TorchScript compiles only the branch that the constants select.
    """

    reads_features: Final[bool]
    reads_weighted: Final[bool]

    def __init__(self, tower: nn.Module, reads_features: bool, reads_weighted: bool) -> None:
        super().__init__()
        self.tower = tower
        self.reads_features = reads_features
        self.reads_weighted = reads_weighted

    def forward(
        self, features: KeyedJaggedTensor | None, weighted_features: KeyedJaggedTensor | None
    ) -> torch.Tensor:
        if self.reads_features and self.reads_weighted:
            if features is None or weighted_features is None:
                raise ValueError("A tower reads features and weighted_features; received None.")
            output: torch.Tensor = self.tower(features, weighted_features)
        elif self.reads_features:
            if features is None:
                raise ValueError("A tower reads features; received None.")
            output = self.tower(features)
        else:
            if weighted_features is None:
                raise ValueError("A tower reads weighted_features; received None.")
            output = self.tower(weighted_features)
        return output


class ScriptedTowers(nn.Module):
    """A collection of towers for TorchScript.

    Args:
        towers: The towers.
        reads: Per tower, whether it reads the unweighted features, and the weighted features.
    """

    def __init__(self, towers: Sequence[nn.Module], reads: Sequence[tuple[bool, bool]]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            _Reader(tower, *kinds) for tower, kinds in zip(towers, reads, strict=True)
        )

    def forward(
        self,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Apply all towers: `[B, columns of all towers]`."""
        outputs: list[torch.Tensor] = []
        for tower in self.towers:
            outputs.append(tower(features, weighted_features))
        return torch.cat(outputs, dim=1)
