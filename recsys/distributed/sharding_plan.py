"""Sharding plans by hand, with one short call per table.

`row_wise()`, `table_wise(rank=0)` and similar functions return *generators*: functions that place a
table of known size on known ranks. `construct_module_sharding_plan` calls them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from recsys.base.arguments import choice, whole, whole_list
from recsys.base.checked import checked
from recsys.base.lazy import moved_names
from recsys.distributed.default_sharders import sharder_of
from recsys.distributed.placement.layout import Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.placement.shard_sizes import (
    bucket_rows,
    calculate_shard_sizes_and_offsets,
)
from recsys.distributed.placement.strategies import (
    STRATEGIES,
    grid_of,
    parameter_sharding,
    placement,
    placement_helper,
    rects_of,
    sharding_of_rects,
    split_by_sizes,
)
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.node import get_local_size
from recsys.distributed.sharded.devices import default_device
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.optim.apply_optimizer_in_backward import attached_optimizer

__all__ = [
    "ParameterShardingGenerator",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "grid_shard",
    "placement",
    "placement_helper",
    "row_wise",
    "table_column_wise",
    "table_row_wise",
    "table_wise",
]

ParameterShardingGenerator = Callable[
    [nn.Parameter, int, int, str, ModuleSharder[Any]], ParameterSharding
]
"""Function that places one table: `(weight, ranks per node, ranks, device type, sharder)`."""


@checked
def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Place the whole table on one rank.

    Args:
        rank: The owner.
        device: Type of device in the plan, "cpu" or "cuda"; None for the type of the whole plan.
        compute_kernel: An `EmbeddingComputeKernel` value. None: "fused" if the table or the sharder
            has an optimizer, else "dense".

    Example:
        >>> plan = {"countries": table_wise(rank=0), "cities": table_wise(rank=1)}
    """
    whole("table_wise: rank", rank, least=0)
    return _on_ranks(ShardingType.TABLE_WISE, lambda *_: [rank], device, compute_kernel)


@checked
def row_wise(
    sizes_placement: tuple[list[int], str | list[str]] | None = None,
    compute_kernel: str | None = None,
    num_buckets: int | None = None,
) -> ParameterShardingGenerator:
    """Split the rows over all ranks, evenly unless sizes are given.

    The generator raises ValueError if sizes or buckets do not fit the table or the ranks.

    Args:
        sizes_placement: Rows of rank 0, 1, ..., and the type of device in the plan, one for all or
            one for each. The sizes must add up to the table's rows; 0 omits a rank.
        compute_kernel: As in `table_wise`.
        num_buckets: Number of buckets of equal size, which are not split.

    Raises:
        ValueError: If both sizes and buckets are given, or there is not one device for each size.

    Example:
        >>> plan = {"users": row_wise(), "items": row_wise(([600, 400], "cpu"))}
    """
    if sizes_placement is None and num_buckets is None:
        return _on_ranks(
            ShardingType.ROW_WISE, lambda _, world: range(world), compute_kernel=compute_kernel
        )
    if num_buckets is not None:
        whole("row_wise: num_buckets", num_buckets)
    sizes, devices = sizes_placement or (None, None)
    if sizes is not None and num_buckets is not None:
        raise ValueError(
            "row_wise needs sizes_placement or num_buckets; received both. Pass sizes that are "
            "multiples of a bucket."
        )
    _check_one_each("row_wise", sizes=sizes, placement=devices)

    def split(rows: int, dim: int, local_size: int, world_size: int) -> list[Rect]:
        rank_rows = bucket_rows(rows, num_buckets or 0, world_size) if sizes is None else sizes
        return grid_of(
            _blocks("row_wise", "rows", rows, rank_rows), [(0, dim)], range(len(rank_rows))
        )

    return _generator(ShardingType.ROW_WISE, split, devices, compute_kernel)


@checked
def column_wise(
    ranks: list[int] | None = None,
    size_per_rank: list[int] | None = None,
    compute_kernel: str | None = None,
    device_types: list[str] | None = None,
) -> ParameterShardingGenerator:
    """Split the columns over ranks.

    The generator raises ValueError if the sizes do not fit the table.

    Args:
        ranks: Owners in the order of their columns; a rank may occur several times. Without sizes,
            the columns are split evenly, in multiples of 4.
        size_per_rank: Columns of each shard, on `ranks`, or on rank 0, 1, ... without `ranks`.
            The sizes must add up to the table's columns.
        compute_kernel: As in `table_wise`.
        device_types: Type of device in the plan for each shard.

    Raises:
        ValueError: If neither ranks nor sizes are given, or not the same number of each.

    Example:
        >>> plan = {"a": column_wise(ranks=[1, 0]), "b": column_wise(size_per_rank=[4, 12])}
    """
    _check_one_each(
        "column_wise", ranks=ranks, size_per_rank=size_per_rank, device_types=device_types
    )
    if size_per_rank is None:
        if ranks is None:
            raise ValueError(
                "column_wise needs ranks or size_per_rank; received neither. Write "
                "column_wise(ranks=[0, 1])."
            )
        owners = ranks
        return _on_ranks(ShardingType.COLUMN_WISE, lambda *_: owners, device_types, compute_kernel)
    sizes, places = size_per_rank, range(len(size_per_rank)) if ranks is None else ranks

    def split(rows: int, dim: int, local_size: int, world_size: int) -> list[Rect]:
        return grid_of([(0, rows)], _blocks("column_wise", "columns", dim, sizes), places)

    return _generator(ShardingType.COLUMN_WISE, split, device_types, compute_kernel)


