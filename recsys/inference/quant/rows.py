"""Tables of quantized collections, whole or in shards, as modules with public names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import Rect
from recsys.inference.quant.lookup import rows_left
from recsys.kernels.quantized import join_columns, row_bytes, take_columns
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig, DataType
from recsys.modules.tables.aliased_storage import detach_storage

__all__ = [
    "SERVED",
    "QuantizedTable",
    "ShardedQuantizedTable",
    "Table",
    "check_rows",
    "shard_of",
    "split_header",
    "to_data_type",
    "whole_table",
]

_COPIED_ROWS = 1 << 16

_DATA_TYPES = {
    **dict.fromkeys((torch.int8, torch.uint8, torch.qint8, torch.quint8), DataType.INT8),
    torch.quint4x2: DataType.INT4,
    torch.quint2x4: DataType.INT2,
    torch.float16: DataType.FP16,
    torch.float32: DataType.FP32,
}
SERVED = (*dict.fromkeys(_DATA_TYPES.values()), DataType.UINT8)
"""Element types that quantized tables support."""


def to_data_type(dtype: torch.dtype) -> DataType:
    """Return the element type of tables for a quantized dtype.

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
        return [(rows_left(self.config), self._row_bytes)]

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
        return [(rect.num_rows, row_bytes(rect.num_cols, self._bits)) for rect in self._rects]

    def assign(self, rows: Tensor) -> None:
        """Write all rows, without padding."""
        for rect, shard in zip(self._rects, self.shards(), strict=True):
            shard.copy_(shard_of(rows, self._bits, rect))

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


def copy_shard(whole: Tensor, bits: int, rect: Rect, target: Tensor) -> None:
    """Copy a shard of a table's rows in blocks, as columns of a row are copied twice."""
    for first in range(rect.row_start, rect.row_end, _COPIED_ROWS):
        last = min(first + _COPIED_ROWS, rect.row_end)
        part = take_columns(whole[first:last], bits, rect.col_start, rect.col_end)
        target[first - rect.row_start : last - rect.row_start, : part.shape[1]].copy_(part)


def shard_of(rows: Tensor, bits: int, rect: Rect) -> Tensor:
    """Return a shard of a table's rows without padding."""
    return take_columns(rows[rect.row_start : rect.row_end], bits, rect.col_start, rect.col_end)


def _described(config: BaseEmbeddingConfig) -> str:
    return f"{rows_left(config)}, {config.embedding_dim}, {config.data_type}"
