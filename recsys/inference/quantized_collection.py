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

from recsys.inference.quantized_tables import QuantizedTables
from recsys.kernels.quantized import OUTPUT_TYPES, quantize_rows, row_bytes
from recsys.kernels.types import PoolingMode
from recsys.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    BaseEmbeddingConfig,
    DataType,
    QuantConfig,
)
from recsys.modules.embedding_inputs import check_features
from recsys.modules.embedding_tables import TableCollection, TableDict
from recsys.sparse import KeyedJaggedTensor

__all__ = ["SERVED", "QuantizedCollection", "Weights", "quantized_rows", "to_data_type"]

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
    """The element type of tables that are quantized to a dtype.

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
class QuantizedTable(nn.Module):
    """One table of a quantized collection: its rows, under the name users know.

    Args:
        config: The table.
        stored: uint8 [rows, bytes per row], the last of which are padding.
    """

    weight: Tensor

    def __init__(self, config: BaseEmbeddingConfig, stored: Tensor) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("weight", stored)

    def rows(self) -> Tensor:
        """The rows without padding."""
        bits = DATA_TYPE_NUM_BITS[self.config.data_type]
        return self.weight[:, : row_bytes(self.config.embedding_dim, bits)]

    def extra_repr(self) -> str:
        """Size and element type, for repr."""
        config = self.config
        return f"{config.num_embeddings}, {config.embedding_dim}, {config.data_type}"


@final
class _Link:
    """The lookups, and what the tables' buffers looked like when they became views of them."""

    def __init__(self, lookups: QuantizedTables, tables: Sequence[QuantizedTable]) -> None:
        self.lookups = lookups
        for table, stored in zip(tables, lookups.stored_rows(), strict=True):
            table.weight = stored
        self._slots = [table._buffers for table in tables]
        self._weights = [table.weight for table in tables]
        self._pointers = list(map(Tensor.data_ptr, self._weights))

    def is_current(self) -> bool:
        weights = [cast(Tensor, slot["weight"]) for slot in self._slots]
        return (
            all(map(is_, weights, self._weights))
            and list(map(Tensor.data_ptr, weights)) == self._pointers
        )


