"""Enumerators: list the options for each table, with estimates."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from recsys.compat.planner.constants import sharder_name
from recsys.compat.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
    build_sharder_data_map,
)
from recsys.compat.planner.topology import Topology
from recsys.compat.planner.types import (
    Enumerator,
    PartitionByType,
    Shard,
    ShardEstimator,
    ShardingOption,
)
from recsys.distributed.planner.constants import BATCH_SIZE
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.tables import UVM_KERNELS, PlannedTable
from recsys.distributed.planner.types import (
    ParameterConstraints,
    PlannerError,
    PlannerErrorType,
)
from recsys.distributed.sharding_plan import calculate_shard_sizes_and_offsets
from recsys.distributed.types import EmbeddingComputeKernel, ModuleSharder, ShardingType

GUARDED_COMPUTE_KERNELS = set(UVM_KERNELS)
"""Kernels of tables in host memory, which are listed only if a constraint names them."""
GUARDED_SHARDING_TYPES_FOR_FP_MODULES = {
    ShardingType.ROW_WISE.value,
    ShardingType.TABLE_ROW_WISE.value,
    ShardingType.GRID_SHARD.value,
}
"""Types that are listed for a feature-processed collection only if a constraint names them."""

_PARTITION_BY = {
    ShardingType.DATA_PARALLEL: PartitionByType.UNIFORM,
    ShardingType.ROW_WISE: PartitionByType.UNIFORM,
    ShardingType.TABLE_WISE: PartitionByType.DEVICE,
    ShardingType.COLUMN_WISE: PartitionByType.DEVICE,
    ShardingType.TABLE_ROW_WISE: PartitionByType.HOST,
    ShardingType.TABLE_COLUMN_WISE: PartitionByType.HOST,
    ShardingType.GRID_SHARD: PartitionByType.MULTI_HOST,
}


def get_partition_by_type(sharding_type: str) -> str:
    """Return the `PartitionByType` value of a sharding type.

    Raises:
        ValueError: The sharding type is unknown.

    Example:
        >>> get_partition_by_type("row_wise")
        'uniform'
    """
    return _PARTITION_BY[ShardingType(sharding_type)].value


class EmbeddingEnumerator(Enumerator):
    """Lists the options that the sharders, the optimizers and the constraints allow.

    Args:
        topology: Machine.
        batch_size: Samples per rank and step (default 512).
        constraints: Constraints by table name.
        estimator: Estimator of shards; the planner's models of bytes and milliseconds if None.

    Example:
        >>> import torch
        >>> from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=64, num_embeddings=1000, feature_names=["f"]
        ... )
        >>> model = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
        >>> lister = EmbeddingEnumerator(Topology(2, "cpu", local_world_size=2), batch_size=512)
        >>> options = lister.enumerate(model, [EmbeddingBagCollectionSharder()])
        >>> [(option.sharding_type, option.num_shards) for option in options][:3]
        [('data_parallel', 2), ('table_wise', 1), ('column_wise', 1)]
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = None,
        constraints: dict[str, ParameterConstraints] | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
    ) -> None:
        super().__init__(topology, batch_size or BATCH_SIZE, constraints, estimator)
        self._sharder_map: dict[str, ModuleSharder[Any]] = {}
        self._last_stored_search_space: list[ShardingOption] | None = None

    @property
    def sharder_map(self) -> dict[str, ModuleSharder[Any]]:
        """Sharders of the last `enumerate`, by module and name of their module type."""
        return self._sharder_map

    @property
    def last_stored_search_space(self) -> list[ShardingOption] | None:
        """Last result of `enumerate`."""
        return self._last_stored_search_space

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[Any]]
    ) -> list[ShardingOption]:
        """Return all options of all tables with their estimates, table by table.

        Args:
            module: Model; may be on the `meta` device.
            sharders: One for each module type to shard.

        Raises:
            PlannerError: A constraint names an unknown table, contradicts its features, or leaves
                no option.
        """
        self._sharder_map = {sharder_name(sharder.module_type): sharder for sharder in sharders}
        tables = tables_of(
            module,
            sharders,
            self._constraints or {},
            self._topology.compute_device,
            batch_size=self._batch_size,
        )
        options: list[ShardingOption] = []
        for table in tables:
            of_table = list(self._options_of(table, module.get_submodule(table.path)))
            if not of_table:
                demands = table.constraints
                raise PlannerError(
                    f"Table {table.name!r} must have an option; received none of sharding types "
                    f"{demands.sharding_types} with compute kernels {demands.compute_kernels}, "
                    f"None for any, on {self._topology.compute_device}. Ease its constraints.",
                    PlannerErrorType.STRICT_CONSTRAINTS,
                )
            options += of_table
        self.populate_estimates(options)
        self._last_stored_search_space = options
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set milliseconds and bytes of the shards of options, in place.

        Args:
            sharding_options: Options for tables of the enumerated model.
        """
        estimators = self._estimator
        if estimators is None:
            estimators = [
                EmbeddingStorageEstimator(self._topology, self._constraints),
                EmbeddingPerfEstimator(self._topology, self._constraints),
            ]
        elif not isinstance(estimators, list):
            estimators = [estimators]
        data = build_sharder_data_map(self._sharder_map)
        for estimator in estimators:
            estimator.estimate(sharding_options, data)

    def _options_of(self, table: PlannedTable, module: nn.Module) -> Iterator[ShardingOption]:
        sharder = self._sharder_map[sharder_name(type(module))]
        weight = sharder.shardable_parameters(module)[table.name]
        demands = table.constraints
        for kind, kernels in table.kernels.items():
            if kind is ShardingType.DATA_PARALLEL and demands.compute_kernels is None:
                kernels = [EmbeddingComputeKernel.DENSE]  # as in TorchRec
            for kernel in kernels:
                if not table.allows(kind, kernel):
                    continue
                sizes, offsets = calculate_shard_sizes_and_offsets(
                    weight,
                    self._topology.world_size,
                    self._topology.local_world_size,
                    kind.value,
                    demands.min_partition,
                )
                option = ShardingOption(
                    name=table.name,
                    tensor=weight,
                    module=(table.path, module),
                    input_lengths=demands.pooling_factors or [1.0] * table.num_features,
                    batch_size=self._batch_size,
                    sharding_type=kind.value,
                    partition_by=get_partition_by_type(kind.value),
                    compute_kernel=kernel.value,
                    shards=[Shard(*both) for both in zip(sizes, offsets, strict=True)],
                    cache_params=demands.cache_params
                    if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING
                    else None,
                    enforce_hbm=demands.enforce_hbm,
                    stochastic_rounding=demands.stochastic_rounding,
                    bounds_check_mode=demands.bounds_check_mode,
                    is_pooled=table.is_pooled,
                    feature_names=demands.feature_names,
                    output_dtype=demands.output_dtype,
                    num_poolings=demands.num_poolings,
                )
                option.is_weighted = table.is_weighted
                guarded = kind.value in GUARDED_SHARDING_TYPES_FOR_FP_MODULES
                asked = kind.value in (demands.sharding_types or ())
                if not (option.has_feature_processor and guarded) or asked:
                    yield option
