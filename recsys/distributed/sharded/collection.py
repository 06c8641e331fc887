"""Base class of sharded collections: tables, lookups, optimizer, stages of a batch, resharding.

Pooled and sequence collections differ in their lookups and in their output stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from itertools import chain, islice
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from recsys.base import step_stages
from recsys.base.step_stages import Stage
from recsys.distributed.placement.fused_params import with_table_settings
from recsys.distributed.placement.layout import Layout
from recsys.distributed.placement.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
)
from recsys.distributed.placement.strategies import check_plan_covers
from recsys.distributed.ranks.build_transaction import build_on_all_ranks
from recsys.distributed.ranks.comm import Awaitable, LazyAwaitable
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.wire import CommOp, QuantizedCommCodecs, codecs_for
from recsys.distributed.sharded.collection_stages import (
    CollectionSettings,
    CollectionStages,
    OutputStageFactory,
    build_stages,
    facts_of,
)
from recsys.distributed.sharded.devices import canonical_device, default_device
from recsys.distributed.sharded.module_tree import check_untied
from recsys.distributed.sharded.reshard import merged_plan, prepare_move
from recsys.distributed.sharded.sharder import OwnShardsModule
from recsys.distributed.sharded.table_options import (
    bounds_check_mode_of,
    options_of_tables,
    output_dtype_of,
)
from recsys.distributed.stages.batch import BatchContext, LookupInput
from recsys.distributed.stages.input_dist import InputDist, start_together
from recsys.distributed.stages.lookup import Lookup, rows_found
from recsys.distributed.state.fused_optimizer import FusedTablesOptimizer
from recsys.distributed.state.table_shards import load_tables
from recsys.modules.tables.eager import run_eagerly
from recsys.modules.tables.embedding_table import TableDict
from recsys.modules.tables.embedding_tables import QUANTIZATION_NOTES, TableCollection
from recsys.optim.keyed import CombinedOptimizer
from recsys.sparse import KeyedJaggedTensor

prefetched_output: ContextVar[Callable[[ShardedCollection, KeyedJaggedTensor], Any] | None] = (
    ContextVar("prefetched_output", default=None)
)
"""Function that returns the output of a collection for a batch that started early; else None."""


def send_ids(ctx: BatchContext) -> None:
    """Wait for the header of a batch and start sending its ids."""
    with step_stages.running((Stage.INPUT_DIST, ctx.stage.module.path)):
        ctx.stage.send(ctx)


def receive_ids(ctx: BatchContext) -> BatchContext:
    """Wait for the ids of a batch and return its context."""
    with step_stages.running((Stage.INPUT_DIST, ctx.stage.module.path)):
        return ctx.stage.receive(ctx)


class ShardedCollection(OwnShardsModule):
    """Tables of one collection, sharded over ranks.

    Args:
        module: The unsharded collection. Its weights are kept, the weights of rank 0 if ranks
            differ. Tables on the `meta` device are allocated and initialized shard by shard.
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
    output_stage: OutputStageFactory
    """Type of the output stage, or a function that makes one."""
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
        with build_on_all_ranks(env) as construction:
            weights = module.table_weights()
            plan = EmbeddingModuleShardingPlan(table_name_to_parameter_sharding)
            path = construction.path or module_fqn or type(module).__name__
            check_plan_covers(path, plan, weights)
            plan = with_table_settings(plan, fused_params or {})
            check_untied(module, weights.values())
            for name in QUANTIZATION_NOTES:
                if hasattr(module, name):
                    setattr(self, name, getattr(module, name))
            self._adopt(module)
            settings = CollectionSettings(
                owner=type(self).__name__,
                path=path,
                env=env,
                device=canonical_device(device or default_device(env)),
                configs=module.configs(),
                poolings=module.poolings(),
                options=options_of_tables(weights, plan, fused_params),
                plan=plan,
                bounds_check_mode=bounds_check_mode_of(plan, module.bounds_check_mode),
                output_dtype=output_dtype_of(plan),
                is_weighted=self._is_weighted,
                distinct=self._use_index_dedup,
                codecs=codecs_for(qcomm_codecs_registry, *self.output_ops),
                output_stage=self.output_stage,
            )
            self._build(settings)
            construction.set_device(settings.device)
            construction.add(path, self._facts(settings, self._stages))
            # after _build, because train() reads the stages
            self.train(module.training)
            # both run after all ranks agree, so that an error leaves no rank inside a collective
            construction.connect(self._stages.output_dist.connect)
            construction.load(
                module.init_seed,
                lambda seed: load_tables(self._stages.tables, module, construction.env, seed),
                # `init_fn` is code of the user; it runs after the last exchange
                may_fail_alone=any(config.init_fn is not None for config in settings.configs),
            )

    def _facts(self, settings: CollectionSettings, stages: CollectionStages) -> dict[str, str]:
        """Return the properties that must be the same on all ranks, by name."""
        switches = {name: value for name, value in vars(self).items() if isinstance(value, bool)}
        return facts_of(settings, stages, switches)

    def _adopt(self, module: Any) -> None:
        """Copy the settings of the unsharded module."""

    def _build(self, settings: CollectionSettings) -> None:
        """Allocate the tables, and build the stages and the optimizer."""
        self._settings = settings
        self._set_stages(build_stages(settings))
        self._tables_optimizer = self._optimizer_of(self._stages)
        self._fused_optimizer = CombinedOptimizer([self._tables_optimizer])

    def _set_stages(self, stages: CollectionStages) -> None:
        """Set the stages and hold their tables as submodules."""
        self._stages = stages
        stages.input_dist.is_training = self.training
        self._hold_tables(TableDict(stages.tables))

    def _optimizer_of(self, stages: CollectionStages) -> FusedTablesOptimizer:
        return FusedTablesOptimizer(
            {self._weight_name(name): table for name, table in stages.tables.items()},
            [option.optimizer for option in self._settings.options],
            stages.finisher.deferred,
        )

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; only in training do new ids get rows."""
        self._stages.input_dist.is_training = mode
        return super().train(mode)

    def _hold_tables(self, tables: TableDict) -> None:
        self.add_module(self.tables_name, tables)

    def _weight_name(self, table: str) -> str:
        """Return the name of a table's weight in the state dict."""
        return f"{self.tables_name}.{table}.weight"

    def configs(self) -> list[Any]:
        """Return the tables, in order."""
        return list(self._settings.configs)

    def table_weights(self) -> dict[str, Tensor]:
        """Table name -> weight, in order: a `ShardedTable`, or a tensor if it is replicated."""
        return {name: table.whole() for name, table in self._stages.tables.items()}

    @property
    def env(self) -> ShardingEnv:
        """The ranks."""
        return self._settings.env

    @property
    def device(self) -> torch.device:
        """Device of the shards."""
        return self._settings.device

    @property
    def input_stage(self) -> InputDist:
        """The input stage."""
        return self._stages.input_dist

    def create_context(self) -> BatchContext:
        """Return a context for the stages of one batch.

        Several batches may be in progress, each with its own context; docs/pipelines.md has an
        example. All ranks must call the stages in the same order.
        """
        return BatchContext(self._stages.input_dist)

    def input_dist(
        self, ctx: BatchContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[BatchContext]]:
        """Start the header exchange of a batch.

        Args:
            ctx: A new context.
            features: The batch, as for `forward`.

        Returns:
            An awaitable of an awaitable. The first `wait()` waits for the headers of all ranks,
            raises the errors of `forward` and starts sending the ids. The second `wait()` waits for
            the ids and returns `dist_input` for `compute`.

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
        if ctx.stage is not self._stages.input_dist or ctx.given is not None:
            raise ValueError(
                "input_dist needs a new context of its own module for each batch; received one of "
                f"{'a batch' if ctx.stage is self._stages.input_dist else 'another module'}. Call "
                "create_context() for every batch."
            )
        with step_stages.running((Stage.INPUT_DIST, self._settings.path)):
            start_together([ctx.stage.prepare(features, ctx)])

        def send() -> Awaitable[BatchContext]:
            send_ids(ctx)
            return LazyAwaitable(lambda: receive_ids(ctx))

        return LazyAwaitable(send)

    def compute(self, ctx: BatchContext, dist_input: BatchContext) -> list[Tensor]:
        """Look up the received ids of a batch.

        Args:
            ctx: The context of the batch.
            dist_input: The awaited result of `input_dist` for this context.

        Returns:
            The output of each lookup: `[B, C]` for replicated tables, then
            `[samples of all ranks, C]` for this rank's shards. For sequences it has a row per id.

        Raises:
            ValueError: If `dist_input` belongs to another context.
        """
        return list(self._look_up(ctx, dist_input))

    def output_dist(self, ctx: BatchContext, output: Iterable[Tensor]) -> LazyAwaitable[Any]:
        """Start sending embeddings to the ranks of their samples; return the output of `forward`.

        Args:
            ctx: The context of the batch.
            output: The result of `compute`.
        """
        lookups = iter(output)
        # the rest stays an iterator: the output stage looks up during the exchange in a node
        # docs/decisions/row_split.md, "Sums inside a node; sequences return by id"
        replicas = list(islice(lookups, len(self._stages.replicas)))
        trains = self._stages.input_dist.module.trains and torch.is_grad_enabled()
        return self.output_type(self._stages.output_dist.start(ctx, lookups, replicas, trains))

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

        Call it on the stream of the lookups, after the update of the previous batch.

        Args:
            dist_input: The awaited result of `input_dist`.
            forward_stream: Ignored.
            ctx: Ignored.
        """
        for lookup, bags in zip(self._stages.lookups, dist_input.received.lookups, strict=True):
            lookup.kernel.prefetch(bags.indices, bags.offsets, bags.of_features)

    def _look_up(self, ctx: BatchContext, dist_input: BatchContext) -> Iterator[Tensor]:
        """Look up in replicated tables now; in others when the output stage iterates the result."""
        if dist_input is not ctx:
            lookup_input: object = dist_input
            if not isinstance(lookup_input, Awaitable) or lookup_input.wait() is not ctx:
                raise ValueError(
                    "compute(ctx, dist_input) needs the awaited result of input_dist for the same "
                    "ctx; received another batch's, or one that is pending. Call "
                    "compute(ctx, input_dist(ctx, features).wait().wait())."
                )
        # a backward pass raised an error: the gradients of its batch must not join this one's
        # docs/decisions/structure.md, "One value per batch, one class per exchange"
        if self._stages.finisher.under_way:
            self._stages.finisher.reset()
        received = ctx.received
        replicas = list(self._outputs(self._stages.replicas, received.replicas))
        return chain(replicas, self._outputs(self._stages.lookups, received.lookups))

    def _outputs(self, lookups: Sequence[Lookup], bags: Sequence[LookupInput]) -> Iterator[Tensor]:
        """Yield the output of each lookup."""
        path = self._settings.path
        for lookup, lookup_bags in zip(lookups, bags, strict=True):
            hashed = lookup.hashed
            rows = nullcontext(lookup_bags) if hashed is None else rows_found(hashed, lookup_bags)
            # closed before the yield: rows lent by the disk have their own weights again
            # docs/decisions/hashed_ids.md, "Rows on the disk: a log that gives them back"
            with step_stages.running((Stage.LOOKUP, path)), rows as lent:
                inputs = lent.indices, lent.offsets, lent.weights
                sizes = lent.ids_of_tables, lent.of_features
                output = lookup.kernel.forward(*inputs, lookup.parameters, *sizes)
            if hashed is not None and output.requires_grad:
                hashed.hold(output)
            if step_stages.observers:
                step_stages.report_update(output, path)
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
        feature, or does not need it (docs/gpu.md has the cases). A later call or `check_ids`
        then raises the error of invalid ids, lengths or inverse indices. Lookups stay within their
        tables meanwhile.
        """
        # see docs/decisions/compile.md, "A sharded collection is a graph break"
        if torch.compiler.is_dynamo_compiling():
            return run_eagerly(self, features)  # type: ignore[no-any-return]
        # a pipeline may have sent the ids of this batch already
        # docs/decisions/exchange.md, "Pipelines read headers a step after they were sent"
        ask = prefetched_output.get()
        output = None if ask is None else ask(self, features)
        if output is not None:
            return output  # type: ignore[no-any-return]
        stage = self._stages.input_dist
        with step_stages.running((Stage.INPUT_DIST, stage.module.path)):
            ctx = stage.prepare(features)
            start_together([ctx])
            stage.send(ctx)
            stage.receive(ctx)
        return self.output_dist(ctx, self._look_up(ctx, ctx))

    def check_ids(self) -> None:
        """Raise the pending errors of earlier batches; waits for the GPU.

        Only batches on a GPU without other ranks have pending errors; `forward` raises all others.

        Raises:
            IndexError: If an id was outside its table.
            ValueError: If lengths, offsets or inverse indices were invalid.
        """
        self._stages.input_dist.late.read_all()

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """Keyed optimizer of the tables with fused updates; names as in the state dict."""
        return self._fused_optimizer

    @property
    def module_sharding_plan(self) -> EmbeddingModuleShardingPlan:
        """The plan."""
        return self._settings.plan

    @property
    def layout(self) -> Layout:
        """The compiled plan, the same on every rank. `layout.plot()` draws it."""
        return self._stages.layout

    @property
    def lookups(self) -> tuple[list[Lookup], list[Lookup]]:
        """The lookups of replicated tables, and of this rank's shards."""
        return list(self._stages.replicas), list(self._stages.lookups)

    # lists of stages, by the names in TorchRec
    _lookups = property(lambda self: list(self._stages.lookups))
    _input_dists = property(lambda self: [self._stages.input_dist])
    _output_dists = property(lambda self: [self._stages.output_dist])

    def extra_repr(self) -> str:
        """Return the lookups of this rank with the reason for their backends, and the stages."""
        lookups = [lookup.kernel for lookup in (*self._stages.lookups, *self._stages.replicas)]
        return "\n".join(map(repr, [*lookups, self._stages.input_dist, self._stages.output_dist]))

    def copy(self, device: torch.device) -> Self:
        """Return a copy on a device, with the plan, weights, optimizer state and learning rates."""
        settings = replace(
            self._settings,
            configs=copy.deepcopy(self._settings.configs),
            plan=copy.deepcopy(self._settings.plan),
            device=canonical_device(device),
        )
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__getstate__())  # type: ignore[no-untyped-call]
        # replaces the registries of parameters and submodules, which belong to the original
        nn.Module.__init__(other)
        other._build(settings)
        with torch.no_grad():
            for name, table in self._stages.tables.items():
                other._stages.tables[name].copy_from(table)
        # a scheduler sets rates in the groups only; the settings keep the first ones
        rates = [group["lr"] for group in self._fused_optimizer.param_groups]
        for group, rate in zip(other._fused_optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        other.train(self.training)
        return other

    def plan_after(self, plan: Mapping[str, ParameterSharding]) -> EmbeddingModuleShardingPlan:
        """Return the plan after `reshard(plan)`, without moving tables or waiting for ranks.

        Raises:
            ValueError: If the plan does not fit the tables.
        """
        whole = merged_plan(self._settings.path, self._settings.plan, plan)
        replace(self._settings, plan=whole).place()
        return whole

    def reshard(self, plan: Mapping[str, ParameterSharding]) -> None:
        """Move tables, with weights and optimizer state, to other ranks during training.

        Call it on every rank between a step and the next forward pass. `fused_optimizer` stays the
        same object, with its learning rates. During the move a rank has the old and the new shards
        of the lookups that change, and up to 64 MiB of send buffers.

        Args:
            plan: New entries by table name; other tables stay. Fields that are None, except the
                shards, keep their values.

        Raises:
            ValueError: On every rank, before anything moves: if the plan does not fit the tables or
                the ranks, or changes a setting; if a moved table trains without a fused optimizer;
                if gradients wait for a step; if row states of column shards would change.
        """
        try:
            with build_on_all_ranks(self.env) as construction:
                after, moved = prepare_move(construction, self._settings, self._stages, plan)
                construction.add(after.path, self._facts(after, moved))
                construction.on_commit(lambda: self._swap_in(after, moved))
        finally:
            for group in self._fused_optimizer.param_groups:  # restore the rates of shared kernels
                group["lr"] = group["lr"]

    def _swap_in(self, settings: CollectionSettings, stages: CollectionStages) -> None:
        """Adopt other stages and their tables; the optimizer object is preserved."""
        # both outlive a batch
        # docs/decisions/structure.md, "One value per batch, one class per exchange"
        stages.input_dist.end_of_data = self._stages.input_dist.end_of_data
        stages.input_dist.late = self._stages.input_dist.late
        self._settings = settings
        self._set_stages(stages)
        self._tables_optimizer.follow(self._optimizer_of(stages))
