"""Rows of the ids of one lookup whose tables have hashed ids."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Final, final

import numpy as np
import torch
from torch import Tensor

from recsys.kernels.hashed.index import Mapped, map_ids
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_layout import DimGroup
from recsys.kernels.types import UpdateMode
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.embedding_init import init_new_rows
from recsys.modules.table_index import TableIndex

__all__ = ["PINNED_BATCHES", "HashedGroup"]

PINNED_BATCHES: Final = 4
"""Batches, with the current one, whose rows keep their ids. It is constant, so that pipelines,
which map ids up to three batches ahead, give the same ids rows as a plain loop."""


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
        # first steps whose rows batches without a backward pass, or updates to come, may read
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
            raise ValueError(
                f"Table '{self._configs[0].name}' with HashedIds needs an optimizer in backward, "
                "which resets its state with each new id; received none. Call "
                "apply_optimizer_in_backward before training."
            )
        step = self._last_step() + is_training
        if not self._tbe.deferred.exist:
            self._to_update.clear()
        pinned = step - PINNED_BATCHES + 1
        mapped = map_ids(
            [index.index for index in self.indexes],
            ids.long(),
            sizes,
            max(step, 1),
            min([pinned, *self._in_flight, *self._to_update]),
            is_training,
        )
        if is_training:
            self._tbe.marks.mark_rows(mapped.rows, sizes)  # their last use is written
            for counter in self._counters:
                counter.step = step
            self._counts += mapped.counts
            if mapped.new_rows.numel():
                self._initialize(mapped, step)
        return mapped.rows

    def prepare_lookup(self) -> None:
        """Set the rows of unknown ids to zero where an update may have changed them."""
        if not self._may_have_changed:
            return
        self._may_have_changed = bool(self._in_flight)
        if self._zeros.numel():
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
        self._may_have_changed = self._zeros.numel() > 0
        first = self._last_step() - PINNED_BATCHES + 1
        self._in_flight.append(first)
        release = partial(_release, first, self._in_flight, self._to_update)
        output.register_hook(lambda grad: release())
        # of a graph that is freed without a backward pass
        weakref.finalize(output.grad_fn, release).atexit = False

    def _last_step(self) -> int:
        return max(counter.step for counter in self._counters)

    def _initialize(self, mapped: Mapped, step: int) -> None:
        """Reset the rows of new ids."""
        sizes = mapped.new_sizes

        def write(group: DimGroup, weights: Tensor, rows: Tensor) -> None:
            init_new_rows(
                weights,
                rows,
                group.select(mapped.new_ids, sizes),
                [sizes[t] for t in group.tables],
                [self.indexes[t].init_seed_number for t in group.tables],
                [self._columns[t] for t in group.tables],
                step,
                [self._configs[t] for t in group.tables],
            )

        self._tbe.reset_rows(sizes, mapped.new_rows, write)


def _release(first: int, in_flight: list[int], to_update: list[int]) -> None:
    if first in in_flight:
        in_flight.remove(first)
        to_update.append(first)  # of gradients that wait for a step
