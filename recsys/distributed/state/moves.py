"""Moves tables from one placement to another while the job runs.

Every rank knows both placements, and so the data that each rank sends to each other. No sizes are
exchanged. Values are sent in rounds with a limited number of bytes, for tables of any size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.lookup import GroupSettings, LocalShard
from recsys.distributed.state.table_shards import TableShards
from recsys.modules.ids.table_index import row_states_of

ROUND_BYTES = 32 << 20  # sent and received by a rank in one round
_ALIGNED = 16  # one buffer holds values of several dtypes
_INDEX = "index."  # before the names of an index's arrays


@final
class Move(NamedTuple):
    """Rows and columns of a table that move from one shard to another. Ranges are half open."""

    source: Rect
    target: Rect
    rows: tuple[int, int]
    cols: tuple[int, int]


def moves_of(
    old: PlacedTable, new: PlacedTable, world_size: int, kind: str = "element"
) -> Iterator[Move]:
    """Yield the moves that fill the new shards of a table from the old ones.

    Args:
        old: The table in its old placement.
        new: The same table in its new placement.
        world_size: Number of ranks.
        kind: Kind of the values: one per "element", per "row" or per "table". Every shard has a
            copy of its values per row or table; a rank prefers its own copy.
    """
    sources = _shards_of(old, world_size)
    for target in _shards_of(new, world_size):
        moves: dict[int, Move] = {}
        for source in sources:
            is_local = source.rank == target.rank
            if not old.rects and not is_local:
                continue  # each rank has the whole table
            rows = max(source.row_start, target.row_start), min(source.row_end, target.row_end)
            cols = max(source.col_start, target.col_start), min(source.col_end, target.col_end)
            move = Move(source, target, rows, cols)
            if kind == "element":
                if rows[0] < rows[1] and cols[0] < cols[1]:
                    yield move
            elif kind == "table" or rows[0] < rows[1]:
                key = 0 if kind == "table" else rows[0]
                if is_local or key not in moves:
                    moves[key] = move
        yield from moves.values()


def _shards_of(table: PlacedTable, world_size: int) -> Sequence[Rect]:
    return table.rects or [replace(table.whole, rank=rank) for rank in range(world_size)]


@final
class _Transfer(NamedTuple):
    """Values that one rank sends another, with this rank's tensors; None on other ranks."""

    source: int
    target: int
    num_bytes: int
    sent: Tensor | None
    received: Tensor | None


@torch.no_grad()
def move_tables(
    old: Mapping[str, TableShards], new: Mapping[str, TableShards], env: ShardingEnv
) -> None:
    """Fill the new shards of tables, weights and optimizer state, from the old ones.

    Every rank must call it. Besides the tables it allocates memory for one round.

    Args:
        old: This rank's shards, by table.
        new: The shards to fill; a shard that shares storage with an old one is not changed.
        env: The ranks.
    """
    waiting: list[_Transfer] = []
    loads = [[0] * env.world_size, [0] * env.world_size]
    for name, table in new.items():
        old[name].flush()
        for transfer in _transfers(old[name], table, env):
            if transfer.source == transfer.target:
                if transfer.received is not None and transfer.sent is not None:
                    transfer.received.copy_(transfer.sent)
                continue
            ends = tuple(zip(loads, transfer[:2], strict=True))
            if any(load[rank] + transfer.num_bytes > ROUND_BYTES for load, rank in ends):
                _exchange(waiting, env, table.device)
                waiting = []
                for load in loads:
                    load[:] = [0] * env.world_size
            waiting.append(transfer)
            for load, rank in ends:
                load[rank] += transfer.num_bytes
    if waiting:
        _exchange(waiting, env, table.device)
    for name, table in new.items():
        for shard in table.shards:
            shard.kernel.drop_cache()  # of all lookups: column owners mark equal rows
        _move_counters(old[name], table, env)


def _move_counters(old: TableShards, new: TableShards, env: ShardingEnv) -> None:
    """Set the counters of the indexes of a table, which are equal on all its owners."""
    if new.rules is None:
        return
    counters = torch.zeros(2, dtype=torch.int64, device=new.device)
    for index in old.indexes()[:1]:
        counters = torch.tensor([index.step, index.init_seed_number], device=new.device)
    source = old.table.rects[0].rank
    if env.world_size > 1:
        comm.broadcast(env, ExchangeName.TABLE_MOVES, counters, source)
    for index in new.indexes():
        index.steps.copy_(counters[0])
        index.init_seed.copy_(counters[1])
        index.restore()


