"""Two-dimensional parallel: groups of ranks that each hold all tables, averaged now and then.

An all-to-all among thousands of ranks is slow, and few models need thousands to hold their tables.
Here the ranks form groups, each of which shards the whole model over its ranks and trains on its
own batches; every few steps, ranks that hold the same parts take the mean of their tables. Dense
parts are replicated over all ranks, as ever.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from recsys.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from recsys.distributed.default_sharders import get_default_sharders
from recsys.distributed.model_parallel import DistributedModelParallel, check_not_wrapped
from recsys.distributed.placement.plan_json import ShardingPlan
from recsys.distributed.planner import EmbeddingShardingPlanner, Topology
from recsys.distributed.ranks.agreement import agree, in_words_by_name
from recsys.distributed.ranks.build_transaction import build_on_all_ranks
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.shard import check_made_for, replace_modules
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.sharded.devices import resolve_device
from recsys.distributed.sharded.module_tree import outermost
from recsys.distributed.sharded.sharder import ModuleSharder, has_tables
from recsys.distributed.state.replica_average import average_over_ranks
from recsys.kernels.arguments import setting, wrong_type
from recsys.kernels.checked import checked

__all__ = ["DMPCollection", "DMPCollectionConfig"]

_SPLIT = "form groups of ranks"


@final
@dataclasses.dataclass(frozen=True)
class DMPCollectionConfig:
    """Groups and plan of the modules of one type, where they differ from the others'.

    Args:
        module: the type, such as `EmbeddingCollection`.
        plan: for groups of this size; names every module of the type by its path in the model. What
            it says of modules of other types does not count.
        sharding_group_size: ranks of a group.
        node_group_size: as for `DMPCollection`.
        use_inter_host_allreduce: as for `DMPCollection`.
    """

    module: type[nn.Module]
    plan: ShardingPlan
    sharding_group_size: int
    node_group_size: int | None = None
    use_inter_host_allreduce: bool = False


class DMPCollection(DistributedModelParallel):
    """Places a model on each of several groups of ranks, whose tables are averaged by `sync`.

    Each group trains as a `DistributedModelParallel` on its ranks does, until `sync` takes the
    mean of all groups' tables: call it every step, or every few. Dense parts are replicated over
    all ranks and need no `sync`. With 8 ranks and groups of 4, ranks 0, 2, 4 and 6 form a group,
    and ranks 0 and 1 hold the same parts of tables.

    A checkpoint is that of one model, so `sync` comes before `save_checkpoint`; it loads on any
    number of ranks, and any checkpoint loads here.

    Args:
        module: the model. Tables and dense parts on the `meta` device are allocated here.
        device: where this rank works; its current GPU under NCCL, else the CPU, if None.
        plan: the placement on the ranks of a group, numbered from 0; planned here if None. Every
            rank must pass the same.
        world_size: number of all ranks.
        sharding_group_size: ranks of a group; divides `world_size`.
        global_pg: the process group of all ranks.
        node_group_size: ranks of a group that share a node, for the strategies that know nodes; as
            `LOCAL_WORLD_SIZE` says if None. Divides `sharding_group_size`.
        sharders: one per module type to shard; those of `get_default_sharders` if None.
        init_data_parallel: wrap the dense parts now; else call `init_data_parallel` before
            training.
        init_parameters: materialise dense parts on the `meta` device by their
            `reset_parameters`.
        data_parallel_wrapper: how dense parts are replicated.
        use_inter_host_allreduce: make groups of neighbouring ranks, so that batches are exchanged
            inside nodes and tables averaged between them; else the other way round.
        custom_all_reduce: takes the mean in place of `sync` 's all-reduce: is given tensors, and
            leaves in them the mean over the ranks of `device_mesh` 's dimension "replicate".
        submodule_configs: groups of other sizes, and their plans, for modules of some types.
        planner: makes the plan if none is given; one for the ranks of a group, with no constraints,
            if None.

    Raises:
        ValueError: on every rank, if a size does not divide the ranks, ranks were given different
            arguments or plans, or a plan does not fit the model or the group.

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
        nn.Module.__init__(self)
        env = ShardingEnv.from_process_group(global_pg)
        configs = list(submodule_configs or ())
        splits = [_Split(sharding_group_size, node_group_size, use_inter_host_allreduce)]
        splits += [
            _Split(one.sharding_group_size, one.node_group_size, one.use_inter_host_allreduce)
            for one in configs
        ]
        _agree_on(env, world_size, splits, configs)
        made: dict[_Split, ShardingEnv] = {}
        for split in splits:
            if split not in made:
                made[split] = split.groups(env)
        self._split = splits[0]
        self._groups = list(made.values())
        self._is_averaged = True
        self._custom_all_reduce: Callable[[list[Tensor]], None] | None = None
        if custom_all_reduce is not None:
            self.set_all_reduce_hook(custom_all_reduce)
        groups = [made[split] for split in splits]
        wrapper = data_parallel_wrapper or DefaultDataParallelWrapper()
        with build_on_all_ranks(env, groups) as construction:
            construction.add(
                type(self).__name__,
                in_words_by_name(
                    data_parallel_wrapper=wrapper,
                    init_data_parallel=init_data_parallel,
                    init_parameters=init_parameters,
                    custom_all_reduce=custom_all_reduce is not None,
                ),
            )
            check_not_wrapped(module)
            device = resolve_device(env, device)
            by_type = {
                sharder.module_type: sharder
                for sharder in (get_default_sharders() if sharders is None else sharders)
            }
            if plan is None:
                of_types = {one.module for one in configs}
                planner = planner or EmbeddingShardingPlanner(
                    topology=Topology(
                        world_size=sharding_group_size,
                        local_world_size=groups[0].node_size,
                        compute_device=device.type,
                    )
                )
                plan = planner.collective_plan(
                    module, [s for kind, s in by_type.items() if kind not in of_types], global_pg
                )
            plan = _joined(module, plan, groups, configs, by_type)
            env_of = {one.module: ranks for one, ranks in zip(configs, groups[1:], strict=True)}
            module = replace_modules(module, plan, by_type, groups[0], device, env_of)
        placed = module, plan, device
        self._finish(env, placed, wrapper, init_data_parallel, init_parameters)

    def _take_settings(self, other: Self) -> None:
        super()._take_settings(other)
        self._split, self._groups = other._split, other._groups
        self._custom_all_reduce = other._custom_all_reduce
        self._is_averaged = other._is_averaged

    @property
    def _plan_world_size(self) -> int:
        return self._groups[0].world_size

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; exchanges are among the ranks of a group."""
        if torch.is_grad_enabled():
            self._is_averaged = False
        return super().forward(*args, **kwargs)

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Give the tables of every group the mean of all groups' weights.

        Every rank must call it, between two steps. The state of the tables' own optimizers is
        averaged alike; numbers of steps are not, which are the same in all groups. What a torch
        optimizer keeps of tables without one of their own is not averaged, nor are tables that
        are not trained.

        Args:
            include_optimizer_state: whether optimizer states are averaged, too.

        Raises:
            ValueError: on the ranks that hold the same parts, if they do not ask for the same.
            LostContactError: if contact with another rank is lost.
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
        # Replicated tables by themselves: these must stay the same on the ranks of a group, so they
        # must be added up in the same order, and so come in buckets alike.
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
                for alike in (weights, states):
                    if alike:
                        self._custom_all_reduce(alike)
            else:
                average_over_ranks(replicas, ExchangeName.AVERAGES, weights + states, self.device)
            for kernel in kernels:
                kernel.drop_cache()

    def set_all_reduce_hook(self, reduce_hook: Callable[[list[Tensor]], None]) -> None:
        """Let a function take the mean in place of `sync` 's all-reduce.

        Args:
            reduce_hook: as `custom_all_reduce`.

        Raises:
            ValueError: if modules form groups of several sizes, as it is not told of which it gets
                tensors.
        """
        if len(self._groups) > 1:
            raise ValueError(
                "A function of your own can take the mean where all modules form the same groups; "
                f"received one, and submodule_configs that make {len(self._groups)} kinds of "
                "groups. Leave out one or the other."
            )
        self._custom_all_reduce = reduce_hook

    def check_averaged(self) -> None:
        """Raise ValueError if the groups may hold different tables, since none called `sync`."""
        if not self._is_averaged:
            raise ValueError(
                f"A checkpoint holds one value of each table, and those of the "
                f"{self._groups[0].replicas and self._groups[0].replicas.world_size} groups of a "
                "DMPCollection differ since they were last averaged, optimizer states included. "
                "Call sync() before save_checkpoint."
            )

    @property
    def device_mesh(self) -> DeviceMesh:
        """All ranks, `[replicate, shard]`: a row is a group, a column holds the same parts.

        Its groups are those that sharded modules and `sync` use, made for it where they are of one
        rank. Every rank must ask for it the first time.
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
    """How the ranks form groups."""

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
        """Return this rank's group, with the ranks that hold the same in others as its replicas.

        Every rank must call it; the process groups are made once.
        """
        rows = self.rows(env.world_size)
        own = next(row for row in rows if env.rank in row)
        if len(rows) == 1:
            group = ShardingEnv(env.world_size, env.rank, env.process_group)
        else:
            group = env.of_ranks(own)
            place = own.index(env.rank)
            group.replicas = env.of_ranks([row[place] for row in rows])
        group.node_size = self.node_size or _ranks_per_node(own)
        return group


