"""Modules that hold one quantized table each, whole or sharded, under its state-dict name.

Tables with hashed ids also have an index, which maps the ids to rows.

Shapes: `N` ids, `R` rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.placement.plan import (
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
)
from recsys.distributed.placement.strategies import MIN_COLUMNS, rects_of
from recsys.inference.quant.options import rows_left
from recsys.kernels.quantize import quantize_rows
from recsys.kernels.quantized import join_columns, row_bytes, take_columns
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig, DataType
from recsys.modules.hashed_ids import LRU, HashedIds
from recsys.modules.ids.rows import stored_rows
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.aliased_storage import detach_storage
from recsys.sparse import KeyedJaggedTensor

__all__ = [
    "SHARDING_TYPES",
    "QuantizedTable",
    "ServedIndexes",
    "ShardedQuantizedTable",
    "Table",
    "check_rows",
    "copy_shard",
    "meta_rows",
    "shard_size",
    "shards_of_plan",
    "split_header",
    "used_rows",
    "whole_table",
]

_COPIED_ROWS = 1 << 16
SHARDING_TYPES = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
_TRAINED = (EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel.DENSE)
"""Default kernels in plans; for quantized tables they mean device memory."""


def split_header(rows: Tensor, data_type: DataType) -> tuple[Tensor, Tensor | None]:
    """Split rows into values, and scales and biases [rows, 4], or None: views."""
    if DATA_TYPE_NUM_BITS[data_type] >= 16:
        return rows, None
    return rows[:, 4:], rows[:, :4]


def check_rows(subject: str, rows: Tensor, size: tuple[int, int]) -> None:
    """Check the rows of a shard.

    Raises:
        ValueError: They are not uint8, or of another shape.
    """
    if rows.dtype is not torch.uint8 or rows.shape != size:
        raise ValueError(
            f"{subject} must be uint8 of shape {size} with scales and biases; received "
            f"{rows.dtype} of {tuple(rows.shape)}."
        )


def whole_table(config: BaseEmbeddingConfig) -> Rect:
    """Return the rectangle of an unsharded table, on owner 0."""
    return Rect(
        row_start=0, row_end=rows_left(config), col_start=0, col_end=config.embedding_dim, rank=0
    )


def shard_size(config: BaseEmbeddingConfig, rect: Rect) -> tuple[int, int]:
    """Return rows, and bytes per row without padding, of a shard."""
    return rect.num_rows, row_bytes(rect.num_cols, DATA_TYPE_NUM_BITS[config.data_type])


@final
class QuantizedTable(nn.Module):
    """One table of a quantized collection: its rows, under the public name.

    Args:
        config: The table.
        splits: Store scales and biases, if any, in separate buffers.
    """

    if TYPE_CHECKING:  # TorchScript does not support annotations that are strings
        weight: Tensor

    def __init__(self, config: BaseEmbeddingConfig, splits: bool) -> None:
        super().__init__()
        self.config = config
        self._bits = DATA_TYPE_NUM_BITS[config.data_type]
        self._row_bytes = row_bytes(config.embedding_dim, self._bits)
        self._splits = splits and self._bits < 16

    def set_views(self, stored: Sequence[Tensor], row_alignment: int) -> None:
        """Make the buffers views of rows.

        Args:
            stored: One tensor, uint8 [rows, bytes per row with padding].
            row_alignment: Alignment of rows in bytes.
        """
        [rows] = stored
        if self._splits:
            self.register_buffer("weight", rows[:, 4 : self._row_bytes])
            self.register_buffer("weight_qscale", rows[:, 0:2].view(torch.float16))
            self.register_buffer("weight_qbias", rows[:, 2:4].view(torch.float16))
        else:
            self.register_buffer("weight", rows)

    def rows(self) -> Tensor:
        """Return the rows without padding; a view if scales and biases are not split."""
        if not self._splits:
            return self.weight[:, : self._row_bytes]
        header = self._buffers["weight_qscale"], self._buffers["weight_qbias"]
        parts = [cast(Tensor, part).view(torch.uint8) for part in header]
        return torch.cat([*parts, self.weight], dim=1)

    def shards(self) -> list[Tensor]:
        """Return the rows of the only shard without padding."""
        return [self.rows()]

    def shard_sizes(self) -> list[tuple[int, int]]:
        """Return rows, and bytes per row without padding, of each shard."""
        return [shard_size(self.config, whole_table(self.config))]

    def assign(self, rows: Tensor) -> None:
        """Write all rows, without padding."""
        if not self._splits:
            self.weight[:, : self._row_bytes].copy_(rows)
            return
        self.weight.copy_(rows[:, 4:])
        for name, start in (("weight_qscale", 0), ("weight_qbias", 2)):
            buffer = cast(Tensor, self._buffers[name])
            buffer.copy_(rows[:, start : start + 2].contiguous().view(torch.float16))

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not keep_vars:
            detach_storage(destination, f"{prefix}weight")
        for name in self._buffers:
            if name != "weight":  # torch.save rejects a storage with two dtypes
                destination[prefix + name] = destination[prefix + name].clone()

    def extra_repr(self) -> str:
        """Size and element type, for repr."""
        return _described(self.config)


@final
class ShardedQuantizedTable(nn.Module):
    """One table of a quantized collection in several shards.

    Each shard is a buffer, `shard_0` and so on. State dicts have the whole table instead, as for
    `QuantizedTable`, in host memory if the shards are on several devices.

    Args:
        config: The table.
        shards: The rectangles that cover it, a grid.
        splits: As for `QuantizedTable`, for state dicts.
    """

    def __init__(self, config: BaseEmbeddingConfig, shards: Sequence[Rect], splits: bool) -> None:
        super().__init__()
        self.config = config
        self._bits = DATA_TYPE_NUM_BITS[config.data_type]
        self._rects = list(shards)
        self._splits = splits
        self._row_alignment = 1

    @property
    def weight(self) -> Tensor:
        """A copy of all rows, as `QuantizedTable.weight`."""
        return self._whole(self.rows()).weight

    def set_views(self, stored: Sequence[Tensor], row_alignment: int) -> None:
        """Make the buffers views of the shards' rows."""
        self._row_alignment = row_alignment
        for i, rows in enumerate(stored):
            self.register_buffer(f"shard_{i}", rows, persistent=False)

    def rows(self) -> Tensor:
        """Return a copy of all rows without padding."""
        shards = self.shards()
        if len({shard.device for shard in shards}) > 1:
            shards = [shard.cpu() for shard in shards]
        by_columns: dict[int, list[tuple[int, Tensor]]] = {}
        for rect, shard in zip(self._rects, shards, strict=True):
            by_columns.setdefault(rect.col_start, []).append((rect.row_start, shard))
        columns = [
            torch.cat([shard for _, shard in sorted(parts, key=lambda part: part[0])])
            for _, parts in sorted(by_columns.items())
        ]
        return join_columns(columns, self._bits)

    def shards(self) -> list[Tensor]:
        """Return views of the rows of each shard without padding."""
        buffers = [cast(Tensor, buffer) for buffer in self._buffers.values()]
        sizes = self.shard_sizes()
        return [rows[:, :size] for rows, (_, size) in zip(buffers, sizes, strict=True)]

    def shard_sizes(self) -> list[tuple[int, int]]:
        """Return rows, and bytes per row without padding, of each shard."""
        return [shard_size(self.config, rect) for rect in self._rects]

    def assign(self, rows: Tensor) -> None:
        """Write all rows, without padding."""
        for rect, shard in zip(self._rects, self.shards(), strict=True):
            shard.copy_(_shard_of(rows, self._bits, rect))

    def _whole(self, rows: Tensor) -> QuantizedTable:
        table = QuantizedTable(self.config, self._splits)
        padding = -rows.shape[1] % self._row_alignment
        table.set_views([nn.functional.pad(rows, (0, padding))], self._row_alignment)
        return table

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self._whole(self.rows())._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        problems = len(missing_keys) + len(error_msgs)
        whole = self._whole(self.rows())
        whole._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if len(missing_keys) + len(error_msgs) == problems:
            self.assign(whole.rows())

    def extra_repr(self) -> str:
        """Size, element type and shards, for repr."""
        shards = [f"{rect.num_rows} x {rect.num_cols} on {rect.rank}" for rect in self._rects]
        return f"{_described(self.config)}, shards: {', '.join(shards)}"


