"""Plans written by hand: one short call per table says where it goes.

`row_wise()`, `table_wise(rank=0)` and their kin return *generators*: functions that place a
table once its size and the ranks are known. `construct_module_sharding_plan` calls them. The
rectangles come from `strategies`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from recsys.distributed.default_sharders import sharder_of
from recsys.distributed.placement.layout import Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.placement.strategies import (
    MIN_COLUMNS,
    STRATEGIES,
    grid_of,
    parameter_sharding,
    placement,
    placement_helper,
    rects_of,
    sharding_of_rects,
    split_by_sizes,
    split_evenly,
)
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.node import get_local_size
from recsys.distributed.sharded.devices import default_device
from recsys.distributed.sharded.sharder import ModuleSharder
from recsys.kernels.arguments import choice, whole, whole_list, wrong_type
from recsys.kernels.checked import checked
from recsys.optim.apply_optimizer_in_backward import attached_optimizer

__all__ = [
    "ParameterShardingGenerator",
    "apply_to_all",
    "calculate_shard_sizes_and_offsets",
    "column_wise",
    "construct_module_sharding_plan",
    "data_parallel",
    "get_sharding_constructor_from_type",
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
"""Places one table: `(weight, ranks per node, ranks, device type, sharder)` to its placement."""


@checked
def table_wise(
    rank: int, device: str | None = None, compute_kernel: str | None = None
) -> ParameterShardingGenerator:
    """Place the whole table on one rank.

    Args:
        rank: the owner.
        device: the kind of device that the plan names, "cpu" or "cuda"; that of the whole plan if
            None.
        compute_kernel: an `EmbeddingComputeKernel` value. If None,
            "fused" for a table with an optimizer attached or a sharder that has one, else "dense".

    Returns:
        The generator.

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
    """Divide the rows among all ranks, evenly unless sizes are given.

    Args:
        sizes_placement: the rows of rank 0, 1, ..., and the kind of device that the plan names, one
            for all or one for each. The sizes must add up to the table's rows; 0 leaves a rank out.
        compute_kernel: as for `table_wise`.
        num_buckets: split the rows into this many buckets of equal size, and never split one.

    Returns:
        The generator. It raises ValueError if sizes or buckets do not fit the table or the ranks.

    Raises:
        ValueError: if both sizes and buckets are given, or not one device for each size.

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
            "row_wise takes sizes_placement or num_buckets; received both. Give sizes that are "
            "multiples of a bucket."
        )
    _check_one_each("row_wise", sizes=sizes, placement=devices)

    def split(rows: int, dim: int, local_size: int, world_size: int) -> list[Rect]:
        own = _bucket_rows(rows, num_buckets or 0, world_size) if sizes is None else sizes
        return grid_of(_blocks("row_wise", "rows", rows, own), [(0, dim)], range(len(own)))

    return _generator(ShardingType.ROW_WISE, split, devices, compute_kernel)


@checked
def column_wise(
    ranks: list[int] | None = None,
    size_per_rank: list[int] | None = None,
    compute_kernel: str | None = None,
    device_types: list[str] | None = None,
) -> ParameterShardingGenerator:
    """Divide the columns among ranks.

    Args:
        ranks: the owners in order of their columns; a rank may come up several times. Without
            sizes, each gets as many columns, in multiples of 4.
        size_per_rank: the columns of each part, on `ranks`, or on rank 0, 1, ... if that is None.
            The sizes must add up to the table's columns.
        compute_kernel: as for `table_wise`.
        device_types: the kind of device that the plan names for each part.

    Returns:
        The generator. It raises ValueError if the sizes do not fit the table.

    Raises:
        ValueError: if neither ranks nor sizes are given, or not as many of each.

    Example:
        >>> plan = {"a": column_wise(ranks=[1, 0]), "b": column_wise(size_per_rank=[4, 12])}
    """
    _check_one_each(
        "column_wise", ranks=ranks, size_per_rank=size_per_rank, device_types=device_types
    )
    if size_per_rank is None:
        if ranks is None:
            raise ValueError(
                "column_wise needs the ranks that own the columns, or size_per_rank; received "
                "neither. Name them: column_wise(ranks=[0, 1])."
            )
        owners = ranks
        return _on_ranks(ShardingType.COLUMN_WISE, lambda *_: owners, device_types, compute_kernel)
    sizes, places = size_per_rank, range(len(size_per_rank)) if ranks is None else ranks

    def split(rows: int, dim: int, local_size: int, world_size: int) -> list[Rect]:
        return grid_of([(0, rows)], _blocks("column_wise", "columns", dim, sizes), places)

    return _generator(ShardingType.COLUMN_WISE, split, device_types, compute_kernel)


@checked
def table_row_wise(host_index: int) -> ParameterShardingGenerator:
    """Divide the rows among the ranks of one node, which adds its parts up before it sends them.

    Args:
        host_index: the node, from 0.

    Returns:
        The generator.

    Example:
        >>> plan = {"users": table_row_wise(host_index=1)}
    """
    whole("table_row_wise: host_index", host_index, least=0)
    return _on_ranks(ShardingType.TABLE_ROW_WISE, lambda local, _: _node(host_index, local))


@checked
def table_column_wise(host_index: int) -> ParameterShardingGenerator:
    """Divide the columns among the ranks of one node.

    Args:
        host_index: the node, from 0.

    Returns:
        The generator.

    Example:
        >>> plan = {"users": table_column_wise(host_index=1)}
    """
    whole("table_column_wise: host_index", host_index, least=0)
    return _on_ranks(ShardingType.TABLE_COLUMN_WISE, lambda local, _: _node(host_index, local))


@checked
def grid_shard(host_indexes: list[int]) -> ParameterShardingGenerator:
    """Divide the columns among nodes, and the rows of each part among the ranks of its node.

    Args:
        host_indexes: the nodes, from 0, in order of their columns.

    Returns:
        The generator.

    Raises:
        ValueError: if no node is given.

    Example:
        >>> plan = {"users": grid_shard(host_indexes=[0, 1])}
    """
    whole_list("grid_shard: host_indexes", host_indexes)
    if not host_indexes:
        raise ValueError(
            "grid_shard.host_indexes must name one node or more; received none. Write "
            "grid_shard([0, 1])."
        )
    return _on_ranks(
        ShardingType.GRID_SHARD,
        lambda local, _: [rank for host in host_indexes for rank in _node(host, local)],
    )


def data_parallel() -> ParameterShardingGenerator:
    """Keep a copy of the table on every rank.

    Returns:
        The generator.

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
    """Names the same generator for every table of a module.

    Args:
        module: such as an EmbeddingBagCollection.
        parameter_sharding_generator: such as `row_wise()`.
        sharder: of the module; the default one for its type if None.

    Returns:
        By table name, for `construct_module_sharding_plan`.

    Raises:
        ValueError: if there is no default sharder for the module.

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
    """Write the plan of one module.

    Args:
        module: such as an EmbeddingBagCollection; may be on the `meta` device.
        per_param_sharding: by table name, where it goes.
        sharder: of the module; the default one for its type if None.
        local_size: ranks per node; those of this job if None.
        world_size: ranks; those of this job if None.
        device_type: "cpu" or "cuda"; what the ranks of this job work on if None.

    Returns:
        One `ParameterSharding` per table.

    Raises:
        ValueError: if a table is missing, unknown, or cannot be placed so; if the sharder does not
            know a sharding type; or if there is no default sharder for the module.

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
            f"local_size must divide world_size: nodes have equally many ranks; received "
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
                f"Table {name!r} must be placed by a sharding type that {type(sharder).__name__} "
                f"knows on {device_type}, one of {', '.join(known)}; received "
                f"{placed.sharding_type}."
            )
        # raises if there is no such rank
        rects_of(name, weight.shape[0], weight.shape[1], placed, world_size, local_size)
        plan[name] = placed
    return plan


