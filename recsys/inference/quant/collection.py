"""Base of quantized collections: tables as buffers, and lookups over them.

Each table is a buffer under its public name, `embedding_bags.<table>.weight` or
`embeddings.<table>.weight`, of uint8 [rows, bytes per row]. The buffers are views of the storages
that the lookups read. Before each lookup the buffers are compared with the views. If a buffer has
been replaced, the buffers are gathered into new storages.

Shapes: `B` batch size, `N` ids, `D` columns.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked_but
from recsys.distributed.placement.layout import Rect
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.inference.quant.lookup import QuantizedTables, Served
from recsys.inference.quant.options import (
    QuantizedOptions,
    quantized_configs,
    rows_left,
)
from recsys.inference.quant.rows import (
    QuantizedTable,
    ServedIndexes,
    ShardedQuantizedTable,
    Table,
    check_rows,
    copy_shard,
    shard_size,
    split_header,
    whole_table,
)
from recsys.inference.quant.sources import SavedTables, index_states, quantize_shards, rows_of_table
from recsys.kernels.quantized import row_bytes
from recsys.kernels.quantized_lookup import row_alignment_on
from recsys.kernels.types import PoolingType
from recsys.modules.embedding_configs import (
    DATA_TYPE_NUM_BITS,
    BaseEmbeddingConfig,
)
from recsys.modules.hashed_ids import HashedIds
from recsys.modules.tables.aliased_storage import AliasedStorage
from recsys.modules.tables.batch_checker import with_one_batch_size
from recsys.modules.tables.embedding_inputs import positions_of
from recsys.modules.tables.embedding_table import TableDict
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import check_features

__all__ = [
    "QuantizedCollection",
    "Weights",
]

Weights = Mapping[str, tuple[Tensor, Tensor | None]]
"""Rows, uint8 [rows, bytes], and scales and biases, uint8 [rows, 4], by table name. The second is
None if each row begins with its scale and bias, or has none."""


@final
class _AliasedLookups(AliasedStorage):
    """Lookups, and the tables' buffers, which are views of their rows."""

    def __init__(self, lookups: QuantizedTables, tables: Sequence[Table]) -> None:
        self.lookups = lookups
        for table, stored in zip(tables, lookups.stored_rows(), strict=True):
            table.set_views(stored, lookups.row_alignment())
        super().__init__([table._buffers for table in tables])