class QuantizedCollection(nn.Module):
    """What quantized collections share: tables as buffers, and lookups over them.

    Args:
        configs: The tables, checked.
        poolings: Pooling of each.
        device: Where the tables live.
        output_dtype: Of what is looked up.
        weights: The tables' rows; None: zeros.
        row_alignment: Rows are stored in multiples of that many bytes.
        unsupported: Options that must be False, by name.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingMode],
        device: torch.device,
        output_dtype: torch.dtype,
        weights: Weights | None,
        row_alignment: int,
        unsupported: Mapping[str, bool],
    ) -> None:
        super().__init__()
        for name, value in unsupported.items():
            if value:
                raise ValueError(
                    f"{type(self).__name__}.{name} is not supported; received {value!r}. The rows "
                    "of each table are its buffer, also without it. Leave it out."
                )
        if output_dtype not in OUTPUT_TYPES:
            raise ValueError(
                f"{type(self).__name__}.output_dtype must be one of {[*OUTPUT_TYPES]}; received "
                f"{output_dtype}."
            )
        self._configs = list(configs)
        self._poolings = tuple(poolings)
        self._output_dtype = output_dtype
        self._row_alignment = row_alignment
        self._shards = [0] * len(self._configs)
        rows = self._given_rows(weights, torch.device(device))
        tables = [QuantizedTable(c, r) for c, r in zip(self._configs, rows, strict=True)]
        self._add_tables(tables)
        self._link: _Link | None = self._new_link()

    _lookups: type[QuantizedTables]
    _tables_name: str

    def configs(self) -> list[BaseEmbeddingConfig]:
        """The tables, in order."""
        return list(self._configs)

    def output_dtype(self) -> torch.dtype:
        """The dtype of what is looked up."""
        return self._output_dtype

    @property
    def device(self) -> torch.device:
        """Where the tables live; the first, if they are spread."""
        return self._tables()[0].weight.device

    def table_bytes(self) -> list[int]:
        """The size of each table in bytes, without padding."""
        return [table.rows().numel() for table in self._tables()]

    def weights(self) -> Weights:
        """The rows of each table, without padding: live views."""
        return {table.config.name: (table.rows(), None) for table in self._tables()}

    def on_devices(self, devices: Sequence[tuple[int, torch.device]]) -> Self:
        """The same collection with each table in the given shard, on its device."""
        new = copy.deepcopy(self)
        new._shards = [shard for shard, _ in devices]
        for table, (_, device) in zip(new._tables(), devices, strict=True):
            table.weight = table.weight.to(device)
        new._link = new._new_link()
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
                size = config.num_embeddings, row_bytes(config.embedding_dim, bits)
            except ValueError as error:
                raise ValueError(f"Table {config.name!r} cannot be quantized. {error}") from error
            if weights is None:
                found.append(torch.zeros(size, dtype=torch.uint8, device=device))
                continue
            rows, header = given[config.name]
            if header is not None:
                rows = torch.cat([header.view(torch.uint8), rows.view(torch.uint8)], dim=1)
            if rows.dtype is not torch.uint8 or rows.shape != size:
                raise ValueError(
                    f"table_name_to_quantized_weights[{config.name!r}] must be uint8 of shape "
                    f"{size} with scales and biases; received {rows.dtype} of {tuple(rows.shape)}."
                )
            found.append(rows.to(device))
        return found

    # -- lookups ------------------------------------------------------------------------------

    def _positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Where the features that the lookups read are among the keys of a batch."""
        keys = features.keys()
        place = {key: i for i, key in enumerate(keys)}
        wanted = self.lookups().feature_names
        missing = [name for name in wanted if name not in place]
        if missing:
            raise KeyError(
                f"The batch lacks the features {missing}, which the tables read; received {keys}."
            )
        return [place[name] for name in wanted]

    def _lengths(self, features: KeyedJaggedTensor, *, is_pooled: bool) -> Tensor:
        """The lengths of a batch, [K * B]; where batch sizes vary, with empty bags at the end."""
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
        """The lookups that serve the tables now: not a part of the module, but of what it runs."""
        if self._link is None or not self._link.is_current():
            self._link = self._new_link()
        return self._link.lookups

    def _new_link(self) -> _Link:
        tables = self._tables()
        lookups = self._lookups(
            self._configs,
            self._poolings,
            [table.rows() for table in tables],
            self._shards,
            self._output_dtype,
            self._row_alignment,
        )
        return _Link(lookups, tables)

    def _tables(self) -> list[QuantizedTable]:
        return list(getattr(self, self._tables_name).values())

    def _add_tables(self, tables: Sequence[QuantizedTable]) -> None:
        named = TableDict()
        for table in tables:
            named[table.config.name] = table
        self.add_module(self._tables_name, named)

    # -- what breaks aliasing -----------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Serves `to`, `to_empty`, `share_memory`: each storage is moved once, as a whole."""
        lookups = self.lookups()._apply(fn)  # type: ignore[no-untyped-call]
        self._link = _Link(lookups, self._tables())
        moved = {id(table.weight) for table in self._tables()}
        return super()._apply(  # type: ignore[no-any-return, no-untyped-call]
            lambda tensor: tensor if id(tensor) in moved else fn(tensor), recurse
        )

    def __getstate__(self) -> dict[str, Any]:
        """What is copied or pickled: each storage once, and not the tables' views."""
        state = self.__dict__.copy()
        state["_link"] = self.lookups()
        state["_modules"] = {**self._modules, self._tables_name: None}  # keeps its place
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        lookups = state.pop("_link")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        stored = lookups.stored_rows()
        self._add_tables([QuantizedTable(c, r) for c, r in zip(self._configs, stored, strict=True)])
        getattr(self, self._tables_name).train(self.training)
        self._link = _Link(lookups, self._tables())


def quantized_rows(
    module: TableCollection | QuantizedCollection, configured: nn.Module
) -> tuple[list[Any], Weights, torch.dtype]:
    """Quantizes the tables of a trained collection.

    Args:
        module: The collection; one that is quantized already stays as it is.
        configured: What has the `qconfig`, if anything has.

    Returns:
        The tables, their rows, and the output dtype.

    Raises:
        ValueError: A table cannot be quantized, or not to its dtype.
    """
    if isinstance(module, QuantizedCollection):  # torch's convert begins with the innermost module
        return module.configs(), module.weights(), module.output_dtype()
    qconfig = getattr(configured, "qconfig", None)
    dtype, output_dtype = torch.int8, torch.float32
    per_table: Mapping[str, torch.dtype] = {}
    if qconfig is not None:
        dtype, output_dtype = qconfig.weight().dtype, qconfig.activation().dtype
        per_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
        # torch's QConfig means the dtype to which dense layers bring their inputs
        if output_dtype not in OUTPUT_TYPES and not isinstance(qconfig, QuantConfig):
            output_dtype = torch.float32
    configs: list[Any] = []
    weights: dict[str, tuple[Tensor, Tensor | None]] = {}
    for config in module.configs():
        data_type = to_data_type(per_table.get(config.name, dtype))
        configs.append(replace(config, data_type=data_type))
        weight = module.table_weights()[config.name]
        try:
            rows = quantize_rows(weight, DATA_TYPE_NUM_BITS[data_type])
        except ValueError as error:
            raise ValueError(f"Table {config.name!r} cannot be quantized. {error}") from error
        weights[config.name] = rows, None
    return configs, weights, output_dtype
