"""Settings of a sharded collection, and the tables and stages that are built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch

from recsys.distributed.placement.layout import Layout, Rect
from recsys.distributed.placement.plan import EmbeddingModuleShardingPlan
from recsys.distributed.placement.plan_layout import place_tables
from recsys.distributed.ranks.agreement import stable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import QuantizedCommCodecs
from recsys.distributed.sharded.table_options import TableOptions, facts_of_tables, group_settings
from recsys.distributed.stages.input_dist import InputDist
from recsys.distributed.stages.lookup import GroupSettings, Lookup, build_lookups, needs_one_width
from recsys.distributed.stages.output_dist import OutputStage
from recsys.distributed.stages.streams import StagedModule
from recsys.distributed.state.row_updates import PostBackwardUpdater
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.types import BoundsCheckMode, PoolingType
from recsys.modules.embedding_interfaces import get_embedding_names_by_table
from recsys.optim.apply_optimizer_in_backward import mark_in_backward

OutputStageFactory: TypeAlias = Callable[..., OutputStage[Any]]
"""Type of an output stage, with further arguments of its own."""


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionSettings:
    """Settings of a sharded collection.

    Attributes:
        owner: Class name of the collection, for messages.
        path: Path of the collection in its model.
        env: The ranks.
        device: Device of the tables.
        configs: The tables, in order.
        poolings: Pooling of each table.
        options: Properties of each unsharded table.
        plan: The plan.
        bounds_check_mode: Handling of ids outside their table.
        output_dtype: dtype of the embeddings.
        is_weighted: Whether ids have weights.
        distinct: Whether each id of a feature is sent once.
        codecs: Wire formats of embeddings and of gradients.
        output_stage: Makes the output stage.
    """

    owner: str
    path: str
    env: ShardingEnv
    device: torch.device
    configs: Sequence[Any]
    poolings: Sequence[PoolingType]
    options: Sequence[TableOptions]
    plan: EmbeddingModuleShardingPlan
    bounds_check_mode: BoundsCheckMode
    output_dtype: torch.dtype
    is_weighted: bool
    distinct: bool
    codecs: QuantizedCommCodecs
    output_stage: OutputStageFactory

    def place(self) -> tuple[list[str], Layout]:
        """Return the distinct features and the compiled plan.

        Raises:
            ValueError: If the plan does not fit the tables.
        """
        return place_tables(
            self.configs,
            self.poolings,
            self.plan,
            self.env.world_size,
            self.env.node_size,
            self._group_of,
            self._needs_one_width,
        )

    def _group_of(self, number: int, rects: Sequence[Rect]) -> GroupSettings:
        name = self.configs[number].name
        option, pooling = self.options[number], self.poolings[number]
        return group_settings(name, self.plan[name], option, rects, pooling, self.device)

    def _needs_one_width(self, number: int, rects: Sequence[Rect]) -> bool:
        # on a CPU the host knows the number of ids of each width
        # docs/decisions/exchange.md, "The host waits for the device once per step"
        if self.device.type != "cuda":
            return False
        # a replicated table has no shards
        dims = [rect.num_cols for rect in rects] or [self.configs[number].embedding_dim]
        group = self._group_of(number, rects)
        return needs_one_width(group, dims, self.device, replicated=not rects)


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class CollectionStages:
    """Tables of a sharded collection on this rank, and the stages of its batches.

    Attributes:
        layout: The compiled plan.
        input_dist: Input stage.
        output_dist: Output stage.
        lookups: Lookups of this rank's shards.
        replicas: Lookups of replicated tables.
        finisher: Updates after backward.
        tables: Tables by name.
    """

    layout: Layout
    input_dist: InputDist
    output_dist: OutputStage[Any]
    lookups: Sequence[Lookup]
    replicas: Sequence[Lookup]
    finisher: PostBackwardUpdater
    tables: Mapping[str, TableShards]


def build_stages(
    settings: CollectionSettings,
    lookups: Sequence[Lookup] = (),
    replicas: Sequence[Lookup] = (),
) -> CollectionStages:
    """Compile the plan, allocate tables and build the stages.

    Args:
        settings: The settings.
        lookups: Lookups that exist. A new lookup of the same tables takes their place in memory.
        replicas: The same, for replicated tables.

    Raises:
        ValueError: If the plan does not fit the tables.
    """
    env, device = settings.env, settings.device
    features, layout = settings.place()
    module = StagedModule(
        layout=layout,
        feature_names=tuple(features),
        env=env,
        device=device,
        mode=settings.bounds_check_mode,
        is_pooled=layout.is_pooled,
        is_weighted=settings.is_weighted,
        # one rank sends no ids: repeated ids cost no exchange
        distinct=settings.distinct and env.world_size > 1,
        # a rank without tables that train takes part in the exchanges of backward, too
        trains=any(option.requires_grad for option in settings.options),
        owner=settings.owner,
        path=settings.path,
    )
    group = layout.groups[env.rank]
    tables, configs = layout.tables, settings.configs
    built = build_lookups(group, tables, configs, device, env.world_size, known=lookups)
    built_replicas = build_lookups(
        layout.replica_groups, tables, configs, device, replicated=True, known=replicas
    )
    finisher = PostBackwardUpdater(built, built_replicas, layout, env, device)
    names = [n for of_table in get_embedding_names_by_table(settings.configs) for n in of_table]
    output_dist = settings.output_stage(
        layout,
        env,
        device,
        finisher.backward,
        settings.codecs,
        features,
        names,
        settings.output_dtype,
    )
    return CollectionStages(
        layout=layout,
        input_dist=InputDist(module, output_dist.most_ids, [lookup.hashed for lookup in built]),
        output_dist=output_dist,
        lookups=built,
        replicas=built_replicas,
        finisher=finisher,
        tables=_tables(settings, layout, [*built, *built_replicas]),
    )


def _tables(
    settings: CollectionSettings, layout: Layout, lookups: Sequence[Lookup]
) -> dict[str, TableShards]:
    """Return the tables, made of the lookups' shards."""
    shards: list[list[Any]] = [[] for _ in layout.tables]
    for lookup in lookups:
        for shard in lookup.shards():
            shards[shard.table].append(shard)
    tables = {}
    for index, (config, option) in enumerate(zip(settings.configs, settings.options, strict=True)):
        tables[config.name] = TableShards(
            layout.tables[index],
            option.dtype,
            settings.device,
            settings.env,
            shards[index],
            config.ids,
        )
        if option.optimizer is not None:
            for shard in shards[index]:
                # in_backward_optimizer_filter must leave out the shards, as it does the whole table
                # docs/decisions/optimizers.md, "A table without an optimizer is a plain parameter"
                mark_in_backward(shard.parameter, option.source)
    return tables


def facts_of(
    settings: CollectionSettings, stages: CollectionStages, switches: Mapping[str, bool]
) -> dict[str, str]:
    """Return the properties of a collection that must be the same on all ranks, by name.

    Args:
        settings: The settings.
        stages: The stages.
        switches: Further options of the collection.
    """
    facts = {
        "the module": "; ".join(
            (
                settings.owner,
                f"{stages.layout.world_size} ranks in nodes of {stages.layout.node_size}",
                f"device {settings.device.type}",
                f"ids out of range {settings.bounds_check_mode.name}",
                f"output {settings.output_dtype}",
                f"on the wire {stable(settings.codecs)}",
                # it decides between reduce-scatter and all-to-all
                # docs/decisions/row_split.md, "Reduce-scatter over NCCL"
                f"deterministic {torch.are_deterministic_algorithms_enabled()}",
                # on a GPU without Triton a rank pads bags, and sizes on the wire differ
                # docs/decisions/ragged.md, "Missing bags are not returned"
                f"leaves out bags {stages.input_dist.leaves_out}",
                stable(dict(switches)),
            )
        )
    }
    return facts | facts_of_tables(stages.layout, settings.configs, settings.options)
