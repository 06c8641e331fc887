"""Towers: an embedding module, and what makes one vector per sample of its embeddings.

Sharding replaces the collections inside; the interactions stay dense and are replicated. Shape:
`B` samples.
"""

from typing import Any

import torch
from torch import nn

from recsys.kernels.checked import checked
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.scripted_towers import ScriptedTowers, scripted_tower
from recsys.sparse import KeyedJaggedTensor


@checked
def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Tell which of a model's two kinds of features an embedding module reads.

    Args:
        module: of a tower.

    Returns:
        Whether it is called with unweighted features, and whether with weighted ones. A module that
        is no collection is called with both, in that order.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        >>> tower_input_params(EmbeddingBagCollection(tables=[table], is_weighted=True))
        (False, True)
    """
    if isinstance(module, EmbeddingCollection):
        return True, False
    if isinstance(module, EmbeddingBagCollection):
        return not module.is_weighted(), module.is_weighted()
    return True, True


class EmbeddingTower(nn.Module):
    """Embeddings and their interaction.

    Args:
        embedding_module: a collection, or a module that looks features up in several.
        interaction_module: maps what that gives to `[B, columns]`.
        device: where both are moved; None: they stay.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> class Interaction(nn.Module):
        ...     def forward(self, pooled):
        ...         return pooled.values().sin()
        >>> table = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        >>> tower = EmbeddingTower(EmbeddingBagCollection(tables=[table]), Interaction())
        >>> ids = KeyedJaggedTensor(["film"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> tower(ids).shape
        torch.Size([2, 4])
    """

    @checked
    def __init__(
        self,
        embedding_module: nn.Module,
        interaction_module: nn.Module,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding_module
        self.interaction = interaction_module
        if device is not None:
            self.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Look features up and let them interact.

        Args:
            args: of the embedding module.
            kwargs: of the embedding module.

        Returns:
            `[B, columns]`.
        """
        output: torch.Tensor = self.interaction(self.embedding(*args, **kwargs))
        return output

    def script_form(self) -> nn.Module:
        """Return what TorchScript compiles in place of this module."""
        return scripted_tower(self.embedding, self.interaction)


class EmbeddingTowerCollection(nn.Module):
    """Towers side by side.

    Args:
        towers: the towers; those whose collection is weighted read the weighted features.
        device: where they are moved; None: they stay.

    Raises:
        ValueError: there is no tower.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> class Interaction(nn.Module):
        ...     def forward(self, pooled):
        ...         return pooled.values().sin()
        >>> towers = []
        >>> for name in ("film", "user"):
        ...     table = EmbeddingBagConfig(10, 4, f"{name}s", feature_names=[name])
        ...     tables = EmbeddingBagCollection(tables=[table])
        ...     towers.append(EmbeddingTower(tables, Interaction()))
        >>> ids = KeyedJaggedTensor(
        ...     ["film", "user"], torch.tensor([3, 1, 4, 1]), lengths=torch.tensor([1, 1, 1, 1])
        ... )
        >>> EmbeddingTowerCollection(towers)(ids).shape
        torch.Size([2, 8])
    """

    @checked
    def __init__(self, towers: list[EmbeddingTower], device: torch.device | None = None) -> None:
        super().__init__()
        if not towers:
            raise ValueError("EmbeddingTowerCollection needs at least one tower; received none.")
        self.towers = nn.ModuleList(towers)
        # Noted here: sharding replaces the collections by modules of another type.
        self._input_params = [tower_input_params(tower.embedding) for tower in towers]
        if device is not None:
            self.to(device)

    def forward(
        self,
        features: KeyedJaggedTensor | None = None,
        weighted_features: KeyedJaggedTensor | None = None,
    ) -> torch.Tensor:
        """Apply all towers.

        Args:
            features: of the towers that read unweighted ones.
            weighted_features: of the towers that read weighted ones.

        Returns:
            `[B, columns of all towers]`, in the order of the towers.

        Raises:
            ValueError: a tower's features are missing.
        """
        outputs = []
        for place, (tower, reads) in enumerate(zip(self.towers, self._input_params, strict=True)):
            given = {"features": features, "weighted_features": weighted_features}
            read = [name for name, is_read in zip(given, reads, strict=True) if is_read]
            missing = [name for name in read if given[name] is None]
            if missing:
                raise ValueError(
                    f"towers[{place}] reads {' and '.join(read)}; received None for "
                    f"{' and '.join(missing)}."
                )
            outputs.append(tower(*(given[name] for name in read)))
        return torch.cat(outputs, dim=1)

    def script_form(self) -> nn.Module:
        """Return what TorchScript compiles in place of this module."""
        return ScriptedTowers(list(self.towers), self._input_params)
