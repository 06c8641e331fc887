"""Two-dimensional parallelism: groups of ranks that each shard all tables, averaged by `sync`.

An all-to-all among thousands of ranks is slow, and few models need so many ranks for their tables.
Here each group of ranks shards the whole model and trains on its own batches. Every few steps,
ranks with the same shards average their tables. Dense parameters are replicated over all ranks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from recsys.base.arguments import setting, wrong_type
from recsys.base.checked import checked
from recsys.distributed.data_parallel import DataParallelWrapper
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner import EmbeddingShardingPlanner
from recsys.distributed.ranks.agreement import agree
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.shard import plan_model, replace_modules, sharders_by_type
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.devices import resolve_device
from recsys.distributed.sharded.module_tree import outermost
from recsys.distributed.sharded.reshard import check_made_for
from recsys.distributed.sharded.sharder import ModuleSharder, has_tables
from recsys.distributed.state.replica_average import average_over_ranks
from recsys.modules.hashed_ids import check_rows_in_memory

__all__ = ["DMPCollection", "DMPCollectionConfig"]

_SPLIT = "form groups of ranks"


@final
@dataclasses.dataclass(frozen=True)
class DMPCollectionConfig:
    """Groups and plan of the modules of one type, if they differ from other modules.

    Args:
        module: The type, such as `EmbeddingCollection`.
        plan: Plan for groups of this size, by path of each module of the type. Entries of other
            modules are ignored.
        sharding_group_size: Ranks per group.
        node_group_size: As in `DMPCollection`.
        use_inter_host_allreduce: As in `DMPCollection`.
    """

    module: type[nn.Module]
    plan: ShardingPlan
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False


class DMPCollection(DistributedModelParallel):
    """Model with tables sharded over each of several groups of ranks and averaged by `sync`.

    Each group trains as a `DistributedModelParallel` until `sync` averages the tables of all
    groups: call it every step, or every few steps. Dense parameters are replicated over all ranks
    and need no `sync`. With 8 ranks and groups of 4, ranks 0, 2, 4 and 6 form a group, and ranks 0
    and 1 have the same shards.

    A checkpoint has one value of each table, so call `sync` before `save_checkpoint`. Checkpoints
    can be loaded on any number of ranks, with or without groups.

    Args:
        module: The model. Parameters on the `meta` device are allocated here.
        device: Device of this rank; None for its current GPU under NCCL, else the CPU.
        plan: Plan for the ranks of a group, numbered from 0, the same on every rank; None to make
            one here.
        world_size: Number of all ranks.
        sharding_group_size: Ranks per group; divides `world_size`.
        global_pg: Process group of all ranks.
        node_group_size: Ranks of a group on the same node; divides `sharding_group_size`. None:
            derived from `LOCAL_WORLD_SIZE`.
        sharders: One for each module type to shard; None for `get_default_sharders`.
        init_data_parallel: Whether to wrap the dense parameters now. If False, call
            `init_data_parallel` before training.
        init_parameters: Whether to initialize dense parameters on the `meta` device by
            `reset_parameters`.
        data_parallel_wrapper: Wrapper that replicates dense parameters.
        use_inter_host_allreduce: Whether groups are neighbouring ranks, so that batches are
            exchanged within nodes and tables are averaged between nodes.
        custom_all_reduce: Function that averages a list of tensors in place, over dimension
            "replicate" of `device_mesh`, instead of the all-reduce of `sync`.
        submodule_configs: Groups of other sizes and their plans, for modules of some types.
        planner: Planner that makes the plan; None for one without constraints.

    Raises:
        ValueError: On every rank, if a size does not divide the ranks, arguments or plans differ
            between ranks, or a plan does not fit the model or the group.

    Example:
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> table = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
        >>> def build(pg: dist.ProcessGroup) -> DMPCollection:  # on each of 8 ranks
        ...     return DMPCollection(
        ...         EmbeddingBagCollection(tables=[table]),
        ...         device=torch.device("cpu"),
        ...         plan=None,
        ...         world_size=8,
        ...         sharding_group_size=4,
        ...         global_pg=pg,
        ...     )
    """

    @checked
    def __init__(
        self,
        module: nn.Module,
        device: torch.device | None,
        plan: ShardingPlan | None,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        *,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder[Any]] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: DataParallelWrapper | None = None,
        use_inter_host_allreduce: bool = False,
        custom_all_reduce: Callable[[list[Tensor]], None] | None = None,
        submodule_configs: Sequence[DMPCollectionConfig] | None = None,
        planner: EmbeddingShardingPlanner | None = None,
    ) -> None:
        check_rows_in_memory(module, "A DMPCollection")
        env = ShardingEnv.from_process_group(global_pg)
        configs = self._configs = list(submodule_configs or ())
        splits = [_Split(sharding_group_size, node_group_size, use_inter_host_allreduce)]
        splits += [
            _Split(
                config.sharding_group_size, config.node_group_size, config.use_inter_host_allreduce
            )
            for config in configs
        ]
        _agree_on(env, world_size, splits, configs, custom_all_reduce is not None)
        groups = {split: split.groups(env) for split in dict.fromkeys(splits)}
        self._split, self._groups = splits[0], list(groups.values())
        self._envs = [groups[split] for split in splits]
        self._is_averaged = True
        self._custom_all_reduce: Callable[[list[Tensor]], None] | None = None
        if custom_all_reduce is not None:
            self.set_all_reduce_hook(custom_all_reduce)
        super().__init__(
            module,
            env,
            device,
            plan,
            sharders,
            init_data_parallel,
            init_parameters,
            data_parallel_wrapper,
            planner=planner,
        )

    def _place(
        self,
        module: nn.Module,
        device: torch.device | None,
        plan: ShardingPlan | None,
        sharders: Sequence[ModuleSharder[Any]] | None,
        planner: EmbeddingShardingPlanner | None,
    ) -> tuple[nn.Module, ShardingPlan, torch.device]:
        group, *others = self._envs
        device = resolve_device(self.env, device)
        by_type = sharders_by_type(sharders)
        env_of = dict(zip([config.module for config in self._configs], others, strict=True))
        if plan is None:
            whole = [sharder for kind, sharder in by_type.items() if kind not in env_of]
            plan = plan_model(module, self.env, group, device, whole, planner)
        plan = _joined(module, plan, self._envs, self._configs, by_type)
        return replace_modules(module, plan, by_type, group, device, env_of), plan, device

    def _take_settings(self, other: Self) -> None:
        super()._take_settings(other)
        self._split, self._groups = other._split, other._groups
        self._custom_all_reduce = other._custom_all_reduce
        self._is_averaged = other._is_averaged

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; it exchanges ids and embeddings within a group."""
        if torch.is_grad_enabled():
            self._is_averaged = False
        return super().forward(*args, **kwargs)

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Average the tables of all groups; a collective call between two steps.

        The state of the tables' own optimizers is averaged too, except step numbers, which are the
        same in all groups. Tables that are not trained, and states of other optimizers, are not
        averaged.

        Args:
            include_optimizer_state: Whether to average optimizer states.

        Raises:
            ValueError: If ranks with the same shards pass different arguments.
            LostContactError: If contact with another rank is lost.
        """
        for group in self._groups:
            replicas = group.replicas
            if replicas is None:
                continue
            assert replicas.process_group is not None
            facts = {"include_optimizer_state": str(include_optimizer_state)}
            agree(replicas.process_group, ExchangeName.AVERAGES, facts, None)
            self._average(group, replicas, include_optimizer_state)
        self._is_averaged = include_optimizer_state

    def _average(self, group: ShardingEnv, replicas: ShardingEnv, with_states: bool) -> None:
        tables = [
            child
            for child in self.module.modules()
            if isinstance(child, ShardedCollection) and child.input_stage.module.env is group
        ]
        # Replicated tables have their own buckets: all ranks of a group must sum them in the same
        # order to keep them equal.
        for is_own in (False, True):
            kernels = [
                lookup.kernel
                for child in tables
                for lookup in child.lookups[is_own]
                if lookup.settings.requires_grad
            ]
            for kernel in kernels:
                kernel.flush()
            weights = [kernel.storage for kernel in kernels]
            states = [
                state
                for kernel in kernels
                if with_states and kernel.optimizer is not None
                for name, state in kernel.flat_states.items()
                if kernel.optimizer.rule.state[name] != "table"  # a number of steps
            ]
            if self._custom_all_reduce is not None:
                for tensors in (weights, states):
                    if tensors:
                        self._custom_all_reduce(tensors)
            else:
                average_over_ranks(replicas, ExchangeName.AVERAGES, weights + states, self.device)
            for kernel in kernels:
                kernel.drop_cache()

    def set_all_reduce_hook(self, reduce_hook: Callable[[list[Tensor]], None]) -> None:
        """Average tables by a function instead of the all-reduce of `sync`.

        Args:
            reduce_hook: The function, as `custom_all_reduce`.

        Raises:
            ValueError: If modules have groups of different sizes; the function is not passed the
                group.
        """
        if len(self._groups) > 1:
            raise ValueError(
                "custom_all_reduce needs the same groups for all modules; received "
                f"submodule_configs with {len(self._groups)} kinds of groups. Pass only one of the "
                "two arguments."
            )
        self._custom_all_reduce = reduce_hook

    def check_averaged(self) -> None:
        """Raise ValueError if the tables of the groups may differ since the last `sync`."""
        replicas = self._groups[0].replicas
        if not self._is_averaged:
            raise ValueError(
                "A checkpoint needs one value of each table and optimizer state; received a "
                f"DMPCollection whose {replicas and replicas.world_size} groups trained since the "
                "last sync. Call sync() before save_checkpoint."
            )

    @property
    def device_mesh(self) -> DeviceMesh:
        """Mesh `[replicate, shard]` of all ranks: rows are groups, columns have the same shards.

        It uses the process groups of sharded modules and of `sync`. The first access is a
        collective call, which creates missing groups of one rank.
        """
        group = self._groups[0]
        replicas = group.replicas
        alone = [self.env.rank]
        pair = [
            (replicas and replicas.process_group) or self.env.group_of(alone),
            group.process_group or self.env.group_of(alone),
        ]
        ranks = dist.get_process_group_ranks(self.env.process_group)
        rows = [[ranks[rank] for rank in row] for row in self._split.rows(self.env.world_size)]
        return DeviceMesh.from_group(
            pair, self.device.type, mesh=rows, mesh_dim_names=("replicate", "shard")
        )


@final
@dataclasses.dataclass(frozen=True)
class _Split:
    """Division of the ranks into groups."""

    size: int
    node_size: int | None
    neighbours: bool

    def rows(self, world_size: int) -> list[list[int]]:
        """Return the ranks of each group."""
        step = world_size // self.size
        if self.neighbours:
            return [list(range(g * self.size, (g + 1) * self.size)) for g in range(step)]
        return [list(range(g, world_size, step)) for g in range(step)]

    def groups(self, env: ShardingEnv) -> ShardingEnv:
        """Return this rank's group; its replicas are the ranks with the same shards.

        A collective call, which creates process groups once.
        """
        rows = self.rows(env.world_size)
        ranks = next(row for row in rows if env.rank in row)
        if len(rows) == 1:
            group = ShardingEnv(env.world_size, env.rank, env.process_group)
        else:
            group = env.of_ranks(ranks)
            place = ranks.index(env.rank)
            group.replicas = env.of_ranks([row[place] for row in rows])
        group.node_size = self.node_size or _ranks_per_node(ranks)
        return group


def _ranks_per_node(ranks: Sequence[int]) -> int:
    """Return the ranks per node among these ranks; all of them if nodes have different numbers."""
    local_size = setting("LOCAL_WORLD_SIZE")
    if local_size is None:
        return len(ranks)
    nodes = [rank // local_size for rank in ranks]
    sizes = {nodes.count(node) for node in nodes}
    return sizes.pop() if len(sizes) == 1 else len(ranks)


def _agree_on(
    env: ShardingEnv,
    world_size: int,
    splits: Sequence[_Split],
    configs: Sequence[DMPCollectionConfig],
    averages_itself: bool,
) -> None:
    """Raise an error on every rank if groups are invalid or differ between ranks."""
    names = ["the model", *(config.module.__name__ for config in configs)]
    facts: dict[str, str] | Exception = {
        f"the groups of {name}": str(split) for name, split in zip(names, splits, strict=True)
    } | {"custom_all_reduce": str(averages_itself)}
    try:
        if world_size != env.world_size:
            raise ValueError(
                "DMPCollection.world_size must be the number of ranks of global_pg, "
                f"{env.world_size}; received {world_size}."
            )
        for split in splits:
            _check_split(split, world_size)
        for name, times in Counter(names).items():
            if times > 1:
                raise ValueError(
                    "DMPCollection.submodule_configs must name each type once; received "
                    f"{name} {times} times."
                )
    except ValueError as error:
        facts = error
    if env.process_group is None or env.world_size == 1:
        if isinstance(facts, Exception):
            raise facts
        return
    agree(env.process_group, _SPLIT, facts, None)


def _check_split(split: _Split, world_size: int) -> None:
    if split.size < 1 or world_size % split.size:
        raise ValueError(
            "DMPCollection.sharding_group_size must divide world_size; received "
            f"{split.size} for {world_size} ranks."
        )
    if split.node_size is not None and (split.node_size < 1 or split.size % split.node_size):
        raise ValueError(
            "DMPCollection.node_group_size must divide sharding_group_size; received "
            f"{split.node_size} for groups of {split.size}."
        )


def _joined(
    module: nn.Module,
    plan: ShardingPlan,
    groups: Sequence[ShardingEnv],
    configs: Sequence[DMPCollectionConfig],
    sharders: Mapping[type[nn.Module], ModuleSharder[Any]],
) -> ShardingPlan:
    """Return the plan of the model, with the entries of configurations for their types."""
    if not configs:
        return plan
    for group_plan, group in zip((plan, *(other.plan for other in configs)), groups, strict=True):
        if not isinstance(group_plan, ShardingPlan):
            wrong_type("The plan of a model", "a ShardingPlan", group_plan)
        check_made_for(group_plan, group.world_size)
    paths = {
        path: type(child)
        for path, child in outermost(module, lambda child: has_tables(child, sharders))
    }
    joined = dict(plan.plan)
    for config in configs:
        paths_of_type = [path for path, kind in paths.items() if kind is config.module]
        if not paths_of_type:
            raise ValueError(
                "DMPCollectionConfig.module must be the type of a sharded module; received "
                f"{config.module.__name__}, and the model has "
                f"{sorted({kind.__name__ for kind in paths.values()})}."
            )
        lacking = [path for path in paths_of_type if path not in config.plan.plan]
        unknown = sorted(config.plan.plan.keys() - paths.keys())
        if lacking or unknown:
            raise ValueError(
                f"The plan of a DMPCollectionConfig must name the modules of its type, "
                f"{config.module.__name__}, by their paths {paths_of_type}; received one that "
                f"lacks {lacking}, and names {unknown}, which are not sharded modules."
            )
        joined |= {path: config.plan.plan[path] for path in paths_of_type}
    return ShardingPlan(joined)
