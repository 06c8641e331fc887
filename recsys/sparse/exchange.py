"""Moving a KeyedJaggedTensor between ranks: what to send, and putting together what came.

`recsys.distributed` has its own narrower wire format; this serves code that exchanges
KeyedJaggedTensors by itself.

Legend: `F` features, `W` ranks, `N` values; a segment is the bags of one feature from one rank.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.sparse.keyed_buffer import KeyedBuffer


class KeyedExchange(KeyedBuffer):
    """The part of KeyedJaggedTensor that an all-to-all between ranks needs."""

    __slots__ = ()

    def dist_labels(self) -> list[str]:
        """Name the tensors an exchange sends: lengths, values, strides and weights if any."""
        labels = ["lengths", "values"]
        if self.variable_stride_per_key():
            labels.append("strides")
        if self._weights is not None:
            labels.append("weights")
        return labels

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Say how many entries of each tensor go to each rank.

        Args:
            key_splits: how many consecutive features go to each rank.

        Returns:
            One list of `W` sizes per entry of `dist_labels()`.
        """
        values = _sum_runs(self.length_per_key(), key_splits)
        splits = [_sum_runs(self.stride_per_key(), key_splits), values]
        if self.variable_stride_per_key():
            splits.append(list(key_splits))
        if self._weights is not None:
            splits.append(values)
        return splits

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors an exchange sends, one per entry of `dist_labels()`."""
        tensors = [self.lengths(), self._values]
        if self.variable_stride_per_key():
            tensors.append(torch.tensor(self.stride_per_key(), device=self._values.device))
        if self._weights is not None:
            tensors.append(self._weights)
        return tensors

    @classmethod
    def dist_init(
        cls,
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> Self:
        """Put together what all ranks sent, each tensor being the ranks' parts end to end.

        Args:
            keys: the features received, the same from every rank.
            tensors: as `dist_tensors()`, received.
            variable_stride_per_key: whether strides are among the tensors.
            num_workers: `W`.
            recat: the permutation from `[W][F]` to `[F][W]` order; of single bags where ranks have
                different batch sizes. None where the order is right already.
            stride_per_rank: batch size of each rank; required unless strides are sent.
            stagger: kept for callers: the order of ranks is what `recat` makes it.

        Returns:
            A synced keyed jagged tensor with the bags of all ranks.

        Raises:
            ValueError: if `stride_per_rank` or `recat` do not have as many entries as there are
                ranks or parts.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor.dist_init(
            ...     keys=["a", "b"],
            ...     tensors=[torch.tensor([1, 0, 0, 1]), torch.tensor([7, 8])],
            ...     variable_stride_per_key=False,
            ...     num_workers=2,
            ...     recat=torch.tensor([0, 2, 1, 3]),
            ...     stride_per_rank=[1, 1],
            ... )
            >>> kjt.lengths()
            tensor([1, 0, 0, 1])
        """
        lengths, values, *rest = tensors
        if variable_stride_per_key:
            strides, *rest = rest
            received = _receive_variable(
                len(keys), lengths, values, rest[0] if rest else None, strides, recat
            )
        else:
            if stride_per_rank is None or len(stride_per_rank) != num_workers:
                raise ValueError(
                    "KeyedJaggedTensor.dist_init: stride_per_rank must have one batch size for "
                    f"each of {num_workers} ranks; received {stride_per_rank}."
                )
            received = _receive_uniform(
                len(keys), lengths, values, rest[0] if rest else None, recat, stride_per_rank
            )
        return cls(
            keys,
            received.values,
            received.weights,
            lengths=received.lengths,
            stride=received.stride,
            stride_per_key_per_rank=received.stride_per_key_per_rank,
        ).sync()


class _Received(NamedTuple):
    """The parts of a KeyedJaggedTensor put together from what several ranks sent."""

    values: Tensor
    weights: Tensor | None
    lengths: Tensor
    stride: int | None
    """Bags per feature, or None when it differs between features."""
    stride_per_key_per_rank: list[list[int]] | None


def _receive_uniform(
    num_keys: int,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    recat: Tensor | None,
    stride_per_rank: Sequence[int],
) -> _Received:
    """Reorder what came rank by rank, `[W][F][B_w]`, into feature-major order, `[F][W][B_w]`.

    `recat` permutes the `W * F` segments where every rank has the same batch size, and single
    bags where they differ. None where the order is right already.
    """
    if recat is not None and lengths.numel():
        is_even = len(set(stride_per_rank)) == 1
        _check_recat(recat, len(stride_per_rank) * num_keys if is_even else lengths.numel())
        if is_even:
            lengths_SB = lengths.view(len(stride_per_rank) * num_keys, -1)
            lengths, values, weights = ops.permute_2d(
                recat, lengths_SB, values, weights, values.numel()
            )
            lengths = lengths.view(-1)
        else:
            lengths, values, weights = ops.permute_1d(
                recat, lengths, values, weights, values.numel()
            )
    return _Received(values, weights, lengths, sum(stride_per_rank), None)


def _receive_variable(
    num_keys: int,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    strides: Tensor,
    recat: Tensor | None,
) -> _Received:
    """Reorder segments of different sizes, `[W][F]`, into feature-major order, `[F][W]`.

    `strides` `[W * F]` is the number of bags of each segment as received.
    """
    if recat is not None:
        _check_recat(recat, strides.numel())
        values_per_segment = ops.segment_sum(lengths, ops.complete_cumsum(strides))
        _, values, weights = ops.permute_1d(
            recat, values_per_segment, values, weights, values.numel()
        )
        strides, lengths, _ = ops.permute_1d(recat, strides, lengths, None, lengths.numel())
    per_key_per_rank: list[list[int]] = strides.view(num_keys, -1).tolist() if num_keys else []
    return _Received(values, weights, lengths, None, per_key_per_rank)


def _check_recat(recat: Tensor, num_segments: int) -> None:
    # A kernel would read past the end.
    if recat.numel() != num_segments:
        raise ValueError(
            "KeyedJaggedTensor.dist_init: recat must permute the parts received (features of each "
            "rank; single bags where batch sizes differ between ranks); received "
            f"{recat.numel()} positions for {num_segments} parts."
        )


def _sum_runs(sizes: list[int], run_lengths: list[int]) -> list[int]:
    remaining = iter(sizes)
    return [sum(itertools.islice(remaining, length)) for length in run_lengths]
