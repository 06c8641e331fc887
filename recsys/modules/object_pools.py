"""Pools of objects that are read and overwritten by id: one row of a tensor, or of jagged features.

A pool holds state that is not trained, such as the last ids of each user. Id `i` is row `i`: ids
are not hashed. A row that was never written holds zeros, or features without ids.

Legend: `P` rows of a pool, `N` ids of a call, `D` columns, `K` features, `L` longest row of all
features together.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from recsys.kernels.arguments import check_input, whole
from recsys.kernels.checked import checked
from recsys.sparse import KeyedJaggedTensor

__all__ = ["KeyedJaggedTensorPool", "ObjectPool", "RowPool", "TensorPool"]

T = TypeVar("T")
META = torch.device("meta")


class ObjectPool(nn.Module, abc.ABC, Generic[T]):
    """A module that stores objects under the ids `0..pool_size - 1`."""

    @property
    @abc.abstractmethod
    def pool_size(self) -> int:
        """How many objects there are."""

    @abc.abstractmethod
    def lookup(self, ids: Tensor) -> T:
        """Return the objects of these ids, in their order."""

    @abc.abstractmethod
    def update(self, ids: Tensor, values: T) -> None:
        """Overwrite the objects of these ids. Of an id that repeats, the last value stays."""

    def forward(self, ids: Tensor) -> T:
        """Do what `lookup` does."""
        return self.lookup(ids)


class RowPool(ObjectPool[T], Generic[T]):
    """A pool whose objects are rows of its buffers.

    Args:
        pool_size: P.
        columns: name, number of columns and dtype of each buffer.
        device: of the objects. None: the meta device, without storage, for a pool that is sharded.
        enable_uvm: keep the buffers in host memory. Rows are copied to and from `device`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A size is negative.
    """

    row_names: Sequence[str]
    """The buffers, in the order of `to_rows`. Rows of the first are used whole. A row of each other
    uses as many columns as the same row of the first adds up to."""

    def __init__(
        self,
        pool_size: int,
        columns: Mapping[str, tuple[int, torch.dtype]],
        device: torch.device | None,
        enable_uvm: bool,
    ) -> None:
        super().__init__()
        self._pool_size = whole(f"{type(self).__name__}.pool_size", pool_size, least=0)
        self._device = torch.empty(0, device=device or META).device  # `cuda:0`, not `cuda`
        self.enable_uvm = enable_uvm
        is_in_host_memory = enable_uvm and self._device.type != "meta"
        place = torch.device("cpu") if is_in_host_memory else self._device
        for name, (num_columns, dtype) in columns.items():
            rows = torch.zeros(pool_size, num_columns, dtype=dtype, device=place)
            self.register_buffer(name, rows)

    @abc.abstractmethod
    def to_rows(self, values: T) -> list[Tensor]:
        """Return the rows of objects, `[N, columns]` for each of `row_names`.

        Raises:
            ValueError: They do not fit the pool.
        """

    @abc.abstractmethod
    def from_rows(self, rows: Sequence[Tensor]) -> T:
        """Return the objects of rows: the inverse of `to_rows`."""

    @abc.abstractmethod
    def resized(self, pool_size: int, device: torch.device) -> Self:
        """Return an empty pool with other rows and the same settings, on a device."""

    @property
    def pool_size(self) -> int:
        """How many objects there are."""
        return self._pool_size

    @property
    def device(self) -> torch.device:
        """Where ids and objects are."""
        return self._device

    def buffers_of_rows(self) -> list[Tensor]:
        """Return the buffers of `row_names`, `[P, columns]` each."""
        return [self.get_buffer(name) for name in self.row_names]

    def read_rows(self, ids: Tensor) -> list[Tensor]:
        """Return rows, `[N, columns]` for each of `row_names`; ids are not checked."""
        buffers = self.buffers_of_rows()
        return [buffer[ids.to(buffer.device)].to(self.device) for buffer in buffers]

    @torch.no_grad()
    def write_rows(self, ids: Tensor, rows: Sequence[Tensor]) -> None:
        """Overwrite rows, of an id that repeats by the last one; ids are not checked."""
        distinct, place_N = ids.unique(return_inverse=True)
        positions = torch.arange(len(ids), device=ids.device)
        last = torch.zeros_like(distinct, dtype=torch.int64)
        last.scatter_reduce_(0, place_N, positions, "amax")
        for buffer, given in zip(self.buffers_of_rows(), rows, strict=True):
            buffer[distinct.to(buffer.device)] = given[last].to(buffer.device)

    def checked_rows(self, ids: Tensor, values: T) -> list[Tensor]:
        """Return the rows of an update's objects, of which there is one for each id.

        Raises:
            TypeError: The values are of another type.
            ValueError: The values do not fit the ids or the pool.
        """
        rows = self.to_rows(values)
        if len(ids) != len(rows[0]):
            raise ValueError(
                f"{type(self).__name__}.update needs one id for each object; received {len(ids)} "
                f"ids and {len(rows[0])} objects."
            )
        return rows

    def lookup(self, ids: Tensor) -> T:
        """Return the objects of these ids, in their order.

        Args:
            ids: int32 or int64 `[N]`.

        Raises:
            IndexError: An id is not in `0..pool_size - 1`.
            TypeError: They are no int32 or int64 tensor.
            ValueError: They are on another device than the pool.
        """
        check_ids(type(self).__name__, ids, self.pool_size, self.device)
        return self.from_rows(self.read_rows(ids))

    def update(self, ids: Tensor, values: T) -> None:
        """Overwrite the objects of these ids. Of an id that repeats, the last value stays.

        Args:
            ids: int32 or int64 `[N]`.
            values: N objects. Gradients do not flow through the pool.

        Raises:
            IndexError: An id is not in `0..pool_size - 1`.
            TypeError: An argument is of another type.
            ValueError: The values do not fit the ids or the pool.
        """
        check_ids(type(self).__name__, ids, self.pool_size, self.device)
        self.write_rows(ids, self.checked_rows(ids, values))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._device = fn(torch.empty(0, device=self._device)).device
        stays = self.enable_uvm and not self.buffers_of_rows()[0].is_meta
        return self if stays else super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


class TensorPool(RowPool[Tensor]):
    """A pool of vectors, such as one embedding per user.

    The state dict holds them as `_pool`.

    Args:
        pool_size: P, the number of vectors.
        dim: D, values of a vector.
        dtype: of the values.
        device: of the pool. None: the meta device, without storage, for a pool that is sharded.
        loaded_values: `[P, D]`, used as storage from then on; None: zeros.
        enable_uvm: keep the pool in host memory. Vectors are copied to and from `device`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A size is negative, or `loaded_values` have another shape, dtype or device.

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
            TypeError: They are no int32 or int64 tensor.
            ValueError: They are on another device than the pool.
        """
        check_input("TensorPool.ids", ids, Tensor)
        return super().lookup(ids.reshape(-1)).view(*ids.shape, self._dim)

    @property
    def dim(self) -> int:
        """Values of a vector."""
        return self._dim

    @property
    def dtype(self) -> torch.dtype:
        """Of the values."""
        return self.pool.dtype

    @property
    def pool(self) -> Tensor:
        """All vectors, `[P, D]`; live."""
        return self.get_buffer("_pool")

    def resized(self, pool_size: int, device: torch.device) -> Self:
        """Return an empty pool with other rows and the same settings, on a device."""
        return type(self)(pool_size, self.dim, self.dtype, device, enable_uvm=self.enable_uvm)

    def to_rows(self, values: Tensor) -> list[Tensor]:
        """Return the vectors themselves, `[N, D]`.

        Raises:
            ValueError: They have another shape, dtype or device than the pool.
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
        """Return the vectors themselves, `[N, D]`."""
        return rows[0]