def _ranks_per_node(ranks: Sequence[int]) -> int:
    """Return how many of these ranks share a node, all of them if that is not the same for all."""
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
) -> None:
    """Raise, on every rank, unless all form the same groups, and these are sound."""
    facts: dict[str, str] | Exception = {
        f"the groups {'of ' + config.module.__name__ if config else 'of the model'}": str(split)
        for split, config in zip(splits, (None, *configs), strict=True)
    }
    try:
        if world_size != env.world_size:
            raise ValueError(
                "DMPCollection.world_size must be the number of ranks of global_pg, "
                f"{env.world_size}; received {world_size}."
            )
        for split in splits:
            _check_split(split, world_size)
        types = [config.module for config in configs]
        for kind in types:
            if types.count(kind) > 1:
                raise ValueError(
                    "DMPCollection.submodule_configs must name each type once; received "
                    f"{kind.__name__} {types.count(kind)} times."
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
            "DMPCollection.sharding_group_size must divide world_size, for groups are equally "
            f"large; received {split.size} for {world_size} ranks."
        )
    if split.node_size is not None and (split.node_size < 1 or split.size % split.node_size):
        raise ValueError(
            "DMPCollection.node_group_size must divide sharding_group_size, for nodes hold equally "
            f"many ranks of a group; received {split.node_size} for groups of {split.size}."
        )


