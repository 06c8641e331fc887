"""EmbeddingCollection placed on many ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import nn

from recsys.distributed.placement.plan import ParameterSharding
from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import SEQUENCE_OPS, QuantizedCommCodecs
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.collection_stages import OutputStageFactory
from recsys.distributed.sharded.sharder import CollectionSharder
from recsys.distributed.stages.sequence_dist import SequenceDist
from recsys.kernels.checked import checked
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.sparse import JaggedTensor


@final
class EmbeddingCollectionAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """The embeddings of a batch's ids, on their way back from the ranks that own the tables."""


@final
class ShardedEmbeddingCollection(ShardedCollection):
    """An `EmbeddingCollection` placed on many ranks.

    Its output, gradients, weights and state dict are those of the unsharded collection, whatever
    the plan. Every rank calls it with its own batch, also when that batch is empty; its features
    may have different numbers of samples. The output is pending, by feature ("feature@table" if
    several tables read it): values `[ids of the feature, D]` of the plan's `output_dtype`, fp32
    if it names none, the feature's lengths, and its ids as weights if asked for.

    Args:
        module: the collection to place.
        table_name_to_parameter_sharding: the plan: one entry per table.
        env: the ranks.
        fused_params: optimizer settings for the tables that have no optimizer attached.
        device: where the tables go.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel.
        use_index_dedup: whether each id of a feature travels, and is looked up, once per batch.
            The result is the same; it pays where ids repeat, and costs a sort where they do not.
            Without other ranks nothing travels, and it means nothing.

    Raises:
        ValueError: as `ShardedCollection` does.
    """

    unsharded_module_type: ClassVar[type[nn.Module]] = EmbeddingCollection
    tables_name: ClassVar[str] = "embeddings"
    output_type = EmbeddingCollectionAwaitable
    output_stage = SequenceDist
    output_ops = SEQUENCE_OPS

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
        module_fqn: str | None = None,
    ) -> None:
        self._use_index_dedup = use_index_dedup
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
            module_fqn,
        )

    def _adopt(self, module: Any) -> None:
        self._need_indices: bool = module.need_indices()

    def _output_stage(self) -> OutputStageFactory:
        return partial(SequenceDist, need_indices=self._need_indices)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configuration of each table."""
        return self.configs()

    def need_indices(self) -> bool:
        """Return whether the ids are returned too."""
        return self._need_indices


class EmbeddingCollectionSharder(
    CollectionSharder[EmbeddingCollection, ShardedEmbeddingCollection]
):
    """Shards `EmbeddingCollection`.

    Args:
        fused_params: optimizer settings for tables that have no optimizer attached.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel, from
            `get_qcomm_codecs_registry`; None: as they are.
        use_index_dedup: whether each id of a feature travels once; see
            `ShardedEmbeddingCollection`.

    Example:
        >>> EmbeddingCollectionSharder(use_index_dedup=True).module_type.__name__
        'EmbeddingCollection'
    """

    replaces: ClassVar[type[Any]] = EmbeddingCollection
    makes = ShardedEmbeddingCollection

    @checked
    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self.use_index_dedup = use_index_dedup

    def _options(self) -> dict[str, Any]:
        return {"use_index_dedup": self.use_index_dedup}
