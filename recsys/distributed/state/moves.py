"""Moves the values of tables from one placement to another while the job lives.

Every rank knows both placements, and so what every rank sends to every other: nothing has to be
said about it. The values travel in rounds of a bounded number of bytes, whatever the tables' size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple, final

import torch
from torch import Tensor

from recsys.distributed.placement.layout import PlacedTable, Rect
from recsys.distributed.ranks import comm
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.ranks.exchanges import ExchangeName
from recsys.distributed.stages.lookup import GroupSettings
from recsys.distributed.state.table_shards import TableShards

ROUND_BYTES = 32 << 20  # that a rank sends, and receives, at a time
_ALIGNED = 16  # values of several dtypes travel in one buffer


@final
class Move(NamedTuple):
    """Rows and columns of a table that one part gives another. Ranges are half open."""

    source: Rect
    target: Rect
    rows: tuple[int, int]
    cols: tuple[int, int]


def moves_of(
    old: PlacedTable, new: PlacedTable, world_size: int, kind: str = "element"
) -> Iterator[Move]:
    """Yield how the parts of a table in its new place are put together from the old ones.

    Args:
        old: the table where it is.
        new: the same table where it is to go.
        world_size: number of ranks.
        kind: of the values: one per "element", per "row" or per "table". Of the last two every
            part has all of its own; what a rank has itself is not taken from another.
    """
    sources = _parts(old, world_size)
    for target in _parts(new, world_size):
        found: dict[int, Move] = {}
        for source in sources:
            is_local = source.rank == target.rank
            if not old.rects and not is_local:
                continue  # each rank has the whole
            rows = max(source.row_start, target.row_start), min(source.row_end, target.row_end)
            cols = max(source.col_start, target.col_start), min(source.col_end, target.col_end)
            move = Move(source, target, rows, cols)
            if kind == "element":
                if rows[0] < rows[1] and cols[0] < cols[1]:
                    yield move
            elif kind == "table" or rows[0] < rows[1]:
                key = 0 if kind == "table" else rows[0]
                if is_local or key not in found:
                    found[key] = move
        yield from found.values()


def _parts(table: PlacedTable, world_size: int) -> Sequence[Rect]:
    whole = table.whole
    replicas = [
        Rect(row_start=0, row_end=whole.row_end, col_start=0, col_end=whole.col_end, rank=rank)
        for rank in range(world_size if not table.rects else 0)
    ]
    return table.rects or replicas


@final
class _Piece(NamedTuple):
    """Values that one rank gives another, with the tensors of this rank: None elsewhere."""

    source: int
    target: int
    num_bytes: int
    given: Tensor | None
    taken: Tensor | None


@torch.no_grad()
def move_tables(
    old: Mapping[str, TableShards], new: Mapping[str, TableShards], env: ShardingEnv
) -> None:
    """Fill the new parts of tables, weights and optimizer state, from the old ones.

    Every rank calls it. Besides the tables it takes memory for what travels at a time.

    Args:
        old: the parts of this rank, by table.
        new: those to fill; what has the storage of an old one is left alone.
        env: the ranks.
    """
    waiting: list[_Piece] = []
    loads: list[list[int]] = [[0] * env.world_size, [0] * env.world_size]
    for name, table in new.items():
        old[name].flush()
        for piece in _pieces(old[name], table, env):
            if piece.source == piece.target:
                if piece.taken is not None and piece.given is not None:
                    piece.taken.copy_(piece.given)
                continue
            ends = tuple(zip(loads, piece[:2], strict=True))
            if any(load[rank] + piece.num_bytes > ROUND_BYTES for load, rank in ends):
                _exchange(waiting, env, table.device)
                waiting = []
                for load in loads:
                    load[:] = [0] * env.world_size
            waiting.append(piece)
            for load, rank in ends:
                load[rank] += piece.num_bytes
    if waiting:
        _exchange(waiting, env, table.device)
    for table in new.values():
        for shard in table.shards:
            shard.kernel.drop_cache()


def _pieces(old: TableShards, new: TableShards, env: ShardingEnv) -> Iterator[_Piece]:
    """Yield the values of one table, in one order on every rank."""
    group = new.table.group
    assert isinstance(group, GroupSettings)
    here = {(s.rect.row_start, s.rect.col_start): s for s in old.shards}
    there = {(s.rect.row_start, s.rect.col_start): s for s in new.shards}
    kinds = {} if group.optimizer is None else dict(group.optimizer.rule.state)
    for name, kind in {"": "element", **kinds}.items():
        dtype = torch.float32 if name else new.dtype
        # a row's state of some of its columns goes where they go
        way = "element" if kind == "row" and group.splits_row_state else kind
        for source, target, rows, cols in moves_of(old.table, new.table, env.world_size, way):
            mine = here.get((source.row_start, source.col_start))
            theirs = there.get((target.row_start, target.col_start))
            given = taken = None
            if source.rank == env.rank:
                assert mine is not None
                given = mine.states[name] if name else mine.kernel.weights[mine.place]
            if target.rank == env.rank:
                assert theirs is not None
                taken = theirs.states[name] if name else theirs.kernel.weights[theirs.place]
            width = cols[1] - cols[0] if kind == "element" else 1
            step = max(ROUND_BYTES // (width * dtype.itemsize), 1)
            starts = [rows[0]] if kind == "table" else range(rows[0], rows[1], step)
            for start in starts:
                end = min(start + step, rows[1])
                numel = 1 if kind == "table" else (end - start) * width
                parts = [
                    None if whole is None else _region(whole, part, (start, end), cols, kind)
                    for whole, part in ((given, source), (taken, target))
                ]
                size = -(-numel * dtype.itemsize // _ALIGNED) * _ALIGNED
                yield _Piece(source.rank, target.rank, size, *parts)


def _region(
    values: Tensor, part: Rect, rows: tuple[int, int], cols: tuple[int, int], kind: str
) -> Tensor:
    """Return a view of a part's values, by rows and columns of the table."""
    if kind == "table":
        return values
    own = values[rows[0] - part.row_start : rows[1] - part.row_start]
    return own if kind == "row" else own[:, cols[0] - part.col_start : cols[1] - part.col_start]


