"""Towers: an embedding module, and an interaction module that maps its output to one vector.

Sharding replaces the collections inside; the dense interactions are replicated.

Shapes: `B` samples.
"""

from typing import Any

import torch
from torch import nn

from recsys.base.checked import checked
from recsys.compat.scripted_towers import ScriptedTowers, scripted_tower
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.sparse import KeyedJaggedTensor


@checked
def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Return the kinds of features that an embedding module reads.

    Args:
        module: The embedding module of a tower.

    Returns:
        Whether it reads the unweighted features, and whether it reads the weighted features. A
        module that is not a collection reads both, in this order.

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
        embedding_module: A collection, or a module with several collections.
        interaction_module: Maps the output of the embedding module to `[B, columns]`.
        device: Both modules are moved to this device; None: they are not moved.

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
        """Look up features and apply the interaction.

        Args:
            args: Arguments of the embedding module.
            kwargs: Arguments of the embedding module.

        Returns:
            `[B, columns]`.
        """
        output: torch.Tensor = self.interaction(self.embedding(*args, **kwargs))
        return output

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this module."""
        return scripted_tower(self.embedding, self.interaction)


class EmbeddingTowerCollection(nn.Module):
    """Several towers with concatenated outputs.

    Args:
        towers: The towers. A tower with a weighted collection reads the weighted features.
        device: The towers are moved to this device; None: they are not moved.

    Raises:
        ValueError: There is no tower.

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
        # computed here, as sharding replaces the collections by modules of another type
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
            features: Unweighted features.
            weighted_features: Weighted features.

        Returns:
            `[B, columns of all towers]`, in the order of the towers.

        Raises:
            ValueError: The features of a tower are missing.
        """
        outputs = []
        for place, (tower, reads) in enumerate(zip(self.towers, self._input_params, strict=True)):
            inputs = {"features": features, "weighted_features": weighted_features}
            read = [name for name, is_read in zip(inputs, reads, strict=True) if is_read]
            missing = [name for name in read if inputs[name] is None]
            if missing:
                raise ValueError(
                    f"towers[{place}] reads {' and '.join(read)}; received None for "
                    f"{' and '.join(missing)}."
                )
            outputs.append(tower(*(inputs[name] for name in read)))
        return torch.cat(outputs, dim=1)

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this module."""
        return ScriptedTowers(list(self.towers), self._input_params)
