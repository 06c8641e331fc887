"""EmbeddingCollection sharded over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar, final

import torch
from torch import nn

from recsys.base.checked import checked
from recsys.distributed.placement.plan import ParameterSharding
from recsys.distributed.ranks.comm import LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import SEQUENCE_OPS, QuantizedCommCodecs
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.sharder import CollectionSharder
from recsys.distributed.stages.sequence_dist import SequenceDist
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.sparse import JaggedTensor


@final
class EmbeddingCollectionAwaitable(LazyAwaitable[dict[str, JaggedTensor]]):
    """Pending embeddings of a batch's ids."""


class ShardedEmbeddingCollection(ShardedCollection):
    """`EmbeddingCollection` that is sharded over ranks.

    Its output, gradients, weights and state dict equal the unsharded collection's under any plan.
    Every rank calls it with its own batch, even if that batch is empty; features may have different
    numbers of samples. The output is pending, by feature ("feature@table" if several tables read
    it): values `[ids of the feature, D]` of the plan's `output_dtype` (default: fp32), the lengths
    of the feature, and its ids as weights if `need_indices`.

    Args:
        module: The unsharded collection.
        table_name_to_parameter_sharding: The plan, with one entry per table.
        env: The ranks.
        fused_params: Optimizer settings for tables without an attached optimizer.
        device: Device of the tables.
        qcomm_codecs_registry: Wire formats of embeddings and gradients.
        use_index_dedup: Whether each id of a feature is sent and looked up once per batch. The
            result is the same. It saves time if many ids repeat, and costs a sort. Ignored without
            other ranks.
        module_fqn: Path of the module in the model, for error messages.

    Raises:
        ValueError: As `ShardedCollection`.
    """

    unsharded_module_type: ClassVar[type[nn.Module]] = EmbeddingCollection
    tables_name: ClassVar[str] = "embeddings"
    output_type = EmbeddingCollectionAwaitable
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
        self.output_stage = partial(SequenceDist, need_indices=self._need_indices)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return self.configs()

    def need_indices(self) -> bool:
        """Return whether the output includes ids."""
        return self._need_indices


class EmbeddingCollectionSharder(
    CollectionSharder[EmbeddingCollection, ShardedEmbeddingCollection]
):
    """Sharder of `EmbeddingCollection`.

    Args:
        fused_params: Optimizer settings for tables without an attached optimizer.
        qcomm_codecs_registry: Wire formats of embeddings and gradients, from
            `get_qcomm_codecs_registry`; None for the dtype of the values.
        use_index_dedup: As in `ShardedEmbeddingCollection`.

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
