"""Estimators of shards that use the planner's models of costs and memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from recsys.compat.planner.estimator_types import HardwarePerfConfig, ShardPerfContext
from recsys.compat.planner.topology import Perf, Storage, Topology
from recsys.compat.planner.types import (
    SharderData,
    SharderDataMap,
    ShardEstimator,
    ShardingOption,
    get_num_poolings,
)
from recsys.compat.planner.values import PipelineType
from recsys.distributed.default_sharders import sharder_of
from recsys.distributed.placement.fused_params import optimizer_of_table
from recsys.distributed.planner import tables
from recsys.distributed.planner.constants import UVM_CACHING_RATIO
from recsys.distributed.planner.costs import Cost, CostModel
from recsys.distributed.planner.model_tables import tables_of
from recsys.distributed.planner.storage import StorageModel
from recsys.distributed.planner.tables import PlannedTable, ShardSpec
from recsys.distributed.planner.types import ParameterConstraints
from recsys.distributed.types import (
    CacheParams,
    EmbeddingComputeKernel,
    ModuleSharder,
    ShardingType,
)

KV_CACHING_RATIO = UVM_CACHING_RATIO
"""Share of a table's rows in a cache. There are no key-value stores."""
_T = TypeVar("_T")


class _Estimator(ShardEstimator):
    """Base of estimators that compute with a model of the planner.

    Args:
        topology: Machine.
        constraints: Constraints by table name, for traffic that options do not state.
        is_inference: Whether to leave out everything that only training needs.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None,
        is_inference: bool,
    ) -> None:
        super().__init__(topology, constraints)
        self._is_inference = is_inference

    def _tables_of(
        self, options: Sequence[ShardingOption], data: SharderDataMap, model_of: Callable[[int], _T]
    ) -> Iterator[tuple[ShardingOption, PlannedTable, _T]]:
        """Yield options with their tables, and the model for their batch size."""
        models: dict[int, _T] = {}
        for option, table in _tables_of(options, data, self._constraints, self._topology):
            if option.batch_size not in models:
                models[option.batch_size] = model_of(option.batch_size)
            if self._is_inference:
                table = replace(table, optimizer=None, trains=False)
            yield option, table, models[option.batch_size]


class EmbeddingPerfEstimator(_Estimator):
    """Sets the milliseconds of shards by `CostModel`.

    If ranks differ, the numbers apply to the slowest rank.

    Args:
        topology: Machine.
        constraints: Constraints by table name, for traffic that options do not state.
        is_inference: Whether to count forward only.
        config: Speeds that override the machine's speeds.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        is_inference: bool = False,
        config: HardwarePerfConfig | None = None,
    ) -> None:
        self._config = config or HardwarePerfConfig()
        super().__init__(self._config.applied_to(topology), constraints, is_inference)

    @property
    def config(self) -> HardwarePerfConfig:
        """Speeds that override the machine's speeds."""
        return self._config

    @property
    def is_inference(self) -> bool:
        """True if only forward is counted."""
        return self._is_inference

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """Set `perf` of every shard, in place; 0 for empty shards.

        Args:
            sharding_options: Options.
            sharder_data_map: Data of their modules' sharders.

        Raises:
            ValueError: A module has neither data nor a default sharder.
        """
        for option, table, model in self._tables_of(
            sharding_options, sharder_data_map, functools.partial(CostModel, self._topology)
        ):
            sizes = [shard.size for shard in option.shards]
            kind, kernel = _kind_of(option)
            costs = _each(table, kind, kernel, sizes, model.shard_cost, model.replica_cost, Cost())
            perfs = [self._perf(table, cost) for cost in costs]
            formulas = self._config.formulas_of(option.sharding_type)
            if formulas:
                contexts = ShardPerfContext.build_shard_perf_contexts(
                    self._config,
                    sizes,
                    option,
                    self._topology,
                    self._constraints,
                    sharder_data_map[option.module_type_key],
                    self._is_inference,
                )
                perfs = [
                    replace(perf, **{part: formula(ctx) for part, formula in formulas.items()})
                    for perf, ctx in zip(perfs, contexts, strict=True)
                ]
            perfs = self._config.post_process_perfs(perfs, sizes, option.sharding_type)
            for shard, perf in zip(option.shards, perfs, strict=True):
                shard.perf = perf

    def _perf(self, table: PlannedTable, cost: Cost) -> Perf:
        there, back = table.wire_bytes
        sent = cost.output * there / (there + back)
        return Perf(
            fwd_compute=cost.forward,
            fwd_comms=sent,
            bwd_compute=cost.backward,
            bwd_comms=0.0 if self._is_inference else cost.output - sent + cost.update,
            input_dist_comms=cost.input,
            prefetch_compute=cost.prefetch,
        )


