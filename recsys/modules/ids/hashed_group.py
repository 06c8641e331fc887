"""Map hashed ids to table rows for one lookup."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import Any, NoReturn, final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels.hashed.index import Mapped, map_ids
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_layout import DimGroup
from recsys.kernels.types import UpdateMode
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.ids.row_store import RowStore, refuse_backward
from recsys.modules.ids.rows import PINNED_BATCHES
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.embedding_init import init_new_rows

__all__ = ["HashedGroup", "refuse_training"]


@final
class HashedGroup:
    """Indexes of the tables of one lookup.

    Rows that a batch reads keep their ids until their update, or until its graph is freed, and for
    `PINNED_BATCHES` at least.

    Args:
        configs: The tables.
        indexes: The index of each, or of its rows in the lookup.
        columns: The columns of each in the lookup.
        tbe: Their lookup.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        indexes: Sequence[TableIndex],
        columns: Sequence[slice],
        tbe: TableBatchedEmbedding,
    ) -> None:
        self._configs, self.indexes, self._tbe = list(configs), list(indexes), tbe
        self._columns = list(columns)
        features = [len(config.feature_names) for config in configs]
        self._store = RowStore(configs, indexes, tbe)
        self._has_borrowed = False  # rows of the last lookup
        self._first_features = np.array(list(accumulate(features, initial=0)))
        self._num_features = sum(features)
        # of tables whose unknown ids read zeros, the rows that they read
        zeros = [
            index.shared_rows()[: None if index.rules.unknown == "zero" else 0] for index in indexes
        ]
        self._zero_sizes, self._zeros = [len(rows) for rows in zeros], torch.cat(zeros)
        self._counters = [index.counter for index in indexes]
        self._counts = torch.stack([index.counts for index in indexes])
        for index, counts in zip(indexes, self._counts, strict=True):
            index.counts = counts  # all are added up at once
        self._may_have_changed = True  # rows of `_zeros` that unknown ids read
        self._batch = 0  # training batches of this group
        # first batches whose rows batches without a backward pass, or updates to come, may read
        self._in_flight: list[int] = []
        self._to_update: list[int] = []

    def sizes_of(self, offsets: Tensor) -> list[int]:
        """Return the number of ids of each table, given the offsets of bags, `[F * B + 1]`."""
        num_bags = (offsets.numel() - 1) // self._num_features
        edges = self._first_features * num_bags
        if offsets.is_cpu:
            on_host: np.ndarray = offsets.numpy()[edges]
        else:
            on_host = offsets[torch.from_numpy(edges)].numpy(force=True)
        sizes: list[int] = np.diff(on_host).tolist()
        return sizes

    def rows_of(self, ids: Tensor, sizes: Sequence[int], is_training: bool) -> Tensor:
        """Return the rows of ids; in training, give rows to new ids.

        Args:
            ids: [N], ordered by table.
            sizes: Number of ids of each table.
            is_training: Whether the batch is trained on. Otherwise nothing is written.

        Returns:
            int64 [N].

        Raises:
            ValueError: The tables are trained without an optimizer in backward.
        """
        if is_training and self._tbe.update_mode is UpdateMode.GRADIENT:
            refuse_training(self._configs[0].name)
        if is_training and self._store:
            self._store.open()
        self._batch += is_training
        if not self._tbe.deferred.exist:
            self._to_update.clear()
        pinned = self._batch - PINNED_BATCHES + 1
        behind = self._batch - min([pinned, *self._in_flight, *self._to_update])
        steps = [counter.step + is_training for counter in self._counters]
        if min(steps) == max(steps):  # of all tables, unless some were loaded alone
            return self._map(slice(None), ids.long(), sizes, steps[0], behind, is_training)
        rows, first, first_id = list[Tensor](), 0, 0
        for step, run in groupby(steps):
            tables = slice(first, first + len(list(run)))
            of_run = sizes[tables]
            run_ids = ids[first_id : first_id + sum(of_run)].long()
            rows.append(self._map(tables, run_ids, of_run, step, behind, is_training))
            first, first_id = tables.stop, first_id + sum(of_run)
        return torch.cat(rows)

    def _map(
        self,
        tables: slice,
        ids: Tensor,
        sizes: Sequence[int],
        step: int,
        behind: int,
        is_training: bool,
    ) -> Tensor:
        """Return the rows of the ids of tables that have had as many training batches.

        Args:
            tables: The tables.
            ids: int64 [N] their ids.
            sizes: Number of ids of each.
            step: The training batch, counted by the tables.
            behind: Number of earlier batches whose rows cannot be evicted.
            is_training: Whether the batch is trained on.
        """
        mapped = map_ids(
            [index.index for index in self.indexes[tables]],
            ids,
            sizes,
            # 0 in `last_used` marks a free row
            max(step, 1),
            step - behind,
            is_training,
            returns_old=is_training and bool(self._store),
        )
        if is_training:
            # deltas contain the row states, and the last use is one:
            # docs/decisions/hashed_ids.md, "Deltas by marks"
            self._tbe.marks.mark_rows(mapped.rows, self._expand_sizes(tables, sizes))  # last use
            for counter in self._counters[tables]:
                counter.step = step
            self._counts[tables] += mapped.counts
            if mapped.new_rows.numel():
                self._initialize(mapped, self._expand_sizes(tables, mapped.new_sizes), step)
        return mapped.rows

    def _expand_sizes(self, tables: slice, sizes: Sequence[int]) -> list[int]:
        """Expand sizes of some tables to all tables of the group; other tables get 0."""
        expanded = [0] * len(self.indexes)
        expanded[tables] = sizes
        return expanded

    def maps_at_lookup(self, is_training: bool) -> bool:
        """Return whether a batch is mapped by `rows_to_read` at its lookup, not by `rows_of`.

        A batch of evaluation borrows rows for ids that have theirs on the disk. These must have
        their own weights again before anything else reads them.
        """
        # CPU lookups are synchronous, so nothing else sees the table meanwhile:
        # docs/decisions/hashed_ids.md, "Rows on the disk: a log that gives them back"
        return bool(self._store) and not is_training

    @contextlib.contextmanager
    def rows_to_read(self, ids: Tensor, sizes: Sequence[int]) -> Iterator[Tensor]:
        """Yield the rows of ids for one lookup of evaluation, after `prepare_lookup`.

        Args:
            ids: [N], ordered by table.
            sizes: Number of ids of each table.

        Raises:
            OSError: Rows on the disk cannot be read.
        """
        rows = self.rows_of(ids, sizes, is_training=False)
        with self._store.borrowed(rows, ids.long(), sizes) as self._has_borrowed:
            yield rows.to(ids.dtype)

    def prepare_lookup(self) -> None:
        """Set the rows of unknown ids to zero where an update may have changed them."""
        self._has_borrowed = False
        if not self._zeros.numel():
            return
        for counter in self._counters:
            if counter.was_loaded:
                self._may_have_changed, counter.was_loaded = True, False
        if not self._may_have_changed:
            return
        self._may_have_changed = bool(self._in_flight) or self._tbe.deferred.exist
        self._tbe.reset_rows(
            self._zero_sizes,
            self._zeros,
            lambda group, weights, rows: weights.index_fill_(0, rows, 0.0),
        )

    def hold(self, output: Tensor) -> None:
        """Keep the ids of the rows of a lookup until its update, or until its graph is freed.

        Args:
            output: The output of the lookup, which requires a gradient.
        """
        if self._has_borrowed:
            output.register_hook(refuse_backward)
        self._may_have_changed = self._zeros.numel() > 0
        first = self._batch - PINNED_BATCHES + 1
        self._in_flight.append(first)
        pin = _Pin()  # it ends with the graph; nodes of C++ have no weak references
        release = weakref.finalize(pin, _release, first, self._in_flight, self._to_update)
        release.atexit = False
        node: Any = output.grad_fn
        node.metadata[_Pin] = pin
        output.register_hook(lambda grad: release())  # runs once

    def _initialize(self, mapped: Mapped, sizes: Sequence[int], step: int) -> None:
        """Set the rows of new ids; `sizes` has their number for each table."""
        new_rows, new_ids = mapped.new_rows, mapped.new_ids
        if self._store:
            new_rows, new_ids, sizes = self._store.exchange(new_rows, new_ids, mapped.old, sizes)

        def write(group: DimGroup, weights: Tensor, rows: Tensor) -> None:
            init_new_rows(
                weights,
                rows,
                group.select(new_ids, sizes),
                [sizes[t] for t in group.tables],
                [self.indexes[t].init_seed_number for t in group.tables],
                [self._columns[t] for t in group.tables],
                step,
                [self._configs[t] for t in group.tables],
            )

        self._tbe.reset_rows(sizes, new_rows, write)


class _Pin:
    """Is referenced by the graph of an output alone."""


def _release(first: int, in_flight: list[int], to_update: list[int]) -> None:
    in_flight.remove(first)
    to_update.append(first)  # of gradients that wait for a step


def refuse_training(table: str) -> NoReturn:
    """Raise the error of a table with hashed ids that is trained without an optimizer."""
    raise ValueError(
        f"Table '{table}' with HashedIds needs an optimizer in backward, "
        "which resets its state with each new id; received none. Call "
        "apply_optimizer_in_backward before training."
    )
