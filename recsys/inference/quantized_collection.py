"""What quantized collections share: tables as buffers, and lookups over them.

Each table is a buffer under the name that users know, `embedding_bags.<table>.weight` or
`embeddings.<table>.weight`, of uint8 [rows, bytes per row]. The buffers are views of the storages
that the lookups read. As in the trained collections, the buffers win where one was replaced: before
a batch is looked up they are compared with the storages, and gathered anew where they differ.

Legend: `B` batch size, `N` ids, `D` columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import is_
from typing import Any, Self, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from recsys.distributed.placement.layout import Rect
from recsys.distributed.sharded_collection import ShardedCollection
from recsys.inference.quant_prep import PREPARED, PRUNED
from recsys.inference.quantized_shards import quantize_shards, rows_of_table
from recsys.inference.quantized_table import (
    QuantizedTable,
    ShardedQuantizedTable,
    Table,
    shard_of,
    whole_table,
)
from recsys.inference.quantized_tables import QuantizedTables, rows_left
from recsys.inference.served import Served
from recsys.kernels.arguments import whole, wrong_type
from recsys.kernels.backend import OUTPUT_CODES
from recsys.kernels.quantized import row_bytes
from recsys.kernels.quantized_lookup import row_alignment_on
from recsys.kernels.types import PoolingType
from recsys.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    BaseEmbeddingConfig,
    DataType,
    QuantConfig,
)
from recsys.modules.embedding_inputs import positions_of
from recsys.modules.embedding_tables import TableCollection, TableDict
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_jagged import check_features

__all__ = [
    "SERVED",
    "QuantizedCollection",
    "Weights",
    "quantized_configs",
    "split_header",
    "to_data_type",
]

SERVED = (
    DataType.FP32,
    DataType.FP16,
    DataType.INT8,
    DataType.UINT8,
    DataType.INT4,
    DataType.INT2,
)
"""Element types of tables that can be looked up."""
_DATA_TYPES = {
    torch.int8: DataType.INT8,
    torch.uint8: DataType.INT8,
    torch.qint8: DataType.INT8,
    torch.quint8: DataType.INT8,
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
    torch.float16: DataType.FP16,
    torch.float32: DataType.FP32,
}

Weights = Mapping[str, tuple[Tensor, Tensor | None]]
"""Table name to rows, uint8 [rows, bytes], and to their scales and biases, uint8 [rows, 4]; None if
the rows have them in front, or have none."""


def to_data_type(dtype: torch.dtype) -> DataType:
    """Return the element type of tables that are quantized to a dtype.

    Raises:
        ValueError: Tables cannot be quantized to it.

    Example:
        >>> to_data_type(torch.quint4x2)
        <DataType.INT4: 'INT4'>
    """
    if not isinstance(dtype, torch.dtype) or dtype not in _DATA_TYPES:
        raise ValueError(
            "Tables are quantized to torch.int8, torch.quint4x2, torch.quint2x4, torch.float16 or "
            f"torch.float32; received {dtype!r}."
        )
    return _DATA_TYPES[dtype]


@final
class _Link:
    """The lookups, and what the tables' buffers looked like when they became views of them."""

    def __init__(self, lookups: QuantizedTables, tables: Sequence[Table]) -> None:
        self.lookups = lookups
        for table, stored in zip(tables, lookups.stored_rows(), strict=True):
            table.show(stored, lookups.row_alignment())
        self._slots = [(table._buffers, name) for table in tables for name in table._buffers]
        self._views = self._now()
        self._pointers = list(map(Tensor.data_ptr, self._views))

    def is_current(self) -> bool:
        views = self._now()
        return (
            all(map(is_, views, self._views))
            and list(map(Tensor.data_ptr, views)) == self._pointers
        )

    def _now(self) -> list[Tensor]:
        return [cast(Tensor, buffers[name]) for buffers, name in self._slots]


