"""Towers as TorchScript compiles them: with arguments that are named. Shape: `B` samples."""

import inspect
from collections.abc import Sequence

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


class _TowerOfTwo(nn.Module):
    """A tower whose embedding module takes an unweighted and a weighted batch."""

    def __init__(self, embedding: nn.Module, interaction: nn.Module) -> None:
        super().__init__()
        self.embedding = embedding
        self.interaction = interaction

    def forward(
        self, features: KeyedJaggedTensor, weighted_features: KeyedJaggedTensor
    ) -> torch.Tensor:
        output: torch.Tensor = self.interaction(self.embedding(features, weighted_features))
        return output


def scripted_tower(embedding: nn.Module, interaction: nn.Module) -> nn.Module:
    """Return a tower that TorchScript compiles.

    Args:
        embedding: Takes one KeyedJaggedTensor, or an unweighted and a weighted one.
        interaction: Maps what that returns to `[B, columns]`.

    Raises:
        TypeError: `embedding` takes another number of arguments.
    """
    taken = list(inspect.signature(embedding.forward).parameters)
    if len(taken) not in (1, 2):
        raise TypeError(
            "TorchScript compiles towers whose embedding module takes one batch, or an unweighted "
            f"and a weighted one; received {type(embedding).__name__}, which takes {taken}."
        )
    return (_TowerOfOne, _TowerOfTwo)[len(taken) - 1](embedding, interaction)


class _ReadsFeatures(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(
        self, features: KeyedJaggedTensor | None, weighted_features: KeyedJaggedTensor | None
    ) -> torch.Tensor:
        if features is None:
            raise ValueError("A tower reads features; received None.")
        output: torch.Tensor = self.tower(features)
        return output


class _ReadsWeighted(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(
        self, features: KeyedJaggedTensor | None, weighted_features: KeyedJaggedTensor | None
    ) -> torch.Tensor:
        if weighted_features is None:
            raise ValueError("A tower reads weighted_features; received None.")
        output: torch.Tensor = self.tower(weighted_features)
        return output


class _ReadsBoth(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower = tower

    def forward(
        self, features: KeyedJaggedTensor | None, weighted_features: KeyedJaggedTensor | None
    ) -> torch.Tensor:
        if features is None or weighted_features is None:
            raise ValueError("A tower reads features and weighted_features; received None.")
        output: torch.Tensor = self.tower(features, weighted_features)
        return output


_READERS = {
    (True, False): _ReadsFeatures,
    (False, True): _ReadsWeighted,
    (True, True): _ReadsBoth,
}


class ScriptedTowers(nn.Module):
    """Towers side by side that TorchScript compiles.

    Args:
        towers: The towers.
        reads: Per tower whether it reads the unweighted features, and whether the weighted ones.
    """

    def __init__(self, towers: Sequence[nn.Module], reads: Sequence[tuple[bool, bool]]) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            _READERS[kinds](tower) for tower, kinds in zip(towers, reads, strict=True)
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
