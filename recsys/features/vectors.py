"""Columns of vectors, such as embeddings of texts or images.

Shapes: `B` rows, `D` numbers of a vector.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, final

import numpy as np
import pyarrow as pa

from recsys.base.arguments import whole
from recsys.features.arrow import column_of, read_numbers, read_values, to_float32
from recsys.features.columns import Column

if TYPE_CHECKING:
    from recsys.features.fit import Fitted

__all__ = ["Vector", "read_vectors"]

_Array: TypeAlias = np.ndarray[Any, Any]
_MOST: Final = 1 << 24
"""Largest size of vectors; packages and the C++ core have it, too."""
_HINT: Final = "Write null for a missing vector."


@final
@dataclass(frozen=True)
class Vector(Column):
    """Vectors of one size: `dim` dense features, `NAME_0`, `NAME_1` and so on.

    The rows are lists of numbers, or fixed-size lists, which are not scaled. A missing vector
    becomes zeros; an empty list is a vector of another size, which is an error.

    Raises:
        TypeError: A value has another type.
        ValueError: `dim` is below 1 or above 2^24.

    Example:
        >>> from recsys.features import FeatureSpec
        >>> spec = FeatureSpec([Vector("image", dim=2)])
        >>> spec.transform({"image": [[0.5, 1.5], None]}).dense_features.tolist()
        [[0.5, 1.5], [0.0, 0.0]]
        >>> spec.dense_names
        ['image_0', 'image_1']
    """

    name: str
    """Name of the column."""
    _: KW_ONLY
    dim: int
    """Number of numbers of each vector."""
    optional: bool = False
    """True if tables may lack the column: all its values are then missing."""

    part = "dense_features"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(f"Vector {self.name!r}: dim", self.dim, 1, _MOST)

    def feature_names(self) -> list[str]:
        """Return a name for each number of the vector."""
        return [f"{self.name}_{i}" for i in range(self.dim)]

    def read(self, table: Any, fitted: Fitted) -> list[_Array]:
        """Read the vectors, as a dense feature for each of their numbers."""
        return list(read_vectors(table, self.name, self.dim)[0].T)

    def describe(
        self, fitted: Fitted, table: Any, tensors: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Return the entry of the column in the manifest of a package."""
        return {
            "name": self.name,
            "kind": "vector",
            "dtype": "float32",
            "is_list": True,
            "dim": self.dim,
        }


def read_vectors(table: Any, name: str, dim: int) -> tuple[_Array, _Array]:
    """Read a column of vectors.

    Args:
        table: An Arrow table.
        name: The column: lists of numbers, or fixed-size lists.
        dim: D, the size of the vectors.

    Returns:
        [B, D] float32, with 0 for missing vectors; and [B] bool, True for missing vectors.

    Raises:
        KeyError: The table does not have the column.
        TypeError: The rows are not lists of numbers.
        ValueError: A vector has another size; or a number is missing, NaN, infinite or outside the
            range of float32.

    Example:
        >>> read_vectors(pa.table({"image": [[1, 2], None]}), "image", 2)[0].tolist()
        [[1.0, 2.0], [0.0, 0.0]]
    """
    values = read_values(table, name, True, "Describe it by Numeric.")
    assert values.lengths is not None
    is_missing = column_of(table, name).is_null().to_numpy(zero_copy_only=False)
    bad = (values.lengths != dim) & ~is_missing
    by_row = values._replace(array=pa.array(values.lengths), lengths=None)
    by_row.reject(ValueError, f"must have lists of length {dim}", bad, "Set dim of the Vector.")
    numbers, no_number = read_numbers(values, _HINT)
    if no_number is not None:
        values.reject(ValueError, "must have no missing number in a vector", no_number, _HINT)
    vectors = np.zeros((len(is_missing), dim), np.float32)
    vectors[~is_missing] = to_float32(values, numbers).reshape(-1, dim)
    return vectors, is_missing
