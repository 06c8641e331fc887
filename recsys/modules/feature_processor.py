"""Feature processors: modules that weigh the ids of a batch before they are looked up.

Legend: `P` positions of a bag, `N` ids.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from recsys.kernels.arguments import check_input
from recsys.kernels.checked import checked, checked_late
from recsys.modules.position_weights import (
    PositionGather,
    PositionWeights,
    ScriptedPositions,
    trimmed,
    weigh,
    with_weights,
)
from recsys.modules.traced import is_proxy, record
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "BaseFeatureProcessor",
    "BaseGroupedFeatureProcessor",
    "FeatureProcessor",
    "FeatureProcessorsCollection",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "PositionWeightedProcessor",
]


class FeatureProcessor(nn.Module, abc.ABC):
    """Weighs the ids of one feature."""

    @abc.abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """Return the same ids in the same bags, with weights."""


class FeatureProcessorsCollection(nn.Module, abc.ABC):
    """Weighs the ids of many features at once."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the same ids in the same bags, with weights."""


class BaseFeatureProcessor(nn.Module, abc.ABC):
    """Weighs the ids of features in a dict; in new code a `FeatureProcessorsCollection`."""

    @abc.abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Return the same ids in the same bags, with weights."""


class BaseGroupedFeatureProcessor(nn.Module, abc.ABC):
    """Weighs the ids of some features; in new code a `FeatureProcessorsCollection`."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the ids of these features in the same bags, with weights."""


class PositionWeightedModule(FeatureProcessor):
    """Weighs each id of one feature by its position in its bag, with weights that are learned.

    The first click of a session may say more than the tenth. All weights are 1 at first.

    Args:
        max_feature_length: How many ids a bag may have.
        device: Where the weights live; None: torch's default device.

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
                f"{max_feature_length}. Give the length of the longest bag."
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
        """Weigh a batch.

        Args:
            features: The bags of the feature; weights that they have are replaced.

        Returns:
            The same bags with weights, [N] of the parameter's dtype.

        Raises:
            ValueError: A bag is too long (on CUDA one of an earlier batch: see `check_lengths`),
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
        """Return what TorchScript compiles in place of this module."""
        return _ScriptedPosition(ScriptedPositions({"": self.position_weight}, type(self).__name__))


def _weigh_bags(features: JaggedTensor, weight: Tensor, owner: str) -> JaggedTensor:
    """Weigh the bags of one feature, as one node of a graph of `torch.fx`."""
    keyed = KeyedJaggedTensor([""], features.values(), None, features.lengths())
    weighed = weigh(keyed, [weight], [""], owner)
    return JaggedTensor(weighed.values(), weighed.weights(), features.lengths())


class _ScriptedPosition(nn.Module):
    """A `PositionWeightedModule` as TorchScript compiles it."""

    def __init__(self, positions: ScriptedPositions) -> None:
        super().__init__()
        self.positions = positions

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        keyed = KeyedJaggedTensor([""], features.values(), None, features.lengths())
        weights = self.positions(keyed).weights()
        return JaggedTensor(features.values(), weights, features.lengths())


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Weighs each id by its position in its bag, with weights that are learned for each feature.

    All features are weighed in one gather. All weights are 1 at first, and stay 1 for features of
    a batch that the collection does not know.

    Args:
        max_feature_lengths: Feature to how many ids one of its bags may have.
        device: Where the weights live; None: torch's default device.

    Attributes:
        position_weights: Feature to parameter [P].

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
        """Feature to parameter [P]."""
        return dict(self.position_weights.items())

    def reset_parameters(self) -> None:
        """Set every weight to 1."""
        self.position_weights.reset_parameters()

    def check_lengths(self) -> None:
        """Wait for the device and raise ValueError if a bag of an earlier batch was too long."""
        self._gather.check()

    @checked_late
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Weigh a batch.

        Args:
            features: The batch, of one batch size or one per key; weights that it has are replaced.

        Returns:
            The same ids in the same bags with weights, [N] of the parameters' dtype.

        Raises:
            ValueError: A bag is too long (on CUDA one of an earlier batch: see `check_lengths`),
                or the batch is on another device than the weights.
        """
        weights = self.position_weights.tensors()
        if is_proxy(features):
            names = list(self.max_feature_lengths)
            return record(weigh, features, weights, names, type(self).__name__)  # type: ignore[no-any-return]
        features = trimmed(features)
        return with_weights(features, self._gather(weights, features))

    def script_form(self) -> nn.Module:
        """Return what TorchScript compiles in place of this module."""
        return ScriptedPositions(self.position_weights_dict, type(self).__name__)


class PositionWeightedProcessor(PositionWeightedModuleCollection, BaseGroupedFeatureProcessor):
    """As its base, and leaves out the features of a batch that it does not know.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 2])
        ... )
        >>> PositionWeightedProcessor({"b": 2})(batch).keys()
        ['b']
    """

    @checked_late
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Weigh a batch, and leave out its other features; arguments and errors as in the base."""
        keys = features.keys()
        known = [i for i, key in enumerate(keys) if key in self.max_feature_lengths]
        return super().forward(features if len(known) == len(keys) else features.permute(known))

    def script_form(self) -> nn.Module:
        """Return what TorchScript compiles in place of this module."""
        weights, owner = self.position_weights_dict, type(self).__name__
        return ScriptedPositions(weights, owner, keeps_others=False)
