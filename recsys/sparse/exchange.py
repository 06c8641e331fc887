"""Moving a KeyedJaggedTensor between ranks: what to send, and putting together what came.

`recsys.distributed` has its own narrower wire format; this serves code that exchanges
KeyedJaggedTensors by itself.

Legend: `F` features, `W` ranks, `N` values; a part is the bags of one feature from one rank.
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
    """Return what an exchange sends: lengths, values, strides if they vary, and weights if any."""
    kjt = kjt.trim()
    tensors = {"lengths": kjt.lengths(), "values": kjt.values()}
    if kjt.variable_stride_per_key():
        tensors["strides"] = torch.tensor(kjt.stride_per_key(), device=kjt.device())
    weights = kjt.weights_or_none()
    return tensors if weights is None else {**tensors, "weights": weights}


def splits(kjt: KeyedBags, key_splits: list[int]) -> list[list[int]]:
    """Return how many entries of each of `named_tensors` go to each rank."""
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
    """Reorder what came rank by rank, `[W][F]`, into feature-major order, `[F][W]`.

    Args:
        keys: the features.
        tensors: lengths, values, the strides `[W * F]` of the parts if sent, and weights if any.
        has_strides: whether strides are among the tensors.
        num_ranks: `W`.
        recat: permutes the `W * F` parts; single bags where ranks have different batch sizes. None
            where the order is right already.
        stride_per_rank: the batch size of each rank; required unless strides are sent.

    Returns:
        Arguments of KeyedJaggedTensor.

    Raises:
        ValueError: as `KeyedJaggedTensor.dist_init`.
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
        told: dict[str, Any] = {
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
        told = {"stride": sum(stride_per_rank)}
    return {"values": values, "weights": weights, "lengths": lengths.view(-1), **told}


def _check_recat(recat: Tensor, num_parts: int) -> None:
    # A kernel would read past the end.
    if recat.numel() != num_parts:
        raise ValueError(
            "KeyedJaggedTensor.dist_init: recat must permute the parts received (features of each "
            "rank; single bags where batch sizes differ between ranks); received "
            f"{recat.numel()} positions for {num_parts} parts."
        )


def _sum_runs(sizes: list[int], run_lengths: list[int]) -> list[int]:
    remaining = iter(sizes)
    return [sum(itertools.islice(remaining, length)) for length in run_lengths]