class EmbeddingStorageEstimator(_Estimator):
    """Sets the bytes of shards by `StorageModel`.

    Args:
        topology: Machine.
        constraints: Constraints by table name, for traffic that options do not state.
        pipeline_type: Determines the number of batches on a device at a time.
        is_inference: Whether to omit optimizer states and gradients.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: dict[str, ParameterConstraints] | None = None,
        pipeline_type: PipelineType = PipelineType.NONE,
        *,
        is_inference: bool = False,
    ) -> None:
        super().__init__(topology, constraints, is_inference)
        self._batches_in_flight = pipeline_type.batches_in_flight

    def estimate(
        self, sharding_options: list[ShardingOption], sharder_data_map: SharderDataMap
    ) -> None:
        """Set `storage` of every shard, in place; 0 for empty shards.

        Args:
            sharding_options: Options.
            sharder_data_map: Data of their modules' sharders.

        Raises:
            ValueError: A module has neither data nor a default sharder.
        """
        make = functools.partial(
            StorageModel, self._topology, batches_in_flight=self._batches_in_flight
        )
        for option, table, model in self._tables_of(sharding_options, sharder_data_map, make):
            sizes = [shard.size for shard in option.shards]
            device = self._topology.compute_device
            storages = _storages(table, *_kind_of(option), sizes, model, device)
            for shard, storage in zip(option.shards, storages, strict=True):
                shard.storage = storage


def calculate_shard_storages(
    sharder_data: SharderData,
    sharding_type: str,
    tensor: torch.Tensor,
    compute_device: str,
    compute_kernel: str,
    shard_sizes: list[list[int]],
    batch_sizes: list[int],
    world_size: int,
    local_world_size: int,
    input_lengths: list[float],
    num_poolings: list[float],
    caching_ratio: float,
    is_pooled: bool,
) -> list[Storage]:
    """Return the bytes of shards: weights, optimizer states and the buffers of a batch.

    Args:
        sharder_data: Data of the sharder of the table's module.
        sharding_type: A `ShardingType` value.
        tensor: Weight, `[rows, columns]`.
        compute_device: "cpu" or "cuda".
        compute_kernel: An `EmbeddingComputeKernel` value.
        shard_sizes: Rows and columns of each shard.
        batch_sizes: Samples per rank for each feature.
        world_size: Number of ranks.
        local_world_size: Ranks per node.
        input_lengths: Mean ids per bag for each feature.
        num_poolings: Mean bags per sample for each feature.
        caching_ratio: Share of the rows in a cache.
        is_pooled: Whether bags are pooled.

    Example:
        >>> weight = nn.Parameter(torch.empty(1000, 8, device="meta"))
        >>> calculate_shard_storages(
        ...     SharderData(fused_params={"optimizer": "ADAM"}), "row_wise", weight, "cuda",
        ...     "fused", [[500, 8]] * 2, [16], 2, 2, [1.0], [1.0], 0.2, True,
        ... )[0]
        Storage(hbm=48708, ddr=0, ssd=0)
    """
    batch_size = max(batch_sizes)
    bags = [n * size / batch_size for n, size in zip(num_poolings, batch_sizes, strict=True)]
    weight = tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)
    table = PlannedTable(
        path="",
        name="",
        rows=tensor.shape[0],
        dim=tensor.shape[1],
        element_bytes=tensor.element_size(),
        optimizer=optimizer_of_table(weight, sharder_data.fused_params),
        trains=weight.requires_grad,
        ids_per_sample=sum(length * n for length, n in zip(input_lengths, bags, strict=True)),
        bags_per_sample=max(bags) * len(bags),
        num_features=len(bags),
        is_pooled=is_pooled,
        constraints=_demands(cache_params=CacheParams(load_factor=caching_ratio)),
        kernels={},
    )
    topology = Topology(
        world_size, compute_device, hbm_cap=0, ddr_cap=0, local_world_size=local_world_size
    )
    model = StorageModel(topology, batch_size)
    kind, kernel = ShardingType(sharding_type), EmbeddingComputeKernel(compute_kernel)
    return _storages(table, kind, kernel, shard_sizes, model, compute_device)


def build_sharder_data_map(sharder_map: Mapping[str, ModuleSharder[Any]]) -> SharderDataMap:
    """Return the data of sharders for estimators.

    Args:
        sharder_map: Sharders by module and name of the module type that each one shards.
    """
    return {
        key: SharderData(
            fused_params=dict(sharder.fused_params),
            qcomm_dtype_sizes={
                name: (codecs.forward.bytes_per_value, codecs.backward.bytes_per_value)
                for name, codecs in (getattr(sharder, "qcomm_codecs_registry", None) or {}).items()
            },
            sharder=sharder,
        )
        for key, sharder in sharder_map.items()
    }


def _kind_of(option: ShardingOption) -> tuple[ShardingType, EmbeddingComputeKernel]:
    return ShardingType(option.sharding_type), EmbeddingComputeKernel(option.compute_kernel)


def _tables_of(
    options: Sequence[ShardingOption],
    sharder_data_map: SharderDataMap,
    constraints: Mapping[str, ParameterConstraints] | None,
    topology: Topology,
) -> Iterator[tuple[ShardingOption, PlannedTable]]:
    """Yield options with their tables, with the traffic that each option states.

    A module is read once for each distinct statement of an option of one of its tables.
    """
    said: dict[tuple[str, int], list[ParameterConstraints]] = {}
    readings: dict[tuple[str, int, int], dict[str, ParameterConstraints]] = {}
    places = []
    for option in options:
        demands = _demands_of(option, (constraints or {}).get(option.name))
        known = said.setdefault((option.fqn, option.batch_size), [])
        if demands not in known:
            known.append(demands)
        place = (option.path, option.batch_size, known.index(demands))
        readings.setdefault(place, {})[option.name] = demands
        places.append(place)
    read: dict[tuple[str, int, int], dict[str, PlannedTable]] = {}
    for option, place in zip(options, places, strict=True):
        if place not in read:
            module = option.module[1]
            data = sharder_data_map.get(option.module_type_key)
            sharder = (data and data.sharder) or sharder_of(module)
            tables = tables_of(
                module,
                [sharder],
                readings[place],
                topology.compute_device,
                batch_size=option.batch_size,
            )
            read[place] = {table.name: table for table in tables}
        yield option, read[place][option.name]


def _demands_of(
    option: ShardingOption, demands: ParameterConstraints | None
) -> ParameterConstraints:
    """Return an option's traffic as constraints, completed by the user's constraints."""
    return _demands(
        cache_params=option.cache_params,
        pooling_factors=list(option.input_lengths),
        num_poolings=get_num_poolings(demands and {option.name: demands}, option),
        batch_sizes=demands and demands.batch_sizes,
        feature_names=demands and demands.feature_names,
        is_weighted=option.is_weighted or (demands is not None and demands.is_weighted),
    )


def _demands(*, cache_params: CacheParams | None, **others: Any) -> ParameterConstraints:
    kernels = None if cache_params is None else [EmbeddingComputeKernel.FUSED_UVM_CACHING.value]
    return ParameterConstraints(compute_kernels=kernels, cache_params=cache_params, **others)


def _storages(
    table: PlannedTable,
    kind: ShardingType,
    kernel: EmbeddingComputeKernel,
    sizes: Sequence[Sequence[int]],
    model: StorageModel,
    device: str,
) -> list[Storage]:
    storages = _each(
        table, kind, kernel, sizes, model.shard_storage, model.replica_storage, tables.RankMemory()
    )
    return [
        Storage(hbm=size.device, ddr=size.host)
        if device == "cuda"
        else Storage(hbm=0, ddr=size.device + size.host)
        for size in (storage.total for storage in storages)
    ]


def _each(
    table: PlannedTable,
    kind: ShardingType,
    kernel: EmbeddingComputeKernel,
    sizes: Sequence[Sequence[int]],
    shard_cost: Callable[..., _T],
    replica_cost: Callable[[PlannedTable, EmbeddingComputeKernel], _T],
    nothing: _T,
) -> list[_T]:
    """Return the cost of each shard with these rows and columns."""
    if kind is ShardingType.DATA_PARALLEL:
        return [replica_cost(table, kernel)] * len(sizes)
    in_node = kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)
    row_parts = table.row_parts((1, rows, cols) for rows, cols in sizes)
    known = {
        (rows, cols): shard_cost(table, ShardSpec(rows, cols, kernel, in_node, row_parts))
        if rows and cols
        else nothing
        for rows, cols in {tuple(size) for size in sizes}
    }
    return [known[rows, cols] for rows, cols in sizes]
