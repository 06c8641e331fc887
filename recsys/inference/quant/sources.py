"""Sources of quantized rows: trained tables, whole or in shards on many ranks, and checkpoints.

Each rank quantizes its own shards in blocks and sends the quantized rows to the receiving ranks. No
rank receives float rows of other ranks. A row has one scale and one bias, so for a table with split
columns, the owners of a row first exchange its minimum and maximum.

Every rank has the plan and computes from it the sizes of all messages, and the result is equal for
all plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from recsys.distributed.checkpoint import CheckpointError
from recsys.distributed.checkpoint.read import SavedValues
from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.agreement import agree, raise_together
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.inference.quant.options import rows_left
from recsys.kernels.quantize import (
    BLOCK_VALUES,
    headers_of,
    pack_values,
    quantize_rows,
    row_ranges,
    values_of,
    write_rows,
)
from recsys.kernels.quantized import row_bytes
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from recsys.modules.tables.embedding_tables import TableCollection

__all__ = ["SavedTables", "index_states", "quantize_shards", "rows_of_table", "with_saved_values"]

_INDEX_STATES = ("ids", "last_used", "steps")
"""Buffers of a trained `TableIndex` that are served."""

_ROUND_BYTES = 8 << 20
"""Maximum number of bytes that a rank sends or receives per round, unless one block is larger."""


def rows_of_table(
    config: BaseEmbeddingConfig, weight: Tensor, stored: Tensor | None = None
) -> Tensor:
    """Quantize the rows of a trained table that are left after pruning.

    Args:
        config: The table, with the new element type.
        weight: The trained rows, [rows, D].
        stored: The output, with rows of at least the quantized size; None: allocated.

    Returns:
        uint8 [rows, bytes].

    Raises:
        ValueError: The table cannot be quantized to this type.
    """
    bits = DATA_TYPE_NUM_BITS[config.data_type]
    try:
        if stored is not None:
            stored = stored[:, : row_bytes(config.embedding_dim, bits)]
        return quantize_rows(weight[: rows_left(config)], bits, stored)
    except ValueError as error:
        raise _refusal(config, error) from error


def _refusal(config: BaseEmbeddingConfig, error: ValueError) -> ValueError:
    return ValueError(f"Table {config.name!r} cannot be quantized. {error}")


def quantize_shards(
    sharded: ShardedCollection,
    configs: Sequence[BaseEmbeddingConfig],
    stored: Sequence[Tensor],
) -> None:
    """Quantize the tables of a sharded collection. Every rank must call it.

    Args:
        sharded: The collection.
        configs: The tables, with the new element types.
        stored: The output per table, uint8 [rows, at least the bytes of a row]; on the `meta`
            device for a rank that receives no rows.

    Raises:
        ValueError: On every rank: ranks pass different element types or rows, or a table cannot be
            quantized to its type.
    """
    env = sharded.env
    wants = [not any(rows.is_meta for rows in stored)]
    if env.process_group is not None and env.world_size > 1:
        facts = {
            f"table {config.name!r}": f"{config.data_type}, {rows_left(config)} rows"
            for config in configs
        }
        wants = agree(env.process_group, ExchangeName.QUANTIZED_ROWS, facts, wants[0])
    weights = sharded.table_weights()
    tables = [
        _Table(config, placed, weights[config.name], rows)
        for config, placed, rows in zip(configs, sharded.layout.tables, stored, strict=True)
    ]
    receivers = [rank for rank, is_wanted in enumerate(wants) if is_wanted]
    exchange = _Exchange(env, receivers, sharded.device)
    for table in tables:
        if not table.placed.rects and wants[env.rank]:  # replicated
            exchange.attempt(partial(rows_of_table, table.config, table.weight, table.stored))
    waiting: list[_Block] = []
    for block in _blocks(tables, len(receivers)):
        sizes = _bytes_per_rank([*waiting, block], env.world_size)
        if waiting and max(max(sizes) * len(receivers), sum(sizes)) > _ROUND_BYTES:
            exchange.run(waiting)
            waiting = []
        waiting.append(block)
    if waiting:
        exchange.run(waiting)
    if exchange.error is not None and env.world_size == 1:
        raise exchange.error
    raise_together(env, ExchangeName.QUANTIZED_ROWS, exchange.error)


@final
class _Table(NamedTuple):
    """A table, its trained rows, and the output."""

    config: BaseEmbeddingConfig
    placed: PlacedTable
    weight: Tensor
    stored: Tensor

    @property
    def bits(self) -> int:
        return DATA_TYPE_NUM_BITS[self.config.data_type]


@final
class _Block(NamedTuple):
    """Some rows of a table, on the ranks that own their columns."""

    table: _Table
    rows: tuple[int, int]
    rects: tuple[Rect, ...]
    """The shards with these rows, ordered by columns."""

    @property
    def num_rows(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def needs_ranges(self) -> bool:
        """True if several shards have columns of these rows, which share a scale and a bias."""
        return len(self.rects) > 1 and self.table.bits < 16

    def piece_shape(self, rect: Rect) -> tuple[int, int]:
        """Return the shape that the owner of a shard sends: rows, and bytes per row."""
        bits = self.table.bits
        if len(self.rects) == 1:
            return self.num_rows, row_bytes(rect.num_cols, bits)
        return self.num_rows, rect.num_cols * max(bits // 8, 1)

    def weight(self, rect: Rect) -> Tensor:
        """Return the float rows of a shard of this rank."""
        assert isinstance(self.table.weight, ShardedTable)
        shards = {shard.offsets: shard.tensor for shard in self.table.weight.local_shards()}
        shard = shards[rect.row_start, rect.col_start]
        return shard[self.rows[0] - rect.row_start : self.rows[1] - rect.row_start].detach()


def _blocks(tables: Sequence[_Table], num_receivers: int) -> Iterator[_Block]:
    """Yield blocks in turn over all shards, so that all ranks work at the same time."""
    ranges: list[tuple[_Table, int, int, tuple[Rect, ...], int]] = []
    for table in tables:
        by_row: dict[int, list[Rect]] = {}
        for rect in sorted(table.placed.rects, key=lambda rect: rect.col_start):
            by_row.setdefault(rect.row_start, []).append(rect)
        left = rows_left(table.config)
        # smaller blocks for more receivers, as each gets a copy
        step = max(BLOCK_VALUES // (table.config.embedding_dim * max(num_receivers, 1)), 1)
        for start, rects_of_rows in sorted(by_row.items()):
            end = min(rects_of_rows[0].row_end, left)
            if start < end:
                ranges.append((table, start, end, tuple(rects_of_rows), step))
    for i in count():
        has_more = False
        for table, start, end, rects, step in ranges:
            first = start + i * step
            if first < end:
                has_more = True
                yield _Block(table, (first, min(first + step, end)), rects)
        if not has_more:
            return


def _bytes_per_rank(blocks: Sequence[_Block], world_size: int) -> list[int]:
    """Return the bytes that each rank sends to one receiver."""
    sent = [0] * world_size
    for block in blocks:
        for rect in block.rects:
            rows, size = block.piece_shape(rect)
            sent[rect.rank] += rows * size
    return sent


@final
class _Exchange:
    """Quantization of blocks and their exchange with the receiving ranks.

    After an error, a rank continues the exchanges with invalid data, so that other ranks do not
    wait; the error is raised at the end.
    """

    def __init__(self, env: ShardingEnv, receivers: Sequence[int], device: torch.device) -> None:
        self._env = env
        self._receivers = receivers
        self._device = device
        self.error: Exception | None = None

    def attempt(self, work: Callable[[], object]) -> None:
        """Call a function, and store its error if there is none yet."""
        try:
            work()
        except Exception as error:
            self.error = self.error or error

    def run(self, blocks: Sequence[_Block]) -> None:
        """Quantize and exchange blocks."""
        env, receivers = self._env, self._receivers
        ranges = self._common_ranges(blocks)
        sizes = _bytes_per_rank(blocks, env.world_size)
        num_bytes = sizes[env.rank]
        send = torch.zeros(num_bytes * len(receivers), dtype=torch.uint8, device=self._device)
        self.attempt(partial(self._quantize, blocks, ranges, send[:num_bytes]))
        for i in range(1, len(receivers)):
            send[i * num_bytes : (i + 1) * num_bytes].copy_(send[:num_bytes])
        send_sizes = [num_bytes if rank in receivers else 0 for rank in range(env.world_size)]
        is_wanted = env.rank in receivers
        recv_sizes = sizes if is_wanted else [0] * env.world_size
        name = ExchangeName.QUANTIZED_ROWS
        received = comm.all_to_all(env, name, send, send_sizes, recv_sizes).wait()
        if is_wanted:
            self.attempt(partial(_write, blocks, ranges, received, sizes))

    def _common_ranges(self, blocks: Sequence[_Block]) -> list[Tensor | None]:
        """Return the value ranges of rows, over all ranks, for blocks with split columns."""
        sizes = [block.num_rows for block in blocks if block.needs_ranges]
        if not sizes:
            return [None] * len(blocks)
        joined = torch.full((2, sum(sizes)), -torch.inf, device=self._device)
        parts = iter(joined.split(sizes, dim=1))
        ranges = [next(parts) if block.needs_ranges else None for block in blocks]
        self.attempt(partial(self._local_ranges, blocks, ranges))
        comm.all_reduce(self._env, ExchangeName.QUANTIZED_ROWS, joined, dist.ReduceOp.MAX).wait()
        return ranges

    def _local_ranges(self, blocks: Sequence[_Block], ranges: Sequence[Tensor | None]) -> None:
        for block, common in zip(blocks, ranges, strict=True):
            for rect in block.rects:
                if common is not None and rect.rank == self._env.rank:
                    try:
                        local_range = row_ranges(block.weight(rect).float())
                    except ValueError as error:
                        raise _refusal(block.table.config, error) from error
                    torch.maximum(common, local_range, out=common)

    def _quantize(
        self, blocks: Sequence[_Block], ranges: Sequence[Tensor | None], send: Tensor
    ) -> None:
        start = 0
        for block, common in zip(blocks, ranges, strict=True):
            for rect in block.rects:
                if rect.rank != self._env.rank:
                    continue
                rows, size = block.piece_shape(rect)
                piece = send[start : start + rows * size].view(rows, size)
                start += rows * size
                weight, bits = block.weight(rect), block.table.bits
                try:
                    if common is None:
                        quantize_rows(weight, bits, piece)
                    else:
                        piece.copy_(values_of(weight.float(), headers_of(common, bits), bits))
                except ValueError as error:
                    raise _refusal(block.table.config, error) from error


def _write(
    blocks: Sequence[_Block],
    ranges: Sequence[Tensor | None],
    received: Tensor,
    sizes: Sequence[int],
) -> None:
    """Write the received rows of blocks to the outputs."""
    from_rank = list(received.split(list(sizes)))
    for block, common in zip(blocks, ranges, strict=True):
        table, pieces = block.table, []
        for rect in block.rects:
            rows, size = block.piece_shape(rect)
            piece, from_rank[rect.rank] = from_rank[rect.rank].split(
                [rows * size, from_rank[rect.rank].numel() - rows * size]
            )
            pieces.append(piece.view(rows, size))
        stored = table.stored[block.rows[0] : block.rows[1]]
        whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
        if common is None:
            stored[:, : whole.shape[1]].copy_(whole)
        else:
            write_rows(stored, headers_of(common, table.bits), pack_values(whole, table.bits))


def index_states(tables: TableCollection | ShardedCollection, name: str) -> dict[str, Tensor]:
    """Return the `_INDEX_STATES` of a trained table with hashed ids.

    Every rank of a sharded collection must call it.
    """
    states = tables.state_dict()
    index = {}
    for key in _INDEX_STATES:
        [state] = [v for path, v in states.items() if path.endswith(f".{name}.index.{key}")]
        index[key] = state.full_tensor() if isinstance(state, ShardedTable) else state
    return index


_COLLECTIONS = ("embedding_bags", "embeddings")


@final
class SavedTables:
    """The tables of a checkpoint.

    Args:
        checkpoint: As `path` of `read_checkpoint`.

    Attributes:
        values: All values of the model in the checkpoint.

    Raises:
        CheckpointError: It is not a checkpoint, is damaged, or has rows that were on
            the disk.
    """

    def __init__(self, checkpoint: str | Path) -> None:
        self.values = SavedValues.find(Path(checkpoint))
        self.values.refuse_logs("A checkpoint to serve")

    def find(self, table: str, path: str | None = None) -> str:
        """Return the full name of a table's values.

        Args:
            table: The name of a table.
            path: The path of its module in the saved model; None: any module.

        Raises:
            CheckpointError: The checkpoint has no such table, or several.
        """
        ends = tuple(f".{kind}.{table}.weight" for kind in _COLLECTIONS)
        start = f"{path}." if path else ""
        names = [n for n in self.values.values if f".{n}".endswith(ends) and n.startswith(start)]
        if len(names) != 1:
            known = [name for name in self.values.values if self.is_table(name)]
            raise CheckpointError(
                f"{self.values.folder} must have one table {table!r}; received {names or known}. "
                "Pass the checkpoint of this model."
            )
        return names[0]

    @staticmethod
    def is_table(name: str) -> bool:
        """Return whether a full name is the name of a table of an embedding collection."""
        parts = name.split(".")
        return len(parts) >= 3 and parts[-1] == "weight" and parts[-3] in _COLLECTIONS

    @staticmethod
    def is_index(name: str) -> bool:
        """Return whether a full name is the name of a part of a table's index of hashed ids."""
        parts = name.split(".")
        return len(parts) >= 4 and parts[-2] == "index" and parts[-4] in _COLLECTIONS

    def index_of(self, name: str, num_rows: int) -> tuple[Tensor, Tensor]:
        """Return the hashed id of each row, int64, and whether the row has one, bool.

        Args:
            name: Full name of the table.
            num_rows: The number of rows.

        Raises:
            CheckpointError: The table has no hashed ids, or another number of rows.
        """
        parts = [f"{name.removesuffix('weight')}index.{key}" for key in ("ids", "last_used")]
        known = self.values.values
        sizes = [tuple(getattr(known.get(part), "size", ())) for part in parts]
        if sizes != [(num_rows,)] * 2:
            raise CheckpointError(
                f"{name!r} of {self.values.folder} must have hashed ids in {num_rows} rows; "
                f"received {sizes}. Pass the checkpoint of this model."
            )
        states = self.values.read(dict.fromkeys(parts))
        return states[parts[0]], states[parts[1]] > 0

    def index_states(self, name: str) -> dict[str, Tensor]:
        """Return the states of the index of a table with hashed ids, as `index_states`.

        Args:
            name: Full name of the table.
        """
        index = name.removesuffix("weight") + "index."
        states = self.values.read({index + key: None for key in _INDEX_STATES})
        return {key: states[index + key] for key in _INDEX_STATES}

    def check_size(self, name: str, rows: range, dim: int) -> None:
        """Check the size of a table.

        Raises:
            CheckpointError: Its number of rows is not in the range, or its width differs.
        """
        value = self.values.values[name]
        size = tuple(value.size) if isinstance(value, TensorStorageMetadata) else ()
        or_more = ", or more rows" if len(rows) > 1 else ""
        if len(size) != 2 or size[0] not in rows or size[1] != dim:
            raise CheckpointError(
                f"{name!r} of {self.values.folder} must have {rows[0]} rows and {dim} "
                f"columns{or_more}; received {size}. Pass the checkpoint of this model."
            )

    def blocks(self, name: str, num_rows: int) -> Iterator[tuple[int, Tensor]]:
        """Yield the first rows of a table in blocks: the first row, and `[R, D]` floats.

        Args:
            name: Full name of the table.
            num_rows: The number of rows.
        """
        for rows in self.values.row_ranges(name):
            if rows is not None and rows.start < num_rows:
                yield rows.start, self.read(name, rows.start, min(rows.stop, num_rows))

    def read(self, name: str, start: int, end: int) -> Tensor:
        """Return rows of a table, `[end - start, D]`."""
        rows: Tensor = self.values.read({name: range(start, end)})[name]
        return rows


