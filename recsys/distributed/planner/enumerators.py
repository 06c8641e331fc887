"""Options for placing each table of a model, for inspection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.distributed.planner.constants import BATCH_SIZE
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.option_lister import OptionLister
from recsys.distributed.planner.options import TableOption
from recsys.distributed.planner.pooling_stats import PoolingStats
from recsys.distributed.planner.tables import PlannedTable
from recsys.distributed.planner.topology import Topology
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.sharded.sharder import ModuleSharder


class EmbeddingEnumerator:
    """Lists the options for placing each table that its constraints allow.

    The planner lists options itself; this class shows them.

    Args:
        topology: Machine.
        batch_size: Samples per rank and step (default 512).
        constraints: Constraints by table name.
        pooling_stats: Statistics of sample batches.

    Example:
        >>> import torch
        >>> from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=64, num_embeddings=1000, feature_names=["f"]
        ... )
        >>> model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        >>> lister = EmbeddingEnumerator(Topology(2, "cpu"), batch_size=512)
        >>> for table, options in lister.enumerate(model, [EmbeddingBagCollectionSharder()]):
        ...     print(table.name, *(option.sharding_type.value for option in options))
        t table_wise column_wise row_wise data_parallel
    """

    @checked
    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        *,
        pooling_stats: PoolingStats | None = None,
    ) -> None:
        self.topology = topology
        self.batch_size = BATCH_SIZE
        if batch_size is not None:
            self.batch_size = whole("EmbeddingEnumerator.batch_size", batch_size)
        self.constraints = dict(constraints or {})
        self.pooling_stats = pooling_stats
        self._lister = OptionLister(topology, self.batch_size)

    @checked
    def enumerate(
        self, module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
    ) -> list[tuple[PlannedTable, list[TableOption]]]:
        """Return every table with its options, simplest first.

        Args:
            module: Model; may be on the `meta` device.
            sharders: One for each module type to shard.

        Raises:
            PlannerError: A constraint names an unknown table, or contradicts its features.
        """
        tables = tables_of(
            module,
            sharders,
            self.constraints,
            self.topology.compute_device,
            batch_size=self.batch_size,
            pooling_stats=self.pooling_stats,
        )
        return [(table, list(self._lister.options_of(table))) for table in tables]