Table: TypeAlias = QuantizedTable | ShardedQuantizedTable


def copy_shard(whole: Tensor, config: BaseEmbeddingConfig, rect: Rect, target: Tensor) -> None:
    """Copy a shard of a table's rows in blocks, as columns of a row are copied twice."""
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    for first in range(rect.row_start, rect.row_end, _COPIED_ROWS):
        last = min(first + _COPIED_ROWS, rect.row_end)
        part = take_columns(whole[first:last], bits, rect.col_start, rect.col_end)
        target[first - rect.row_start : last - rect.row_start, : part.shape[1]].copy_(part)


def _shard_of(rows: Tensor, bits: int, rect: Rect) -> Tensor:
    """Return a shard of a table's rows without padding."""
    return take_columns(rows[rect.row_start : rect.row_end], bits, rect.col_start, rect.col_end)


def _described(config: BaseEmbeddingConfig) -> str:
    return f"{rows_left(config)}, {config.embedding_dim}, {config.data_type}"


@final
class ServedIndexes(nn.Module):
    """Indexes of the tables of a quantized collection that have hashed ids, by table name.

    Ids without a row read the first row of their region. No id loses its row here: a `ttl` ends
    when the index is assigned.

    Args:
        configs: The tables of the collection.
        device: Device of the indexes.

    Raises:
        ValueError: Another table reads the feature of a table with hashed ids, or such a table is
            pruned or may have rows on the disk.
    """

    def __init__(self, configs: Iterable[BaseEmbeddingConfig], device: torch.device) -> None:
        super().__init__()
        readers: dict[str, list[BaseEmbeddingConfig]] = {}
        for config in configs:
            for feature in config.feature_names:
                readers.setdefault(feature, []).append(config)
            if config.ids is None:
                continue
            if config.num_embeddings_post_pruning not in (None, config.num_embeddings):
                raise ValueError(
                    f"Table {config.name!r} with HashedIds must keep all rows; received "
                    f"num_embeddings_post_pruning={config.num_embeddings_post_pruning}."
                )
            config.ids.check_rows_in_memory(config.name, "Quantization")
            served = replace(config, ids=replace(config.ids, eviction=LRU(), admission=None))
            self._modules[config.name] = TableIndex(served, device)
        self._tables: dict[str, str] = {}
        """The table with hashed ids that reads a feature."""
        for feature, tables in readers.items():
            names = [config.name for config in tables]
            if any(config.ids is not None for config in tables):
                if len(names) > 1:
                    raise ValueError(
                        f"Feature {feature!r} of a table with HashedIds must be read by one "
                        f"quantized table; received {names}. Give each table a feature of its own."
                    )
                self._tables[feature] = names[0]

    def table(self, name: str) -> TableIndex:
        """Return the index of a table."""
        index = self._modules[name]
        assert isinstance(index, TableIndex)
        return index

    def rows_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Replace hashed ids of a batch by table rows; ids become int64 if there are any."""
        keys = features.keys()
        hashed = [i for i, key in enumerate(keys) if key in self._tables]
        if not hashed:
            return features
        sizes = features.length_per_key()
        parts = list(features.values().long().split(sizes))
        indexes = [self.table(self._tables[keys[i]]).index for i in hashed]
        ids = torch.cat([parts[i] for i in hashed])
        hashed_sizes = [sizes[i] for i in hashed]
        all_rows = stored_rows(indexes, ids, hashed_sizes).split(hashed_sizes)
        for i, rows in zip(hashed, all_rows, strict=True):
            parts[i] = rows
        return features.with_values(torch.cat(parts))

    @torch.no_grad()
    def assign(
        self,
        config: BaseEmbeddingConfig,
        states: Mapping[str, Tensor],
        rules: HashedIds,
        stored: Tensor,
    ) -> None:
        """Write the index of a table.

        Args:
            config: The quantized table.
            states: `INDEX_STATES` of the trained index.
            rules: Rules of the trained index.
            stored: The table's quantized rows, uint8 `[R, row bytes]`; rows of unknown ids are
                set to zero if the rules require it.

        Raises:
            ValueError: Ids have other rows than the hash gives them.
        """
        index = self.table(config.name)
        index.ids.copy_(states["ids"])
        index.last_used.copy_(used_rows(states["last_used"], int(states["steps"]), rules))
        index.restore()
        if rules.unknown == "zero":
            shared = index.shared_rows()
            zeros = torch.zeros(len(shared), config.embedding_dim)
            rows = quantize_rows(zeros, DATA_TYPE_NUM_BITS[config.data_type])
            stored[shared, : rows.shape[1]] = rows.to(stored.device)


def used_rows(last_used: Tensor, step: int, rules: HashedIds) -> Tensor:
    """Return whether rows have an id that has not expired, bool `[R]`.

    Args:
        last_used: The last batch that had the id, `[R]`; 0: the row is free.
        step: Number of training batches.
        rules: Rules of the table.
    """
    oldest = max(step - rules.ttl, 1) if rules.ttl else 1
    return last_used >= oldest


def meta_rows(config: BaseEmbeddingConfig) -> nn.Parameter:
    """Return a placeholder of a table's rows on `meta`, `[rows, columns]`."""
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    dtype = {32: torch.float32, 16: torch.float16}.get(bits, torch.uint8)
    rows = torch.empty(rows_left(config), config.embedding_dim, dtype=dtype, device="meta")
    return nn.Parameter(rows, requires_grad=False)


