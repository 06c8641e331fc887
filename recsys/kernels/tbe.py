"""Table-batched embedding: one lookup over many tables, its backward, and their update.

Shape suffixes: N ids, F features, B bags per feature, T tables, R rows, K touched rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recsys.kernels.bounds import check_ids
from recsys.kernels.row_update import row_statistic
from recsys.kernels.scaled_loss import TABLE_UPDATES, TableUpdates, watch_grad_scaler
from recsys.kernels.support import Backend, BackendChoice, LookupSettings, choose_backend
from recsys.kernels.tbe_fbgemm import FbgemmCpuKernel
from recsys.kernels.tbe_fbgemm_module import FbgemmModule
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import (
    Rates,
    RowGradients,
    RowStatistics,
    TorchKernel,
    merge_row_gradients,
    put_rows,
    without_repeats,
)
from recsys.kernels.types import (
    EmbeddingLocation,
    OptimizerSpec,
    PoolingMode,
    TableSpec,
    UpdateMode,
)

__all__ = ["TableBatchedEmbedding", "check_ids"]

_Batch: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""What one backward pass brings: gradient of the output, indices, offsets, per-sample weights."""


@final
class TableBatchedEmbedding:
    """Many tables looked up, differentiated and updated as one.

    All tables lie in one flat storage; `weights[t]` are views of it. The object holds plain
    tensors and is no nn.Module: modules wrap it and decide about parameters and names.

    Args:
        tables: The tables. Their rows are uninitialised: fill `weights`.
        feature_table_map: [F] the table number each feature reads.
        pooling: SUM, MEAN (divides by the number of ids, weighted or not) or NONE (all dims equal).
        weights_dtype: fp32, fp16 or bf16. Optimizer state and its math are fp32.
        output_dtype: Of the looked-up values.
        optimizer: The tables' own optimizer; needed unless `update_mode` is GRADIENT.
        update_mode: See `UpdateMode`.
        device: Where the tables live; "meta" gives shapes only.
        location: Placement. None: HOST on a CPU, DEVICE elsewhere.
        cache_load_factor: Share of the rows that the cache of MANAGED_CACHING holds; None: 0.2.
        keeps_batch: DEFERRED mode: keep what a backward pass was given until the step, which can
            then be fused. The memory of the batch's ids must be left alone until then.
        sparse_grad: GRADIENT mode: fill `.grad` with sparse tensors instead of dense ones.
        backend: Force "fbgemm" or "torch"; None: chosen by `support.choose_backend`.
        weights: [sum of R*D] storage to adopt, laid out as `layout` says; None: allocated here.

    Attributes:
        layout: Where each table lies in the storage.
        storage: The flat weights.
        weights: Per table a [R, D] view.
        states: Per table its optimizer state by name, live views.
        backend: "fbgemm" or "torch".

    Raises:
        ValueError: Settings contradict each other, or `backend="fbgemm"` cannot serve them.

    Example:
        >>> tbe = TableBatchedEmbedding(
        ...     [TableSpec(name="t", num_rows=3, dim=2)],
        ...     feature_table_map=[0],
        ...     pooling=PoolingMode.SUM,
        ...     update_mode=UpdateMode.GRADIENT,
        ...     device=torch.device("cpu"),
        ... )
        >>> _ = tbe.weights[0].copy_(torch.arange(6.0).view(3, 2))
        >>> tbe.forward(torch.tensor([0, 2]), torch.tensor([0, 2]), None)
        tensor([[4., 6.]])
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        *,
        feature_table_map: Sequence[int],
        pooling: PoolingMode,
        weights_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        optimizer: OptimizerSpec | None = None,
        update_mode: UpdateMode,
        device: torch.device,
        location: EmbeddingLocation | None = None,
        cache_load_factor: float | None = None,
        keeps_batch: bool = False,
        sparse_grad: bool = False,
        backend: Backend | None = None,
        weights: Tensor | None = None,
    ) -> None:
        device = torch.device(device)
        on_host = device.type in ("cpu", "meta")
        self.location = location or (
            EmbeddingLocation.HOST if on_host else EmbeddingLocation.DEVICE
        )
        self.layout = StorageLayout(tables, feature_table_map, device)
        self.pooling, self.update_mode = pooling, update_mode
        self.output_dtype, self.optimizer = output_dtype, optimizer
        self.keeps_batch, self.sparse_grad = keeps_batch, sparse_grad
        settings = LookupSettings(
            device=device,
            weights_dtype=weights_dtype,
            output_dtype=output_dtype,
            dims=[t.dim for t in tables],
            feature_table_map=feature_table_map,
            pooling=pooling,
            optimizer=optimizer,
            update_mode=update_mode,
            location=self.location,
        )
        self._check(settings, weights)
        choice = choose_backend(settings)
        if backend == "torch" and choice.backend != "torch":
            choice = BackendChoice("torch", "asked for")
        elif backend == "fbgemm" and choice.backend != "fbgemm":
            raise ValueError(
                f"backend='fbgemm' cannot serve this lookup: {choice.reason}. Leave "
                "backend=None to use the torch backend."
            )
        if choice.backend == "torch" and "MANAGED" in self.location.name:
            raise ValueError(
                f"EmbeddingLocation.{self.location.name} needs FBGEMM; received settings it does "
                f"not serve ({choice.reason})."
            )
        self.backend, self.backend_reason = choice

        self._module: FbgemmModule | None = None
        flat_states: dict[str, Tensor] = {}
        if self.backend == "fbgemm" and device.type == "cuda":
            assert optimizer is not None
            self._module = FbgemmModule(
                self.layout,
                weights,
                pooling,
                weights_dtype,
                output_dtype,
                optimizer,
                self.location,
                cache_load_factor,
            )
            self.weights, self.states = self._module.weights, self._module.states
            self.storage, flat_states = self._module.storage, self._module.flat_states
        else:
            if weights is None:
                weights = torch.empty(self.layout.num_elements, dtype=weights_dtype, device=device)
            self.storage = weights
            self.weights = self.layout.table_views(weights)
            if optimizer is not None and update_mode is not UpdateMode.GRADIENT:
                flat_states = self._new_states(optimizer)
            self.states = self._split_states(flat_states)
        kernel_class = (
            FbgemmCpuKernel if self.backend == "fbgemm" and device.type == "cpu" else TorchKernel
        )
        self._kernel = kernel_class(
            self.layout, self.storage, pooling, output_dtype, optimizer, flat_states
        )
        self._rates: Rates = 0.0 if optimizer is None else float(optimizer.learning_rate)
        # Makes outputs require grad although no input does.
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # DEFERRED mode: what backward left, as it came (one pass only) or reduced to rows
        self._held: _Batch | None = None
        self._pending: list[RowGradients] | None = None
        self._statistics: list[RowStatistics] = []
        # what a GradScaler must know: see `scaled_loss`
        names = tuple(table.name for table in tables)
        self._updates: TableUpdates | None = None
        if update_mode is not UpdateMode.GRADIENT:
            fused = update_mode is UpdateMode.FUSED
            self._updates = TableUpdates(in_backward=names) if fused else TableUpdates(kept=names)
            watch_grad_scaler()
        self._ids_of_tables: list[int] | None = None  # of what was left, where known

    def _check(self, settings: LookupSettings, weights: Tensor | None) -> None:
        if settings.update_mode is not UpdateMode.GRADIENT and settings.optimizer is None:
            raise ValueError(
                f"UpdateMode.{settings.update_mode.name} needs an optimizer; received None. Give "
                "an OptimizerSpec, or use UpdateMode.GRADIENT and a torch optimizer."
            )
        if settings.pooling is PoolingMode.NONE and len(set(settings.dims)) > 1:
            raise ValueError(
                f"PoolingMode.NONE needs equal dims; received {sorted(set(settings.dims))}. Build "
                "one lookup per dim."
            )
        if (
            settings.optimizer is not None
            and settings.optimizer.stochastic_rounding
            and settings.weights_dtype not in (torch.float16, torch.bfloat16)
        ):
            raise ValueError(
                "stochastic_rounding is for tables of torch.float16 and torch.bfloat16; received "
                f"{settings.weights_dtype}. Leave it False."
            )
        if not settings.weights_dtype.is_floating_point:
            raise ValueError(f"weights_dtype must be floating; received {settings.weights_dtype}.")
        on_host = settings.device.type in ("cpu", "meta")
        if on_host is not (settings.location is EmbeddingLocation.HOST):
            raise ValueError(
                f"EmbeddingLocation.{settings.location.name} does not fit device "
                f"{settings.device}: HOST is for the CPU, the others are for CUDA."
            )
        if weights is not None and (
            weights.shape != (self.layout.num_elements,)
            or weights.dtype is not settings.weights_dtype
            or weights.device.type != settings.device.type
            or not weights.is_contiguous()
        ):
            raise ValueError(
                f"weights must be a contiguous [{self.layout.num_elements}] tensor of "
                f"{settings.weights_dtype} on {settings.device}; received {list(weights.shape)} "
                f"of {weights.dtype} on {weights.device}."
            )

    def _new_states(self, optimizer: OptimizerSpec) -> dict[str, Tensor]:
        layout = self.layout
        sizes = {
            "element": layout.num_elements,
            "row": layout.num_rows,
            "table": len(layout.tables),
        }
        host = None if layout.device.type != "meta" else layout.device
        return {
            name: torch.zeros(sizes[kind], device=host if kind == "table" else layout.device)
            for name, kind in optimizer.rule.state.items()
        }

    def _split_states(self, flat_states: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        views: list[dict[str, Tensor]] = [{} for _ in self.layout.tables]
        if not flat_states:
            return views
        assert self.optimizer is not None
        split: dict[str, Callable[[Tensor], Sequence[Tensor]]] = {
            "element": self.layout.table_views,
            "row": self.layout.row_views,
            "table": Tensor.unbind,
        }
        for name, kind in self.optimizer.rule.state.items():
            for view, tensor in zip(views, split[kind](flat_states[name]), strict=True):
                view[name] = tensor
        return views

    def __repr__(self) -> str:
        layout = self.layout
        rule = "" if self.optimizer is None else f" {self.optimizer.algorithm.name}"
        return (
            f"{type(self).__name__}(tables={len(layout.tables)}, features={layout.num_features}, "
            f"dims={sorted({t.dim for t in layout.tables})}, rows={layout.num_rows}, "
            f"pooling={self.pooling.name}, update={self.update_mode.name}{rule}, "
            f"weights={self.storage.dtype}, device={layout.device}, backend={self.backend}: "
            f"{self.backend_reason})"
        )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """[T] used by the next update; set all, or one by `set_learning_rate`."""
        rates = self._rates
        return (rates,) * len(self.layout.tables) if isinstance(rates, float) else rates

    @learning_rates.setter
    def learning_rates(self, values: Sequence[float]) -> None:
        num_tables = len(self.layout.tables)
        if len(values) != num_tables:
            raise ValueError(
                f"learning_rates must be one per table; received {len(values)} for "
                f"{num_tables} tables."
            )
        rates = tuple(map(float, values))
        self._rates = rates[0] if len(set(rates)) == 1 else rates
        if self._module is not None and isinstance(self._rates, float):
            self._module.set_learning_rate(self._rates)

    def set_learning_rate(self, value: float, tables: Iterable[int] | None = None) -> None:
        """Set the rate that the next update uses.

        Args:
            value: The learning rate.
            tables: Numbers of the tables that it is for; None: all.
        """
        rates = list(self.learning_rates)
        for table in range(len(rates)) if tables is None else tables:
            rates[table] = value
        self.learning_rates = rates

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        parameters: Sequence[Tensor] | None = None,
        ids_of_tables: Sequence[int] | None = None,
    ) -> Tensor:
        """Look up a batch.

        Args:
            indices: [N] int32 or int64, in range (see `check_ids`), on the tables' device.
            offsets: [F * B + 1]; bag b of feature f is `indices[offsets[f * B + b]:...]`.
            per_sample_weights: [N] floats, or None. Receives a gradient when it requires one.
            parameters: [T] leaf tensors that alias `weights`. GRADIENT mode: they receive the
                gradients. In the other modes they only say, by `requires_grad`, which tables train.
            ids_of_tables: [T] ids that read each table, where the host knows them: then
                `row_statistics` need not wait for the device.

        Returns:
            [B, sum of D over the features], or [N, D] without pooling.

        Raises:
            ValueError: Weights for a lookup without pooling.
        """
        if per_sample_weights is not None:
            if self.pooling is PoolingMode.NONE:
                raise ValueError(
                    "PoolingMode.NONE takes no per_sample_weights; received weights of shape "
                    f"{list(per_sample_weights.shape)}. Multiply the output instead."
                )
            per_sample_weights = per_sample_weights.float()
        if self.layout.device.type == "meta":
            return self._meta_output(indices, offsets)
        if self._module is not None:
            if isinstance(self._rates, float) and (
                parameters is None or all(p.requires_grad for p in parameters)
            ):
                pooled = self._module.forward(indices, offsets, per_sample_weights)
                if pooled.grad_fn is not None:
                    pooled.grad_fn.metadata[TABLE_UPDATES] = self._updates  # type: ignore[index]
                return pooled
            if self.location is EmbeddingLocation.MANAGED_CACHING:
                raise ValueError(
                    "Tables in MANAGED_CACHING that share a lookup must all train, at one learning "
                    f"rate; received the rates {self.learning_rates}. Give each its own lookup."
                )
        if not torch.is_grad_enabled():
            return self._kernel.lookup(indices, offsets, per_sample_weights)
        if parameters is None:
            parameters = () if self.update_mode is UpdateMode.GRADIENT else (self._anchor,)
        out: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self, ids_of_tables, indices, offsets, per_sample_weights, *parameters
        )
        return out

    def _meta_output(self, indices: Tensor, offsets: Tensor) -> Tensor:
        if self.pooling is PoolingMode.NONE:
            shape = (indices.numel(), self.layout.feature_dims[0])
        else:
            num_bags = (offsets.numel() - 1) // self.layout.num_features
            shape = (num_bags, self.layout.total_dim)
        return torch.empty(shape, dtype=self.output_dtype, device="meta")

    # -- DEFERRED mode ------------------------------------------------------------------------

    @property
    def row_gradients(self) -> list[tuple[Tensor, Tensor] | None]:
        """Per table (rows [K] ascending, grads [K, D] fp32); None before the first backward."""
        self._reduce()
        if self._pending is None:
            return [None] * len(self.layout.tables)
        return list(self._by_table([without_repeats(found) for found in self._pending]))

    @property
    def gradient_values(self) -> list[Tensor]:
        """DEFERRED mode: [K, D] fp32 per dim, without the rows; live, so that it can be scaled."""
        self._reduce()
        return [grads for _, grads in self._pending or ()]

    @property
    def has_gradients(self) -> bool:
        """DEFERRED mode: whether a backward pass has left any since the last step."""
        return self._held is not None or self._pending is not None

    def row_statistics(self) -> list[Tensor]:
        """DEFERRED mode: per table [K], `row_statistic` of its row gradients, see `RowGradients`.

        Raises:
            ValueError: The optimizer has no such statistic.
        """
        assert self.optimizer is not None
        if self._held is not None and self._kernel.takes_row_moments:
            self._statistics = self._kernel.row_statistics(*self._held)
        else:
            self._reduce()
            self._statistics = [
                (rows, row_statistic(self.optimizer, grads, group.matrix(self.storage), rows))
                for group, (rows, grads) in zip(
                    self.layout.groups, self._pending or (), strict=False
                )
            ]
        found = [torch.empty(0, device=self.layout.device)] * len(self.layout.tables)
        if not self._statistics:
            return found
        sizes = self._entries_per_table(self._statistics)
        for group, (_, statistic), of_table in zip(
            self.layout.groups, self._statistics, sizes, strict=True
        ):
            for table, part in zip(group.tables, statistic.split(of_table), strict=True):
                found[table] = part
        return found

    def take_dense_gradients(self) -> list[Tensor]:
        """DEFERRED mode: return the gradient of the whole storage, and forget it.

        Returns:
            [elements of all tables] fp32, laid out as `storage`; and, if the optimizer
            `moves_without_gradient`, [rows of all tables] fp32, 1 for each row with a gradient.
        """
        assert self.optimizer is not None
        counts_rows = self.optimizer.moves_without_gradient
        if self._held is not None and self._pending is None and not counts_rows:
            held, self._held = self._held, None
            return [self._kernel.dense_gradients(*held)]
        self._reduce()
        layout = self.layout
        summed = torch.zeros(layout.num_elements, device=layout.device)
        touched = torch.zeros(layout.num_rows if counts_rows else 0, device=layout.device)
        for group, (rows, grads) in zip(layout.groups, self._pending or (), strict=False):
            put_rows(group.matrix(summed), rows, grads)
            if counts_rows:
                group.rows(touched).index_fill_(0, rows, 1.0)
        self._pending = None
        return [summed, touched] if counts_rows else [summed]

    def step_dense(self, summed: Tensor, touched: Tensor | None = None) -> None:
        """DEFERRED mode: apply the tables' optimizer to what `take_dense_gradients` returned.

        Args:
            summed: [elements of all tables], such as the mean over replicas.
            touched: [rows of all tables]; rows with 0 keep weights and optimizer state. Needed if
                the optimizer `moves_without_gradient`.
        """
        if touched is None:
            self._kernel.apply_dense(summed, self._rates)
            return
        if touched.is_cuda:
            self._kernel.apply_touched(summed, touched, self._rates)
            self.zero_grad()
            return
        self._held, self._pending = None, []
        for group in self.layout.groups:
            rows = group.rows(touched).nonzero().squeeze(1)
            self._pending.append((rows, group.matrix(summed).index_select(0, rows)))
        self.step()

    def step(self, row_moments: Sequence[Tensor] | None = None) -> None:
        """DEFERRED mode: apply the tables' optimizer to the row gradients, and clear them.

        Args:
            row_moments: Per table [K], aligned with `row_gradients`: the mean of g*g over all
                columns of a row, for row-wise optimizers on tables split by columns. None:
                computed here.
        """
        grouped = None
        if row_moments is not None:
            grouped = [
                torch.cat([row_moments[t] for t in group.tables]) for group in self.layout.groups
            ]
            if self._held is not None and self._statistics:
                self._kernel.update_by_moments(self._held, self._statistics, grouped, self._rates)
                self.zero_grad()
                return
        self._reduce()
        if self._pending is not None:
            self._kernel.apply(self._pending, self._rates, grouped)
        self.zero_grad()

    def zero_grad(self) -> None:
        """DEFERRED mode: forget the row gradients."""
        self._held = self._pending = self._ids_of_tables = None
        self._statistics = []

    def _reduce(self) -> None:
        """Adds what is held to the row gradients."""
        if self._held is None:
            return
        held, self._held = self._held, None
        self._collect(self._kernel.row_gradients(*held))

    def _collect(self, fresh: list[RowGradients]) -> None:
        if self._pending is not None:
            fresh = [
                merge_row_gradients(old, new, group.num_rows)
                for group, old, new in zip(self.layout.groups, self._pending, fresh, strict=True)
            ]
        self._pending = fresh

    def flush(self) -> None:
        """Write cached rows back to `weights` (MANAGED_CACHING); nothing to do elsewhere."""
        if self._module is not None:
            self._module.flush()

    def drop_cache(self) -> None:
        """Forget cached rows after `weights` or `states` were written (MANAGED_CACHING)."""
        if self._module is not None:
            self._module.drop_cache()

    # -- called by backward -------------------------------------------------------------------

    def _update(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        trained: Sequence[bool],
        ids_of_tables: Sequence[int] | None,
    ) -> None:
        kernel = self._kernel
        if self.update_mode is UpdateMode.DEFERRED:
            self._count_ids(ids_of_tables)
        if all(trained):
            if self.update_mode is UpdateMode.FUSED:
                kernel.update(grad, indices, offsets, weights, self._rates)
            else:
                self._reduce()
                self._held = (grad, indices, offsets, weights)
                if not self.keeps_batch:
                    self._reduce()
            return
        self._ids_of_tables = None
        fresh = kernel.drop_frozen(kernel.row_gradients(grad, indices, offsets, weights), trained)
        if self.update_mode is UpdateMode.FUSED:
            kernel.apply(fresh, self._rates)
        else:
            self._reduce()
            self._collect(fresh)

    def _count_ids(self, ids_of_tables: Sequence[int] | None) -> None:
        """Adds a batch to `_ids_of_tables`, which is known if it is of all batches."""
        known = self._ids_of_tables if self.has_gradients else [0] * len(self.layout.tables)
        if known is not None and ids_of_tables is not None:
            known = [a + b for a, b in zip(known, ids_of_tables, strict=True)]
        self._ids_of_tables = None if ids_of_tables is None else known

    def _parameter_gradients(
        self,
        grad: Tensor,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        trained: Sequence[bool],
    ) -> list[Tensor | None]:
        """Per table its gradient, dense or sparse; None for frozen tables."""
        if not self.sparse_grad:
            flat = self._kernel.dense_gradients(grad, indices, offsets, weights)
            flat = flat.to(self.storage.dtype)
            pieces = self.layout.table_views(flat)
            return [g if wanted else None for g, wanted in zip(pieces, trained, strict=True)]
        result: list[Tensor | None] = [None] * len(self.layout.tables)
        row_gradients = self._kernel.row_gradients(grad, indices, offsets, weights)
        found = [without_repeats(of_group) for of_group in row_gradients]
        for table, (rows, grads) in enumerate(self._by_table(found)):
            if trained[table]:
                spec = self.layout.tables[table]
                result[table] = torch.sparse_coo_tensor(
                    rows.unsqueeze(0),
                    grads.to(self.storage.dtype),
                    (spec.num_rows, spec.dim),
                    is_coalesced=True,
                    check_invariants=False,
                )
        return result

    def _by_table(self, row_gradients: list[RowGradients]) -> list[RowGradients]:
        """Row gradients of dim groups -> of tables, rows counted from the start of the table."""
        per_table: dict[int, RowGradients] = {}
        sizes = self._rows_per_table(row_gradients)
        for group, (rows, grads), of_table in zip(
            self.layout.groups, row_gradients, sizes, strict=True
        ):
            first_rows = accumulate(group.table_rows, initial=0)
            parts = zip(rows.split(of_table), grads.split(of_table), strict=True)
            for table, first_row, (rows_K, grads_KD) in zip(
                group.tables, first_rows, parts, strict=False
            ):
                per_table[table] = (rows_K - first_row, grads_KD)
        return [per_table[t] for t in range(len(self.layout.tables))]

    def _entries_per_table(self, found: Sequence[tuple[Tensor, Tensor]]) -> list[list[int]]:
        """How many entries each dim group's tables have in what is left of the backward passes."""
        if self.layout.device.type != "cuda" or self._ids_of_tables is None:
            return self._rows_per_table(found)
        ids = self._ids_of_tables  # there is an entry per id
        return [[ids[table] for table in group.tables] for group in self.layout.groups]

    def _rows_per_table(self, found: Sequence[tuple[Tensor, Tensor]]) -> list[list[int]]:
        """How many of each dim group's rows each table has: one wait for the device, for all."""
        counts = [
            torch.searchsorted(rows, group.row_starts).diff()
            for group, (rows, _) in zip(self.layout.groups, found, strict=True)
        ]
        on_host = iter(torch.cat(counts).tolist())
        return [list(islice(on_host, len(group.tables))) for group in self.layout.groups]


