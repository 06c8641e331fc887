"""FeatureProcessedEmbeddingBagCollection: feature processors before a pooled lookup.

Shapes: `B` batch size, `D` columns, `N` ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.feature_processor import (
    FeatureProcessor,
    FeatureProcessorsCollection,
    PositionWeightedModule,
)
from recsys.modules.position_weights import (
    PositionGather,
    ScriptedPositions,
    trimmed,
    with_weights,
)
from recsys.modules.tables.traced import is_exporting, is_proxy
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["FeatureProcessedEmbeddingBagCollection", "FeatureProcessorDictWrapper"]


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """A collection of one processor per feature.

    Position weights of all features need one gather. Other processors are called per feature; on
    CUDA the host waits for the batch's lengths. Ids of features without a processor get weight 1.

    Args:
        feature_processors: Processors by feature.

    Raises:
        TypeError: A value is not a `FeatureProcessor`.

    Example:
        >>> processors = FeatureProcessorDictWrapper({"clicks": PositionWeightedModule(3)})
        >>> list(processors.state_dict())
        ['clicks.position_weight']
    """

    def __init__(self, feature_processors: Mapping[str, FeatureProcessor] | nn.ModuleDict) -> None:
        super().__init__()
        if not isinstance(cast(object, feature_processors), Mapping | nn.ModuleDict):
            name = type(self).__name__
            wrong_type(f"{name}.feature_processors", "a dict", feature_processors)
        for name, processor in feature_processors.items():
            if not isinstance(processor, FeatureProcessor):
                raise TypeError(
                    f"feature_processors[{name!r}] must be a FeatureProcessor; received "
                    f"{type(processor).__name__}. Derive it from FeatureProcessor."
                )
            self.add_module(name, processor)
        self._gather: PositionGather | None = None
        if all(type(processor) is PositionWeightedModule for processor in self._modules.values()):
            lengths = {name: p.position_weight.numel() for name, p in self._processors().items()}
            self._gather = PositionGather(lengths, PositionWeightedModule.__name__)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Set the weights of a batch.

        Args:
            features: The batch; processors receive its own weights.

        Returns:
            The same ids in the same bags, with weights [N].

        Raises:
            ValueError: A processor did not return one weight per id, processors other than
                `PositionWeightedModule` are traced or exported, or a processor raised it.
        """
        if self._gather is not None:
            weights: list[Tensor] = [p.position_weight for p in self._processors().values()]
            return self._gather.weigh(features, weights)
        if is_exporting() or is_proxy(features):
            raise self._needs_eager_mode()
        features = trimmed(features)
        weigh_each = _run_eagerly if torch.compiler.is_compiling() else _weigh_each
        return with_weights(features, weigh_each(self, features))

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this module.

        Raises:
            ValueError: A processor is not a `PositionWeightedModule`.
        """
        if self._gather is None:
            raise self._needs_eager_mode()
        weights = {name: p.position_weight for name, p in self._processors().items()}
        return ScriptedPositions(weights, PositionWeightedModule.__name__)

    def _needs_eager_mode(self) -> ValueError:
        kinds = sorted({type(processor).__name__ for processor in self._modules.values()})
        return ValueError(
            f"A graph needs feature processors of the whole batch; received {kinds}, which are "
            "called per feature. Pass a PositionWeightedModule for each feature, or a "
            "FeatureProcessorsCollection."
        )

    def check_lengths(self) -> None:
        """Wait for the device and raise ValueError if a bag of an earlier batch was too long."""
        if self._gather is not None:
            self._gather.check()
        for processor in self._modules.values():
            if isinstance(processor, PositionWeightedModule):
                processor.check_lengths()

    def _processors(self) -> dict[str, PositionWeightedModule]:
        return cast(dict[str, PositionWeightedModule], self._modules)

    def _weigh(self, name: str, bags: JaggedTensor) -> Tensor:
        processor, ids = self._modules.get(name), bags.values()
        if processor is None:
            return torch.ones(ids.numel(), device=ids.device)
        weights: Tensor | None = processor(bags).weights_or_none()
        if weights is None or weights.shape != ids.shape:
            raise ValueError(
                f"The processor of feature {name!r} ({type(processor).__name__}) must return one "
                f"weight per id; received {'none' if weights is None else tuple(weights.shape)} "
                f"for {ids.numel()} ids. Return a JaggedTensor of the same bags with weights."
            )
        return weights


def _weigh_each(processors: FeatureProcessorDictWrapper, features: KeyedJaggedTensor) -> Tensor:
    bags = features.to_dict()
    return torch.cat([processors._weigh(name, of_name) for name, of_name in bags.items()])


_run_eagerly: Any = torch.compiler.disable(
    _weigh_each, reason="feature processors in a dict run eagerly, one per feature"
)


class FeatureProcessedEmbeddingBagCollection(nn.Module):
    """Pooled lookup of bags whose weights feature processors compute.

    The processors are ordinary dense modules, trained by the gradient of the weights.

    Args:
        embedding_bag_collection: The tables, built with `is_weighted=True`.
        feature_processors: One processor for each feature of the tables, by name; or a collection
            for all features.

    Raises:
        TypeError: A processor in a dict is not a `FeatureProcessor`.
        ValueError: The tables have no weights, or the dict does not have exactly their features.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.feature_processor import PositionWeightedModuleCollection
        >>> table = EmbeddingBagConfig(100, 4, "films", feature_names=["watched"])
        >>> model = FeatureProcessedEmbeddingBagCollection(
        ...     EmbeddingBagCollection(tables=[table], is_weighted=True),
        ...     PositionWeightedModuleCollection({"watched": 10}),
        ... )
        >>> bags = KeyedJaggedTensor(["watched"], torch.tensor([7, 8]), lengths=torch.tensor([2]))
        >>> model(bags)["watched"].shape
        torch.Size([1, 4])
    """

    @checked
    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: Mapping[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise ValueError(
                "FeatureProcessedEmbeddingBagCollection needs an EmbeddingBagCollection with "
                "is_weighted=True; received is_weighted=False."
            )
        if not isinstance(feature_processors, FeatureProcessorsCollection):
            names = set(feature_processors)
            configs = embedding_bag_collection.embedding_bag_configs()
            wanted = {feature for config in configs for feature in config.feature_names}
            if names != wanted:
                raise ValueError(
                    "feature_processors must have exactly the features of the tables; missing: "
                    f"{sorted(wanted - names)}, unknown: {sorted(names - wanted)}. To process only "
                    "some features, pass a FeatureProcessorsCollection."
                )
            feature_processors = FeatureProcessorDictWrapper(feature_processors)
        self._embedding_bag_collection = embedding_bag_collection
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Apply the processors, look up and pool a batch.

        Args:
            features: int32 or int64 ids of all features of the tables; weights are not needed.

        Returns:
            fp32 [B, sum of D], as returned by the `EmbeddingBagCollection`.

        Raises:
            ValueError: As the processors, for example a bag longer than its position weights.
            KeyError: As the `EmbeddingBagCollection`.
            TypeError: As the `EmbeddingBagCollection`.
            IndexError: As the `EmbeddingBagCollection`.
        """
        pooled: KeyedTensor = self._embedding_bag_collection(self._feature_processors(features))
        return pooled

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """Return the processors and the tables."""
        return self._feature_processors, self._embedding_bag_collection

    def is_weighted(self) -> bool:
        """Return True: the processors compute weights."""
        return True