class QuantizedCollection(nn.Module):
    """Base of quantized collections: tables as buffers, and lookups over them.

    Args:
        configs: The tables, as returned by `check_tables`.
        poolings: The pooling of each table.
        device: Device of the tables.
        weights: The rows; None: all zeros.
        options: The options.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingType],
        device: torch.device,
        weights: Weights | None,
        options: QuantizedOptions,
    ) -> None:
        super().__init__()
        self._options = options
        self._order: tuple[list[str], list[int]] | None = None
        self._aliased: _AliasedLookups | None = None
        self._configs = list(configs)
        self._poolings = tuple(poolings)
        self._shards = [(whole_table(config),) for config in self._configs]
        if any(config.ids is not None for config in self._configs):
            self.indexes = ServedIndexes(self._configs, torch.device(device))
        rows = self._checked_rows(weights, torch.device(device))
        self._alias(self._new_lookups([[of_table] for of_table in rows], self._shards))

    _lookups: type[QuantizedTables]
    _tables_name: str
    is_placed = False
    """True for the result of `placed`, which keeps its devices when a model is moved."""

    @classmethod
    @checked_but("module")
    def from_float(cls, module: Any, use_precomputed_fake_quant: bool = False) -> Self:
        """Quantize the tables of a trained collection.

        Every rank of a sharded collection must call this, and receives all tables.

        Args:
            module: The collection. Its `qconfig`, if any, is a `QuantConfig` or a QConfig of torch.
                Without it, rows are int8 and outputs float32. Feature processors are copied.
            use_precomputed_fake_quant: Ignored; tables have no fake quantization.

        Raises:
            TypeError: The module is not such a collection.
            ValueError: A dtype is not supported, or a table cannot be quantized.
        """
        return cls.like(module).quantize(module).eval()

    @classmethod
    def like(cls, module: Any, device: torch.device | None = None) -> Self:
        """Build a collection for the tables of a trained collection; all rows are zero.

        Args:
            module: As for `from_float`.
            device: Device of the tables; None: the device of the trained tables.
        """
        tables = cls._tables_of(module)
        if isinstance(tables, QuantizedCollection):  # torch's convert starts at inner modules
            configs, options = tables.configs(), tables.options()
        else:
            configs, options = quantized_configs(tables, module)
        options |= cls._options_of(module)
        return cls(configs, device=device or tables.device, **options)

    @classmethod
    def _tables_of(cls, module: Any) -> Any:
        """Return the trained collection of tables in a module."""
        return module

    @classmethod
    def _options_of(cls, module: Any) -> dict[str, Any]:
        """Return the arguments of this class that a trained module determines."""
        raise NotImplementedError

    def configs(self) -> list[BaseEmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._configs)

    def output_dtype(self) -> torch.dtype:
        """Return the dtype of the output."""
        return self._options.output_dtype

    @property
    def device(self) -> torch.device:
        """The device of the tables; of the first shard if there are several devices."""
        return next(self._tables()[0].buffers()).device

    def poolings(self) -> tuple[PoolingType, ...]:
        """Return the pooling of each table."""
        return self._poolings

    def stored_row_bytes(self, table: str, num_cols: int, device_type: str) -> int:
        """Return the bytes per row of a shard with `num_cols` columns on a kind of device."""
        [config] = [config for config in self._configs if config.name == table]
        size = row_bytes(num_cols, DATA_TYPE_NUM_BITS[config.data_type])
        return size + -size % row_alignment_on(device_type, self._options.row_alignment)

    def quantized_weights(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Return rows, and scales and biases, by table, in the form of the constructor."""
        return {
            table.config.name: split_header(table.rows(), table.config.data_type)
            for table in self._tables()
        }

    def assign(self, weights: Weights) -> None:
        """Write the rows of all tables.

        Args:
            weights: As for the constructor.

        Raises:
            ValueError: The names or shapes do not match the tables.
        """
        tables = self._tables()
        all_rows = self._checked_rows(weights, torch.device("cpu"))
        for table, rows in zip(tables, all_rows, strict=True):
            table.assign(rows)

    def quantize(self, module: Any) -> Self:
        """Write the rows of all tables from a trained collection.

        Every rank of a sharded collection must call this. A collection on the `meta` device takes
        part in the exchange and receives no rows.

        Args:
            module: As for `from_float`. If it is quantized already, nothing is written.

        Raises:
            ValueError: A table cannot be quantized to its dtype.
        """
        tables = self._tables_of(module)
        if isinstance(tables, QuantizedCollection):
            return self
        stored = [rows for [rows] in self.lookups().stored_rows()]
        if isinstance(tables, ShardedCollection):
            quantize_shards(tables, self._configs, stored)
        else:
            weights = tables.table_weights()
            for config, rows in zip(self._configs, stored, strict=True):
                rows_of_table(config, weights[config.name], rows)
        for config, trained in zip(self._configs, tables.configs(), strict=True):
            if config.ids is not None:
                self._assign_index(config, index_states(tables, config.name), trained.ids)
        return self

    def quantize_saved(self, saved: SavedTables, path: str) -> Self:
        """Write the rows of all tables from a checkpoint, block by block.

        Args:
            saved: The checkpoint.
            path: The path of the collection in the saved model.

        Raises:
            CheckpointError: It lacks a table, or has one of another size.
            ValueError: A table cannot be quantized to its dtype.
        """
        for config, [rows] in zip(self._configs, self.lookups().stored_rows(), strict=True):
            name = saved.find(config.name, path)
            saved.check_size(
                name, range(config.num_embeddings, config.num_embeddings + 1), config.embedding_dim
            )
            for start, block in saved.blocks(name, rows_left(config)):
                part = replace(
                    config, num_embeddings=len(block), num_embeddings_post_pruning=None, ids=None
                )
                rows_of_table(part, block, rows[start : start + len(block)])
            if config.ids is not None:
                self._assign_index(config, saved.index_states(name), config.ids)
        return self

    def _assign_index(
        self, config: BaseEmbeddingConfig, states: Mapping[str, Tensor], rules: HashedIds
    ) -> None:
        [stored] = self.lookups().stored_rows()[self._configs.index(config)]
        if not stored.is_meta:
            self.indexes.assign(config, states, rules, stored)

    def options(self) -> dict[str, Any]:
        """Return constructor arguments, by name, for a collection with the same rows."""
        return {
            "output_dtype": self._options.output_dtype,
            "table_name_to_quantized_weights": {
                table.config.name: (table.rows(), None) for table in self._tables()
            },
            "quant_state_dict_split_scale_bias": self._options.splits,
            "row_alignment": self._options.row_alignment,
            "cache_features_order": self._options.caches_order,
        }

    def placed(
        self, shards: Sequence[Sequence[Rect]], device_of: Callable[[int], torch.device]
    ) -> Self:
        """Return the same collection with each shard of its tables on its owner's device.

        Args:
            shards: Per table the rectangles that cover it, a grid.
            device_of: Maps an owner to its device.
        """
        state = self.__getstate__()
        del state["_aliased"]
        zero = torch.zeros(1, 1, dtype=torch.uint8)
        rows = [
            [zero.to(device_of(rect.rank)).expand(shard_size(config, rect)) for rect in rects]
            for config, rects in zip(self._configs, shards, strict=True)
        ]
        state = copy.deepcopy(state | {"_shards": [tuple(rects) for rects in shards]})
        lookups = self._new_lookups(rows, shards)
        sources = self.lookups().stored_rows()
        for table, source, rects, stored in zip(
            self._tables(), sources, shards, lookups.stored_rows(), strict=True
        ):
            _, size = shard_size(table.config, whole_table(table.config))
            whole = source[0][:, :size] if len(source) == 1 else table.rows()
            for rect, target in zip(rects, stored, strict=True):
                copy_shard(whole, table.config, rect, target)
        new = self._with(state, lookups)
        new.is_placed = True
        return new

    def over(self, lookups: QuantizedTables) -> Self:
        """Return the collection over other lookups of the same rows; it takes no hashed ids."""
        state = {k: v for k, v in self.__getstate__().items() if k != "_aliased"}
        state["_modules"] = {k: v for k, v in self._modules.items() if k != "indexes"}
        state["_modules"][self._tables_name] = None
        return self._with(copy.deepcopy(state), lookups)

    def _with(self, state: dict[str, Any], lookups: QuantizedTables) -> Self:
        new = type(self).__new__(type(self))
        new.__setstate__({**state, "_aliased": lookups})
        return new

    def _checked_rows(self, weights: Weights | None, device: torch.device) -> list[Tensor]:
        rows_by_table = dict(weights or {})
        names = [config.name for config in self._configs]
        if weights is not None and rows_by_table.keys() != set(names):
            raise ValueError(
                "table_name_to_quantized_weights must have exactly the collection's tables; "
                f"received {sorted(rows_by_table)} for {names}."
            )
        all_rows = []
        for config in self._configs:
            try:
                size = shard_size(config, whole_table(config))
            except ValueError as error:
                raise ValueError(f"Table {config.name!r} cannot be quantized. {error}") from error
            if weights is None:  # all zeros, expanded from one byte
                zero = torch.zeros(1, 1, dtype=torch.uint8, device=device)
                all_rows.append(zero.expand(size))
                continue
            rows, header = rows_by_table[config.name]
            if header is not None:
                rows = torch.cat([header.view(torch.uint8), rows.view(torch.uint8)], dim=1)
            check_rows(f"table_name_to_quantized_weights[{config.name!r}]", rows, size)
            all_rows.append(rows.to(device))
        return all_rows

    # -- lookups ------------------------------------------------------------------------------

    def _positions(self, features: KeyedJaggedTensor) -> list[int]:
        """Return the positions of the lookups' features among the keys of a batch."""
        if not isinstance(features, KeyedJaggedTensor):
            wrong_type(f"{type(self).__name__}: features", "a KeyedJaggedTensor", features)
        keys = features.keys()
        if self._order is not None and self._order[0] == keys:
            return self._order[1]
        positions = positions_of(self.lookups().feature_names, keys, type(self).__name__)
        if self._options.caches_order:
            self._order = list(keys), positions
        return positions

    def _with_rows(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch with rows in place of hashed ids."""
        return self.indexes.rows_of(features) if "indexes" in self._modules else features

    @property
    def served(self) -> Served:
        """The module that exported programs run; it reads the same tables.

        Raises:
            ValueError: Tables have hashed ids, which programs do not map.
        """
        if "indexes" in self._modules:
            names = [config.name for config in self._configs if config.ids is not None]
            raise ValueError(
                f"A program cannot map the ids of tables with HashedIds; received {names}. Write "
                "a package by recsys.inference.package, whose servers map them."
            )
        return self.lookups()

    def script_form(self) -> nn.Module:
        """Return the module that TorchScript compiles in place of this collection."""
        return self.served

    def _lengths(self, features: KeyedJaggedTensor, *, is_pooled: bool) -> Tensor:
        """Return the lengths of a batch, [K * B], padded with empty bags to one batch size."""
        if not features.variable_stride_per_key():
            return features.lengths()
        owner, device = type(self).__name__, features.device()
        _, bags = check_features(features, owner, device, is_pooled=is_pooled, is_weighted=False)
        return with_one_batch_size(bags, features.stride_per_key()).lengths

    def lookups(self) -> QuantizedTables:
        """Return the current lookups, which are not registered as a submodule."""
        if self._aliased is None or not self._aliased.is_current():
            rows = [table.shards() for table in self._tables()]
            for table, table_shards in zip(self._tables(), rows, strict=True):
                for shard, size in zip(table_shards, table.shard_sizes(), strict=True):
                    check_rows(f"{self._tables_name}[{table.config.name!r}]", shard, size)
            self._alias(self._new_lookups(rows, self._shards))
        assert self._aliased is not None
        return self._aliased.lookups

    def _new_lookups(
        self, rows: Sequence[Sequence[Tensor]], shards: Sequence[Sequence[Rect]]
    ) -> QuantizedTables:
        return self._lookups(self._configs, self._poolings, rows, shards, self._options)

    def _alias(self, lookups: QuantizedTables) -> None:
        """Make the tables' buffers views of the lookups' rows; create missing table modules."""
        if self._modules.get(self._tables_name) is None:
            named = TableDict()
            for config, rects in zip(self._configs, self._shards, strict=True):
                named[config.name] = (
                    QuantizedTable(config, self._options.splits)
                    if len(rects) == 1
                    else ShardedQuantizedTable(config, rects, self._options.splits)
                )
            self._modules[self._tables_name] = named.train(self.training)
        self._aliased = _AliasedLookups(lookups, self._tables())

    def _tables(self) -> list[Table]:
        return list(getattr(self, self._tables_name).values())

    def _get_name(self) -> str:
        return f"{'Sharded' if self.is_placed else ''}{type(self).__name__}"

    def extra_repr(self) -> str:
        """Return the lookups of a sharded collection."""
        return "\n".join(map(repr, self.lookups().lookups)) if self.is_placed else ""

    # -- operations that break aliasing -------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply `to`, `to_empty` or `share_memory` once per storage."""
        self._alias(self.lookups()._apply(fn))  # type: ignore[no-untyped-call]
        moved = {id(buffer) for table in self._tables() for buffer in table.buffers()}
        return super()._apply(  # type: ignore[no-any-return, no-untyped-call]
            lambda tensor: tensor if id(tensor) in moved else fn(tensor), recurse
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to copy or pickle: each storage once, without the tables' views."""
        state = self.__dict__.copy()
        state["_aliased"] = self.lookups()
        state["_modules"] = {**self._modules, self._tables_name: None}  # keeps its position
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        lookups = state.pop("_aliased")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._alias(lookups)
