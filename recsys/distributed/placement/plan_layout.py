"""The layout of a plan, without the ranks: to look at a placement before a job is started."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from recsys.distributed.placement.layout import Layout, PlacedTable, Rect, build_layout
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ParameterSharding
from recsys.distributed.placement.strategies import check_plan_covers, pooling_of_parts, rects_of
from recsys.distributed.ranks.node import get_local_size
from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked
from recsys.kernels.types import PoolingType
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.embedding_tables import TableCollection


@checked
def layout_of_plan(
    module: TableCollection,
    plan: Mapping[str, ParameterSharding],
    world_size: int,
    local_size: int | None = None,
) -> Layout:
    """Compile the plan of one collection, as sharding it on so many ranks would.

    Lookups are grouped by their pooling alone: other reasons to keep tables apart, such as
    different optimizers, are known once the collection is sharded.

    Args:
        module: an EmbeddingBagCollection or EmbeddingCollection; may be on the `meta` device.
        plan: by table name, such as `construct_module_sharding_plan` and planners make it.
        world_size: number of ranks.
        local_size: ranks per node; as in this job if None.

    Returns:
        The layout; `layout.plot()` draws it.

    Raises:
        ValueError: if the plan does not fit the tables or the ranks.

    Example:
        >>> from recsys.distributed.sharding_plan import construct_module_sharding_plan, row_wise
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(
        ...     name="t", embedding_dim=4, num_embeddings=10, feature_names=["f"]
        ... )
        >>> ebc = EmbeddingBagCollection(tables=[table])
        >>> plan = construct_module_sharding_plan(ebc, {"t": row_wise()}, world_size=2)
        >>> layout_of_plan(ebc, plan, world_size=2).rank_widths
        (4, 4)
    """
    whole("layout_of_plan: world_size", world_size)
    if local_size is not None:
        whole("layout_of_plan: local_size", local_size)
    configs, poolings = module.configs(), module.poolings()
    check_plan_covers(
        type(module).__name__, EmbeddingModuleShardingPlan(plan), [c.name for c in configs]
    )
    _, layout = place_tables(
        configs,
        poolings,
        plan,
        world_size,
        local_size or get_local_size(world_size),
        lambda i, rects: pooling_of_parts(poolings[i], rects),
    )
    return layout


def place_tables(
    configs: Sequence[BaseEmbeddingConfig],
    poolings: Sequence[PoolingType],
    plan: Mapping[str, ParameterSharding],
    world_size: int,
    local_size: int,
    group_of: Callable[[int, Sequence[Rect]], Hashable],
    needs_one_width: Callable[[int, Sequence[Rect]], bool] = lambda number, rects: False,
) -> tuple[list[str], Layout]:
    """Place tables.

    Args:
        configs: of the tables.
        poolings: of the tables.
        plan: by table name.
        world_size: number of ranks.
        local_size: ranks per node.
        group_of: from a table's number and rectangles to what the tables of one lookup must have in
            common.
        needs_one_width: from the same to whether a lookup of that table serves one width only.

    Returns:
        The distinct features in the layout's numbering, and the layout.
    """
    names = dict.fromkeys(f for config in configs for f in config.feature_names)
    number = {name: i for i, name in enumerate(names)}
    placed = []
    for i, config in enumerate(configs):
        rows, dim = config.num_embeddings, config.embedding_dim
        rects = rects_of(config.name, rows, dim, plan[config.name], world_size, local_size)
        placed.append(
            PlacedTable(
                name=config.name,
                num_rows=rows,
                dim=dim,
                features=tuple(number[f] for f in config.feature_names),
                group=group_of(i, rects),
                rects=rects,
                combine=poolings[i],
                one_width=needs_one_width(i, rects),
            )
        )
    return list(names), build_layout(placed, len(names), world_size, node_size=local_size)
