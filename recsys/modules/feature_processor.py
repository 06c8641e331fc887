"""Feature processors: modules that compute the weights of ids before the lookup.

Shapes: `P` positions of a bag, `N` ids.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from recsys.base.arguments import check_input
from recsys.base.checked import checked, checked_late
from recsys.base.lazy import moved_names
from recsys.modules.position_weights import (
    PositionGather,
    PositionWeights,
    ScriptedPositions,
    weigh,
)
from recsys.modules.tables.traced import is_proxy, record
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
]


class FeatureProcessor(nn.Module, abc.ABC):
    """Base of processors that compute the weights of one feature's ids."""

    @abc.abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the same ids in the same bags, with weights."""


class FeatureProcessorsCollection(nn.Module, abc.ABC):
    """Base of processors that compute the weights of many features' ids at once."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same ids in the same bags, with weights."""


class PositionWeightedModule(FeatureProcessor):
    """Learned weights of the ids of one feature by their position in a bag.

    For example, the first click of a session may matter more than the tenth. Initial weights are 1.

    Args:
        max_feature_length: Maximum number of ids of a bag.
        device: Device of the weights; None: torch's default device.

    Attributes:
        position_weight: [P] parameter.

    Raises:
        ValueError: The length is not positive.

    Example:
        >>> module = PositionWeightedModule(3)
        >>> _ = torch.nn.init.normal_(module.position_weight)
        >>> bags = JaggedTensor(torch.tensor([7, 8, 9]), lengths=torch.tensor([2, 1]))
        >>> (module(bags).weights() == module.position_weight[[0, 1, 0]]).tolist()
        [True, True, True]
    """

    @checked
    def __init__(self, max_feature_length: int, device: torch.device | None = None) -> None:
        super().__init__()
        if max_feature_length < 1:
            raise ValueError(
                "PositionWeightedModule.max_feature_length must be at least 1; received "
                f"{max_feature_length}. Pass the length of the longest bag."
            )
        self.position_weight = nn.Parameter(torch.ones(max_feature_length, device=device))
        self._gather = PositionGather({"": max_feature_length}, type(self).__name__)

    def reset_parameters(self) -> None:
        """Set every weight to 1."""
        nn.init.ones_(self.position_weight)

    def check_lengths(self) -> None:
        """Wait for the device and raise ValueError if a bag of an earlier batch was too long."""
        self._gather.check()

    @checked_late
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Set the weights of a batch.

        Args:
            features: The bags of the feature; their own weights are replaced.

        Returns:
            The same bags with weights, [N] of the parameter's dtype.

        Raises:
            ValueError: A bag is too long (on CUDA, a bag of an earlier batch: see `check_lengths`),
                or the bags are on another device than the weights.
        """
        check_input(f"{type(self).__name__}: features", features, JaggedTensor)
        if is_proxy(features):
            return record(_weigh_bags, features, self.position_weight, type(self).__name__)  # type: ignore[no-any-return]
        features = features.trim()
        values, lengths, offsets = features.values(), features.lengths(), features.offsets()
        keyed = KeyedJaggedTensor.from_parts(
            [""], values, None, lengths, offsets, stride=lengths.numel()
        )
        weights = self._gather([self.position_weight], keyed)
        return JaggedTensor.from_parts(values, weights, lengths, offsets)

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this module."""
        return _ScriptedPosition(self.position_weight, type(self).__name__)


def _weigh_bags(features: JaggedTensor, weight: Tensor, owner: str) -> JaggedTensor:
    """Set the weights of one feature; one node of a graph of `torch.fx`."""
    keyed = KeyedJaggedTensor([""], features.values(), None, features.lengths())
    weighed = weigh(keyed, [weight], [""], owner)
    return JaggedTensor(features.values(), weighed.weights(), features.lengths())


class _ScriptedPosition(nn.Module):
    """A `PositionWeightedModule` for TorchScript."""

    def __init__(self, weight: nn.Parameter, owner: str) -> None:
        super().__init__()
        self.weight = weight
        self.owner = owner

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        return _weigh_bags(features, self.weight, self.owner)


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Learned weights of ids by their position in a bag, for several features in one gather.

    Initial weights are 1. Ids of other features get weight 1.

    Args:
        max_feature_lengths: Maximum number of ids of a bag, by feature.
        device: Device of the weights; None: torch's default device.

    Attributes:
        position_weights: Parameter [P] by feature.

    Raises:
        ValueError: A length is not positive.

    Example:
        >>> processors = PositionWeightedModuleCollection({"clicks": 3, "likes": 2})
        >>> list(processors.state_dict())
        ['position_weights.clicks', 'position_weights.likes']
        >>> batch = KeyedJaggedTensor(
        ...     ["likes", "clicks"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2])
        ... )
        >>> processors(batch).weights().tolist()
        [1.0, 1.0, 1.0]
    """

    @checked
    def __init__(
        self, max_feature_lengths: Mapping[str, int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.max_feature_lengths = dict(max_feature_lengths)
        self.position_weights = PositionWeights(max_feature_lengths, device)
        self._gather = PositionGather(max_feature_lengths, type(self).__name__)

    @property
    @torch.jit.unused
    def position_weights_dict(self) -> dict[str, nn.Parameter]:
        """The parameters [P] by feature."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """Set every weight to 1."""
        self.position_weights.reset_parameters()

    def check_lengths(self) -> None:
        """Wait for the device and raise ValueError if a bag of an earlier batch was too long."""
        self._gather.check()

    @checked_late
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Set the weights of a batch.

        Args:
            features: The batch, with one batch size or one per key; its own weights are replaced.

        Returns:
            The same ids in the same bags with weights, [N] of the parameters' dtype.

        Raises:
            ValueError: A bag is too long (on CUDA, a bag of an earlier batch: see `check_lengths`),
                or the batch is on another device than the weights.
        """
        return self._gather.weigh(features, self.position_weights.tensors())

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this module."""
        return ScriptedPositions(self.position_weights_dict, type(self).__name__)


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
