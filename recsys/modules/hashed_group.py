"""Rows of the ids of one lookup whose tables have hashed ids."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Final, final

import torch
from torch import Tensor

from recsys.kernels.hashed.index import COUNTS, map_ids
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import UpdateMode
from recsys.modules.embedding_configs import BaseEmbeddingConfig
from recsys.modules.embedding_init import init_ids
from recsys.modules.table_index import TableIndex

__all__ = ["HashedGroup"]

_UNKNOWN: Final = COUNTS.index("unknown")


@final
class HashedGroup:
    """Indexes of the tables of one lookup.

    Rows that a batch reads keep their ids until its backward pass, or until its graph is freed.

    Args:
        configs: The tables.
        indexes: The index of each.
        tbe: Their lookup.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        indexes: Sequence[TableIndex],
        tbe: TableBatchedEmbedding,
    ) -> None:
        self._configs, self._indexes, self._tbe = list(configs), list(indexes), tbe
        features = [len(config.feature_names) for config in configs]
        self._first_features = torch.tensor(list(accumulate(features, initial=0)))
        self._num_features = sum(features)
        self._in_flight: list[int] = []
        # tables whose unknown ids read zeros, while an update may have changed these rows
        self._changed = {t for t, index in enumerate(indexes) if index.rules.unknown == "zero"}

    def rows_of(self, indices: Tensor, offsets: Tensor, is_training: bool) -> Tensor:
        """Return the rows of ids; in training, give rows to new ids.

        Args:
            indices: [N] ids, ordered by table.
            offsets: [F * B + 1].
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
        self._restore_zeros()
        step = max(index.step for index in self._indexes) + is_training
        num_bags = (offsets.numel() - 1) // self._num_features
        edges = offsets[self._first_features * num_bags]
        mapped = map_ids(
            [index.index for index in self._indexes],
            indices.long(),
            edges.diff().tolist(),
            max(step, 1),
            min(self._in_flight, default=max(step, 1)),
            is_training,
        )
        if is_training:
            for t, index in enumerate(self._indexes):
                index.step = step
                index.count(mapped.counts[t])
            self._initialize(mapped.new_rows, mapped.new_ids, mapped.new_sizes, step)
            self._changed |= {
                t
                for t, index in enumerate(self._indexes)
                if index.rules.unknown == "zero" and mapped.counts[t, _UNKNOWN]
            }
        return mapped.rows

    def hold(self, output: Tensor) -> None:
        """Keep the ids of all rows that the last batch read until the backward pass of its output.

        Args:
            output: The output of the lookup, which requires a gradient.
        """
        step = max(index.step for index in self._indexes)
        self._in_flight.append(step)
        release = partial(_remove, self._in_flight, step)
        output.register_hook(lambda grad: release())
        # of a graph that is freed without one
        weakref.finalize(output.grad_fn, release).atexit = False

    def _initialize(self, rows: Tensor, ids: Tensor, sizes: Sequence[int], step: int) -> None:
        for t, (own_rows, own_ids) in enumerate(
            zip(rows.split(list(sizes)), ids.split(list(sizes)), strict=True)
        ):
            if own_rows.numel():
                values = init_ids(
                    self._indexes[t].init_seed_number, own_ids, step, self._configs[t]
                )
                self._tbe.reset_rows(t, own_rows, values)

    def _restore_zeros(self) -> None:
        """Set the rows of unknown ids to zero where an update may have changed them."""
        for t in self._changed:
            rows = self._indexes[t].shared_rows()
            zeros = torch.zeros(len(rows), self._configs[t].embedding_dim, device=rows.device)
            self._tbe.reset_rows(t, rows, zeros)
        if not self._in_flight:
            self._changed.clear()


def _remove(steps: list[int], step: int) -> None:
    if step in steps:
        steps.remove(step)
