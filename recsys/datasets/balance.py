"""Division of batches of sequences among ranks by the cost of attention.

The cost of a sequence of `n` values is `n * (n + linear)`: attention reads all pairs, other layers
each value. Shapes: `B` samples of all ranks, `W` ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, cast, final

import numpy as np
import torch
from torch.utils.data import IterableDataset, Sampler

from recsys.base.arguments import finite, flag, shown, whole
from recsys.base.loaders import begin_epoch, epoch_length
from recsys.datasets.utils import Batch, check_rank, rank_in_job
from recsys.datasets.windows import take_rows

if TYPE_CHECKING:
    from recsys.datasets.table_reader import TableReader

__all__ = ["BalancedBatches", "BalancedSampler", "balanced_order", "imbalance"]

_Array: TypeAlias = np.ndarray[Any, Any]
_STATE_METHODS: Final = ("state_dict", "load_state_dict", "load_state_dicts")


def balanced_order(costs: _Array, num_parts: int) -> tuple[_Array, _Array]:
    """Divide items into parts of about equal cost.

    Items are given in order of falling cost to the part that costs least so far: the costliest part
    costs at most 4/3 of the best division (Graham, "Bounds on multiprocessing timing anomalies",
    1969), and hardly more than the mean if there are many items per part. Of parts that cost the
    same, the one with fewer items is chosen, so that items without cost are divided, too.

    Args:
        costs: [B] not negative.
        num_parts: Number of parts.

    Returns:
        int64 [B], the items by part, ascending in each; and int64 [num_parts + 1], the edges of
        the parts in them.

    Example:
        >>> order, edges = balanced_order(np.array([9.0, 1.0, 4.0, 4.0]), 2)
        >>> [order[edges[i] : edges[i + 1]].tolist() for i in range(2)]
        [[0], [1, 2, 3]]
    """
    heap = [(0.0, 0, part) for part in range(whole("num_parts", num_parts))]
    part_of = np.empty(len(costs), np.int64)
    for item in np.argsort(-costs, kind="stable").tolist():
        total, count, part = heap[0]
        part_of[item] = part
        heapq.heapreplace(heap, (total + float(costs[item]), count + 1, part))
    edges = np.zeros(num_parts + 1, np.int64)
    np.cumsum(np.bincount(part_of, minlength=num_parts), out=edges[1:])
    return np.argsort(part_of, kind="stable"), edges


def imbalance(costs: _Array, order: _Array, edges: _Array) -> float:
    """Return by how much the costliest part exceeds the mean, as a share of the mean.

    Args:
        costs: [B].
        order: Items by part.
        edges: Edges of the parts in `order`.

    Example:
        >>> imbalance(np.array([9.0, 1.0, 4.0, 4.0]), np.arange(4), np.array([0, 2, 4]))
        0.11111111111111116
    """
    sums = np.add.reduceat(np.append(costs[order], 0.0), edges[:-1])
    sums[edges[:-1] == edges[1:]] = 0.0
    return float(sums.max() / sums.mean() - 1) if sums.any() else 0.0


@final
class BalancedBatches(IterableDataset[Batch]):
    """A rank's share of batches of all ranks, balanced by the lengths of a feature.

    Every rank reads the same batches, such as from a reader with `batch_size` times the number of
    ranks, `rank=0` and `world_size=1`, and takes the samples that are its own. Nothing is
    exchanged, but every rank decodes the samples of all ranks, as with `divide="batches"` of a
    reader; `BalancedSampler` reads its own samples alone. A step has the same samples as without
    balancing, and their weights make the mean loss over ranks equal to the loss of the whole batch,
    so training gives the same results, except for rounding. This holds if the loss of a sample does
    not depend on other samples. The loss "in_batch" of `NextItem` does: it compares a target with
    the other targets of its rank. Add the `candidates` of `NextItem` after the division. A rank has
    an empty batch in a step with fewer samples than ranks.

    Args:
        batches: Batches of all ranks, on the CPU, equal on every rank. This object has their
            `state_dict`, `load_state_dict` and `load_state_dicts`, if they have them.
        feature: Feature whose lengths decide the cost.
        rank: This process; None: its rank in the process group, if there is one, else 0.
        world_size: Number of processes, `W`; None: as for `rank`, else 1.
        mean_over: The items whose mean is the loss of a rank: "samples", as of `DLRMTrain`, or
            "values" of the feature, as of `NextItem`.
        linear: Number of values that cost as much in other layers as one pair in attention.

    Attributes:
        imbalance: Mean over the batches so far of the cost of the costliest rank, relative to the
            mean of all, minus 1.
        unbalanced: The same for samples divided in order.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> lengths = torch.tensor([3, 1, 2, 2])
        >>> ids = KeyedJaggedTensor(["seen"], torch.arange(8), lengths=lengths)
        >>> batch = Batch(torch.zeros(4, 0), ids, torch.zeros(4))
        >>> balanced = BalancedBatches([batch], "seen", rank=1, world_size=2)
        >>> [part.sparse_features["seen"].lengths().tolist() for part in balanced]
        [[1, 2, 2]]
        >>> balanced.imbalance, round(balanced.unbalanced, 3)
        (0.0, 0.111)
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        feature: str,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        mean_over: Literal["samples", "values"] = "values",
        linear: float = 0.0,
    ) -> None:
        super().__init__()
        rank, world_size = rank_in_job(rank, world_size)
        check_rank(rank, world_size, 1)
        if (shared_by := getattr(batches, "world_size", 1)) > 1:
            raise ValueError(
                "batches must have the samples of all ranks; received a reader of a rank of "
                f"{shared_by}. Pass rank=0 and world_size=1 to the reader."
            )
        if mean_over not in ("samples", "values"):
            raise ValueError(
                f"mean_over must be 'samples' or 'values'; received {shown(mean_over)}."
            )
        self.batches, self.feature = batches, feature
        self.rank, self.world_size, self.mean_over = rank, world_size, mean_over
        self.linear = finite("linear", linear)
        self.imbalance = self.unbalanced = 0.0
        self._count = 0
        for name in _STATE_METHODS:
            if hasattr(batches, name):  # a trainer skips batches that have none
                setattr(self, name, getattr(batches, name))
        if hasattr(batches, "_load_other_ranks"):  # a TableReader, which needs pyarrow
            self.load_state_dicts = self._load_state_dicts

    @property
    def num_batches(self) -> int | None:
        """Number of batches of an epoch; None if it is unknown."""
        return epoch_length(self.batches)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, on which the order of a shuffle depends.

        Args:
            epoch: Its number, from 0.
        """
        begin_epoch(self.batches, whole("epoch", epoch, 0))

    def _load_state_dicts(self, states: Sequence[Mapping[str, int]]) -> None:
        reader = cast("TableReader", self.batches)  # a reader of one process
        if len(states) == self.world_size:
            reader.load_state_dict(states[0])
        else:
            reader._load_other_ranks(states)

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.batches:
            yield self._share(batch)

    def _share(self, batch: Batch) -> Batch:
        lengths = batch.sparse_features[self.feature].lengths().numpy()
        costs = _costs(lengths, self.linear)
        size, world_size = len(lengths), self.world_size
        order, edges = balanced_order(costs, world_size)
        self._count += 1
        in_order = np.arange(world_size + 1) * size // world_size
        for name, *parts in (
            ("imbalance", order, edges),
            ("unbalanced", np.arange(size), in_order),
        ):
            mean = getattr(self, name)
            setattr(self, name, mean + (imbalance(costs, *parts) - mean) / self._count)
        first, last = edges[self.rank : self.rank + 2].tolist()
        mine = take_rows(batch, order[first:last])
        counts = np.ones(size) if self.mean_over == "samples" else lengths.astype(np.float64)
        rank_samples = counts[order[first:last]].sum()
        weight = rank_samples * world_size / counts.sum() if rank_samples else 0.0
        weights = torch.full((last - first,), weight)
        if mine.sample_weights is not None:
            weights = weights * mine.sample_weights
        return replace(mine, sample_weights=weights)


@final
class BalancedSampler(Sampler[list[int]]):
    """Positions of a rank's samples of a map-style data set, balanced by their lengths.

    For `torch.utils.data.DataLoader(data, batch_sampler=...)`. In each step all ranks together have
    `world_size * batch_size` samples. Losses that are means over a rank's samples or values are to
    be multiplied by `weights`; see `BalancedBatches`. In a last step with fewer samples than ranks,
    a rank has an empty list, which the `collate_fn` of the DataLoader must accept.

    Args:
        lengths: Number of values of each sample.
        batch_size: Samples of a rank and step, on average.
        rank: This process; None: its rank in the process group, if there is one, else 0.
        world_size: Number of processes, `W`; None: as for `rank`, else 1.
        shuffle: Another order in each epoch; see `set_epoch`.
        seed: Seed of the order; the same on all ranks.
        linear: As for `BalancedBatches`.

    Raises:
        ValueError: An argument is out of its range.

    Example:
        >>> sampler = BalancedSampler([5, 3, 4, 0], 2, rank=0, world_size=2)
        >>> list(sampler), sampler.weights(0, mean_over="values")
        ([[0, 3]], 0.8333333333333334)
    """

    def __init__(
        self,
        lengths: Sequence[int] | _Array,
        batch_size: int,
        rank: int | None = None,
        world_size: int | None = None,
        *,
        shuffle: bool = False,
        seed: int = 0,
        linear: float = 0.0,
    ) -> None:
        rank, world_size = rank_in_job(rank, world_size)
        check_rank(rank, world_size, batch_size)
        lengths_N: _Array = np.asarray(lengths)
        self.lengths: _Array = lengths_N.astype(np.int64)
        if lengths_N.ndim != 1 or (self.lengths != lengths_N).any() or (self.lengths < 0).any():
            raise ValueError(
                "lengths must be whole numbers, [samples], not negative; received "
                f"{lengths_N.dtype} {list(lengths_N.shape)}, the least {lengths_N.min(initial=0)}."
            )
        self.batch_size, self.rank, self.world_size = batch_size, rank, world_size
        self.shuffle, self.seed = flag("shuffle", shuffle), whole("seed", seed, 0)
        self.linear = finite("linear", linear)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration.

        Args:
            epoch: Its number, from 0.
        """
        self.epoch = whole("epoch", epoch, 0)
        self._order = np.arange(len(self.lengths))
        if self.shuffle:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self._order)

    def __len__(self) -> int:
        """Return the number of steps."""
        return -(-len(self.lengths) // (self.batch_size * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        for step in range(len(self)):
            yield self._parts(step)[self.rank].tolist()

    def weights(self, step: int, mean_over: Literal["samples", "values"] = "values") -> float:
        """Return the factor by which this rank's mean loss counts in the mean of all.

        Args:
            step: Number of the step in the epoch, from 0.
            mean_over: The items whose mean is the loss of a rank.
        """
        sums = [
            float(len(part) if mean_over == "samples" else self.lengths[part].sum())
            for part in self._parts(step)
        ]
        return sums[self.rank] * self.world_size / max(1.0, sum(sums))

    def _parts(self, step: int) -> list[_Array]:
        """Return the positions of each rank."""
        size = self.batch_size * self.world_size
        chosen = self._order[step * size : (step + 1) * size]
        by_part, edges = balanced_order(_costs(self.lengths[chosen], self.linear), self.world_size)
        return [chosen[part] for part in np.split(by_part, edges[1:-1])]


def _costs(lengths: _Array, linear: float) -> _Array:
    lengths = lengths.astype(np.float64)
    costs: _Array = lengths * (lengths + linear)
    return costs