class QuantizedCollection(nn.Module):
    """What quantized collections share: tables as buffers, and lookups over them.

    Args:
        configs: The tables, checked.
        poolings: Pooling of each.
        device: Where the tables live.
        output_dtype: Of what is looked up.
        weights: The tables' rows; None: zeros.
        register_tbes: Must be False.
        splits: Scales and biases are buffers of their own.
        row_alignment: Rows are stored in multiples of that many bytes.
        caches_order: Remember where the features were among the keys of the last batch.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingType],
        device: torch.device,
        output_dtype: torch.dtype,
        weights: Weights | None,
        register_tbes: bool,
        splits: bool,
        row_alignment: int,
        caches_order: bool,
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        if register_tbes:
            raise ValueError(
                f"{owner}.register_tbes is not supported; received {register_tbes!r}. The rows of "
                "each table are its buffer, also without it. Leave it out."
            )
        self._row_alignment = whole(f"{owner}.row_alignment", row_alignment)
        if splits and self._row_alignment % 2:
            raise ValueError(
                f"{owner} with quant_state_dict_split_scale_bias=True shows parts of rows as fp16, "
                f"so row_alignment must be even; received {row_alignment}."
            )
        self._splits = splits
        self._caches_order = caches_order
        self._order: tuple[list[str], list[int]] | None = None
        if output_dtype not in OUTPUT_CODES:
            raise ValueError(
                f"{owner}.output_dtype must be one of {[*OUTPUT_CODES]}; received {output_dtype}."
            )
        self._configs = list(configs)
        self._poolings = tuple(poolings)
        self._output_dtype = output_dtype
        self._shards = [(whole_table(config),) for config in self._configs]
        rows = self._given_rows(weights, torch.device(device))
        lookups = self._new_lookups([[of_table] for of_table in rows], self._shards)
        self._link: _Link | None = self._linked(lookups)

    _lookups: type[QuantizedTables]
    _tables_name: str
    is_placed = False
    """Whether `placed` made it: who moves a model's dense parts leaves it alone."""

    def configs(self) -> list[BaseEmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._configs)

    def output_dtype(self) -> torch.dtype:
        """Return the dtype of what is looked up."""
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        """Where the tables live; the first, if they are spread."""
        return next(self._tables()[0].buffers()).device

    def poolings(self) -> tuple[PoolingType, ...]:
        """Return the pooling of each table."""
        return self._poolings

    def stored_row_bytes(self, table: str, num_cols: int, device_type: str) -> int:
        """Return the bytes of a row of so many columns of a table, as a device stores them."""
        [config] = [config for config in self._configs if config.name == table]
        size = row_bytes(num_cols, DATA_TYPE_NUM_BITS[config.data_type])
        return size + -size % row_alignment_on(device_type, self._row_alignment)

    def table_bytes(self) -> list[int]:
        """Return the size of each table in bytes, without padding."""
        return [
            rows_left(c) * row_bytes(c.embedding_dim, DATA_TYPE_NUM_BITS[c.data_type])
            for c in self._configs
        ]

    def quantized_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return the tables' rows, and their scales and biases, as the constructor takes them."""
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        for table in self._tables():
            found[table.config.name] = split_header(table.rows(), table.config.data_type)
        return found

    def assign(self, weights: Weights) -> None:
        """Write the rows of all tables, as the constructor takes them.

        Raises:
            ValueError: They do not fit the tables.
        """
        tables = self._tables()
        given = self._given_rows(weights, torch.device("cpu"))
        for table, rows in zip(tables, given, strict=True):
            table.assign(rows)

    def quantize(self, module: TableCollection | ShardedCollection | QuantizedCollection) -> Self:
        """Write the rows of all tables, from a trained collection.

        Every rank of a sharded collection must call it. A collection on the `meta` device takes
        part and gets no rows.

        Args:
            module: The collection. A collection that is quantized already is left as it is.

        Raises:
            ValueError: A table cannot be quantized to its dtype.
        """
        if isinstance(module, QuantizedCollection):
            return self
        stored = [rows for [rows] in self.lookups().stored_rows()]
        if isinstance(module, ShardedCollection):
            quantize_shards(module, self._configs, stored)
            return self
        weights = module.table_weights()
        for config, rows in zip(self._configs, stored, strict=True):
            rows_of_table(config, weights[config.name], rows)
        return self

    def options(self) -> dict[str, Any]:
        """Return the arguments, by name, that make a collection of the same rows."""
        return {
            "output_dtype": self._output_dtype,
            "table_name_to_quantized_weights": {
                table.config.name: (table.rows(), None) for table in self._tables()
            },
            "quant_state_dict_split_scale_bias": self._splits,
            "row_alignment": self._row_alignment,
            "cache_features_order": self._caches_order,
        }

    def placed(
        self, shards: Sequence[Sequence[Rect]], device_of: Callable[[int], torch.device]
    ) -> Self:
        """Return the same collection with its tables in shards, each on its owner's device.

        Args:
            shards: Per table the rectangles that cover it, a grid.
            device_of: Tells the device of an owner.
        """
        state = self.__getstate__()
        del state["_link"]
        rows = []
        for table, of_table in zip(self._tables(), shards, strict=True):
            whole, bits = table.rows(), DATA_TYPE_NUM_BITS[table.config.data_type]
            rows.append([shard_of(whole, bits, r).to(device_of(r.rank)) for r in of_table])
        state = copy.deepcopy(state | {"_shards": [tuple(of_table) for of_table in shards]})
        new = type(self).__new__(type(self))
        new.__setstate__({**state, "_link": self._new_lookups(rows, shards)})
        new.is_placed = True
        return new

    def _given_rows(self, weights: Weights | None, device: torch.device) -> list[Tensor]:
        given = dict(weights or {})
        names = [config.name for config in self._configs]
        if weights is not None and given.keys() != set(names):
            raise ValueError(
                "table_name_to_quantized_weights must have exactly the collection's tables; "
                f"received {sorted(given)} for {names}."
            )
        found = []
        for config in self._configs:
            bits = DATA_TYPE_NUM_BITS[config.data_type]
            try:
                size = rows_left(config), row_bytes(config.embedding_dim, bits)
            except ValueError as error:
                raise ValueError(f"Table {config.name!r} cannot be quantized. {error}") from error
            if weights is None:  # all zeros, in the memory of one
                zero = torch.zeros(1, 1, dtype=torch.uint8, device=device)
                found.append(zero.expand(size))
                continue
            rows, header = given[config.name]
            if header is not None:
                rows = torch.cat([header.view(torch.uint8), rows.view(torch.uint8)], dim=1)
            _check_rows(f"table_name_to_quantized_weights[{config.name!r}]", rows, size)
            found.append(rows.to(device))
        return found

    # -- lookups ------------------------------------------------------------------------------

    def _positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Return where the features that the lookups read are among the keys of a batch."""
        if not isinstance(features, KeyedJaggedTensor):
            wrong_type(f"{type(self).__name__}: features", "a KeyedJaggedTensor", features)
        keys = features.keys()
        if self._order is not None and self._order[0] == keys:
            return self._order[1]
        positions = positions_of(self.lookups().feature_names, keys, type(self).__name__)
        if self._caches_order:
            self._order = list(keys), positions
        return positions

    @property
    def served(self) -> Served:
        """What programs run in place of this collection; it reads the same tables."""
        raise NotImplementedError

    def _lengths(self, features: KeyedJaggedTensor, *, is_pooled: bool) -> Tensor:
        """Return the lengths of a batch, [K * B]; short features with empty bags at the end."""
        if not features.variable_stride_per_key():
            return features.lengths()
        owner, device = type(self).__name__, features.device()
        check_features(features, owner, device, is_pooled=is_pooled, is_weighted=False)
        strides = features.stride_per_key()
        longest = max(strides, default=0)
        pieces = features.lengths().split_with_sizes(strides)
        return torch.cat(
            [functional.pad(p, (0, longest - s)) for p, s in zip(pieces, strides, strict=True)]
        )

    def lookups(self) -> QuantizedTables:
        """Return the lookups that serve the tables now: no part of the module."""
        if self._link is None or not self._link.is_current():
            rows = [table.shards() for table in self._tables()]
            for table, of_table in zip(self._tables(), rows, strict=True):
                for found, size in zip(of_table, table.shard_sizes(), strict=True):
                    _check_rows(f"{self._tables_name}[{table.config.name!r}]", found, size)
            self._link = self._linked(self._new_lookups(rows, self._shards))
        return self._link.lookups

    def _new_lookups(
        self, rows: Sequence[Sequence[Tensor]], shards: Sequence[Sequence[Rect]]
    ) -> QuantizedTables:
        return self._lookups(
            self._configs, self._poolings, rows, shards, self._output_dtype, self._row_alignment
        )

    def _linked(self, lookups: QuantizedTables) -> _Link:
        """Return the tables, new ones if there are none, as views of what lookups read."""
        if self._modules.get(self._tables_name) is None:
            named = TableDict()
            for config, of_table in zip(self._configs, self._shards, strict=True):
                named[config.name] = (
                    QuantizedTable(config, self._splits)
                    if len(of_table) == 1
                    else ShardedQuantizedTable(config, of_table, self._splits)
                )
            self._modules[self._tables_name] = named.train(self.training)
        return _Link(lookups, self._tables())

    def _tables(self) -> list[Table]:
        return list(getattr(self, self._tables_name).values())

    # -- what breaks aliasing -----------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Serve `to`, `to_empty`, `share_memory`: each storage is moved once, as a whole."""
        lookups = self.lookups()._apply(fn)  # type: ignore[no-untyped-call]
        self._link = self._linked(lookups)
        moved = {id(buffer) for table in self._tables() for buffer in table.buffers()}
        return super()._apply(  # type: ignore[no-any-return, no-untyped-call]
            lambda tensor: tensor if id(tensor) in moved else fn(tensor), recurse
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied or pickled: each storage once, and not the tables' views."""
        state = self.__dict__.copy()
        state["_link"] = self.lookups()
        state["_modules"] = {**self._modules, self._tables_name: None}  # keeps its place
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        lookups = state.pop("_link")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._link = self._linked(lookups)


def _check_rows(subject: str, rows: Tensor, size: tuple[int, int]) -> None:
    if rows.dtype is not torch.uint8 or rows.shape != size:
        raise ValueError(
            f"{subject} must be uint8 of shape {size} with scales and biases; received "
            f"{rows.dtype} of {tuple(rows.shape)}."
        )


def split_header(rows: Tensor, data_type: DataType) -> tuple[Tensor, Tensor | None]:
    """Rows without their scales and biases, and these, [rows, 4]; None if rows have none: views."""
    if DATA_TYPE_NUM_BITS[data_type] >= 16:
        return rows, None
    return rows[:, 4:], rows[:, :4]


def quantized_configs(
    module: TableCollection | ShardedCollection | QuantizedCollection, configured: nn.Module
) -> tuple[list[Any], dict[str, Any]]:
    """Return how the tables of a trained collection will be quantized.

    Args:
        module: The collection, sharded or not; or one that is quantized already.
        configured: What has the `qconfig`, if anything has.

    Returns:
        The tables, and the arguments by name of the quantized collection that they have in common.
        The rows are among these if the collection is quantized already.

    Raises:
        TypeError: The module is no collection.
        ValueError: A table cannot be quantized to its dtype.
    """
    if isinstance(module, QuantizedCollection):  # torch's convert begins with the innermost module
        return module.configs(), module.options()
    if not isinstance(cast(object, module), TableCollection | ShardedCollection):
        wrong_type("module", "a collection of tables, sharded or not", module)
    qconfig = getattr(configured, "qconfig", None)
    dtype, output_dtype = torch.int8, torch.float32
    per_table: Mapping[str, torch.dtype] = {}
    if qconfig is not None:
        dtype, output_dtype = qconfig.weight().dtype, qconfig.activation().dtype
        per_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
        # torch's QConfig means the dtype to which dense layers bring their inputs
        if output_dtype not in OUTPUT_CODES and not isinstance(qconfig, QuantConfig):
            output_dtype = torch.float32
    pruned: Mapping[str, int] = getattr(module, PRUNED, {})
    configs: list[Any] = []
    for config in module.configs():
        data_type = to_data_type(per_table.get(config.name, dtype))
        left = pruned.get(config.name, config.num_embeddings_post_pruning)
        configs.append(replace(config, data_type=data_type, num_embeddings_post_pruning=left))
    return configs, {"output_dtype": output_dtype} | getattr(configured, PREPARED, {})