def _joined(
    module: nn.Module,
    plan: ShardingPlan,
    groups: Sequence[ShardingEnv],
    configs: Sequence[DMPCollectionConfig],
    sharders: Mapping[type[nn.Module], ModuleSharder[Any]],
) -> ShardingPlan:
    """Return one plan in which modules of the types that have a configuration follow its plan."""
    if not configs:
        return plan
    for given, group in zip((plan, *(one.plan for one in configs)), groups, strict=True):
        if not isinstance(given, ShardingPlan):
            wrong_type("The plan of a model", "a ShardingPlan", given)
        check_made_for(given, group)
    paths = {
        path: type(child)
        for path, child in outermost(module, lambda child: has_tables(child, sharders))
    }
    joined = dict(plan.plan)
    for config in configs:
        own = [path for path, kind in paths.items() if kind is config.module]
        if not own:
            raise ValueError(
                "DMPCollectionConfig.module must be the type of a module that is sharded; received "
                f"{config.module.__name__}, and the model has "
                f"{sorted({kind.__name__ for kind in paths.values()})}."
            )
        lacking = [path for path in own if path not in config.plan.plan]
        unknown = sorted(config.plan.plan.keys() - paths.keys())
        if lacking or unknown:
            raise ValueError(
                f"The plan of a DMPCollectionConfig must name the modules of its type, "
                f"{config.module.__name__}, by their paths {own}; received one that lacks "
                f"{lacking}, and names {unknown}, which are no modules to shard."
            )
        joined |= {path: config.plan.plan[path] for path in own}
    return ShardingPlan(joined)
