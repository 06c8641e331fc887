"""Base class of sharded collections: tables, lookups, optimizer, stages of a batch, resharding.

Pooled and sequence collections differ in their lookups and in their output stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn

from recsys import step_stages
from recsys.distributed.module_tree import check_untied
from recsys.distributed.placement.fused_params import settings_of_table, with_table_settings
from recsys.distributed.placement.layout import Layout, Rect
from recsys.distributed.placement.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)
from recsys.distributed.placement.plan_layout import place_tables
from recsys.distributed.placement.strategies import check_plan_covers
from recsys.distributed.ranks.agreement import stable
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable, together
from recsys.distributed.ranks.construction import constructing
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import CommOp, QuantizedCommCodecs, codecs_for
from recsys.distributed.reshard import check_moves, merged_plan
from recsys.distributed.sharder import ShardedModule, refuse_to_pickle
from recsys.distributed.stages.batch import Bags, BatchContext
from recsys.distributed.stages.input_dist import InputDist, start_together
from recsys.distributed.stages.lookup import GroupSettings, Lookup, build_lookups, needs_one_width
from recsys.distributed.stages.output_dist import OutputStage
from recsys.distributed.state.fused_optimizer import FusedTablesOptimizer
from recsys.distributed.state.moves import move_tables
from recsys.distributed.state.row_updates import BackwardFinisher
from recsys.distributed.state.table_shards import TableShards, load_tables
from recsys.distributed.table_options import (
    TableOptions,
    bounds_check_mode_of,
    facts_of_tables,
    group_settings,
    output_dtype_of,
)
from recsys.kernels.arguments import setting
from recsys.modules.eager import run_eagerly
from recsys.modules.embedding_interfaces import get_embedding_names_by_table
from recsys.modules.embedding_tables import QUANTIZATION_NOTES, TableCollection, TableDict
from recsys.optim.apply_optimizer_in_backward import (
    mark_in_backward,
)
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor
from recsys.step_stages import Stage

started_ahead: ContextVar[Callable[[ShardedCollection, KeyedJaggedTensor], Any] | None] = (
    ContextVar("started_ahead", default=None)
)
"""Function that returns the output of a collection for a batch that started early; else None."""


class ShardedCollection(ShardedModule):
    """Tables of one collection, sharded over ranks.

    Args:
        module: The unsharded collection. Its weights are kept (those of rank 0 if ranks differ);
            tables on the `meta` device are allocated and initialized shard by shard.
        table_name_to_parameter_sharding: The plan, with one entry per table.
        env: The ranks.
        fused_params: Optimizer settings for tables without an attached optimizer, such as
            `{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}`.
        device: Device of the tables.
        qcomm_codecs_registry: Wire formats of embeddings and gradients, from
            `get_qcomm_codecs_registry`; None for the dtype of the values.
        module_fqn: Path of the module in the model, for error messages.

    Raises:
        ValueError: If the plan lacks a table, has an unknown table or rank, does not cover a table
            exactly once, or splits the columns of a table whose optimizer needs whole rows.
    """

    unsharded_module_type: ClassVar[type[nn.Module]]
    """Type of the unsharded module."""
    tables_name: ClassVar[str]
    """Name of the attribute with the tables, as in the unsharded collection."""
    output_type: ClassVar[type[LazyAwaitable[Any]]]
    """Type of the output of `forward`."""
    output_stage: ClassVar[type[OutputStage[Any]]]
    """Type of the output stage."""
    output_ops: ClassVar[Sequence[CommOp]]
    """Names of its exchanges in a registry of codecs."""
    _is_weighted = False
    _use_index_dedup = False

    def __init__(
        self,
        module: TableCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        module_fqn: str | None = None,
    ) -> None:
        super().__init__()
        env.check_can_exchange()
        self._qcomm_codecs_registry = qcomm_codecs_registry
        with constructing(env) as construction:
            weights = module.table_weights()
            plan = EmbeddingModuleShardingPlan(table_name_to_parameter_sharding)
            subject = construction.path or module_fqn or type(module).__name__
            self._path = subject
            check_plan_covers(subject, plan, weights)
            plan = with_table_settings(plan, fused_params or {})
            check_untied(module, weights.values())
            self._configs: list[Any] = module.configs()
            for name in QUANTIZATION_NOTES:
                if hasattr(module, name):
                    setattr(self, name, getattr(module, name))
            self._poolings = module.poolings()
            self._plan = plan
            self._env = env
            self._device = canonical_device(device or default_device(env))
            self._bounds_check_mode = bounds_check_mode_of(plan, module.bounds_check_mode)
            self._output_dtype = output_dtype_of(plan)
            self._adopt(module)
            self._build(
                [
                    TableOptions(
                        weight,
                        settings_of_table(fused_params, plan[name]),
                        plan[name].stochastic_rounding,
                    )
                    for name, weight in weights.items()
                ]
            )
            construction.works_on(self._device)
            construction.add(subject, self._facts())
            construction.connect(self._output_dist.connect)
            construction.load(
                module.init_seed,
                lambda seed: load_tables(self._tables(), module, construction.env, seed),
                may_fail_alone=any(config.init_fn is not None for config in self._configs),
            )

    def _facts(self) -> dict[str, str]:
        """Return the properties that must be the same on all ranks, by name."""
        switches = {name: value for name, value in vars(self).items() if isinstance(value, bool)}
        facts = {
            "the module": "; ".join(
                (
                    type(self).__name__,
                    f"{self._layout.world_size} ranks in nodes of {self._layout.node_size}",
                    f"device {self._device.type}",
                    f"ids out of range {self._bounds_check_mode.name}",
                    f"output {self._output_dtype}",
                    f"on the wire {stable(self._qcomm_codecs_registry)}",
                    f"deterministic {torch.are_deterministic_algorithms_enabled()}",
                    f"leaves out bags {self._input_dist.leaves_out}",
                    stable(switches),
                )
            )
        }
        return facts | facts_of_tables(self._layout, self._configs, self._options)

    def _adopt(self, module: Any) -> None:
        """Copy the settings of the unsharded module."""

    def _output_options(self) -> dict[str, bool]:
        """Return further arguments of the output stage."""
        return {}

    def _build(
        self,
        options: Sequence[TableOptions],
        lookups: Sequence[Lookup] = (),
        replicas: Sequence[Lookup] = (),
    ) -> None:
        """Compile the plan and allocate the tables that no given lookup has."""
        env, device = self._env, self._device
        self._options = list(options)
        features, layout = self._place()
        self._layout = layout
        self._input_dist = InputDist(
            layout,
            features,
            env,
            device,
            self._bounds_check_mode,
            is_weighted=self._is_weighted,
            distinct=self._use_index_dedup,
            trains=any(option.requires_grad for option in options),
            owner=type(self).__name__,
            path=self._path,
        )
        own = layout.groups[env.rank]
        self._lookups = build_lookups(own, layout.tables, device, env.world_size, known=lookups)
        self._replicas = build_lookups(
            layout.replica_groups, layout.tables, device, replicated=True, known=replicas
        )
        self._finisher = BackwardFinisher(self._lookups, self._replicas, layout, env, device)
        names = [n for names in get_embedding_names_by_table(self._configs) for n in names]
        self._output_dist = self.output_stage(
            layout,
            env,
            device,
            self._finisher.backward,
            codecs_for(self._qcomm_codecs_registry, *self.output_ops),
            features,
            names,
            self._output_dtype,
            **self._output_options(),
        )
        self._input_dist.most_ids = self._output_dist.most_ids
        self._trains = self._input_dist.trains
        tables = TableDict()
        shards: list[list[Any]] = [[] for _ in layout.tables]
        for lookup in (*self._lookups, *self._replicas):
            for shard in lookup.shards():
                shards[shard.table].append(shard)
        for index, (config, option) in enumerate(zip(self._configs, options, strict=True)):
            table = TableShards(layout.tables[index], option.dtype, device, env, shards[index])
            tables[config.name] = table
            if option.optimizer is not None:
                for shard in shards[index]:
                    mark_in_backward(shard.parameter, option.source)
        self._hold_tables(tables)
        self._tables_optimizer = FusedTablesOptimizer(
            {self._weight_name(name): table for name, table in self._tables().items()},
            [option.optimizer for option in options],
            self._finisher.deferred,
        )
        self._fused_optimizer = CombinedOptimizer([self._tables_optimizer])

    def _place(self) -> tuple[list[str], Layout]:
        return place_tables(
            self._configs,
            self._poolings,
            self._plan,
            self._env.world_size,
            self._env.node_size,
            self._group_of,
            self._needs_one_width,
        )

    def _group_of(self, number: int, rects: Sequence[Rect]) -> GroupSettings:
        name = self._configs[number].name
        sharding, option = self._plan[name], self._options[number]
        return group_settings(name, sharding, option, rects, self._poolings[number], self._device)

    def _needs_one_width(self, number: int, rects: Sequence[Rect]) -> bool:
        if self._device.type != "cuda":
            return False
        dims = [rect.num_cols for rect in rects] or [self._configs[number].embedding_dim]
        return needs_one_width(
            self._group_of(number, rects), dims, self._device, replicated=not rects
        )

    def _hold_tables(self, tables: TableDict) -> None:
        self.add_module(self.tables_name, tables)

    def _weight_name(self, table: str) -> str:
        """Return the name of a table's weight in the state dict."""
        return f"{self.tables_name}.{table}.weight"

    def _tables(self) -> dict[str, TableShards]:
        tables: dict[str, TableShards] = dict(getattr(self, self.tables_name).items())
        return tables

    def configs(self) -> list[Any]:
        """Return the tables, in order."""
        return list(self._configs)

    def table_weights(self) -> dict[str, Tensor]:
        """Table name -> weight, in order: a `ShardedTable`, or a tensor if it is replicated."""
        return {name: table.whole() for name, table in self._tables().items()}

    @property
    def env(self) -> ShardingEnv:
        """The ranks."""
        return self._env

    @property
    def device(self) -> torch.device:
        """Device of this rank's shards."""
        return self._device

    @property
    def input_stage(self) -> InputDist:
        """The input stage."""
        return self._input_dist

    def create_context(self) -> BatchContext:
        """Return a context for one batch, for `input_dist`, `compute` and `output_dist`.

        Several batches may be in progress, each with its own context. All ranks must call the
        stages in the same order. docs/engine.md has an example of such a loop.
        """
        return BatchContext(self._input_dist)

    def input_dist(
        self, ctx: BatchContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Start the header exchange of a batch.

        Args:
            ctx: A new context.
            features: The batch, as for `forward`.

        Returns:
            An awaitable of an awaitable. The first `wait()` waits on the host for the headers of
            all ranks (not on a GPU without other ranks if sizes are known, see `forward`), raises
            the errors of `forward`, and starts sending the ids. The second `wait()` waits for the
            ids and returns `dist_input` for `compute`.

        Raises:
            ValueError: If the context belongs to another module or batch.

        Example:
            >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig
            >>> from recsys.distributed.shard import shard
            >>> from recsys.distributed.sharding_plan import table_wise
            >>> from recsys.distributed.types import ShardingEnv
            >>> table = EmbeddingBagConfig(9, 2, "films", feature_names=["film"])
            >>> ebc = EmbeddingBagCollection(tables=[table])
            >>> env, plan = ShardingEnv.from_local(), {"films": table_wise(rank=0)}
            >>> sharded = shard(ebc, plan, env, torch.device("cpu"))
            >>> film = KeyedJaggedTensor(["film"], torch.tensor([3]), lengths=torch.tensor([1]))
            >>> ctx = sharded.create_context()
            >>> ids = sharded.input_dist(ctx, film).wait().wait()
            >>> sharded.output_dist(ctx, sharded.compute(ctx, ids)).wait().values().shape
            torch.Size([1, 2])
        """
        if ctx.stage is not self._input_dist or ctx.given is not None:
            raise ValueError(
                "input_dist needs a new context of its own module for each batch; received one of "
                f"{'a batch' if ctx.stage is self._input_dist else 'another module'}. Call "
                "create_context() for every batch."
            )
        stage, place = self._input_dist, (Stage.INPUT_DIST, self._path)
        with step_stages.running(place):
            start_together([stage.prepare(features, ctx)])

        def send() -> Awaitable[BatchContext]:
            with step_stages.running(place):
                stage.send(ctx)
            return LazyAwaitable(receive)

        def receive() -> BatchContext:
            with step_stages.running(place):
                return stage.ids(ctx)

        return LazyAwaitable(send)

    def compute(self, ctx: BatchContext, dist_input: BatchContext) -> list[Tensor]:
        """Look up the received ids of a batch.

        Args:
            ctx: The context of the batch.
            dist_input: The awaited result of `input_dist` for this context.

        Returns:
            The output of each lookup: `[B, C]` for replicated tables, then
            `[samples of all ranks, C]` for this rank's shards; for sequences a row per id.

        Raises:
            ValueError: If `dist_input` belongs to another context.
        """
        return list(self._look_up(ctx, dist_input))

    def output_dist(self, ctx: BatchContext, output: Iterable[Tensor]) -> LazyAwaitable[Any]:
        """Start sending embeddings to the ranks of their samples.

        Args:
            ctx: The context of the batch.
            output: The result of `compute`.

        Returns:
            The output, as from `forward`.
        """
        lookups = iter(output)
        replicas = list(islice(lookups, len(self._replicas)))
        trains = self._trains and torch.is_grad_enabled()
        return self.output_type(self._output_dist.start(ctx, lookups, replicas, trains))

    def compute_and_output_dist(self, ctx: BatchContext, input: BatchContext) -> LazyAwaitable[Any]:
        """Look up the received ids of a batch and start sending embeddings.

        If partial sums are added up within a node, other tables are looked up during that exchange,
        as in `forward`; `compute` looks up all tables first.

        Args:
            ctx: The context of the batch.
            input: The awaited result of `input_dist` for this context.

        Returns:
            The output, as from `forward`.

        Raises:
            ValueError: If `input` belongs to another context.
        """
        return self.output_dist(ctx, self._look_up(ctx, input))

    def prefetch(
        self,
        dist_input: BatchContext,
        forward_stream: torch.Stream | None = None,
        ctx: BatchContext | None = None,
    ) -> None:
        """Fetch the rows that `compute` will read into the device caches of tables.

        Args:
            dist_input: The awaited result of `input_dist`.
            forward_stream: Ignored. Call `prefetch` on the stream of the lookups, after the update
                of the previous batch.
            ctx: Ignored.
        """
        for lookup, bags in zip(self._lookups, dist_input.received.lookups, strict=True):
            lookup.kernel.prefetch(bags.indices, bags.offsets, bags.of_features)

    def _look_up(self, ctx: BatchContext, dist_input: BatchContext) -> Iterator[Tensor]:
        """Look up in replicated tables now; in the others when the result is iterated."""
        if dist_input is not ctx:
            given: object = dist_input
            if not isinstance(given, Awaitable) or given.wait() is not ctx:
                raise ValueError(
                    "compute(ctx, dist_input) needs the awaited result of input_dist for the same "
                    "ctx; received another batch's, or one that is pending. Call "
                    "compute(ctx, input_dist(ctx, features).wait().wait())."
                )
        if self._finisher.under_way:
            self._finisher.forget_failed_backward()
        received = ctx.received
        replicas = list(self._outputs(self._replicas, received.replicas))
        return chain(replicas, self._outputs(self._lookups, received.lookups))

    def _outputs(self, lookups: Sequence[Lookup], bags: Sequence[Bags]) -> Iterator[Tensor]:
        """Yield the output of each lookup."""
        for lookup, given in zip(lookups, bags, strict=True):
            with step_stages.running((Stage.LOOKUP, self._path)):
                output = lookup.kernel.forward(*given[:3], lookup.parameters, *given[3:])
            if step_stages.observers:
                step_stages.report_update(output, self._path)
            yield output

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Look up this rank's batch.

        Args:
            features: int32 or int64 ids of this rank's samples, with every feature of the tables.

        Returns:
            The output of the unsharded collection, as a `LazyAwaitable`.

        Raises:
            IndexError: On every rank, if an id on any rank is outside its table.
            KeyError: On every rank, if a batch lacks a feature.
            TypeError: On every rank, if the features of a rank are not a KeyedJaggedTensor or its
                ids are not integers.
            ValueError: On every rank, if lengths, offsets, weights or inverse indices of a rank are
                invalid.

        On a GPU without other ranks the host does not wait if it knows the number of ids of each
        feature (`features.length_per_key_or_none()` is not None) or does not need it
        (docs/engine.md, "On a GPU the host waits once a step, or never"). Invalid values (ids,
        lengths, inverse indices) are then raised by a later call or by `check_ids`. Lookups stay
        within their tables meanwhile.
        """
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(self, features)  # type: ignore[no-any-return]
        ask = started_ahead.get()
        output = None if ask is None else ask(self, features)
        if output is not None:
            return output  # type: ignore[no-any-return]
        stage = self._input_dist
        with step_stages.running((Stage.INPUT_DIST, self._path)):
            ctx = stage.prepare(features)
            start_together([ctx])
            stage.send(ctx)
            stage.ids(ctx)
        return self.output_dist(ctx, self._look_up(ctx, ctx))

    def check_ids(self) -> None:
        """Raise the pending errors of earlier batches; waits for the GPU.

        Only batches on a GPU without other ranks have pending errors; `forward` raises all others.

        Raises:
            IndexError: If an id was outside its table.
            ValueError: If lengths, offsets or inverse indices were invalid.
        """
        self._input_dist.late.read_all()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Keyed optimizer of the tables with fused updates; names as in the state dict."""
        return self._fused_optimizer

    @property
    def module_sharding_plan(self) -> EmbeddingModuleShardingPlan:
        """The plan."""
        return self._plan

    @property
    def layout(self) -> Layout:
        """The compiled plan, the same on every rank. `layout.plot()` draws it."""
        return self._layout

    @property
    def lookups(self) -> tuple[list[Lookup], list[Lookup]]:
        """The lookups of replicated tables, and of this rank's shards."""
        return self._replicas, self._lookups

    @property
    def _input_dists(self) -> list[InputDist]:
        return [self._input_dist]

    @property
    def _output_dists(self) -> list[OutputStage[Any]]:
        return [self._output_dist]

    def extra_repr(self) -> str:
        """Return the lookups of this rank with the reason for their backends, and the stages."""
        lookups = [lookup.kernel for lookup in (*self._lookups, *self._replicas)]
        return "\n".join(map(repr, [*lookups, self._input_dist, self._output_dist]))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        probe = fn(torch.empty(0, device=self._device))
        if probe.device != self._device or probe.dtype != torch.float32:
            raise ValueError(
                f"A sharded collection stays on its device and keeps its dtype ({self._device}); "
                f"received a move to {probe.device}, {probe.dtype}. Shard it with device=..., or "
                "use DistributedModelParallel.copy."
            )
        return self

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict; a collective call. An error of one rank is raised on all."""
        load = partial(super().load_state_dict, state_dict, *args, **kwargs)
        return together(self._env, "load a state dict", load)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy(self._device)

    def copy(self, device: torch.device) -> Self:
        """Return a copy on a device, with the plan, weights, optimizer state and learning rates."""
        other = self._with(self._plan, canonical_device(device))
        other._build(self._options)
        own, others = self._tables(), other._tables()
        with torch.no_grad():
            for name, table in own.items():
                others[name].copy_from(table)
        settings = zip(
            other._fused_optimizer.param_groups, self._fused_optimizer.param_groups, strict=True
        )
        for mine, theirs in settings:
            mine["lr"] = theirs["lr"]
        other.train(self.training)
        return other

    def _with(self, plan: EmbeddingModuleShardingPlan, device: torch.device) -> Self:
        """Return a shallow clone with a new plan and device; layout and tables are not built."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__getstate__())  # type: ignore[no-untyped-call]
        nn.Module.__init__(other)
        other._configs, other._plan = copy.deepcopy((self._configs, plan))
        other._device = device
        return other

    def plan_after(self, plan: Mapping[str, ParameterSharding]) -> EmbeddingModuleShardingPlan:
        """Return the plan after `reshard(plan)`, without moving tables or waiting for ranks.

        Args:
            plan: As for `reshard`.

        Raises:
            ValueError: If the plan does not fit the tables.
        """
        whole = merged_plan(self._path, self._plan, plan)
        self._with(whole, self._device)._place()
        return whole

    def reshard(self, plan: Mapping[str, ParameterSharding]) -> None:
        """Move tables, with weights and optimizer state, to other ranks during training.

        Call it on every rank between a step and the next forward pass. During the move a rank has
        the old and the new shards of the lookups that change, and up to 64 MiB of send buffers.
        Lookups without a moved table are unchanged. `fused_optimizer` stays the same object, with
        its learning rates.

        Args:
            plan: New entries by table name; other tables stay. Fields that are None, except the
                shards, keep their values.

        Raises:
            ValueError: On every rank, before anything moves: if the plan does not fit the tables or
                the ranks, or changes `bounds_check_mode`, `output_dtype` or `stochastic_rounding`;
                if a moved table trains without a fused optimizer, or gradients wait for a step; if
                row states of column shards would have to be split or joined.
        """
        try:
            with constructing(self._env) as construction:
                if self._finisher.deferred.wait_for_step:
                    raise ValueError(
                        f"Gradients of the tables of {self._path!r} wait for a step, and would be "
                        "lost by a move. Call step() or zero_grad() before reshard."
                    )
                whole = merged_plan(self._path, self._plan, plan)
                other = self._with(whole, self._device)
                other._build(self._options, self._lookups, self._replicas)
                own, others = self._tables(), other._tables()
                check_moves(own, others)
                construction.add(self._path, other._facts())
                construction.connect(other._output_dist.connect)
                construction.load(0, lambda seed: move_tables(own, others, self._env))
                construction.at_the_end(lambda: self._become(other))
        finally:
            for group in self._fused_optimizer.param_groups:  # of kernels that serve both
                group["lr"] = group["lr"]

    def _become(self, other: Self) -> None:
        """Adopt the stages and tables of another instance; the optimizer object is preserved."""
        other._input_dist.end_of_data = self._input_dist.end_of_data
        other._input_dist.late = self._input_dist.late
        tables = TableDict()
        for name, table in other._tables().items():
            tables[name] = table
        self._hold_tables(tables)
        for name in (
            *("_plan", "_layout", "_input_dist", "_output_dist"),
            *("_lookups", "_replicas", "_finisher"),
        ):
            setattr(self, name, getattr(other, name))
        self._tables_optimizer.follow(other._tables_optimizer)


def canonical_device(device: torch.device | str) -> torch.device:
    """Return the device as tensors name it: `cuda:0`, not `cuda`."""
    return torch.empty(0, device=device).device


def default_device(env: ShardingEnv) -> torch.device:
    """Return the device a rank works on: a GPU under NCCL, else the CPU.

    That is the GPU the process group is bound to, or the current one. A process that has not chosen
    one, so that it is still GPU 0, takes the one of its `LOCAL_RANK`.
    """
    group = env.process_group
    # a group made with no backend named serves both kinds of device
    if group is not None and torch.distributed.get_backend(group) in ("gloo", "mpi"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    bound = getattr(group, "bound_device_id", None)
    if bound is not None:
        return torch.device(bound)
    current = torch.cuda.current_device()
    local_rank = setting("LOCAL_RANK", least=0) or 0
    chosen = current == 0 and local_rank < torch.cuda.device_count()
    return torch.device("cuda", local_rank if chosen else current)
