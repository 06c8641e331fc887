"""Checks of a batch in an exported program, in eager mode, TorchScript and `torch.export`.

Shapes: `K` keys of a batch, `B` batch size, `N` ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recsys.sparse import KeyedJaggedTensor

__all__ = [
    "are_outside",
    "by_key",
    "fails",
    "first_bad_id",
    "positions_in",
    "read_sizes",
    "to_device",
]


def positions_in(features: KeyedJaggedTensor, names: list[str]) -> list[int]:
    """Return the positions of features among the keys of a batch.

    Raises:
        KeyError: The batch lacks a feature.
        ValueError: The batch has a batch size per key.
    """
    if features.variable_stride_per_key():
        raise ValueError("A traced model takes batches with one batch size for all features.")
    keys = features.keys()
    positions: list[int] = []
    for name in names:
        if name not in keys:
            raise KeyError(f"The batch lacks the feature {name}; received {keys}.")
        positions.append(keys.index(name))
    return positions


def by_key(values: Tensor, lengths: Tensor, num_keys: int) -> Tensor:
    """Return the lengths of a batch, `[K, B]`.

    Raises:
        TypeError: The ids are not integers.
        ValueError: The ids have two dims, or the lengths do not match the keys.
    """
    if values.is_floating_point():
        raise TypeError("ids must be integers; received floats. Convert with values.long().")
    if values.dim() != 1:
        raise ValueError(f"ids must have one dim; received {values.dim()}.")
    if lengths.numel() % num_keys != 0:
        raise ValueError(
            f"lengths must have one value per feature and sample, {num_keys} features; "
            f"received {lengths.numel()} values."
        )
    return lengths.view(num_keys, lengths.numel() // num_keys)


def fails(holds: Tensor, message: str) -> bool:
    """Return whether a condition is false; this waits for the device.

    `torch.export` records an assertion instead, as a program cannot branch on the value.

    Args:
        holds: One bool.
        message: Message of the assertion.
    """
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():  # type: ignore[attr-defined]
        torch._assert_async(holds, message)
        return False
    return not bool(holds)


def are_outside(values: Tensor, ids_per_key: Tensor, rows: list[int]) -> Tensor:
    """Return which ids are outside their table, `[N]`.

    Args:
        values: `[N]` ids, ordered by key.
        ids_per_key: `[K]`, with the sum `N`.
        rows: The rows of the table of each key; -1 if no table looks up its ids.
    """
    rows_N = torch.repeat_interleave(
        to_device(rows, values.device), ids_per_key, output_size=values.numel()
    )
    return (rows_N >= 0) & ((values < 0) | (values >= rows_N))


def first_bad_id(bad_N: Tensor, ids_per_key: Tensor) -> tuple[int, int, int]:
    """Return the index of the first bad id, its key, and its position among the ids of the key.

    This waits for the device.

    Args:
        bad_N: `[N]` bool, at least one True; see `are_outside`.
        ids_per_key: `[K]`, with the sum `N`.
    """
    where = int(bad_N.nonzero()[0].item())
    ends_K = ids_per_key.cumsum(0)
    key = int(torch.searchsorted(ends_K, where, right=True))
    return where, key, where - int(ends_K[key] - ids_per_key[key])


def read_sizes(values: Tensor, lengths_KB: Tensor, is_needed: bool) -> list[int]:
    """Return the number of ids of each key; this waits for the device once.

    Args:
        values: `[N]` ids.
        lengths_KB: `[K, B]` ids per bag.
        is_needed: If False, `torch.export` gets no sizes and needs no symbols for them.

    Raises:
        ValueError: The lengths do not match the ids.
    """
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():  # type: ignore[attr-defined]
        return _traced_sizes(values, lengths_KB, is_needed)
    num_negative = (lengths_KB < 0).sum().view(1)
    counts: list[int] = torch.cat([lengths_KB.sum(1), num_negative]).tolist()
    sizes = counts[:-1]
    if counts[-1] > 0 or sum(sizes) != values.numel():
        raise ValueError(
            f"lengths must not be negative and must add up to the number of ids, {values.numel()}; "
            f"received {counts[-1]} negative lengths and a sum of {sum(sizes)}."
        )
    return sizes


def _traced_sizes(values: Tensor, lengths_KB: Tensor, is_needed: bool) -> list[int]:
    ids_per_key = lengths_KB.sum(1)
    fit = (lengths_KB >= 0).all() & (ids_per_key.sum() == values.numel())
    fails(fit, "lengths must add up to the number of ids.")
    sizes: list[int] = ids_per_key.tolist() if is_needed else []
    for size in sizes:
        torch._check(size >= 0)
    if is_needed:
        torch._check(sum(sizes) == values.numel())
    return sizes


def to_device(values: list[int], device: torch.device) -> Tensor:
    """Copy numbers to a device as an int64 tensor; the host does not wait."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():  # type: ignore[attr-defined]
        return tensor.to(device)  # torch.export cannot trace pinned memory
    if device.type == "cuda":  # a copy from pinned memory is asynchronous
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