@final
class _Lookup(torch.autograd.Function):
    """The autograd node of a lookup: its backward updates the tables or returns their gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        tbe: TableBatchedEmbedding,
        ids_of_tables: Sequence[int] | None,
        indices: Tensor,
        offsets: Tensor,
        weights: Tensor | None,
        *parameters: Tensor,
    ) -> Tensor:
        if tbe._updates is not None:
            ctx.metadata[TABLE_UPDATES] = tbe._updates
        ctx.tbe, ctx.ids_of_tables = tbe, ids_of_tables
        ctx.save_for_backward(indices, offsets, weights)
        return tbe._kernel.lookup(indices, offsets, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tbe: TableBatchedEmbedding = ctx.tbe
        indices, offsets, weights = ctx.saved_tensors
        _, _, _, _, needs_weights, *trained = ctx.needs_input_grad
        weights_grad = None
        if needs_weights:  # before the update: it reads the rows the forward read
            weights_grad = tbe._kernel.weight_gradients(grad, indices, offsets)
        gradients: list[Tensor | None] = [None] * len(trained)
        if any(trained):
            batch = (grad, indices, offsets, weights, trained)
            if tbe.update_mode is UpdateMode.GRADIENT:
                gradients = tbe._parameter_gradients(*batch)
            else:
                tbe._update(*batch, ctx.ids_of_tables)
        return (None, None, None, None, weights_grad, *gradients)
