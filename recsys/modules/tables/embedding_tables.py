"""Base of the two unsharded collections: tables as parameters, and fused lookups over them.

Each table is a module with a real parameter. Parameters of tables that share a lookup are views of
one storage. Before each lookup the parameters are compared with the views. If one has been
replaced, the parameters are gathered into new storages, and the optimizer state moves along.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from recsys.kernels.lookup_batch import LookupBatch
from recsys.kernels.types import BoundsCheckMode, PoolingType
from recsys.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from recsys.modules.embedding_interfaces import get_embedding_names_by_table
from recsys.modules.tables.eager import run_eagerly
from recsys.modules.tables.embedding_init import draw_seed, init_rows, seed_of_ids
from recsys.modules.tables.embedding_table import EmbeddingTable, TableDict
from recsys.modules.tables.table_lookups import TableGroup, TableLookups, TableSlot, new_weights
from recsys.modules.tables.traced import add_collection, is_exporting, is_proxy, record
from recsys.optim.apply_optimizer_in_backward import (
    AttachedOptimizer,
    attached_optimizer,
    is_marked,
    mark,
)
from recsys.sparse import KeyedJaggedTensor

__all__ = ["QUANTIZATION_NOTES", "TableCollection"]

QUANTIZATION_NOTES = ("_quantized_with", "_rows_after_pruning")
"""Attributes in which `recsys.inference.quant_prep` stores quantization options of a collection.
Sharding copies them."""


class TableCollection(nn.Module):
    """Tables as parameters, and fused lookups over them.

    Args:
        configs: The tables, as returned by `check_tables`.
        poolings: Pooling of each.
        device: Device of the tables; None: torch's default device.
        bounds_check_mode: Handling of ids outside their table.

    Attributes:
        init_seed: The seed of the initial values.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingType],
        device: torch.device | None,
        bounds_check_mode: BoundsCheckMode,
    ) -> None:
        super().__init__()
        self._configs = list(configs)
        self._poolings = tuple(poolings)
        reads = [(f, t) for t, config in enumerate(self._configs) for f in config.feature_names]
        # lists for TorchScript
        self._read, self._table_of = [f for f, _ in reads], [t for _, t in reads]
        self._pooling_names = [pooling.name for pooling in poolings]
        self._names_by_table = get_embedding_names_by_table(configs)
        self._names = [name for names in self._names_by_table for name in names]
        self._bounds_check_mode = BoundsCheckMode[bounds_check_mode.name]
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._attached: dict[str, AttachedOptimizer] = {}
        self._saved_states: dict[str, dict[str, Tensor]] = {}
        self._lookups: TableLookups | None = None
        self.init_seed = draw_seed()
        add_collection(self)

    def _new_tables(self) -> TableDict:
        """Return the table modules, in the collection's order, without values."""
        weights = new_weights(self._configs, self._poolings, self._device)
        tables = TableDict()
        for config, weight in zip(self._configs, weights, strict=True):
            tables[config.name] = EmbeddingTable(config, weight)
        return tables

    def _tables(self) -> list[EmbeddingTable]:
        raise NotImplementedError

    def configs(self) -> list[BaseEmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._configs)

    def poolings(self) -> tuple[PoolingType, ...]:
        """Return the pooling of each table; NONE in a collection without pooling."""
        return self._poolings

    def table_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights by table name, in order."""
        return {
            config.name: table.weight
            for config, table in zip(self._configs, self._tables(), strict=True)
        }

    def table(self, name: str) -> EmbeddingTable:
        """Return the module of a table."""
        return self._tables()[[config.name for config in self._configs].index(name)]

    @property
    @torch.jit.unused
    def bounds_check_mode(self) -> BoundsCheckMode:
        """The handling of ids outside their table."""
        return self._bounds_check_mode

    @property
    @torch.jit.unused
    def device(self) -> torch.device:
        """The device of the tables."""
        tables = self._tables()
        return tables[0].weight.device if tables else self._device

    def reset_parameters(self) -> None:
        """Draw new initial values for all tables, from the global generator."""
        self.init_seed = draw_seed()
        self._fill()

    def initial_rows(
        self,
        table_index: int,
        row_start: int,
        row_end: int,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the initial values of some rows of a table, also of a table on `meta`.

        Args:
            table_index: Position of the table in the collection.
            row_start: First row.
            row_end: One past the last row.
            device: Device that draws the values; None: the CPU.

        Returns:
            [row_end - row_start, embedding_dim] in the table's dtype.
        """
        config = self._configs[table_index]
        dim, dtype = config.embedding_dim, data_type_to_dtype(config.data_type)
        rows = torch.empty(row_end - row_start, dim, dtype=dtype, device=device or "cpu")
        return init_rows(self.init_seed, table_index, row_start, row_end, dim, config, rows)

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Return the live optimizer state, by table and name, of tables with an optimizer."""
        states = {self._configs[t].name: s for t, s in self._current_lookups().states()}
        return {name: state for name, state in states.items() if name in self._attached}

    def marked_lookups(self) -> list[TableGroup]:
        """Return the current lookups, which mark the rows that change."""
        return list(self._current_lookups().groups)

    def mark_all_rows(self) -> None:
        """Mark all rows as changed, after a write that is not an update."""
        for group in () if self._lookups is None else self._lookups.groups:
            group.tbe.marks.mark_all()

    def check_ids(self) -> None:
        """On CUDA, wait, and raise if an earlier batch had bad lengths or ids."""
        self._current_lookups().late.read_all()

    def _fill(self) -> None:
        for t, (config, table) in enumerate(zip(self._configs, self._tables(), strict=True)):
            weight = table.weight.detach()
            if not weight.is_meta:
                rows, dim = weight.shape
                init_rows(self.init_seed, t, 0, rows, dim, config, weight)
                if config.ids is not None:
                    table.index.clear(seed_of_ids(self.init_seed, t))
        self.mark_all_rows()

    # -- traced, see `traced` -------------------------------------------------------------------

    def _traced(
        self,
        function: Callable[..., Any],
        features: KeyedJaggedTensor,
        option: bool,
        names: list[str],
        *dims: list[int],
    ) -> Any:
        """Call a lookup function of `traced` with a batch or its proxy."""
        hashed = [config.name for config in self._configs if config.ids is not None]
        if hashed and (is_exporting() or is_proxy(features)):
            raise ValueError(
                f"Tables with HashedIds cannot be traced or exported; received {hashed}. Export "
                "the part of the model after the lookup."
            )
        weights = [table.weight for table in self._tables()]
        # under `torch.fx`, attributes are proxies
        updates = any(is_marked(table._parameters["weight"]) for table in self._tables())
        varies = not is_proxy(features) and features.variable_stride_per_key()
        if not (is_exporting() or is_proxy(features)):
            if updates or varies or hashed:
                return run_eagerly(self, features)
        elif varies:
            raise ValueError(
                f"An exported {type(self).__name__} takes batches with one batch size for all "
                "features; received one with a batch size per feature. Export the part of the "
                "model after the lookup."
            )
        elif updates and self.training:
            raise ValueError(
                f"The tables of {type(self).__name__} are updated in backward, which a graph "
                "cannot do. For serving, call eval() before the export. To train, call the model "
                "or use torch.compile."
            )
        reads = self.reads()
        parts = option, weights, *map(list, reads), names, *dims
        return record(function, features, *parts)

    def reads(self) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
        """Return the features, the position of the table that each reads, and the poolings."""
        return tuple(self._read), tuple(self._table_of), tuple(self._pooling_names)

    def is_linked_to(self, pointers: list[int]) -> bool:
        """Return whether the current lookups read tables at these addresses."""
        lookups = self._lookups
        return lookups is not None and lookups.addresses == pointers and lookups.is_current()

    def gradients(self, batch: KeyedJaggedTensor, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of all tables end to end, and of a batch's weights if it has any.

        Args:
            batch: The batch; it has weights only if the lookup used them.
            gradients: The gradients of the traced lookup's outputs.

        Returns:
            fp32 [sum of R*D], and [N].
        """
        if any(is_marked(table.weight) for table in self._tables()):
            raise ValueError(
                f"The tables of {type(self).__name__} are updated in backward, which an exported "
                "program cannot do. Train the model itself, and run programs under torch.no_grad()."
            )
        weights, lookups = batch.weights_or_none(), self._current_lookups()
        whole = lookups.check_batch(batch, is_weighted=weights is not None).bags
        groups, of_tables = lookups.groups, dict[int, Tensor]()
        of_weights = [] if weights is None else [torch.zeros_like(weights)]
        for group in groups:
            bags, tbe = group.selector.select(whole, weights), group.tbe
            part = LookupBatch(bags.indices, bags.offsets, bags.weights)
            grad = self._gradient_of(group, gradients)
            flat = tbe.dense_gradients(grad, part)
            of_tables.update(zip(group.tables, tbe.layout.table_views(flat), strict=True))
            for total in of_weights:
                numbers = whole._replace(values=torch.arange(total.numel(), device=total.device))
                places = group.selector.select(numbers, None).indices
                total.index_add_(0, places, tbe.weight_gradients(grad, part).to(total.dtype))
        order = groups[0].tbe.layout.storage_order
        if len(groups) > 1 or order != tuple(range(len(order))):
            flat = torch.cat([of_tables[t].flatten() for t in range(len(of_tables))])
        return [flat, *of_weights]

    def _gradient_of(self, group: TableGroup, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradient of a group's output, given the gradients of all outputs."""
        raise NotImplementedError

    # -- lookups ------------------------------------------------------------------------------

    def _current_lookups(self) -> TableLookups:
        if self._lookups is None or not self._lookups.is_current():
            self._save_optimizers()
            tables = zip(self._configs, self._poolings, self._tables(), strict=True)
            slots = [
                TableSlot(
                    t,
                    config,
                    pooling,
                    table._parameters,  # type: ignore[arg-type]
                    self._attached.get(config.name),
                    table.index if config.ids is not None else None,
                )
                for t, (config, pooling, table) in enumerate(tables)
            ]
            owner, mode = type(self).__name__, self._bounds_check_mode
            self._lookups = TableLookups(slots, self._saved_states, owner, mode, self.device)
            self._saved_states = {}
        return self._lookups

    def _save_optimizers(self) -> None:
        """Save optimizer state of the old lookups, and attachments of the parameters."""
        if self._lookups is not None:
            self._saved_states = {
                self._configs[t].name: state for t, state in self._lookups.states()
            }
        for config, table in zip(self._configs, self._tables(), strict=True):
            attached = attached_optimizer(table.weight)
            if attached is not None:
                self._attached[config.name] = attached
            elif config.name in self._attached:  # a new parameter of a table with an optimizer
                mark(table.weight, self._attached[config.name])

    # -- operations that break aliasing ------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # current lookups first: `share_memory_` shares their storage, and optimizers of parameters
        # that are replaced are saved
        moved = self._current_lookups().moved_views(fn)
        return super()._apply(moved, recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _load_from_state_dict(self, *args: Any) -> None:
        self.mark_all_rows()
        self._save_optimizers()
        super()._load_from_state_dict(*args)

    def _portable_state(self) -> dict[str, Any]:
        """Return `__dict__` with optimizer state instead of lookups."""
        self._save_optimizers()
        state = self.__dict__.copy()
        state["_lookups"] = None
        state["_saved_states"] = {
            table: {name: value.clone() for name, value in states.items()}
            for table, states in self._saved_states.items()
        }
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        copied: Callable[[Tensor], Tensor] = torch.clone
        if self._lookups is not None and self._lookups.is_current():
            copied = self._lookups.moved_views(torch.clone)
        with torch.no_grad():
            for table in self._tables():
                if type(weight := table.weight) is nn.Parameter:
                    parameter = nn.Parameter(copied(weight), weight.requires_grad)
                    memo.setdefault(id(weight), parameter)
        new.__setstate__(copy.deepcopy(self._portable_state(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = self._portable_state()
        for table in self._tables():
            weight = table.weight
            if not weight.untyped_storage().is_shared() and not weight.is_meta:
                # pickle saves the whole storage of each view, so make copies; the next lookup
                # gathers them again
                weight.data = weight.data.clone()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        add_collection(self)
        self._save_optimizers()