def shards_of_plan(
    config: BaseEmbeddingConfig,
    entry: ParameterSharding,
    world_size: int,
    output_dtype: torch.dtype,
) -> tuple[Rect, ...]:
    """Return the rectangles of a table in a plan.

    Raises:
        ValueError: The rectangles are invalid, or quantized tables do not support an option of the
            entry.
    """
    name, rows, dim = config.name, rows_left(config), config.embedding_dim
    kind, kernel = ShardingType(entry.sharding_type), EmbeddingComputeKernel(entry.compute_kernel)
    is_unsupported = {
        "compute_kernel": kernel not in (EmbeddingComputeKernel.QUANT, *_TRAINED),
        "cache_params": entry.cache_params is not None,
        "stochastic_rounding": bool(entry.stochastic_rounding),
        "bounds_check_mode": entry.bounds_check_mode not in (None, BoundsCheckMode.FATAL),
        "output_dtype": entry.output_dtype not in (None, output_dtype),
    }
    if kind not in SHARDING_TYPES or any(is_unsupported.values()):
        bad = [key for key, is_bad in is_unsupported.items() if is_bad] or ["sharding_type"]
        kinds = ", ".join(kind.value for kind in SHARDING_TYPES)
        raise ValueError(
            f"A quantized table must be sharded {kinds}, in device memory, with the output_dtype "
            f"of its collection and bounds_check_mode FATAL; received {bad[0]}="
            f"{getattr(entry, bad[0])!r} for table {name!r}."
        )
    rects = rects_of(name, rows, dim, entry, world_size)
    # raises an error for gaps and overlaps
    PlacedTable(name=name, num_rows=rows, dim=dim, features=(), group=None, rects=rects)
    odd = [rect.col_start for rect in rects if rect.col_start % MIN_COLUMNS]
    if odd:
        raise ValueError(
            f"Columns of a quantized table must be split at multiples of {MIN_COLUMNS}; received "
            f"column {odd[0]} of table {name!r}."
        )
    return rects
