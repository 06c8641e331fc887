"""Base of pools whose objects are read and overwritten by id.

Shapes: `P` rows of a pool, `N` ids of a call.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import torch
from torch import Tensor, nn

from recsys.base.arguments import check_input, whole

__all__ = ["ObjectPool", "RowPool", "check_ids"]

T = TypeVar("T")
META = torch.device("meta")


class ObjectPool(nn.Module, abc.ABC, Generic[T]):
    """Base of modules that store objects under the ids `0..pool_size - 1`."""

    @property
    @abc.abstractmethod
    def pool_size(self) -> int:
        """The number of objects."""

    @abc.abstractmethod
    def lookup(self, ids: Tensor) -> T:
        """Return the objects of these ids, in their order."""

    @abc.abstractmethod
    def update(self, ids: Tensor, values: T) -> None:
        """Overwrite the objects of these ids; of a repeated id, the last value is stored."""

    def forward(self, ids: Tensor) -> T:
        """Call `lookup`."""
        return self.lookup(ids)


class RowPool(ObjectPool[T], Generic[T]):
    """A pool whose objects are rows of its buffers.

    Args:
        pool_size: P.
        columns: Number of columns and dtype of each buffer, by name.
        device: Device of the objects. None: the meta device, without storage, for sharding.
        enable_uvm: Keep the buffers in host memory; rows are copied to and from `device`.

    Raises:
        TypeError: An argument is of another type.
        ValueError: A size is negative.
    """

    row_names: Sequence[str]
    """The buffers, in the order of `to_rows`. Rows of the first buffer are used whole; their sum is
    the number of used columns in the same row of each other buffer."""

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
            ValueError: The values do not match the pool.
        """

    @abc.abstractmethod
    def from_rows(self, rows: Sequence[Tensor]) -> T:
        """Return the objects of rows, the inverse of `to_rows`."""

    @abc.abstractmethod
    def resized(self, pool_size: int, device: torch.device) -> Self:
        """Return an empty pool of another size with the same settings, on a device."""

    @property
    def pool_size(self) -> int:
        """The number of objects."""
        return self._pool_size

    @property
    def device(self) -> torch.device:
        """The device of ids and objects."""
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
        """Overwrite rows; of a repeated id, the last row is stored; ids are not checked."""
        distinct, place_N = ids.unique(return_inverse=True)
        positions = torch.arange(len(ids), device=ids.device)
        last = torch.zeros_like(distinct, dtype=torch.int64)
        last.scatter_reduce_(0, place_N, positions, "amax")
        for buffer, values in zip(self.buffers_of_rows(), rows, strict=True):
            buffer[distinct.to(buffer.device)] = values[last].to(buffer.device)

    def check(self, ids: Tensor, any_shape: bool = False) -> None:
        """Check ids of a call, as `check_ids` does."""
        check_ids(type(self).__name__, ids, self.pool_size, self.device, any_shape)

    def checked_rows(self, ids: Tensor, values: T) -> list[Tensor]:
        """Return the rows of an update's objects and check that there is one per id.

        Raises:
            TypeError: The values are of another type.
            ValueError: The values do not match the ids or the pool.
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
            TypeError: The ids are not an int32 or int64 tensor.
            ValueError: The ids are on another device than the pool.
        """
        self.check(ids)
        return self.from_rows(self.read_rows(ids))

    def update(self, ids: Tensor, values: T) -> None:
        """Overwrite the objects of these ids; of a repeated id, the last value is stored.

        Args:
            ids: int32 or int64 `[N]`.
            values: N objects. Gradients do not flow through the pool.

        Raises:
            IndexError: An id is not in `0..pool_size - 1`.
            TypeError: An argument is of another type.
            ValueError: The values do not match the ids or the pool.
        """
        self.check(ids)
        self.write_rows(ids, self.checked_rows(ids, values))

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self._device = fn(torch.empty(0, device=self._device)).device
        stays = self.enable_uvm and not self.buffers_of_rows()[0].is_meta
        return self if stays else super()._apply(fn, recurse)  # type: ignore[no-untyped-call]


@torch.fx.wrap
def check_ids(
    owner: str, ids: Tensor, pool_size: int, device: torch.device, any_shape: bool = False
) -> None:
    """Check ids of a call.

    Args:
        owner: Class of the pool, for messages.
        ids: `[N]`.
        pool_size: P.
        device: Device of the pool.
        any_shape: Allow ids of any number of dimensions.

    Raises:
        IndexError: An id is not in `0..pool_size - 1`.
        TypeError: The ids are not an int32 or int64 tensor.
        ValueError: The ids have more than one dimension or are on another device than the pool, or
            the pool has no storage.

    Example:
        >>> check_ids("TensorPool", torch.tensor([0, 4]), 5, torch.device("cpu"))
    """
    check_input(f"{owner}.ids", ids, Tensor)
    if ids.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{owner}.ids must be int32 or int64; received {ids.dtype}.")
    if ids.dim() != 1 and not any_shape:
        raise ValueError(f"{owner}.ids must have one dimension; received {list(ids.shape)}.")
    if device.type == "meta":
        raise ValueError(
            f"{owner} must not be on the meta device, where it has no rows to read or write. Pass "
            'device=torch.device("cpu"), or shard the pool.'
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