@checked
def get_sharding_constructor_from_type(
    sharding_type: ShardingType,
) -> Callable[..., ParameterShardingGenerator]:
    """Return the helper that makes generators of a sharding type, such as `row_wise`.

    Args:
        sharding_type: or the value of one.

    Raises:
        ValueError: if there is no such type.

    Example:
        >>> get_sharding_constructor_from_type(ShardingType.TABLE_WISE)(rank=1) is not None
        True
    """
    return _HELPERS[choice("sharding_type", sharding_type, ShardingType)]


_HELPERS: Mapping[ShardingType, Callable[..., ParameterShardingGenerator]] = {
    ShardingType.DATA_PARALLEL: data_parallel,
    ShardingType.TABLE_WISE: table_wise,
    ShardingType.COLUMN_WISE: column_wise,
    ShardingType.ROW_WISE: row_wise,
    ShardingType.TABLE_ROW_WISE: table_row_wise,
    ShardingType.TABLE_COLUMN_WISE: table_column_wise,
    ShardingType.GRID_SHARD: grid_shard,
}


@checked
def calculate_shard_sizes_and_offsets(
    tensor: Tensor,
    world_size: int,
    local_world_size: int,
    sharding_type: str,
    col_wise_shard_dim: int | None = None,
    device_memory_sizes: Sequence[int] | None = None,
    num_buckets: int | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """Split a table as a sharding type does, before anybody knows who owns the parts.

    Rows are split evenly, the last parts smaller or empty. Columns are split into parts of one
    width, a multiple of 4; where no such width fits, there is one part.

    Args:
        tensor: the table, `[rows, columns]`; only its shape is read.
        world_size: ranks: the parts of `row_wise`, the copies of `data_parallel`.
        local_world_size: ranks per node: the row parts of `table_row_wise` and `grid_shard`.
        sharding_type: a `ShardingType` value.
        col_wise_shard_dim: the least width of a part that is split by columns; 128 if None.
        device_memory_sizes: for `row_wise`, one number per rank: rows are in proportion.
        num_buckets: for `row_wise`, as for `row_wise`.

    Returns:
        The sizes of the parts, `[rows, columns]` each, and their offsets.

    Raises:
        ValueError: if there is no such type, buckets do not fit, or there is not one memory size
            per rank.

    Example:
        >>> import torch
        >>> calculate_shard_sizes_and_offsets(torch.empty(10, 4), 2, 2, "row_wise")
        ([[5, 4], [5, 4]], [[0, 0], [5, 0]])
    """
    kind = choice("sharding_type", sharding_type, ShardingType)
    if tensor.dim() != 2:
        wrong_type("tensor", "a table, [rows, columns]", tensor)
    whole("world_size", world_size)
    whole("local_world_size", local_world_size)
    if col_wise_shard_dim is not None:
        whole("col_wise_shard_dim", col_wise_shard_dim)
    if num_buckets is not None:
        whole("num_buckets", num_buckets)
    num_rows, dim = tensor.shape
    rows, columns = [(0, num_rows)], [(0, dim)]
    if kind is ShardingType.ROW_WISE and num_buckets is not None:
        rows = split_by_sizes(_bucket_rows(num_rows, num_buckets, world_size))
    elif kind is ShardingType.ROW_WISE and device_memory_sizes is not None:
        rows = _in_proportion(num_rows, device_memory_sizes, world_size)
    elif kind is ShardingType.ROW_WISE:
        rows = _even_parts(num_rows, world_size)
    elif kind in (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD):
        rows = _even_parts(num_rows, local_world_size)
    if kind in (
        ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD
    ):  # fmt: skip
        least = 128 if col_wise_shard_dim is None else col_wise_shard_dim
        fitting = [w for w in range(MIN_COLUMNS, dim, MIN_COLUMNS) if dim % w == 0 and w >= least]
        columns = split_evenly(dim, dim // (fitting or [dim])[0])
    parts = [(row, column) for column in columns for row in rows]
    if kind is ShardingType.DATA_PARALLEL:
        parts *= world_size
    return (
        [[bottom - top, right - left] for (top, bottom), (left, right) in parts],
        [[top, left] for (top, _), (left, _) in parts],
    )


def _even_parts(size: int, parts: int) -> list[tuple[int, int]]:
    """As `split_evenly`, with the empty blocks."""
    blocks = split_evenly(size, parts)
    return blocks + [(size, size)] * (parts - len(blocks))


def _in_proportion(num_rows: int, sizes: Sequence[int], world_size: int) -> list[tuple[int, int]]:
    if len(sizes) != world_size:
        raise ValueError(
            f"device_memory_sizes must be one per rank; received {len(sizes)} for {world_size} "
            "ranks."
        )
    rows = [num_rows * size // sum(sizes) for size in sizes[:-1]]
    return split_by_sizes([*rows, num_rows - sum(rows)])


def _generator(
    kind: ShardingType,
    split: Callable[[int, int, int, int], list[Rect]],
    devices: str | list[str] | None = None,
    compute_kernel: str | None = None,
) -> ParameterShardingGenerator:
    """Make a generator from a function of rows, columns, ranks per node and ranks."""

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
            for rect, device in zip(rects, kinds, strict=False)  # narrow tables have fewer parts
        ]
        updates_itself = attached_optimizer(weight) is not None or sharder.fused_params
        default = EmbeddingComputeKernel.FUSED if updates_itself else EmbeddingComputeKernel.DENSE
        kernel = default
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
    """Make a generator from `(ranks per node, ranks)` to the owners."""

    def split(num_rows: int, dim: int, local_size: int, world_size: int) -> list[Rect]:
        return STRATEGIES[kind](num_rows, dim, ranks_of(local_size, world_size), local_size)

    return _generator(kind, split, devices, compute_kernel)


def _node(index: int, local_size: int) -> range:
    return range(index * local_size, (index + 1) * local_size)


def _bucket_rows(num_rows: int, num_buckets: int, world_size: int) -> list[int]:
    """Return the rows of each rank when the first ranks get the buckets that are left over."""
    if num_rows % num_buckets or num_buckets < world_size:
        raise ValueError(
            f"row_wise.num_buckets must divide the table's rows and be at least the number of "
            f"ranks; received num_buckets={num_buckets} for {num_rows} rows on {world_size} ranks."
        )
    each, more = divmod(num_buckets, world_size)
    return [(each + (rank < more)) * (num_rows // num_buckets) for rank in range(world_size)]


def _blocks(helper: str, what: str, size: int, sizes: Sequence[int]) -> list[tuple[int, int]]:
    if sum(sizes) != size or min(sizes) < 0:
        raise ValueError(
            f"The sizes given to {helper} must add up to the table's {what}; received "
            f"{list(sizes)}, which is {sum(sizes)}, for {size} {what}."
        )
    return split_by_sizes(sizes)


def _check_one_each(helper: str, **given: Sequence[object] | None) -> None:
    lists = {name: value for name, value in given.items() if isinstance(value, list)}
    if len({len(value) for value in lists.values()}) > 1 or [] in lists.values():
        raise ValueError(
            f"{helper} needs one entry for each part in each of {', '.join(lists)}; received "
            f"{', '.join(str(value) for value in lists.values())}."
        )
