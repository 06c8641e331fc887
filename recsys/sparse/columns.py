"""Conversion of the columns of a table to a KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recsys.base.arguments import MissingKeyError, whole, wrong_type
from recsys.base.checked import checked_late
from recsys.sparse.column import read_bags, read_ids, read_weights
from recsys.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["from_columns", "jagged_of"]


@checked_late
def from_columns(
    columns: Any, weights: Mapping[str, Any] | None = None, *, padding: int | None = None
) -> KeyedJaggedTensor:
    """Build a batch from one column per feature.

    A column has one id or a list of ids for each sample. It may be:

    - a tensor or array of shape [B], or [B, L] with `padding`;
    - a list of integers, or of lists of integers;
    - a column of pandas, Arrow or polars with integers or lists of integers.

    A missing id (None, NaN, null) or list is an empty bag.

    Categorical columns (pandas) and dictionary columns (Arrow) yield their categories if these are
    numbers, else the codes of the categories. Codes are positions in the category list of the
    table. Use the same list for training and serving. Equal entries have the code of the first.

    Args:
        columns: Columns by feature: a dict, a pandas or polars DataFrame or an Arrow Table.
        weights: Columns of weights by feature, with one weight per id in the same bags. Ids of
            other features have the weight 1.
        padding: The value that fills unused places of a matrix.

    Returns:
        Features in the order of the columns, with int64 ids, int64 lengths and fp32 weights, on
        the device of the tensor columns, else on the CPU.

    Raises:
        TypeError: A column contains values that are not integers or not exact, or a weight is not a
            number.
        ValueError: There is no column, an id does not fit into int64, or a list has a missing
            value. Columns have different numbers of samples, or weights and ids different bags. A
            weight is NaN or infinite.
        KeyError: `weights` has a feature without a column.

    Example:
        >>> batch = from_columns({"user": [7, 8], "films": [[1, 2, 3], []]})
        >>> print(batch, end="")
        KeyedJaggedTensor({
            "user": [[7], [8]],
            "films": [[1, 2, 3], []]
        })
        >>> padded = torch.tensor([[5, 0], [6, 4]])
        >>> from_columns({"films": padded}, padding=0).to_dict()["films"].to_dense()
        [tensor([5]), tensor([6, 4])]
    """
    check_table("from_columns: columns", columns)
    if hasattr(columns, "get_columns"):  # polars
        names = list(columns.columns)
    else:
        names = list(getattr(columns, "column_names", None) or columns.keys())
    weights = {} if weights is None else weights
    unknown = sorted(weights.keys() - set(names))
    if unknown:
        raise MissingKeyError(f"weights must name columns, {names}; received {unknown}.")
    named = {name: (f"Weights of {name!r}", column) for name, column in weights.items()}
    return jagged_of({name: columns[name] for name in names}, named, padding)


def check_table(subject: str, columns: object) -> None:
    """Check that an argument is a table.

    Args:
        subject: Name of the argument, for messages.
        columns: The argument.

    Raises:
        TypeError: It is not a table.
    """
    is_table = any(hasattr(columns, name) for name in ("get_columns", "column_names", "keys"))
    if not is_table or not hasattr(columns, "__getitem__") or isinstance(columns, type):
        wrong_type(subject, "a dict of columns or a table of pandas, polars or Arrow", columns)


def jagged_of(
    columns: Mapping[str, Any], weights: Mapping[str, tuple[str, Any]], padding: int | None
) -> KeyedJaggedTensor:
    """Build a batch as `from_columns`.

    Args:
        columns: Columns by feature.
        weights: Name for messages and column of the weights, by feature.
        padding: As for `from_columns`.

    Returns:
        The batch.

    Raises:
        TypeError: As `from_columns`.
        ValueError: As `from_columns`.
    """
    if padding is not None:
        whole("from_columns: padding", padding, least=None)
    if not columns:
        raise ValueError("from_columns needs at least one column; received none.")
    ids: list[Tensor] = []
    lengths: list[Tensor] = []
    weighed: list[Tensor] = []
    first = next(iter(columns))
    for name, column in columns.items():
        subject = f"Column {name!r}"
        bags = read_bags(subject, column, padding, as_codes=True)
        ids.append(read_ids(subject, bags))
        lengths.append(bags.lengths)
        if bags.lengths.numel() != lengths[0].numel():
            raise ValueError(
                f"All columns must have the same number of samples; received {lengths[0].numel()} "
                f"in {first!r} and {bags.lengths.numel()} in {name!r}."
            )
        if name in weights:
            of_weights, column = weights[name]
            weight_bags = read_bags(of_weights, column)
            if not torch.equal(weight_bags.lengths, bags.lengths):
                raise ValueError(
                    f"{of_weights} must hold one weight for each id of {name!r}; received "
                    f"{_first_difference(weight_bags.lengths, bags.lengths)}."
                )
            weighed.append(read_weights(of_weights, weight_bags))
        else:
            weighed.append(torch.ones(ids[-1].shape, device=ids[-1].device))
    return KeyedJaggedTensor(
        list(columns), torch.cat(ids), torch.cat(weighed) if weights else None, torch.cat(lengths)
    )


def _first_difference(weights: Tensor, ids: Tensor) -> str:
    if weights.shape != ids.shape:
        return f"{weights.numel()} rows of weights and {ids.numel()} of ids"
    row = int((weights != ids).nonzero()[0, 0])
    return (
        f"{int(weights[row])} weights and {int(ids[row])} ids in row {row} (missing values are not "
        "counted)"
    )