def _transfers(old: TableShards, new: TableShards, env: ShardingEnv) -> Iterator[_Transfer]:
    """Yield the values of one table, in the same order on every rank."""
    group = new.table.group
    assert isinstance(group, GroupSettings)
    old_shards = {shard.rect.offsets: shard for shard in old.shards}
    new_shards = {shard.rect.offsets: shard for shard in new.shards}

    def values_of(shard: LocalShard, name: str) -> Tensor:
        if name.startswith(_INDEX):
            return getattr(shard.index, name.removeprefix(_INDEX))  # type: ignore[no-any-return]
        return shard.states[name] if name else shard.kernel.weights[shard.place]

    kinds = {} if group.optimizer is None else dict(group.optimizer.rule.state)
    of_index = {} if new.rules is None else row_states_of(new.rules)
    kinds |= dict.fromkeys((_INDEX + name for name in of_index), "row")
    for name, kind in {"": "element", **kinds}.items():
        dtype, per_row = torch.float32 if name else new.dtype, 1
        if name.startswith(_INDEX):
            dtype, per_row = of_index[name.removeprefix(_INDEX)]
        # state of some of a row's columns moves with the columns
        is_split = group.splits_row_state and not name.startswith(_INDEX)
        moved_as = "element" if kind == "row" and is_split else kind
        for source, target, rows, cols in moves_of(old.table, new.table, env.world_size, moved_as):
            sent = received = None
            if source.rank == env.rank:
                sent = values_of(old_shards[source.offsets], name)
            if target.rank == env.rank:
                received = values_of(new_shards[target.offsets], name)
            width = cols[1] - cols[0] if kind == "element" else per_row
            step = max(ROUND_BYTES // (width * dtype.itemsize), 1)
            starts = [rows[0]] if kind == "table" else range(rows[0], rows[1], step)
            for start in starts:
                end = min(start + step, rows[1])
                numel = 1 if kind == "table" else (end - start) * width
                parts = [
                    None if whole is None else _region(whole, part, (start, end), cols, kind)
                    for whole, part in ((sent, source), (received, target))
                ]
                size = -(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED
                yield _Transfer(source.rank, target.rank, size, *parts)


def _region(
    values: Tensor, part: Rect, rows: tuple[int, int], cols: tuple[int, int], kind: str
) -> Tensor:
    """Return a view of a shard's values, by rows and columns of the table."""
    if kind == "table":
        return values
    region = values[rows[0] - part.row_start : rows[1] - part.row_start]
    return (
        region if kind == "row" else region[:, cols[0] - part.col_start : cols[1] - part.col_start]
    )


def _exchange(transfers: Sequence[_Transfer], env: ShardingEnv, device: torch.device) -> None:
    sends = sorted((t for t in transfers if t.source == env.rank), key=lambda t: t.target)
    receives = sorted((t for t in transfers if t.target == env.rank), key=lambda t: t.source)
    send_sizes, recv_sizes = [0] * env.world_size, [0] * env.world_size
    for transfer in sends:
        send_sizes[transfer.target] += transfer.num_bytes
    for transfer in receives:
        recv_sizes[transfer.source] += transfer.num_bytes
    buffer = torch.empty(sum(send_sizes), dtype=torch.uint8, device=device)
    for part, transfer in zip(buffer.split([t.num_bytes for t in sends]), sends, strict=True):
        assert transfer.sent is not None
        _values(part, transfer.sent).copy_(transfer.sent)
    what = ExchangeName.TABLE_MOVES
    buffer = comm.all_to_all(env, what, buffer, send_sizes, recv_sizes).wait()
    for part, transfer in zip(buffer.split([t.num_bytes for t in receives]), receives, strict=True):
        assert transfer.received is not None
        transfer.received.copy_(_values(part, transfer.received))


def _values(part: Tensor, like: Tensor) -> Tensor:
    """Return a part of a buffer with the shape and dtype of a tensor."""
    num_bytes = prod(like.shape) * like.dtype.itemsize
    return part[:num_bytes].view(like.dtype).view(like.shape)
