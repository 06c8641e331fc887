"""Rows of the ids of one lookup whose tables have hashed ids."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Final, final

import torch
from torch import Tensor

from recsys.kernels.hashed.index import map_ids
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import UpdateMode
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.embedding_init import init_ids
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
        self._first_features = torch.tensor(list(accumulate(features, initial=0)))
        self._num_features = sum(features)
        self._zeros = [t for t, index in enumerate(indexes) if index.rules.unknown == "zero"]
        self._may_have_changed = True  # rows of `_zeros` that unknown ids read
        # first steps whose rows batches without a backward pass, or updates to come, may read
        self._in_flight: list[int] = []
        self._to_update: list[int] = []

    def sizes_of(self, offsets: Tensor) -> list[int]:
        """Return the number of ids of each table, given the offsets of bags, `[F * B + 1]`."""
        num_bags = (offsets.numel() - 1) // self._num_features
        sizes: list[int] = offsets[self._first_features * num_bags].diff().tolist()
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
        step = max(index.step for index in self.indexes) + is_training
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
            for t, index in enumerate(self.indexes):
                index.step = step
                index.count(mapped.counts[t])
            self._initialize(mapped.new_rows, mapped.new_ids, mapped.new_sizes, step)
        return mapped.rows

    def prepare_lookup(self) -> None:
        """Set the rows of unknown ids to zero where an update may have changed them."""
        if not self._may_have_changed:
            return
        self._may_have_changed = bool(self._in_flight)
        for t in self._zeros:
            rows, dim = self.indexes[t].shared_rows(), self._tbe.layout.tables[t].dim
            self._tbe.reset_rows(t, rows, torch.zeros(len(rows), dim, device=rows.device))

    def hold(self, output: Tensor) -> None:
        """Keep the ids of the rows of a lookup until its update, or until its graph is freed.

        Args:
            output: The output of the lookup, which requires a gradient.
        """
        self._may_have_changed = bool(self._zeros)
        first = max(index.step for index in self.indexes) - PINNED_BATCHES + 1
        self._in_flight.append(first)
        release = partial(_release, first, self._in_flight, self._to_update)
        output.register_hook(lambda grad: release())
        # of a graph that is freed without a backward pass
        weakref.finalize(output.grad_fn, release).atexit = False

    def _initialize(self, rows: Tensor, ids: Tensor, sizes: Sequence[int], step: int) -> None:
        for t, (own_rows, own_ids) in enumerate(
            zip(rows.split(list(sizes)), ids.split(list(sizes)), strict=True)
        ):
            if own_rows.numel():
                values = init_ids(self.indexes[t].init_seed_number, own_ids, step, self._configs[t])
                self._tbe.reset_rows(t, own_rows, values[:, self._columns[t]])


def _release(first: int, in_flight: list[int], to_update: list[int]) -> None:
    if first in in_flight:
        in_flight.remove(first)
        to_update.append(first)  # of gradients that wait for a step