class KeyedJaggedTensorPool(RowPool[KeyedJaggedTensor]):
    """A pool of jagged features: under each id the ids of every feature, such as a user's history.

    The state dict holds `key_lengths` `[P, K]` int32, `values` `[P, L]` and, of a weighted pool,
    `weights` `[P, L]` float32. A row has the ids of all features one after the other, then zeros.

    Args:
        pool_size: P, the number of rows.
        feature_max_lengths: feature to the most ids that a row may have of it.
        values_dtype: of the ids of features.
        is_weighted: whether each id of a feature has a weight.
        device: of the pool. None: the meta device, without storage, for a pool that is sharded.
        enable_uvm: keep the pool in host memory. Rows are copied to and from `device`.

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
        """Feature to the most ids that a row may have of it."""
        return self._feature_max_lengths

    @property
    def values_dtype(self) -> torch.dtype:
        """Of the ids of features."""
        return self.get_buffer("values").dtype

    @property
    def is_weighted(self) -> bool:
        """Whether each id of a feature has a weight."""
        return self._is_weighted

    def resized(self, pool_size: int, device: torch.device) -> Self:
        """Return an empty pool with other rows and the same settings, on a device."""
        return type(self)(
            pool_size,
            self._feature_max_lengths,
            self.values_dtype,
            self._is_weighted,
            device,
            self.enable_uvm,
        )

    def to_rows(self, values: KeyedJaggedTensor) -> list[Tensor]:
        """Return lengths `[N, K]`, ids `[N, L]` and, of a weighted pool, weights `[N, L]`.

        Features are picked by name. Features that the pool does not have are left out, and so are
        weights that it does not have.

        Raises:
            KeyError: A feature is missing.
            ValueError: A row of a feature is too long, weights are missing, the features have
                different batch sizes, or a dtype or device is another one.
        """
        check_input("KeyedJaggedTensorPool.update.values", values, KeyedJaggedTensor)
        keys, maxima = list(self._feature_max_lengths), list(self._feature_max_lengths.values())
        missing = [key for key in keys if key not in values.keys()]  # noqa: SIM118
        if missing:
            raise KeyError(
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
                "rows, or raise feature_max_lengths."
            )
        width = sum(maxima)
        place = _places(lengths_NK, width)
        rows = [part.new_zeros(len(lengths_NK), width) for part in parts]
        for row, part in zip(rows, parts, strict=True):
            row.view(-1)[place] = part.detach()
        return [lengths_NK.to(torch.int32), *rows]

    def from_rows(self, rows: Sequence[Tensor]) -> KeyedJaggedTensor:
        """Return features with as many rows, and int32 lengths."""
        lengths_NK, *parts = rows
        place = _places(lengths_NK, parts[0].shape[1])
        picked = [part.reshape(-1)[place] for part in parts]
        return KeyedJaggedTensor.from_parts(
            list(self._feature_max_lengths),
            picked[0],
            picked[1] if self._is_weighted else None,
            lengths_NK.T.reshape(-1),
            stride=len(lengths_NK),
        )


def check_ids(owner: str, ids: Tensor, pool_size: int, device: torch.device) -> None:
    """Check ids of a call.

    Args:
        owner: Class of the pool, for messages.
        ids: `[N]`.
        pool_size: P.
        device: of the pool.

    Raises:
        IndexError: An id is not in `0..pool_size - 1`.
        TypeError: They are no int32 or int64 tensor.
        ValueError: They have more than one dimension, are on another device than the pool, or the
            pool has no storage.

    Example:
        >>> check_ids("TensorPool", torch.tensor([0, 4]), 5, torch.device("cpu"))
    """
    check_input(f"{owner}.ids", ids, Tensor)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{owner}.ids must be int32 or int64; received {ids.dtype}.")
    if ids.dim() != 1:
        raise ValueError(f"{owner}.ids must have one dimension; received {list(ids.shape)}.")
    if device.type == "meta":
        raise ValueError(
            f"{owner}.device must have storage to read or write the pool; received a pool on the "
            'meta device. Pass device=torch.device("cpu"), or shard the pool.'
        )
    if ids.device != device:
        raise ValueError(
            f"{owner}.ids must be on the pool's device, {device}; received ids on {ids.device}. "
            "Move one of them with .to()."
        )
    is_bad = (ids < 0) | (ids >= pool_size)
    if bool(is_bad.any()):
        raise IndexError(
            f"{owner}.ids must be in [0, {pool_size}); received {int(ids[is_bad][0])}."
        )


def _places(lengths_NK: Tensor, width: int) -> Tensor:
    """Return where the values of features, feature by feature, are in rows of this width."""
    lengths_KN = lengths_NK.long().T.reshape(-1)
    row_N = torch.arange(len(lengths_NK), device=lengths_NK.device) * width
    begin_KN = (lengths_NK.cumsum(1) - lengths_NK + row_N[:, None]).T.reshape(-1)
    first_KN = lengths_KN.cumsum(0) - lengths_KN
    place = (begin_KN - first_KN).repeat_interleave(lengths_KN)
    return place + torch.arange(len(place), device=place.device)