@checked
def table_row_wise(host_index: int) -> ParameterShardingGenerator:
    """Split the rows over the ranks of one node, which sums partial results before it sends them.

    Args:
        host_index: The node, from 0.

    Example:
        >>> plan = {"users": table_row_wise(host_index=1)}
    """
    whole("table_row_wise: host_index", host_index, least=0)
    return _on_nodes(ShardingType.TABLE_ROW_WISE, [host_index])


@checked
def table_column_wise(host_index: int) -> ParameterShardingGenerator:
    """Split the columns over the ranks of one node.

    Args:
        host_index: The node, from 0.

    Example:
        >>> plan = {"users": table_column_wise(host_index=1)}
    """
    whole("table_column_wise: host_index", host_index, least=0)
    return _on_nodes(ShardingType.TABLE_COLUMN_WISE, [host_index])


@checked
def grid_shard(host_indexes: list[int]) -> ParameterShardingGenerator:
    """Split the columns over nodes, and the rows of each shard over the ranks of its node.

    Args:
        host_indexes: The nodes, from 0, in the order of their columns.

    Raises:
        ValueError: If no node is given.

    Example:
        >>> plan = {"users": grid_shard(host_indexes=[0, 1])}
    """
    whole_list("grid_shard: host_indexes", host_indexes)
    if not host_indexes:
        raise ValueError(
            "grid_shard.host_indexes must name at least one node; received none. Write "
            "grid_shard([0, 1])."
        )
    return _on_nodes(ShardingType.GRID_SHARD, host_indexes)


def data_parallel() -> ParameterShardingGenerator:
    """Replicate the table on every rank.

    Example:
        >>> plan = {"countries": data_parallel()}
    """
    return _on_ranks(ShardingType.DATA_PARALLEL, lambda _, world: range(world))


@checked
def apply_to_all(
    module: nn.Module,
    parameter_sharding_generator: ParameterShardingGenerator,
    sharder: ModuleSharder[Any] | None = None,
) -> dict[str, ParameterShardingGenerator]:
    """Use the same generator for every table of a module.

    Args:
        module: Module such as an EmbeddingBagCollection.
        parameter_sharding_generator: Generator such as `row_wise()`.
        sharder: Sharder of the module; None for the default one.

    Returns:
        Generators by table name, for `construct_module_sharding_plan`.

    Raises:
        ValueError: If the module has no default sharder.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        ... )
        >>> list(apply_to_all(EmbeddingBagCollection(tables=[table]), row_wise()))
        ['t']
    """
    sharder = sharder or sharder_of(module)
    return dict.fromkeys(sharder.shardable_parameters(module), parameter_sharding_generator)


