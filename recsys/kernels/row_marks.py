"""Marks of the rows of a lookup that changed, for consumers that save or publish changes.

Shapes: N ids, T tables, R rows, K rows of a call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import final
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from recsys.kernels.lookup_batch import LookupBatch, rows_of_features
from recsys.kernels.ops import upload
from recsys.kernels.row_gradients import RowGradients
from recsys.kernels.tbe_layout import StorageLayout

_MOST_CONSUMERS = 8  # bits of a byte
_ALL = 255  # also for consumers to come, whose bits are cleared first


@final
class RowMarks:
    """One byte per row, one bit per consumer, set when a row is written.

    Without a consumer there is no memory, and calls return at once. The lookup marks the rows of
    its own updates. Other writes, by a torch optimizer or `load_state_dict` for example, are
    found by the version counters of the tensors and mark all rows.

    Args:
        layout: Geometry of the tables.
        watched: Weights and optimizer states.
    """

    def __init__(self, layout: StorageLayout, watched: Sequence[Tensor]) -> None:
        self._layout = layout
        self._watched = list(watched)
        # a bit per consumer; docs/decisions/hashed_ids.md, "Deltas by marks"
        self._bits: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._bytes: Tensor | None = None
        self._versions: list[int] = []

    @cached_property
    def _first_row_T(self) -> Tensor:
        first = [self._layout.first_row[t] for t in range(len(self._layout.tables))]
        return torch.tensor(first, device=self._layout.device)

    @cached_property
    def _first_row_F(self) -> Tensor:
        return self._first_row_T[list(self._layout.feature_table_map)]

    @property
    def exist(self) -> bool:
        """True if there is a consumer."""
        return self._bytes is not None and bool(self._bits)

    def watch(self, tensors: Sequence[Tensor]) -> None:
        """Watch further tensors that alias the weights."""
        self._watched += tensors
        if self.exist:
            self._versions = self._current_versions()

    def add(self, consumer: object) -> None:
        """Add a consumer; no row is marked for it yet.

        Args:
            consumer: Any object that can be referenced weakly. It is removed with its last
                reference.

        Raises:
            ValueError: There are 8 consumers.
        """
        free = set(range(_MOST_CONSUMERS)) - set(self._bits.values())
        if not free:
            raise ValueError(
                f"A table can have {_MOST_CONSUMERS} consumers of changed rows; received another. "
                "Close one that is not needed."
            )
        if not self.exist:
            self._bytes = torch.zeros(
                self._layout.num_rows, dtype=torch.uint8, device=self._layout.device
            )
            self._versions = self._current_versions()
        # first: a write that is found later would mark all rows for the new consumer
        self._check_writes()
        self._bits[consumer] = min(free)
        self._clear(consumer)

    def remove(self, consumer: object) -> None:
        """Remove a consumer, if it is known."""
        self._bits.pop(consumer, None)
        if not self._bits:
            self._bytes = None

    def knows(self, consumer: object) -> bool:
        """Return whether a consumer was added."""
        return consumer in self._bits

    def take(self, consumer: object) -> list[Tensor]:
        """Return the marks of a consumer, and clear them.

        Returns:
            [R] bool of each table.
        """
        self._check_writes()
        assert self._bytes is not None
        marked = self._bytes.bitwise_and(1 << self._bits[consumer]).bool()
        self._clear(consumer)
        return self._layout.row_views(marked)

    @contextlib.contextmanager
    def writes(
        self, batch: LookupBatch | None = None, by_group: Sequence[RowGradients] = ()
    ) -> Iterator[None]:
        """Context of a write by the lookup; marks the rows of a batch or of row gradients."""
        if not self.exist:
            # the last consumer may have been collected without `remove`
            self._bytes = None
            yield
            return
        # before the write by the lookup, which changes the versions, too
        self._check_writes()
        yield
        if batch is not None:
            self._fill(rows_of_features(self._first_row_F, batch))
        for group, (rows, _) in zip(self._layout.groups, by_group, strict=False):
            self._fill(rows + group.first_row)
        self._versions = self._current_versions()

    def mark_rows(self, rows: Tensor, sizes: Sequence[int]) -> None:
        """Mark rows of tables.

        Args:
            rows: [K] int64, ordered by table.
            sizes: [T] number of rows of each table.
        """
        if self.exist:
            starts = np.array([*accumulate(sizes, initial=0)], dtype=np.int64)
            batch = LookupBatch(rows, upload(starts, rows.device))  # a bag per table
            self._fill(rows_of_features(self._first_row_T, batch))

    def mark_changed(self, values: Tensor, is_changed: Tensor | None) -> None:
        """Mark the rows with a value that is not 0.

        Args:
            values: [elements of all tables], in the layout of the storage.
            is_changed: [rows of all tables], not 0 for changed rows; None: computed from `values`.
        """
        if self.exist:
            assert self._bytes is not None
            for group in self._layout.groups:
                changed = (
                    (group.matrix(values) != 0).any(1)
                    if is_changed is None
                    else group.rows(is_changed) != 0
                )
                group.rows(self._bytes).masked_fill_(changed, _ALL)

    def mark_all(self, consumer: object = None) -> None:
        """Mark all rows, after a write to weights or states from outside.

        Args:
            consumer: The only consumer to mark them for; None: all.
        """
        if self.exist:
            assert self._bytes is not None
            self._bytes.bitwise_or_(_ALL if consumer is None else 1 << self._bits[consumer])
            self._versions = self._current_versions()

    def _fill(self, rows: Tensor) -> None:
        assert self._bytes is not None
        if rows.is_cpu:  # a third of the time of `index_fill_`
            self._bytes.scatter_(0, rows, self._bytes.new_full(rows.shape, _ALL))
        else:
            self._bytes.index_fill_(0, rows, _ALL)

    def _clear(self, consumer: object) -> None:
        assert self._bytes is not None
        self._bytes.bitwise_and_(_ALL - (1 << self._bits[consumer]))

    def _current_versions(self) -> list[int]:
        # inference tensors have no version: reading it raises an error
        return [tensor._version for tensor in self._watched if not tensor.is_inference()]

    def _check_writes(self) -> None:
        if self._current_versions() != self._versions:
            self.mark_all()
