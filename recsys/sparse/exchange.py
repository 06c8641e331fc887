"""Tensors to exchange a KeyedJaggedTensor between ranks, and the assembly of received tensors.

For user code that exchanges KeyedJaggedTensors; `recsys.distributed` has a narrower wire format.

Shapes: `F` features, `W` ranks, `N` values; a part has the bags of one feature from one rank.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from recsys.kernels import ops

if TYPE_CHECKING:
    from recsys.sparse.keyed_bags import KeyedBags


def named_tensors(kjt: KeyedBags) -> dict[str, Tensor]:
    """Return the tensors to send: lengths, values, strides if they vary, and weights if any."""
    kjt = kjt.trim()
    tensors = {"lengths": kjt.lengths(), "values": kjt.values()}
    if kjt.variable_stride_per_key():
        tensors["strides"] = torch.tensor(kjt.stride_per_key(), device=kjt.device())
    weights = kjt.weights_or_none()
    return tensors if weights is None else {**tensors, "weights": weights}


def splits(kjt: KeyedBags, key_splits: list[int]) -> list[list[int]]:
    """Return the number of entries of each of `named_tensors` to send to each rank."""
    values = _sum_runs(kjt.length_per_key(), key_splits)
    strides = _sum_runs(kjt.stride_per_key(), key_splits)
    sizes = {"lengths": strides, "values": values, "strides": list(key_splits), "weights": values}
    return [sizes[name] for name in named_tensors(kjt)]


def receive(
    keys: list[str],
    tensors: list[Tensor],
    has_strides: bool,
    num_ranks: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
) -> dict[str, Any]:
    """Reorder received tensors from `[W][F]` order, by rank, to `[F][W]` order, by feature.

    Args:
        keys: The features.
        tensors: Lengths, values, strides `[W * F]` of the parts if sent, and weights if any.
        has_strides: True if `tensors` contains strides.
        num_ranks: `W`.
        recat: Permutation of the `W * F` parts, or of single bags if ranks have different batch
            sizes. None if no permutation is needed.
        stride_per_rank: Batch size of each rank; required unless strides are sent.

    Returns:
        Arguments of KeyedJaggedTensor.

    Raises:
        ValueError: As `KeyedJaggedTensor.dist_init`.
    """
    lengths, values, *rest = tensors
    strides = rest.pop(0) if has_strides else None
    weights = rest[0] if rest else None
    num_parts = len(keys) * num_ranks
    if strides is not None:
        if recat is not None:
            _check_recat(recat, strides.numel())
            sizes = ops.segment_sum(lengths, ops.complete_cumsum(strides))
            _, values, weights = ops.permute_1d(recat, sizes, values, weights, values.numel())
            strides, lengths, _ = ops.permute_1d(recat, strides, lengths, None, lengths.numel())
        sizes_of: dict[str, Any] = {
            "stride_per_key_per_rank": strides.view(len(keys), -1).tolist() if keys else []
        }
    else:
        if stride_per_rank is None or len(stride_per_rank) != num_ranks:
            raise ValueError(
                "KeyedJaggedTensor.dist_init: stride_per_rank must have one batch size for "
                f"each of {num_ranks} ranks; received {stride_per_rank}."
            )
        if recat is not None and lengths.numel():
            if len(set(stride_per_rank)) > 1:
                num_parts = lengths.numel()  # single bags
            _check_recat(recat, num_parts)
            lengths, values, weights = ops.permute_2d(
                recat, lengths.view(num_parts, -1), values, weights, values.numel()
            )
        sizes_of = {"stride": sum(stride_per_rank)}
    return {"values": values, "weights": weights, "lengths": lengths.view(-1), **sizes_of}


def _check_recat(recat: Tensor, num_parts: int) -> None:
    # a kernel would read out of bounds
    if recat.numel() != num_parts:
        raise ValueError(
            "KeyedJaggedTensor.dist_init: recat must permute the received parts (features of each "
            "rank, or single bags if batch sizes differ between ranks); received "
            f"{recat.numel()} positions for {num_parts} parts."
        )


def _sum_runs(sizes: list[int], run_lengths: list[int]) -> list[int]:
    remaining = iter(sizes)
    return [sum(itertools.islice(remaining, length)) for length in run_lengths]