def _exchange(pieces: Sequence[_Piece], env: ShardingEnv, device: torch.device) -> None:
    sends = [piece for piece in pieces if piece.source == env.rank]
    takes = [piece for piece in pieces if piece.target == env.rank]
    sends.sort(key=lambda piece: piece.target)
    takes.sort(key=lambda piece: piece.source)
    send_sizes, recv_sizes = [0] * env.world_size, [0] * env.world_size
    for piece in sends:
        send_sizes[piece.target] += piece.num_bytes
    for piece in takes:
        recv_sizes[piece.source] += piece.num_bytes
    buffer = torch.empty(sum(send_sizes), dtype=torch.uint8, device=device)
    for place, piece in _places(sends, buffer):
        assert piece.given is not None
        _values(place, piece.given).copy_(piece.given)
    what = ExchangeName.TABLE_MOVES
    came = comm.all_to_all(env, what, buffer, send_sizes, recv_sizes).wait()
    for place, piece in _places(takes, came):
        assert piece.taken is not None
        piece.taken.copy_(_values(place, piece.taken))


def _places(pieces: Sequence[_Piece], buffer: Tensor) -> Iterator[tuple[Tensor, _Piece]]:
    at = 0
    for piece in pieces:
        yield buffer[at : at + piece.num_bytes], piece
        at += piece.num_bytes


def _values(place: Tensor, like: Tensor) -> Tensor:
    """Return the stretch of a buffer as values of a shape and dtype."""
    num_bytes = prod(like.shape) * like.dtype.itemsize
    return place[:num_bytes].view(like.dtype).view(like.shape)