def with_saved_values(model: nn.Module, saved: SavedTables) -> nn.Module:
    """Load all values of a checkpoint but the tables into a model, in place.

    Args:
        model: An unsharded model whose tables are on the `meta` device.
        saved: The checkpoint.

    Raises:
        CheckpointError: The checkpoint lacks a value, or has one of another shape.
        ValueError: A table is not on the `meta` device.
    """
    state = model.state_dict()
    tables = {
        f"{path}.{name}" if path else name
        for path, child in model.named_modules()
        if isinstance(child, TableCollection)
        for name in child.state_dict()
    }
    weights = [name for name in tables if SavedTables.is_table(name)]
    allocated = sorted(name for name in weights if not state[name].is_meta)
    if allocated:
        raise ValueError(
            f"Tables must be on the meta device, as the checkpoint has their rows; received "
            f"{allocated[:5]} in memory. Build the model with device=torch.device('meta')."
        )
    others = [name for name in state if name not in tables]
    folder = saved.values.folder
    missing = [name for name in others if name not in saved.values.values]
    if missing:
        raise CheckpointError(
            f"{folder} must have all values of the model; received none for {missing[:5]}. Pass "
            "the checkpoint of this model."
        )
    read = saved.values.read(dict.fromkeys(others))
    for name in others:
        if isinstance(read[name], Tensor) and state[name].shape != read[name].shape:
            raise CheckpointError(
                f"{name!r} of {folder} must have the shape {tuple(state[name].shape)}; received "
                f"{tuple(read[name].shape)}. Pass the checkpoint of this model."
            )
    on_meta = {name: value for name, value in read.items() if state[name].is_meta}
    model.load_state_dict(on_meta, strict=False, assign=True)
    model.load_state_dict({n: v for n, v in read.items() if n not in on_meta}, strict=False)
    return model
