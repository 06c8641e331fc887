"""What sharded collections share: their tables, lookups, optimizer, and copying.

The pooled and the sequence collection differ in how a table is looked up, in what the input stage
must remember of a batch, and in the output stage; the rest is here.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, NoReturn, Self, final

import torch
from torch import Tensor, nn

from recsys import step_stages
from recsys.distributed.module_tree import check_untied
from recsys.distributed.placement.fused_params import settings_of_table, with_table_settings
from recsys.distributed.placement.layout import Layout, Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    compute_kernel_to_embedding_location,
    warn_once,
)
from recsys.distributed.placement.plan_layout import place_tables
from recsys.distributed.placement.strategies import check_plan_covers, pooling_of_parts
from recsys.distributed.ranks.agreement import in_words, stable
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
from recsys.distributed.state.fused_optimizer import FusedTablesOptimizer, optimizer_of_table
from recsys.distributed.state.moves import move_tables
from recsys.distributed.state.row_updates import BackwardFinisher
from recsys.distributed.state.table_shards import TableShards, load_tables
from recsys.kernels.arguments import setting
from recsys.kernels.support import shared_optimizer
from recsys.kernels.types import BoundsCheckMode, EmbeddingLocation
from recsys.modules.eager import run_eagerly
from recsys.modules.embedding_interfaces import get_embedding_names_by_table
from recsys.modules.embedding_tables import QUANTIZATION_NOTES, TableCollection, TableDict
from recsys.optim.apply_optimizer_in_backward import (
    attached_optimizer,
    mark_in_backward,
)
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor
from recsys.step_stages import Stage

started_ahead: ContextVar[Callable[[ShardedCollection, KeyedJaggedTensor], Any] | None] = (
    ContextVar("started_ahead", default=None)
)
"""Asked at each call of a collection for its output of these features, if their trip has started
already; else returns None."""


class ShardedCollection(ShardedModule):
    """Tables of one unsharded collection, placed on many ranks.

    Args:
        module: the collection to place. Its weights are kept, rank 0's where ranks differ; tables
            on the `meta` device are allocated and initialised shard by shard.
        table_name_to_parameter_sharding: the plan: one entry per table.
        env: the ranks.
        fused_params: optimizer settings for the tables that have no optimizer attached, such as
            `{"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}`.
        device: where the tables go.
        qcomm_codecs_registry: what embeddings and gradients look like while they travel, from
            `get_qcomm_codecs_registry`; None: as they are.
        module_fqn: the module's path in the model, by which errors name it.

    Raises:
        ValueError: if the plan misses a table, names an unknown one, does not cover a table
            exactly once, uses a rank that does not exist, or splits the columns of a table whose
            optimizer needs whole rows.
    """

    unsharded_module_type: ClassVar[type[nn.Module]]
    """What it takes the place of."""
    tables_name: ClassVar[str]
    """The attribute that holds the tables, as in the unsharded collection."""
    output_type: ClassVar[type[LazyAwaitable[Any]]]
    """What `forward` returns."""
    output_stage: ClassVar[type[OutputStage[Any]]]
    """What sends embeddings back."""
    output_ops: ClassVar[Sequence[CommOp]]
    """The names of its exchange in a registry of codecs."""
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
            self._bounds_check_mode = _bounds_check_mode(plan, module.bounds_check_mode)
            self._output_dtype = _output_dtype(plan)
            self._adopt(module)
            self._build(
                [
                    _TableOptions(
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
        """Return what has to be the same on all ranks, by its name."""
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
        return facts | _facts_of_tables(self._layout, self._configs, self._options)

    def _adopt(self, module: Any) -> None:
        """Take over the settings of the given module."""

    def _output_options(self) -> dict[str, bool]:
        """Return what the output stage is told besides what every collection tells it."""
        return {}

    def _build(
        self,
        options: Sequence[_TableOptions],
        lookups: Sequence[Lookup] = (),
        replicas: Sequence[Lookup] = (),
    ) -> None:
        """Compile the plan and allocate the tables, but for what given lookups hold already."""
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
        """Return what a table must have in common with those it shares a lookup with.

        Raises:
            ValueError: if the plan asks of it what its optimizer or the engine does not do.
        """
        name = self._configs[number].name
        sharding, option = self._plan[name], self._options[number]
        if sharding.compute_kernel == EmbeddingComputeKernel.QUANT.value:
            raise ValueError(
                f"Table {name!r} has compute_kernel 'quant', which is for inference; shard a "
                "quantized model by recsys.inference.shard_quant_model."
            )
        splits_columns = len({rect.col_start for rect in rects}) > 1
        owned = option.optimizer
        if owned is not None and splits_columns and not owned.may_split_columns:
            raise ValueError(
                f"Table {name!r} is split by columns, but its optimizer "
                f"{owned.spec.algorithm.name} takes the norm of whole rows. Place it table_wise, "
                "row_wise or data_parallel, or ask for row_state='per_shard', which takes each "
                "part's columns for whole rows."
            )
        reads_rows = owned is not None and splits_columns and owned.spec.rule.reduces_rows
        exchanges = owned is not None and splits_columns and owned.exchanges_row_state
        if owned is not None and not rects and not owned.may_replicate:
            raise ValueError(
                f"Table {name!r} is data_parallel and has stochastic_rounding, with which its "
                "replicas would drift apart. Place it otherwise, or turn the rounding off."
            )
        location = compute_kernel_to_embedding_location(
            EmbeddingComputeKernel(sharding.compute_kernel)
        )
        return GroupSettings(
            pooling=pooling_of_parts(self._poolings[number], rects),
            weights_dtype=option.dtype,
            optimizer=owned and shared_optimizer(owned.spec, self._device, owned.update_mode),
            requires_grad=option.requires_grad,
            location=None if location is EmbeddingLocation.DEVICE else location,
            deferred=owned is not None and owned.is_deferred,
            exchanges_row_statistics=exchanges,
            splits_row_state=reads_rows and not exchanges,
            cache_load_factor=sharding.cache_params and sharding.cache_params.load_factor,
        )

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
        """Table name to weight, in order: a `ShardedTable`, or whole where it is replicated."""
        return {name: table.whole() for name, table in self._tables().items()}

    @property
    def env(self) -> ShardingEnv:
        """The ranks."""
        return self._env

    @property
    def device(self) -> torch.device:
        """Where this rank's parts of the tables are."""
        return self._device

    @property
    def input_stage(self) -> InputDist:
        """The stage that sends ids to the ranks that own their rows."""
        return self._input_dist

    def create_context(self) -> BatchContext:
        """Return what goes with one batch through `input_dist`, `compute` and `output_dist`.

        Several batches may be under way at once, each with a context of its own. All ranks call
        the stages in one order. See docs/engine.md for a loop of this kind.
        """
        return BatchContext(self._input_dist)

    def input_dist(
        self, ctx: BatchContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Start to tell the ranks that own a batch's rows how many ids come.

        Args:
            ctx: a new context.
            features: as for `forward`.

        Returns:
            Its `wait()` waits on the host for what all ranks told (on a GPU without other ranks
            it need not where sizes are known, see `forward`), raises what `forward` raises, and
            starts sending the ids. The `wait()` of what that returns gives what this rank looks up,
            the `dist_input` of `compute`.

        Raises:
            ValueError: if the context is another module's, or a batch has it already.

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
        """Look up what this rank has of a batch.

        Args:
            ctx: the batch's context.
            dist_input: what its `input_dist` gave in the end.

        Returns:
            The output of each lookup: of replicated tables, `[B, C]`, then of this rank's own,
            `[samples of all ranks, C]`; of sequences a row for each id.

        Raises:
            ValueError: if `dist_input` does not belong to the context.
        """
        return list(self._look_up(ctx, dist_input))

    def output_dist(self, ctx: BatchContext, output: Iterable[Tensor]) -> LazyAwaitable[Any]:
        """Start sending embeddings to the samples' ranks.

        Args:
            ctx: the batch's context.
            output: what `compute` gave.

        Returns:
            What `forward` returns.
        """
        lookups = iter(output)
        replicas = list(islice(lookups, len(self._replicas)))
        trains = self._trains and torch.is_grad_enabled()
        return self.output_type(self._output_dist.start(ctx, lookups, replicas, trains))

    def compute_and_output_dist(self, ctx: BatchContext, input: BatchContext) -> LazyAwaitable[Any]:
        """Look up what this rank has of a batch, and start sending embeddings.

        Where tables are added up inside a node, the others are looked up meanwhile, as in
        `forward`; `compute` looks all up before.

        Args:
            ctx: the batch's context.
            input: what its `input_dist` gave in the end.

        Returns:
            What `forward` returns.

        Raises:
            ValueError: if `input` does not belong to the context.
        """
        return self.output_dist(ctx, self._look_up(ctx, input))

    def prefetch(
        self,
        dist_input: BatchContext,
        forward_stream: torch.Stream | None = None,
        ctx: BatchContext | None = None,
    ) -> None:
        """Bring the rows that `compute` will read into the caches of tables that have one.

        Args:
            dist_input: what its `input_dist` gave in the end.
            forward_stream: Ignored: call it on the stream of the lookups, after the update of
                the batch before.
            ctx: Ignored.
        """
        for lookup, bags in zip(self._lookups, dist_input.received.lookups, strict=True):
            lookup.kernel.prefetch(bags.indices, bags.offsets, bags.of_features)

    def _look_up(self, ctx: BatchContext, dist_input: BatchContext) -> Iterator[Tensor]:
        """Look up in the replicated tables now, in the others while the result is read."""
        if dist_input is not ctx:
            given: object = dist_input
            if not isinstance(given, Awaitable) or given.wait() is not ctx:
                raise ValueError(
                    "compute needs a batch's context and what input_dist(context, features) gave, "
                    "waited for twice; received another batch's, or what is under way. Call "
                    "compute(context, input_dist(context, features).wait().wait())."
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
            features: int32 or int64 ids of this rank's samples, with every feature the tables read.

        Returns:
            What the unsharded collection returns, pending.

        Raises:
            IndexError: on every rank, if an id on any rank is outside its table.
            KeyError: on every rank, if a batch lacks a feature.
            TypeError: on every rank, if a rank's features are no KeyedJaggedTensor or ids are not
                integers.
            ValueError: on every rank, if lengths, offsets, weights or inverse indices of a rank
                do not fit.

        On a GPU without other ranks the host waits for nothing if it knows how many ids each
        feature has (`features.length_per_key_or_none()` is not None), or needs no such number
        (docs/engine.md, "On a GPU the host waits once a step, or never"). Values that are bad (ids
        out of range, lengths, inverse indices) may then be raised only by a later call, or by
        `check_ids`. Nothing foreign is read or written meanwhile.
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
        """Raise now what is wrong with the values of an earlier batch, as when unsharded.

        There is something to raise only on a GPU without other ranks, and the host waits for the
        GPU; elsewhere `forward` has raised it.

        Raises:
            IndexError: if an id was outside its table.
            ValueError: if lengths, offsets or inverse indices did not fit.
        """
        self._input_dist.late.read_all()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The keyed optimizer of the tables that update themselves; names as in the state dict."""
        return self._fused_optimizer

    @property
    def module_sharding_plan(self) -> EmbeddingModuleShardingPlan:
        """The plan."""
        return self._plan

    @property
    def layout(self) -> Layout:
        """The plan, compiled; the same on every rank. `layout.plot()` draws it."""
        return self._layout

    @property
    def lookups(self) -> tuple[list[Lookup], list[Lookup]]:
        """The lookups of replicated tables, and those of this rank's parts of the others."""
        return self._replicas, self._lookups

    @property
    def _input_dists(self) -> list[InputDist]:
        return [self._input_dist]

    @property
    def _output_dists(self) -> list[OutputStage[Any]]:
        return [self._output_dist]

    def extra_repr(self) -> str:
        """Show the lookups of this rank and why each runs on its backend, and the two stages."""
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
        """As of any module; every rank must call it, and an error on one is raised on all."""
        load = partial(super().load_state_dict, state_dict, *args, **kwargs)
        return together(self._env, "load a state dict", load)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        refuse_to_pickle(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy(self._device)

    def copy(self, device: torch.device) -> Self:
        """Return a copy on another device: same plan, weight, optimizer state, learning rates."""
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
        """Return one with these settings, of which nothing is built yet."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__getstate__())  # type: ignore[no-untyped-call]
        nn.Module.__init__(other)
        other._configs, other._plan = copy.deepcopy((self._configs, plan))
        other._device = device
        return other

    def plan_after(self, plan: Mapping[str, ParameterSharding]) -> EmbeddingModuleShardingPlan:
        """Return the plan that `reshard(plan)` leads to; nothing moves, and no rank waits.

        Args:
            plan: as for `reshard`.

        Raises:
            ValueError: as `reshard` does of a plan that fits no tables.
        """
        whole = merged_plan(self._path, self._plan, plan)
        self._with(whole, self._device)._place()
        return whole

    def reshard(self, plan: Mapping[str, ParameterSharding]) -> None:
        """Move tables to other ranks while training goes on: weights and optimizer state.

        Every rank must call it, between a step and the next forward pass. Until the old parts are
        given up, a rank holds the old and the new parts of the lookups that change, and up to 64
        MiB on their way; lookups of which no table moves are left alone. `fused_optimizer` stays
        the same object, with its learning rates.

        Args:
            plan: where tables go, by name; the others stay. What an entry leaves None, but for the
                shards, stays as it was.

        Raises:
            ValueError: on every rank, with nothing moved: if the plan does not fit the tables or
                the ranks, or asks for another `bounds_check_mode`, `output_dtype` or
                `stochastic_rounding`; if a table that moves has no optimizer of its own but trains,
                or gradients are held for a step to come; if row states of parts of the columns
                would have to be split or joined.
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
        """Take over what another one was built of; what users hold of this one stays theirs."""
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


@final
class _TableOptions:
    """What a table brings along: dtype, whether it trains, and its optimizer."""

    def __init__(
        self, weight: nn.Parameter, fused_params: Mapping[str, Any], rounds: bool | None
    ) -> None:
        # carries what was attached, without keeping the whole table alive
        self.source: nn.Parameter | None = None
        if attached_optimizer(weight) is not None:
            self.source = nn.Parameter(torch.empty(0))
            mark_in_backward(self.source, weight)
        self.dtype = weight.dtype
        self.is_meta = weight.is_meta
        self.requires_grad = weight.requires_grad
        self.optimizer = optimizer_of_table(weight, fused_params)
        if self.optimizer is not None and weight.dtype in (torch.float16, torch.bfloat16):
            self.optimizer = self.optimizer.rounding(rounds)
        elif rounds:
            warn_once(
                "ParameterSharding.stochastic_rounding",
                rounds,
                "It is for tables of float16 or bfloat16 that own an optimizer.",
            )


def _facts_of_tables(
    layout: Layout, configs: Sequence[Any], options: Sequence[_TableOptions]
) -> dict[str, str]:
    """Return what of each table has to be the same on all ranks."""
    facts: dict[str, str] = {}
    spoken: dict[Hashable, str] = {}  # of what many tables share
    for placed, config, option in zip(layout.tables, configs, options, strict=True):
        shared = (placed.group, option.optimizer)
        alike = spoken.get(shared)
        if alike is None:
            alike = spoken[shared] = "; ".join(map(in_words, shared))
        shards = [
            f"rows {r.row_start}-{r.row_end} and columns {r.col_start}-{r.col_end} on {r.rank}"
            for r in placed.rects
        ]
        facts[f"table {config.name!r}"] = "; ".join(
            (
                in_words(config),
                "on the meta device" if option.is_meta else "with values",
                f"trains {option.requires_grad}",
                alike,
                f"shards {', '.join(shards) or 'on every rank'}",
            )
        )
    return facts


def _bounds_check_mode(
    plan: EmbeddingModuleShardingPlan, default: BoundsCheckMode
) -> BoundsCheckMode:
    """Return the mode the plan asks for, the collection's own if it asks for none."""
    asked = {s.bounds_check_mode.name for s in plan.values() if s.bounds_check_mode is not None}
    if len(asked) > 1:
        raise ValueError(
            "The tables of one collection share one bounds_check_mode; the plan asks for "
            f"{sorted(asked)}."
        )
    return BoundsCheckMode[asked.pop()] if asked else default


def _output_dtype(plan: EmbeddingModuleShardingPlan) -> torch.dtype:
    """Return the dtype of what the tables of a plan give, float32 if it asks for none."""
    asked = {sharding.output_dtype or torch.float32 for sharding in plan.values()}
    served = (torch.float32, torch.float16, torch.bfloat16)
    if len(asked) > 1 or not asked <= {*served}:
        raise ValueError(
            f"The tables of one collection must share one output_dtype of {[*served]}; the plan "
            f"asks for {sorted(map(str, asked))}."
        )
    return asked.pop() if asked else torch.float32


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