@checked
def construct_module_sharding_plan(
    module: nn.Module,
    per_param_sharding: Mapping[str, ParameterShardingGenerator],
    sharder: ModuleSharder[Any] | None = None,
    local_size: int | None = None,
    world_size: int | None = None,
    device_type: str | None = None,
) -> EmbeddingModuleShardingPlan:
    """Make the plan of one module.

    Args:
        module: Module such as an EmbeddingBagCollection; may be on the `meta` device.
        per_param_sharding: Generators by table name.
        sharder: Sharder of the module; None for the default one.
        local_size: Ranks per node; None for the value of this job.
        world_size: Number of ranks; None for the value of this job.
        device_type: "cpu" or "cuda"; None for the type of this rank's device.

    Returns:
        One `ParameterSharding` per table.

    Raises:
        ValueError: If a table is missing, unknown or cannot be placed, if the sharder does not
            support a sharding type, or if the module has no default sharder.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> small, large = (
        ...     EmbeddingBagConfig(name=n, embedding_dim=4, num_embeddings=10, feature_names=[n])
        ...     for n in ("small", "large")
        ... )
        >>> plan = construct_module_sharding_plan(
        ...     EmbeddingBagCollection(tables=[small, large]),
        ...     {"small": data_parallel(), "large": row_wise()},
        ...     world_size=2,
        ...     device_type="cpu",
        ... )
        >>> [shard.shard_sizes for shard in plan["large"].sharding_spec.shards]
        [[5, 4], [5, 4]]
    """
    for name, size in (("world_size", world_size), ("local_size", local_size)):
        if size is not None:
            whole(f"construct_module_sharding_plan: {name}", size)
    sharder = sharder or sharder_of(module)
    tables = sharder.shardable_parameters(module)
    if tables.keys() != per_param_sharding.keys():
        raise ValueError(
            f"per_param_sharding must name each table of the {type(module).__name__} once; "
            f"missing: {sorted(tables.keys() - per_param_sharding.keys())}, not in the module: "
            f"{sorted(per_param_sharding.keys() - tables.keys())}. apply_to_all(module, row_wise())"
            " names them all."
        )
    world_size = world_size or ShardingEnv.default().world_size
    local_size = local_size or get_local_size(world_size)
    if world_size % local_size:
        raise ValueError(
            "local_size must divide world_size: nodes have the same number of ranks; received "
            f"local_size={local_size}, world_size={world_size}."
        )
    device_type = device_type or default_device(ShardingEnv.default()).type
    known = sharder.sharding_types(device_type)
    plan = EmbeddingModuleShardingPlan()
    for name, weight in tables.items():
        generate = per_param_sharding[name]
        placed = generate(weight, local_size, world_size, device_type, sharder)
        if placed.sharding_type not in known:
            raise ValueError(
                f"Table {name!r} must have a sharding type that {type(sharder).__name__} supports "
                f"on {device_type}, one of {', '.join(known)}; received {placed.sharding_type}."
            )
        # raises an error for an unknown rank
        rects_of(name, weight.shape[0], weight.shape[1], placed, world_size, local_size)
        plan[name] = placed
    return plan


def _generator(
    kind: ShardingType,
    split: Callable[[int, int, int, int], list[Rect]],
    devices: str | list[str] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Return a generator from a function of rows, columns, ranks per node and ranks."""

    def generate(
        weight: nn.Parameter,
        local_size: int,
        world_size: int,
        device_type: str,
        sharder: ModuleSharder[Any],
    ) -> ParameterSharding:
        rows, dim = weight.shape
        if kind is ShardingType.DATA_PARALLEL:
            kernel = EmbeddingComputeKernel.DENSE
            return parameter_sharding(kind, rows, dim, range(world_size), compute_kernel=kernel)
        rects = split(rows, dim, local_size, world_size)
        named = devices or device_type
        kinds = [named] * len(rects) if isinstance(named, str) else named
        placements = [
            placement(device, rect.rank, local_size)
            for rect, device in zip(rects, kinds, strict=False)  # narrow tables have fewer shards
        ]
        is_fused = attached_optimizer(weight) is not None or sharder.fused_params
        kernel = EmbeddingComputeKernel.FUSED if is_fused else EmbeddingComputeKernel.DENSE
        if compute_kernel is not None:
            kernel = choice("compute_kernel", compute_kernel, EmbeddingComputeKernel)
        return sharding_of_rects(kind, rects, placements, kernel)

    return generate


def _on_ranks(
    kind: ShardingType,
    ranks_of: Callable[[int, int], Sequence[int]],
    devices: str | list[str] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Return a generator from a function of `(ranks per node, ranks)` to the owners."""

    def split(num_rows: int, dim: int, local_size: int, world_size: int) -> list[Rect]:
        return STRATEGIES[kind](num_rows, dim, ranks_of(local_size, world_size), local_size)

    return _generator(kind, split, devices, compute_kernel)


def _on_nodes(kind: ShardingType, nodes: Sequence[int]) -> ParameterShardingGenerator:
    """Return a generator that places a table on all ranks of these nodes."""
    return _on_ranks(
        kind, lambda local, _: [node * local + rank for node in nodes for rank in range(local)]
    )


def _blocks(function: str, unit: str, size: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    if sum(sizes) != size or min(sizes) < 0:
        raise ValueError(
            f"The sizes of {function} must add up to the table's {unit}; received {list(sizes)}, "
            f"in total {sum(sizes)}, for {size} {unit}."
        )
    return split_by_sizes(sizes)


def _check_one_each(function: str, **given: Sequence[object] | None) -> None:
    lists = {name: value for name, value in given.items() if isinstance(value, list)}
    if len({len(value) for value in lists.values()}) > 1 or [] in lists.values():
        raise ValueError(
            f"{function}: {' and '.join(lists)} must have one entry per shard; "
            f"received {' and '.join(str(value) for value in lists.values())}."
        )


if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
