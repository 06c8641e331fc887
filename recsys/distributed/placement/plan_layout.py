"""Layout of a plan without its ranks, to inspect a placement before a job starts."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.distributed.placement.layout import IdHash, Layout, PlacedTable, Rect, build_layout
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan, ParameterSharding
from recsys.distributed.placement.strategies import (
    check_plan_covers,
    pooling_of_parts,
    rects_of,
    rects_of_regions,
)
from recsys.distributed.ranks.node import get_local_size
from recsys.kernels.hashed.index import geometry
from recsys.kernels.types import PoolingType
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.tables.embedding_tables import TableCollection


@checked
def layout_of_plan(
    module: TableCollection,
    plan: Mapping[str, ParameterSharding],
    world_size: int,
    local_size: int | None = None,
) -> Layout:
    """Compile the plan of one collection, as sharding it on that many ranks would.

    Lookups are grouped by their pooling alone. Other reasons to separate tables, such as different
    optimizers, are known only when the collection is sharded.

    Args:
        module: An EmbeddingBagCollection or EmbeddingCollection; may be on the `meta` device.
        plan: Placements by table name, from `construct_module_sharding_plan` or a planner.
        world_size: Number of ranks.
        local_size: Ranks per node; None for the value of this job.

    Returns:
        The layout; `layout.plot()` draws it.

    Raises:
        ValueError: The plan does not fit the tables or the ranks.

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
    """Compile the placement of tables.

    Args:
        configs: Configs of the tables.
        poolings: Poolings of the tables.
        plan: Placements by table name.
        world_size: Number of ranks.
        local_size: Ranks per node.
        group_of: Function from a table's number and rectangles to the key of its lookup. Tables
            with the same key share a lookup.
        needs_one_width: Function from the same arguments to whether a lookup of that table requires
            rectangles of one width.

    Returns:
        The unique features in the layout's numbering, and the layout.
    """
    names = dict.fromkeys(f for config in configs for f in config.feature_names)
    number = {name: i for i, name in enumerate(names)}
    placed = []
    for i, config in enumerate(configs):
        rows, dim = config.num_embeddings, config.embedding_dim
        rects = rects_of(config.name, rows, dim, plan[config.name], world_size, local_size)
        hashed = None
        if config.ids is not None:
            _, num_regions = geometry(rows, config.ids.num_regions)
            hashed = IdHash(
                seed=config.ids.seed, num_regions=num_regions, region_rows=rows // num_regions
            )
            # row blocks are whole regions, the parts that ranks own:
            # docs/decisions/hashed_ids.md,
            # "Rows addressed by ids, instead of a remap in front of the table"
            rects = rects_of_regions(config.name, rects, hashed)
            # each column shard would need a part of the records at a load:
            # docs/decisions/hashed_ids.md, "Rows on the disk: a log that gives them back"
            if config.ids.has_rows_on_disk and any(rect.num_cols < dim for rect in rects):
                raise ValueError(
                    f"Table {config.name!r} with rows on the disk must be table_wise, row_wise "
                    f"or table_row_wise; received {plan[config.name].sharding_type}, which splits "
                    "its columns. Choose one of these."
                )
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
                hashed=hashed,
            )
        )
    return list(names), build_layout(placed, len(names), world_size, node_size=local_size)
