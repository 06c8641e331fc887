"""Rows of the tables of one lookup that go to logs on the disk, and come back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, final

import torch
from torch import Tensor

from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.ids.row_log import RecordField, RowLog, split_records
from recsys.modules.ids.table_index import TableIndex

__all__ = ["RowStore", "fields_of", "open_log", "refuse_backward"]


def fields_of(tbe: TableBatchedEmbedding, table: int) -> list[RecordField]:
    """Return the fields of the records of a table, by the number of the table in its lookup."""
    return [
        RecordField(name, values.dtype, values[:1].numel())
        for name, values in _arrays(tbe, table).items()
    ]


def _arrays(tbe: TableBatchedEmbedding, table: int) -> dict[str, Tensor]:
    """Return the arrays of a table with values of each row; live, [rows] or [rows, columns]."""
    states = tbe.states[table].items()
    # sorted, so that records have one order; states without dimensions are of the whole table
    return {"weight": tbe.weights[table], **{n: s for n, s in sorted(states) if s.dim()}}


@final
class RowStore:
    """The tables of a lookup whose `HashedIds` have an `overflow`.

    Args:
        configs: All tables of the lookup.
        indexes: The index of each.
        tbe: Their lookup.

    Raises:
        ValueError: The tables are not on the CPU.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        indexes: Sequence[TableIndex],
        tbe: TableBatchedEmbedding,
    ) -> None:
        self._indexes, self._tbe, self._is_open = indexes, tbe, False
        self._tables = [t for t, index in enumerate(indexes) if index.rules.has_rows_on_disk]
        self._names = [config.name for config in configs]
        device = tbe.layout.device
        if self._tables and device.type not in ("cpu", "meta"):
            raise ValueError(
                f"HashedIds.overflow must be None for tables on {device}; received "
                f"{indexes[self._tables[0]].rules.overflow!r} for table "
                f"'{self._names[self._tables[0]]}'. Use it on the CPU."
            )

    def __bool__(self) -> bool:
        return bool(self._tables)

    def open(self) -> None:
        """Make the logs that do not exist yet.

        Raises:
            OSError: A folder cannot be written.
            ValueError: The rows of a log have another optimizer.
        """
        if self._is_open:
            return
        for t in self._tables:
            open_log(self._indexes[t], self._names[t], fields_of(self._tbe, t))
        self._is_open = True

    def exchange(
        self, new_rows: Tensor, new_ids: Tensor, old: Tensor, sizes: Sequence[int]
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Append the rows that ids lost to the logs, and fill the rows of ids that come back.

        Args:
            new_rows: int64 [N] rows that got a new id, ordered by table.
            new_ids: int64 [N] the ids.
            old: int64 [N, 2], `Mapped.old`.
            sizes: Number of rows of each table.

        Returns:
            The rows, the ids and the sizes of the ids without a record, which need initial values.

        Raises:
            OSError: A log cannot be written or read.
        """
        sizes = list(sizes)
        parts = [part.split(sizes) for part in (new_rows, new_ids, old)]
        rows, ids, olds = (list(part) for part in parts)
        for t in self._tables:
            log = self._indexes[t].log
            if not sizes[t] or log is None:
                continue
            lost = olds[t][:, 1].bool()
            # first, since `_scatter` writes to the same rows
            log.append(olds[t][lost, 0], self._gather(t, rows[t][lost]))
            comes_back, records = log.take(ids[t])
            if records.numel():
                self._scatter(t, rows[t][comes_back], split_records(records, log.fields))
                rows[t], ids[t] = rows[t][~comes_back], ids[t][~comes_back]
                sizes[t] = ids[t].numel()
        return torch.cat(rows), torch.cat(ids), sizes

    @contextlib.contextmanager
    def borrowed(self, rows: Tensor, ids: Tensor, sizes: Sequence[int]) -> Iterator[bool]:
        """Lend rows to ids that have a record, for one lookup: rows that the lookup does not read.

        Args:
            rows: int64 [N] rows of the ids, ordered by table; rows of such ids are replaced.
            ids: int64 [N] the ids.
            sizes: Number of ids of each table.

        Yields:
            Whether rows are lent. Afterwards these have their own weights again.

        Raises:
            OSError: A log cannot be read.
        """
        lent = []
        try:
            for t, own_rows, own_ids in zip(
                range(len(sizes)), rows.split(list(sizes)), ids.split(list(sizes)), strict=True
            ):
                log = self._indexes[t].log
                if t in self._tables and log is not None and len(log):
                    # `own_rows` is a view of `rows`, so the caller sees the rows that are lent
                    borrowed_rows = self._lend(t, log, own_rows, own_ids)
                    if borrowed_rows is not None:
                        lent.append((self._tbe.weights[t], *borrowed_rows))
            yield bool(lent)
        finally:
            with torch.no_grad():
                for weights, places, values in lent:
                    # also after an error: nothing else may see the lent rows:
                    # docs/decisions/hashed_ids.md, "Rows on the disk: a log that gives them back"
                    weights.index_copy_(0, places, values)

    @torch.no_grad()
    def _lend(
        self, table: int, log: RowLog, rows: Tensor, ids: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Write weights of a log to rows that are not read; return these and their own weights."""
        is_unknown = self._indexes[table].are_shared(rows)
        unknown, inverse = ids[is_unknown].unique(return_inverse=True)
        known = unknown[log.has(unknown)]
        if not known.numel():
            return None
        weights = self._tbe.weights[table]
        # among so many rows, at least as many as `known` are not read
        is_read = torch.zeros(min(len(weights), rows.numel() + known.numel()), dtype=torch.bool)
        is_read[rows[rows < len(is_read)]] = True
        places = (~is_read).nonzero().flatten()[: known.numel()]
        # a small table may have too few rows to lend; the other ids stay unknown
        known = known[: places.numel()]
        if not known.numel():
            return None
        # a copy, since `places` is a tensor of indices
        original = weights[places]
        weights.index_copy_(0, places, split_records(log.read(known), log.fields)["weight"])
        # both are ascending, since `unique` sorts; an id above the last one would be out of range
        at = torch.searchsorted(known, unknown).clamp_(max=known.numel() - 1)
        lent = torch.where(known[at] == unknown, places[at], -1)[inverse]
        rows[is_unknown] = torch.where(lent >= 0, lent, rows[is_unknown])
        return places, original

    def _gather(self, table: int, rows: Tensor) -> Tensor:
        """Return the records of rows; uint8 [N, bytes]."""
        arrays = _arrays(self._tbe, table).values()
        values = (array[rows].view(rows.numel(), array[:1].numel()) for array in arrays)
        return torch.cat([part.view(torch.uint8) for part in values], 1)

    def _scatter(self, table: int, rows: Tensor, values: Mapping[str, Tensor]) -> None:
        """Set the weights and the states of rows."""
        for name, array in _arrays(self._tbe, table).items():
            array.index_copy_(0, rows, values[name].view(-1, *array.shape[1:]))


def refuse_backward(gradient: Tensor) -> NoReturn:
    """Raise the error of a backward pass through rows that were borrowed."""
    raise ValueError(
        "A batch of evaluation that reads rows from the folder of HashedIds.overflow must have no "
        "backward pass; received a gradient. Call train() before the lookup."
    )


def open_log(index: TableIndex, name: str, fields: Sequence[RecordField]) -> RowLog:
    """Return the log of a table's index, which is made if there is none yet.

    Args:
        index: The index.
        name: Name of the table.
        fields: Fields of the records.

    Raises:
        OSError: The folder cannot be written.
        ValueError: The log has rows with other fields.
    """
    assert index.rules.overflow is not None
    log = index.log
    if log is not None and log.fields == tuple(fields):
        return log
    if log is not None and len(log):
        raise ValueError(
            f"Table '{name}' must keep its dtype and its optimizer while rows of it are in the "
            f"folder of HashedIds.overflow; received fields {[f.name for f in fields]} instead of "
            f"{[f.name for f in log.fields]}. Save a checkpoint, and load it into a new model."
        )
    index.log = log = RowLog(index.rules.overflow, name, fields)
    return log
