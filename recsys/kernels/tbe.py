"""Table-batched embedding: one lookup over many tables, its backward, and their update.

Shapes: N ids, F features, B bags per feature, T tables, R rows, K touched rows, D columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recsys.kernels.deferred import DeferredGradients
from recsys.kernels.lookup_batch import LookupBatch, RankedBags
from recsys.kernels.row_gradients import split_by_table
from recsys.kernels.row_marks import RowMarks
from recsys.kernels.scaled_loss import TABLE_UPDATES, TableUpdates, warn_of_fp16
from recsys.kernels.support import choose_backend
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.tbe_torch import TorchKernel, WriteRows
from recsys.kernels.types import (
    EmbeddingLocation,
    LookupSettings,
    OptimizerSpec,
    PoolingType,
    TableSpec,
    UpdateMode,
)


@final
class TableBatchedEmbedding:
    """Lookup, backward and update of many tables at once.

    All tables are in one flat storage; `weights[t]` are views of it. The object holds plain
    tensors and is not an nn.Module: modules wrap it and define parameters and names.

    Args:
        tables: The tables. Their rows are uninitialized: fill `weights`.
        feature_table_map: [F] the table number each feature reads.
        pooling: SUM, MEAN (divides by the number of ids, weighted or not) or NONE (all dims equal).
        weights_dtype: fp32, fp16 or bf16. Optimizer state and its math are fp32.
        output_dtype: Dtype of the output.
        optimizer: The tables' own optimizer; required unless `update_mode` is GRADIENT.
        update_mode: See `UpdateMode`.
        device: Device of the tables; "meta" returns shapes only.
        location: Placement. None: HOST on a CPU, DEVICE elsewhere.
        cache_load_factor: Share of the rows that the cache of MANAGED_CACHING holds; None: 0.2.
        keeps_batch: DEFERRED mode: see `DeferredGradients`.
        sparse_grad: GRADIENT mode: fill `.grad` with sparse tensors instead of dense ones.
        backend: Name of the required backend, "fbgemm" or "torch"; None: chosen by
            `support.choose_backend`, for the lookup and for the update.
        weights: [sum of R*D] storage to adopt, in the layout of `layout`; None: allocated here.

    Attributes:
        layout: Position of each table in the storage.
        storage: The flat weights.
        weights: [R, D] view of each table.
        states: Optimizer state of each table by name, live views.
        backend: Name of the backend that updates the tables: "fbgemm", "triton" or "torch".
        deferred: DEFERRED mode: pending gradients.
        marks: Marks of the rows that changed.

    Raises:
        ValueError: Settings contradict each other, or `backend="fbgemm"` cannot serve them.

    Example:
        >>> tbe = TableBatchedEmbedding(
        ...     [TableSpec(name="t", num_rows=3, dim=2)],
        ...     feature_table_map=[0],
        ...     pooling=PoolingType.SUM,
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
        pooling: PoolingType,
        weights_dtype: torch.dtype = torch.float32,
        output_dtype: torch.dtype = torch.float32,
        optimizer: OptimizerSpec | None = None,
        update_mode: UpdateMode,
        device: torch.device,
        location: EmbeddingLocation | None = None,
        cache_load_factor: float | None = None,
        keeps_batch: bool = False,
        sparse_grad: bool = False,
        backend: str | None = None,
        weights: Tensor | None = None,
    ) -> None:
        device = torch.device(device)
        settings = LookupSettings(
            device=device,
            weights_dtype=weights_dtype,
            output_dtype=output_dtype,
            dims=[t.dim for t in tables],
            feature_table_map=feature_table_map,
            pooling=pooling,
            optimizer=optimizer,
            update_mode=update_mode,
            location=location,
            cache_load_factor=cache_load_factor,
        )
        self.layout = StorageLayout(tables, feature_table_map, device)
        self.settings, self.sparse_grad = settings, sparse_grad
        self.pooling, self.update_mode, self.optimizer = pooling, update_mode, optimizer
        if weights is not None:
            self.layout.check_storage(weights, weights_dtype)
        self._updater, self._looker = self._build_kernels(backend, weights)
        self.storage = self._updater.storage
        self.weights = self.layout.table_views(self.storage)
        self.states = self.layout.split_states(settings.owned, self._updater.states)
        # FBGEMM's module updates within its own graph
        watched = () if self._updater.has_own_graph else (self.storage, *self.flat_states.values())
        self.marks = RowMarks(self.layout, watched)
        self.deferred = DeferredGradients(self._updater, self.marks, keeps_batch=keeps_batch)
        # makes outputs require grad although no input does
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        # for `scaled_loss`
        names = tuple(table.name for table in tables)
        self._updates = TableUpdates(names if update_mode is UpdateMode.FUSED else ())

    def _build_kernels(
        self, wanted: str | None, weights: Tensor | None
    ) -> tuple[TorchKernel, TorchKernel]:
        """Return the kernel that updates the tables, and the kernel that looks up."""
        settings = self.settings
        self.backend, self.backend_reason, kernel = choose_backend(settings, "update", wanted)
        location = settings.location
        if location is not None and "MANAGED" in location.name and kernel is TorchKernel:
            raise ValueError(
                f"EmbeddingLocation.{location.name} needs FBGEMM; received settings it does "
                f"not serve ({self.backend_reason})."
            )
        assert issubclass(kernel, TorchKernel)
        updater = kernel(self.layout, settings, weights)
        looks_up = choose_backend(settings, "lookup", wanted).kernel
        if looks_up is kernel:
            return updater, updater
        assert issubclass(looks_up, TorchKernel)
        return updater, looks_up(self.layout, settings, updater.storage, updater.states)

    def __repr__(self) -> str:
        layout = self.layout
        rule = "" if self.optimizer is None else f" {self.optimizer.algorithm.name}"
        return (
            f"{type(self).__name__}(tables={len(layout.tables)}, features={layout.num_features}, "
            f"dims={sorted({t.dim for t in layout.tables})}, rows={layout.num_rows}, "
            f"pooling={self.pooling.name}, update={self.update_mode.name}{rule}, "
            f"weights={self.storage.dtype}, device={layout.device}, lookup={self._looker.name}, "
            f"backend={self.backend}: {self.backend_reason})"
        )

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """[T] learning rates of the next update; `set_learning_rate` sets one."""
        rates = self._updater.rates
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
        self._updater.use_rates(rates[0] if len(set(rates)) == 1 else rates)

    def set_learning_rate(self, value: float, tables: Iterable[int] | None = None) -> None:
        """Set the learning rate from the next update on.

        Args:
            value: The learning rate.
            tables: Numbers of the tables; None: all.
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
        bags: np.ndarray | None = None,
    ) -> Tensor:
        """Look up a batch.

        All features have the same number of bags, B. With `bags`, each feature has its own number,
        or its own number for each of R ranks; the output is then sorted by rank, as it is sent.

        Args:
            indices: [N] int32 or int64, in range (see `find_bad_ids`), on the tables' device.
            offsets: [F * B + 1]; bag b of feature f is `indices[offsets[f * B + b]:...]`. With
                `bags`: [sum of bags + 1], bags sorted by feature.
            per_sample_weights: [N] floats, or None. Receives a gradient when it requires one.
            parameters: [T] leaf tensors that alias `weights`. GRADIENT mode: they receive the
                gradients. In the other modes only their `requires_grad` is read: frozen tables.
            ids_of_tables: [T] number of ids of each table, if the host knows them. Then
                `row_statistics` does not wait for the device.
            bags: [F] int64 on the host: number of bags of each feature; or [F, R]: of each feature
                and rank, sorted by rank. None: all features have the same number.

        Returns:
            [B, sum of D over the features], or [N, D] without pooling. With `bags`: flat, the
            [bags, D] of each rank and feature, sorted by rank, then by feature. The gradient of the
            output has the same layout.

        Raises:
            ValueError: Weights or `bags` for a lookup without pooling; `bags` that do not fit.

        Example:
            >>> tbe = TableBatchedEmbedding(
            ...     [TableSpec(name="t", num_rows=3, dim=2)],
            ...     feature_table_map=[0, 0],
            ...     pooling=PoolingType.SUM,
            ...     update_mode=UpdateMode.GRADIENT,
            ...     device=torch.device("cpu"),
            ... )
            >>> _ = tbe.weights[0].copy_(torch.arange(6.0).view(3, 2))
            >>> ids, offsets = torch.tensor([0, 2, 1]), torch.tensor([0, 2, 2, 3])
            >>> tbe.forward(ids, offsets, bags=np.array([1, 2])).view(3, 2)
            tensor([[4., 6.],
                    [0., 0.],
                    [2., 3.]])
        """
        by_rank = None
        if bags is not None:
            bags, by_rank = self._checked_bags(bags, offsets)
        if per_sample_weights is not None:
            if self.pooling is PoolingType.NONE:
                raise ValueError(
                    "PoolingType.NONE takes no per_sample_weights; received weights of shape "
                    f"{list(per_sample_weights.shape)}. Multiply the output instead."
                )
            per_sample_weights = per_sample_weights.float()
        batch = LookupBatch(indices, offsets, per_sample_weights, bags, by_rank)
        if self.layout.device.type == "meta":
            return self._meta_output(batch)
        if torch.is_grad_enabled() and torch.is_autocast_enabled(self.layout.device.type):
            warn_of_fp16(self._updates, self.layout.device.type)
        # the module updates all of its tables or none
        if self._updater.has_own_graph and (
            parameters is None or all(p.requires_grad for p in parameters)
        ):
            output = self._updater.look_up_and_update(batch)
            if output is not None:
                if output.grad_fn is not None:
                    output.grad_fn.metadata[TABLE_UPDATES] = self._updates  # type: ignore[index]
                    output.register_hook(partial(_mark, self.marks, batch))
                return output
        if self.settings.location is EmbeddingLocation.MANAGED_CACHING:
            raise ValueError(
                "Tables in MANAGED_CACHING that share a lookup must all train, at one learning "
                f"rate; received the rates {self.learning_rates}. Give each its own lookup."
            )
        if not torch.is_grad_enabled():
            return self._looker.lookup(batch) if by_rank is None else self._look_up_by_rank(batch)
        if parameters is None:
            parameters = () if self.update_mode is UpdateMode.GRADIENT else (self._anchor,)
        out: Tensor = _Lookup.apply(  # type: ignore[no-untyped-call]
            self, ids_of_tables, *batch, *parameters
        )
        return out

    @property
    def flat_states(self) -> dict[str, Tensor]:
        """Optimizer state of all tables by name, flat like `storage`; live."""
        return dict(self._updater.states)

    def prefetch(self, indices: Tensor, offsets: Tensor, bags: np.ndarray | None = None) -> None:
        """Prefetch the rows of a later batch into the cache (MANAGED_CACHING only).

        The arguments are as for `forward`.
        """
        if bags is not None:
            bags, _ = self._checked_bags(bags, offsets)
        self._updater.prefetch(LookupBatch(indices, offsets, bags=bags))

    def flush(self) -> None:
        """Write cached rows back to `weights` (MANAGED_CACHING only)."""
        self._updater.flush()

    def drop_cache(self) -> None:
        """Drop cached rows after `weights` or `states` were written, and mark all rows."""
        self._updater.drop_cache()
        self.marks.mark_all()

    @torch.no_grad()
    def reset_rows(self, sizes: Sequence[int], rows: Tensor, write: WriteRows) -> None:
        """Reassign rows: set new weights and reset their optimizer state.

        Args:
            sizes: Number of rows of each table.
            rows: [K] int64 rows of their tables, ordered by table, without duplicates.
            write: Writes the new weights; called for each dim.
        """
        with self.marks.writes():
            self._updater.reset_rows(sizes, rows, write)
            self.marks.mark_rows(rows, sizes)

    @torch.no_grad()
    def write_rows(self, table: int, rows: Tensor, values: Tensor, *, is_new: bool) -> None:
        """Set weights of rows of a table, `[K, D]`; reset their optimizer state if `is_new`."""
        sizes = [0] * len(self.weights)
        sizes[table] = rows.numel()
        values = values.to(self.storage.dtype)
        if is_new:
            self.reset_rows(sizes, rows, lambda group, w, at: w.index_copy_(0, at, values))
            return
        with self.marks.writes():
            self._updater.flush()
            self.weights[table].index_copy_(0, rows, values)
            self._updater.drop_cache()
            self.marks.mark_rows(rows, sizes)

    def dense_gradients(self, grad: Tensor, batch: LookupBatch) -> Tensor:
        """Return the gradient of all tables in any update mode: fp32, in the layout of `storage`.

        Args:
            grad: Gradient of the output of `forward`.
            batch: Batch of the lookup.
        """
        return self._updater.dense_gradients(grad, batch)

    def weight_gradients(self, grad: Tensor, batch: LookupBatch) -> Tensor:
        """Return the gradient of the per-sample weights, [N] fp32; see `dense_gradients`."""
        return self._updater.weight_gradients(grad, batch)

    def _meta_output(self, batch: LookupBatch) -> Tensor:
        if self.pooling is PoolingType.NONE:
            shape: tuple[int, ...] = (batch.indices.numel(), self.layout.feature_dims[0])
        elif batch.bags is not None:
            shape = (int(batch.bags @ self.layout.dims_F),)
        else:
            num_bags = (batch.offsets.numel() - 1) // self.layout.num_features
            shape = (num_bags, self.layout.total_dim)
        return torch.empty(shape, dtype=self.settings.output_dtype, device="meta")

    def _checked_bags(
        self, bags: np.ndarray, offsets: Tensor
    ) -> tuple[np.ndarray, RankedBags | None]:
        """Return `bags` and `by_rank` of a `LookupBatch`, or raise ValueError.

        The results are copies: backward reads them later.
        """
        if self.pooling is PoolingType.NONE:
            raise ValueError(
                f"bags must be None with PoolingType.NONE; received {bags.tolist()}. Leave it out: "
                "offsets define the ids of each feature."
            )
        num_features, num_bags = self.layout.num_features, offsets.numel() - 1
        if bags.ndim not in (1, 2) or len(bags) != num_features or bags.sum() != num_bags:
            raise ValueError(
                "bags must have shape [F] or [F, R] and sum to len(offsets) - 1; received "
                f"{bags.tolist()} for {num_features} features and {num_bags} bags."
            )
        bags = np.array(bags, dtype=np.int64)
        if bags.ndim == 1:
            return bags, None
        return bags.sum(1), RankedBags(bags) if bags.shape[1] > 1 else None

    def _look_up_by_rank(self, batch: LookupBatch) -> Tensor:
        """Look up bags of several ranks, without autograd."""
        by_rank, looker = batch.by_rank, self._looker
        assert by_rank is not None
        if looker.takes_ranks:
            return looker.lookup(batch)
        rows = looker.lookup(batch._replace(by_rank=None))
        return by_rank.rows_by_rank(rows, self.layout.dims_F)

    # -- called by backward -------------------------------------------------------------------

    def _updates_by_rank(self, needs_input_grad: Sequence[bool]) -> bool:
        """Return whether backward is only an update, by a kernel that supports gradients by rank.

        Args:
            needs_input_grad: `ctx.needs_input_grad` of `_Lookup`.
        """
        _, _, _, _, needs_weights, _, _, *trained = needs_input_grad
        is_update = self.update_mode is UpdateMode.FUSED and all(trained) and not needs_weights
        return is_update and self._updater.takes_ranks

    def _update(
        self,
        grad: Tensor,
        batch: LookupBatch,
        trained: Sequence[bool],
        ids_of_tables: Sequence[int] | None,
    ) -> None:
        kernel = self._updater
        if self.update_mode is UpdateMode.DEFERRED:
            self.deferred.add(grad, batch, trained, ids_of_tables)
        elif all(trained):
            with self.marks.writes(batch):
                kernel.update(grad, batch)
        else:
            # `update` would change frozen tables, too
            gradients = kernel.drop_frozen(kernel.row_gradients(grad, batch), trained)
            with self.marks.writes(by_group=gradients):
                kernel.apply(gradients)

    def _parameter_gradients(
        self, grad: Tensor, batch: LookupBatch, trained: Sequence[bool]
    ) -> list[Tensor | None]:
        """Return the gradient of each table, dense or sparse; None for frozen tables."""
        dtype = self.storage.dtype
        if not self.sparse_grad:
            flat = self._updater.dense_gradients(grad, batch).to(dtype)
            pieces = self.layout.table_views(flat)
        else:
            gradients = split_by_table(self.layout, self._updater.row_gradients(grad, batch))
            pieces = [
                torch.sparse_coo_tensor(
                    rows.unsqueeze(0),
                    grads.to(dtype),
                    weight.shape,
                    is_coalesced=True,
                    check_invariants=False,
                )
                for weight, (rows, grads) in zip(self.weights, gradients, strict=True)
            ]
        return [g if wanted else None for g, wanted in zip(pieces, trained, strict=True)]


def _mark(marks: RowMarks, batch: LookupBatch, _: Tensor) -> None:
    """Mark the rows of a batch, in a backward pass that updates them."""
    with marks.writes(batch):
        pass


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
        bags: np.ndarray | None,
        by_rank: RankedBags | None,
        *parameters: Tensor,
    ) -> Tensor:
        ctx.metadata[TABLE_UPDATES] = tbe._updates
        ctx.tbe, ctx.ids_of_tables, ctx.bags = tbe, ids_of_tables, (bags, by_rank)
        # saved, so that autograd raises if a batch is written to before its backward pass
        ctx.save_for_backward(indices, offsets, weights)
        batch = LookupBatch(indices, offsets, weights, bags, by_rank)
        if by_rank is None:
            return tbe._looker.lookup(batch)
        out = tbe._look_up_by_rank(batch)
        if not tbe._updates_by_rank(ctx.needs_input_grad):
            by_rank.in_order = None  # backward does not read it
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tbe: TableBatchedEmbedding = ctx.tbe
        indices, offsets, weights = ctx.saved_tensors
        batch = LookupBatch(indices, offsets, weights, *ctx.bags)
        _, _, _, _, needs_weights, _, _, *trained = ctx.needs_input_grad
        if batch.by_rank is not None and not tbe._updates_by_rank(ctx.needs_input_grad):
            grad = batch.by_rank.rows_by_feature(grad, tbe.layout.dims_F)
            batch = batch._replace(by_rank=None)
        weights_grad = None
        if needs_weights:  # before the update: it reads the rows the forward read
            weights_grad = tbe._updater.weight_gradients(grad, batch)
        gradients: list[Tensor | None] = [None] * len(trained)
        if any(trained):
            if tbe.update_mode is UpdateMode.GRADIENT:
                gradients = tbe._parameter_gradients(grad, batch, trained)
            else:
                tbe._update(grad, batch, trained, ctx.ids_of_tables)
        if batch.by_rank is not None:  # free it: outputs can outlive the batch
            batch.by_rank.in_order = None
        return (None, None, None, None, weights_grad, None, None, *gradients)
