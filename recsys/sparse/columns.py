"""From columns of a data frame, matrices or lists to a KeyedJaggedTensor.

pandas and pyarrow are not imported here: a column is recognised by what it can do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recsys.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["from_columns"]


def from_columns(
    columns: Any, weights: Mapping[str, Any] | None = None, *, padding: int | None = None
) -> KeyedJaggedTensor:
    """Make a batch from one column per feature.

    A column holds, for each sample, one id or a list of ids. It is a tensor or an array ([B], or
    [B, L] with `padding` behind the ids of a sample), a list (of numbers, or of lists of them), a
    pandas Series, or an Arrow array (of whole numbers or lists of them). A missing id (None, NaN,
    null) or list is an empty bag.

    Args:
        columns: Feature to column: a dict, a pandas DataFrame or an Arrow Table.
        weights: Feature to column of weights, one for each id of that feature, in the same bags;
            ids of other features weigh 1.
        padding: What a matrix holds where a sample has no more ids; those entries are left out.

    Returns:
        Features in the order of the columns; ids int64, lengths int64, weights fp32, on the device
        of the tensors given, else on the CPU.

    Raises:
        TypeError: A column holds no whole numbers, or weights no numbers.
        ValueError: There is no column, columns differ in their number of samples, or weights in
            their bags from the ids.
        KeyError: Weights are of no column.

    Example:
        >>> batch = from_columns({"user": [7, 8], "films": [[1, 2, 3], []]})
        >>> print(batch)
        KeyedJaggedTensor({
            "user": [[7], [8]],
            "films": [[1, 2, 3], []]
        })
        >>> padded = torch.tensor([[5, 0], [6, 4]])
        >>> from_columns({"films": padded}, padding=0).to_dict()["films"].to_dense()
        [tensor([5]), tensor([6, 4])]
    """
    names = list(getattr(columns, "column_names", None) or columns.keys())
    if not names:
        raise ValueError("from_columns needs at least one column; received none.")
    weights = weights or {}
    unknown = sorted(weights.keys() - set(names))
    if unknown:
        raise KeyError(f"Weights are given for {unknown}, which are no columns of {names}.")
    ids, bags, weighed = [], [], []
    for name in names:
        values, lengths = _bags(name, columns[name], padding)
        ids.append(_whole(name, values))
        bags.append(lengths)
        if lengths.numel() != bags[0].numel():
            raise ValueError(
                f"Columns must have as many samples; received {bags[0].numel()} in {names[0]!r} "
                f"and {lengths.numel()} in {name!r}."
            )
        if name in weights:
            given, of_given = _bags(f"weights of {name}", weights[name], None)
            if not torch.equal(of_given, lengths):
                raise ValueError(
                    f"Each id of {name!r} needs a weight in the same place; received bags of "
                    f"{lengths.tolist()[:8]} ids and {of_given.tolist()[:8]} weights."
                )
            weighed.append(_numbers(name, given))
        else:
            weighed.append(torch.ones(values.shape[0], device=values.device))
    return KeyedJaggedTensor(
        names, torch.cat(ids), torch.cat(weighed) if weights else None, torch.cat(bags)
    )


def _bags(name: str, column: Any, padding: int | None) -> tuple[Tensor, Tensor]:
    """Return the values of a column end to end, and how many each sample has."""
    if isinstance(column, Tensor):
        return _rows(name, column, padding)
    if hasattr(column, "combine_chunks"):  # Arrow's ChunkedArray
        column = column.combine_chunks()
    if hasattr(column, "value_lengths"):  # Arrow's lists
        values, there = _bags(name, column.flatten(), None)
        if not bool(there.all()):
            raise ValueError(f"A list of column {name!r} holds a missing value. Leave it out.")
        return values, _tensor(name, column.value_lengths().fill_null(0).to_numpy()).long()
    if hasattr(column, "drop_null"):  # Arrow's numbers
        there = column.is_valid().to_numpy(zero_copy_only=False)
        ids = column.drop_null().to_numpy(zero_copy_only=False)
        return _tensor(name, ids), torch.tensor(there).long()
    if hasattr(column, "to_numpy"):  # pandas
        column = column.to_numpy()
    if isinstance(column, np.ndarray) and column.dtype != object:
        if column.ndim == 1 and column.dtype.kind == "f":
            is_there = ~np.isnan(column)
            return _tensor(name, column[is_there]), torch.from_numpy(is_there).long()
        return _rows(name, _tensor(name, column), padding)
    return _lists(name, column)


def _rows(name: str, values: Tensor, padding: int | None) -> tuple[Tensor, Tensor]:
    if values.dim() not in (1, 2):
        raise ValueError(
            f"Column {name!r} must be [samples] or [samples, ids]; received shape "
            f"{tuple(values.shape)}."
        )
    there = torch.ones_like(values, dtype=torch.bool) if padding is None else values != padding
    lengths = there.sum(1) if values.dim() == 2 else there.long()
    return values[there], lengths


def _lists(name: str, column: Sequence[Any]) -> tuple[Tensor, Tensor]:
    parts: list[list[Any]] = []
    for sample in column:
        if _is_missing(sample):
            parts.append([])
        else:
            parts.append(list(sample) if np.iterable(sample) else [sample])
    flat = [value for part in parts for value in part]
    lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    return _tensor(name, np.asarray(flat, dtype=None if flat else np.int64)), lengths


def _is_missing(sample: object) -> bool:
    is_nan = isinstance(sample, float) and sample != sample
    return sample is None or is_nan or type(sample).__name__ == "NAType"  # pandas.NA


def _tensor(name: str, values: np.ndarray[Any, Any]) -> Tensor:
    if values.dtype.kind not in "iuf":
        raise TypeError(
            f"Column {name!r} must hold numbers; received {values.dtype} values, such as "
            f"{values.ravel()[:1].tolist()}. Give each value a number, for instance its place in a "
            "dictionary, or a hash."
        )
    # a copy: Arrow's memory may not be written to
    return torch.from_numpy(values.astype(np.int64 if values.dtype.kind == "u" else values.dtype))


def _whole(name: str, values: Tensor) -> Tensor:
    ids = values.long()
    if values.dtype == torch.bool or (values.is_floating_point() and not torch.equal(ids, values)):
        raise TypeError(
            f"Ids must be whole numbers; received {values.dtype} values in column {name!r}, such "
            f"as {values[:3].tolist()}."
        )
    if values.is_floating_point() and bool((values.abs() > 2**53).any()):
        raise TypeError(
            f"Ids above 2**53 are not exact as {values.dtype}; received some in column {name!r}. "
            "Give them as int64; pandas keeps missing ones apart in the dtype 'Int64'."
        )
    return ids


def _numbers(name: str, values: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        raise TypeError(f"Weights must be numbers; received {values.dtype} for {name!r}.")
    return values.float()
