"""Features with other ids, and sharded collections that return features with rows for ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from recsys.compat.returned_rows import return_rows
from recsys.distributed.embedding import ShardedEmbeddingCollection
from recsys.distributed.embeddingbag import ShardedEmbeddingBagCollection
from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.collection_stages import CollectionStages
from recsys.distributed.stages.batch import BatchContext
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.sparse import KeyedJaggedTensor


def features_in_order(
    features: KeyedJaggedTensor, configs: Sequence[BaseEmbeddingConfig]
) -> KeyedJaggedTensor:
    """Return the features of tables, in order.

    Raises:
        ValueError: A feature is missing, or two tables read it.
    """
    names = [feature for config in configs for feature in config.feature_names]
    if len(set(names)) < len(names):
        raise ValueError(
            "Each feature must be of one table to have one row per id; received the features "
            f"{names}. Put the feature into the batch once for each table."
        )
    keys = features.keys()
    missing = sorted(set(names) - set(keys))
    if missing:
        raise ValueError(f"features must have all features of the tables; {missing} are missing.")
    return features if keys == names else features.permute([keys.index(name) for name in names])


def with_ids(features: KeyedJaggedTensor, ids: Tensor) -> KeyedJaggedTensor:
    """Return the features with other ids."""
    return KeyedJaggedTensor.from_parts(**features.parts()._replace(values=ids)._asdict())


def hashed(
    features: KeyedJaggedTensor, functions: Mapping[str, Callable[[Tensor], Tensor]]
) -> KeyedJaggedTensor:
    """Return the features with ids after functions, by feature."""
    if not functions:
        return features
    keys, ids = features.keys(), features.values().split(features.length_per_key())
    pairs = zip(keys, ids, strict=True)
    return with_ids(
        features,
        torch.cat(
            [
                functions[key](feature_ids) if key in functions else feature_ids
                for key, feature_ids in pairs
            ]
        ),
    )


class ReturnsRows(ShardedCollection):
    """Sharded collection; its pending output has `rows`, the pending features with rows for ids."""

    def _set_stages(self, stages: CollectionStages) -> None:
        stages.input_dist.keeps_places = True
        super()._set_stages(stages)

    def output_dist(self, ctx: BatchContext, output: Iterable[Tensor]) -> LazyAwaitable[Any]:
        """Start sending embeddings and rows to the ranks of their samples."""
        pending = super().output_dist(ctx, output)
        wait, bags, configs = return_rows(ctx), ctx.given, self.configs()
        assert isinstance(bags, KeyedJaggedTensor)
        vars(pending)["rows"] = LazyAwaitable(
            lambda: features_in_order(with_ids(bags, wait()), configs)
        )
        return pending


@final
class BagsWithRows(ReturnsRows, ShardedEmbeddingBagCollection):
    """Sharded collection of bags that returns rows."""


@final
class SequencesWithRows(ReturnsRows, ShardedEmbeddingCollection):
    """Sharded collection of sequences that returns rows."""
