"""Pools of vectors and of jagged features, which are read and overwritten by id.

A pool stores state that is not trained, such as the last ids of each user. Id `i` is row `i`,
without hashing. Initial rows are zeros, or features without ids.

Shapes: `P` rows of a pool, `N` ids of a call, `D` columns, `K` features, `L` maximum number of ids
of a row over all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from recsys.base.arguments import MissingKeyError, check_input, whole
from recsys.base.checked import checked
from recsys.modules.row_pool import RowPool
from recsys.sparse import KeyedJaggedTensor

__all__ = ["KeyedJaggedTensorPool", "TensorPool"]


class TensorPool(RowPool[Tensor]):
    """A pool of vectors, such as one embedding per user.

    The state dict has the vectors as `_pool`.

    Args:
        pool_size: P, the number of vectors.
        dim: D, values of a vector.
        dtype: Dtype of the values.
        device: Device of the pool. None: the meta device, without storage, for sharding.
        loaded_values: `[P, D]`, used as the storage; None: zeros.
        enable_uvm: Keep the pool in host memory; vectors are copied to and from `device`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A size is negative, or `loaded_values` has another shape, dtype or device.

    Example:
        >>> pool = TensorPool(4, 2, torch.float32, device=torch.device("cpu"))
        >>> pool.update(torch.tensor([3, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> pool.lookup(torch.tensor([1, 0, 3]))
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """

    row_names = ("_pool",)

    @checked
    def __init__(
        self,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        loaded_values: Tensor | None = None,
        enable_uvm: bool = False,
    ) -> None:
        self._dim = whole("TensorPool.dim", dim, least=0)
        super().__init__(pool_size, {"_pool": (dim, dtype)}, device, enable_uvm)
        if loaded_values is not None:
            expected = self.get_buffer("_pool")
            described = [
                (list(values.shape), values.dtype, values.device.type)
                for values in (expected, loaded_values)
            ]
            if described[0] != described[1]:
                raise ValueError(
                    "TensorPool.loaded_values must have the shape, dtype and device of the pool, "
                    f"{described[0]}; received {described[1]}."
                )
            self._buffers["_pool"] = loaded_values.detach()

    def lookup(self, ids: Tensor) -> Tensor:
        """Return the vectors of these ids.

        Args:
            ids: int32 or int64, of any shape.

        Returns:
            `[*ids.shape, D]`.

        Raises:
            IndexError: An id is not in `0..pool_size - 1`.
            TypeError: The ids are not an int32 or int64 tensor.
            ValueError: The ids are on another device than the pool.
        """
        self.check(ids, any_shape=True)
        return self.read_rows(ids)[0]

    def __prepare_scriptable__(self) -> nn.Module:
        return _ScriptedTensorPool(self)

    @property
    def dim(self) -> int:
        """Values of a vector."""
        return self._dim

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self.pool.dtype

    @property
    def pool(self) -> Tensor:
        """All vectors, `[P, D]`; live."""
        return self.get_buffer("_pool")

    def resized(self, pool_size: int, device: torch.device) -> Self:
        """Return an empty pool of another size with the same settings, on a device."""
        return type(self)(pool_size, self.dim, self.dtype, device, enable_uvm=self.enable_uvm)

    def to_rows(self, values: Tensor) -> list[Tensor]:
        """Return the vectors, `[N, D]`.

        Raises:
            ValueError: The vectors have another shape, dtype or device than the pool.
        """
        check_input("TensorPool.update.values", values, Tensor)
        if (
            values.dim() != 2
            or (values.shape[1], values.dtype) != (self.dim, self.dtype)
            or values.device != self.device
        ):
            raise ValueError(
                f"TensorPool.update.values must have the shape [ids, {self.dim}] and be "
                f"{self.dtype} on {self.device}; received {list(values.shape)}, {values.dtype} on "
                f"{values.device}."
            )
        return [values.detach()]

    def from_rows(self, rows: Sequence[Tensor]) -> Tensor:
        """Return the vectors, `[N, D]`."""
        return rows[0]


class KeyedJaggedTensorPool(RowPool[KeyedJaggedTensor]):
    """A pool of jagged features, such as the history of each user.

    The state dict has `key_lengths` `[P, K]` int32, `values` `[P, L]` and, for a weighted pool,
    `weights` `[P, L]` float32. A row has the ids of all features one after the other, then zeros.

    Args:
        pool_size: P, the number of rows.
        feature_max_lengths: Maximum number of ids of a row, by feature.
        values_dtype: Of the ids of features.
        is_weighted: Whether each id of a feature has a weight.
        device: Of the pool. None: the meta device, without storage, for a pool that is sharded.
        enable_uvm: Keep the pool in host memory. Rows are copied to and from `device`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A size is negative.

    Example:
        >>> pool = KeyedJaggedTensorPool(4, {"film": 2, "genre": 1}, device=torch.device("cpu"))
        >>> history = KeyedJaggedTensor(
        ...     ["film", "genre"], torch.tensor([70, 71, 5]), lengths=torch.tensor([2, 1])
        ... )
        >>> pool.update(torch.tensor([3]), history)
        >>> found = pool.lookup(torch.tensor([0, 3]))
        >>> found["film"].to_dense()
        [tensor([], dtype=torch.int64), tensor([70, 71])]
    """

    @checked
    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: dict[str, int],
        values_dtype: torch.dtype = torch.int64,
        is_weighted: bool = False,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        for key, length in feature_max_lengths.items():
            whole(f"KeyedJaggedTensorPool.feature_max_lengths[{key!r}]", length, least=0)
        width = sum(feature_max_lengths.values())
        columns = {
            "values": (width, values_dtype),
            "key_lengths": (len(feature_max_lengths), torch.int32),
        }
        if is_weighted:
            columns["weights"] = (width, torch.float32)
        super().__init__(pool_size, columns, device, enable_uvm)
        self.row_names = ("key_lengths", "values", "weights")[: len(columns)]
        self._feature_max_lengths = dict(feature_max_lengths)
        self._is_weighted = is_weighted

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """The maximum number of ids of a row, by feature."""
        return self._feature_max_lengths

    @property
    def values_dtype(self) -> torch.dtype:
        """The dtype of the ids of features."""
        return self.get_buffer("values").dtype

    @property
    def is_weighted(self) -> bool:
        """True if each id of a feature has a weight."""
        return self._is_weighted

    def resized(self, pool_size: int, device: torch.device) -> Self:
        """Return an empty pool of another size with the same settings, on a device."""
        return type(self)(
            pool_size,
            self._feature_max_lengths,
            self.values_dtype,
            self._is_weighted,
            device,
            self.enable_uvm,
        )

    def to_rows(self, values: KeyedJaggedTensor) -> list[Tensor]:
        """Return lengths `[N, K]`, ids `[N, L]` and, for a weighted pool, weights `[N, L]`.

        Features are selected by name. Other features are ignored, and so are the weights if the
        pool is unweighted.

        Raises:
            KeyError: A feature is missing.
            ValueError: A row of a feature is too long, weights are missing, the features have
                different batch sizes, or a dtype or device differs from the pool.
        """
        check_input("KeyedJaggedTensorPool.update.values", values, KeyedJaggedTensor)
        keys, maxima = list(self._feature_max_lengths), list(self._feature_max_lengths.values())
        missing = [key for key in keys if key not in values.keys()]  # noqa: SIM118
        if missing:
            raise MissingKeyError(
                f"KeyedJaggedTensorPool.update.values must have the features {keys}; {missing} are "
                f"missing in {values.keys()}."
            )
        if values.variable_stride_per_key():
            raise ValueError(
                "KeyedJaggedTensorPool.update.values must have one row per id in every feature; "
                f"received the batch sizes {values.stride_per_key()}."
            )
        if values.keys() != keys:
            values = values.permute([values.keys().index(key) for key in keys])
        parts = [values.values()]
        if self._is_weighted:
            weights = values.weights_or_none()
            if weights is None:
                raise ValueError(
                    "KeyedJaggedTensorPool.update.values must have weights, as the pool is "
                    "weighted; received features without weights."
                )
            parts.append(weights)
        for part, buffer in zip(parts, self.buffers_of_rows()[1:], strict=True):
            if part.dtype != buffer.dtype or part.device != self.device:
                raise ValueError(
                    f"KeyedJaggedTensorPool.update.values must be {buffer.dtype} on {self.device}; "
                    f"received {part.dtype} on {part.device}."
                )
        lengths_NK = values.lengths().view(len(keys), values.stride()).T
        most_K = torch.tensor(maxima, device=self.device)
        too_long_K = (lengths_NK > most_K).any(dim=0).tolist()
        if any(too_long_K):
            index = too_long_K.index(True)
            raise ValueError(
                f"KeyedJaggedTensorPool.update.values may have {maxima[index]} ids in a row of "
                f"feature {keys[index]!r}; received {int(lengths_NK[:, index].max())}. Shorten the "
                "rows, or increase feature_max_lengths."
            )
        width = sum(maxima)
        place = _places(lengths_NK, width)
        rows = [part.new_zeros(len(lengths_NK), width) for part in parts]
        for row, part in zip(rows, parts, strict=True):
            row.view(-1)[place] = part.detach()
        return [lengths_NK.to(torch.int32), *rows]

    def from_rows(self, rows: Sequence[Tensor]) -> KeyedJaggedTensor:
        """Return features of the same number of rows, with int32 lengths."""
        return _features_of(list(self._feature_max_lengths), list(rows), self._is_weighted)


class _ScriptedTensorPool(nn.Module):
    """A `TensorPool` for TorchScript: lookups only."""

    def __init__(self, pool: TensorPool) -> None:
        super().__init__()
        self._pool = nn.Buffer(pool.pool)

    def forward(self, ids: Tensor) -> Tensor:
        return self.lookup(ids)

    def lookup(self, ids: Tensor) -> Tensor:
        if bool(((ids < 0) | (ids >= self._pool.shape[0])).any()):
            raise IndexError("TensorPool.ids must be in [0, pool_size).")
        return self._pool[ids]


@torch.fx.wrap
def _features_of(keys: list[str], rows: list[Tensor], is_weighted: bool) -> KeyedJaggedTensor:
    lengths_NK, *parts = rows
    place = _places(lengths_NK, parts[0].shape[1])
    picked = [part.reshape(-1)[place] for part in parts]
    return KeyedJaggedTensor.from_parts(
        keys,
        picked[0],
        picked[1] if is_weighted else None,
        lengths_NK.T.reshape(-1),
        stride=len(lengths_NK),
    )


def _places(lengths_NK: Tensor, width: int) -> Tensor:
    """Return the positions of feature-major values in flattened rows of this width."""
    lengths_KN = lengths_NK.long().T.reshape(-1)
    row_N = torch.arange(len(lengths_NK), device=lengths_NK.device) * width
    begin_KN = (lengths_NK.cumsum(1) - lengths_NK + row_N[:, None]).T.reshape(-1)
    first_KN = lengths_KN.cumsum(0) - lengths_KN
    place = (begin_KN - first_KN).repeat_interleave(lengths_KN)
    return place + torch.arange(len(place), device=place.device)
