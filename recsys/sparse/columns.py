"""From the columns of a table to a KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from recsys.kernels.arguments import whole, wrong_type
from recsys.kernels.checked import checked_late
from recsys.sparse.column import read_bags, read_ids, read_weights
from recsys.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["from_columns", "jagged_of"]


@checked_late
def from_columns(
    columns: Any, weights: Mapping[str, Any] | None = None, *, padding: int | None = None
) -> KeyedJaggedTensor:
    """Make a batch from one column per feature.

    A column holds, for each sample, one id or a list of ids. It is a tensor or an array ([B], or
    [B, L] with `padding` behind the ids of a sample), a list (of numbers, or of lists of them), or
    a column of pandas, Arrow or polars (of whole numbers or lists of them). A missing id (None,
    NaN, null) or list is an empty bag.

    The ids of a categorical column (pandas) or a dictionary column (Arrow) are its categories if
    those are numbers, and otherwise their codes. A code is the position of a category in the
    table's own list of categories, so it means something else in a table with another list. Give
    the tables for training and serving the same list.

    Args:
        columns: Feature to column: a dict, a pandas or polars DataFrame or an Arrow Table.
        weights: Feature to column of weights, one for each id of that feature, in the same bags;
            ids of other features weigh 1.
        padding: What a matrix holds where a sample has no more ids; those entries are left out.

    Returns:
        Features in the order of the columns; ids int64, lengths int64, weights fp32, on the device
        of the tensors given, else on the CPU.

    Raises:
        TypeError: A column holds no whole numbers, or floats so large that they may stand for
            several; or weights are no numbers.
        ValueError: There is no column, an id does not fit into int64, a list has a missing value,
            columns differ in their number of samples, weights differ from the ids in their bags, or
            a weight is NaN or infinite.
        KeyError: Weights are of no column.

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
        raise KeyError(f"Weights are given for {unknown}, which are no columns of {names}.")
    named = {name: (f"Weights of {name!r}", column) for name, column in weights.items()}
    return jagged_of({name: columns[name] for name in names}, named, padding)


def check_table(subject: str, columns: object) -> None:
    """Refuse what is no table.

    Args:
        subject: how errors call it.
        columns: what should be one.

    Raises:
        TypeError: it is none.
    """
    is_table = any(hasattr(columns, name) for name in ("get_columns", "column_names", "keys"))
    if not is_table or not hasattr(columns, "__getitem__") or isinstance(columns, type):
        wrong_type(subject, "a dict of columns or a table of pandas, polars or Arrow", columns)


def jagged_of(
    columns: Mapping[str, Any], weights: Mapping[str, tuple[str, Any]], padding: int | None
) -> KeyedJaggedTensor:
    """Make a batch as `from_columns` does.

    Args:
        columns: feature to column.
        weights: feature to what its weights are, for messages, and their column.
        padding: of matrices.

    Returns:
        The batch.

    Raises:
        TypeError: as `from_columns`.
        ValueError: as `from_columns`.
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
                f"Columns must have as many samples; received {lengths[0].numel()} in {first!r} "
                f"and {bags.lengths.numel()} in {name!r}."
            )
        if name in weights:
            of_weights, column = weights[name]
            given = read_bags(of_weights, column)
            if not torch.equal(given.lengths, bags.lengths):
                raise ValueError(
                    f"{of_weights} must hold one weight for each id of {name!r}; received "
                    f"{_first_difference(given.lengths, bags.lengths)}."
                )
            weighed.append(read_weights(of_weights, given))
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
        f"{int(weights[row])} weights and {int(ids[row])} ids in row {row}; a missing value (None, "
        "NaN) counts as none"
    )
