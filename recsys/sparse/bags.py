"""Bags: the tensors and accessors that JaggedTensor and KeyedJaggedTensor share.

Shapes: `M` bags (lists), `N` values of all bags together.
"""

from abc import abstractmethod
from collections.abc import Callable
from typing import Self, cast

import torch
from torch import Tensor

from recsys.base.arguments import wrong_type
from recsys.kernels import ops
from recsys.sparse import validate


class JaggedBase:
    """Base of JaggedTensor and KeyedJaggedTensor: values in bags, of one or several features."""

    __slots__ = ("__weakref__", "_lengths", "_num_read", "_offsets", "_values", "_weights")

    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None
    _num_read: int | None  # the sum of the lengths, if it was read

    def values(self) -> Tensor:
        """Return the values of all bags, concatenated: `[N, ...]`."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights, `[N, ...]`.

        Raises:
            ValueError: If there are none.
        """
        weights = self.weights_or_none()
        if weights is None:
            validate.refuse_missing(type(self).__name__, "weights")
        return weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, `[N, ...]`, or None if there are none."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values in each bag, `[M]`.

        With several features, `[F * B]` lengths, or the sum of the strides, in feature order.

        Raises:
            ValueError: On a CPU, if the offsets decrease.
        """
        if self._lengths is None and self.lengths_or_none() is None:
            assert self._offsets is not None
            lengths = self._offsets.diff()
            self._num_read = validate.check_lengths(self, lengths)
            self._lengths = lengths
        return self._lengths  # type: ignore[return-value]  # not None by now

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they are known, else None; computes nothing."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the position of the first value of each bag, and the end: `[M + 1]`.

        Raises:
            ValueError: On a CPU, if a length is negative, or the sum of the lengths exceeds the
                number of values.
        """
        if self._offsets is None:
            lengths = self.lengths()
            self._num_read = validate.check_lengths(self, lengths)
            self._offsets = ops.complete_cumsum(lengths)
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they are known, else None; computes nothing."""
        return self._offsets

    def trim(self) -> Self:
        """Drop the values after the last bag, without waiting for a GPU.

        Values may be a buffer of a fixed size that is longer than the bags. `values()` returns the
        whole buffer; all other methods ignore the values after the last bag.

        Returns:
            The same bags with views of the values and weights; self if there is nothing to drop.

        Example:
            >>> from recsys.sparse import JaggedTensor
            >>> buffer = torch.tensor([5, 6, 7, 0, 0])
            >>> JaggedTensor(buffer, lengths=torch.tensor([1, 2])).trim().values()
            tensor([5, 6, 7])
        """
        total, values = self.num_read(), self.values()
        if total is None or total >= values.shape[0]:
            return self
        weights = self.weights_or_none()
        trimmed = self._map(lambda tensor: tensor)
        trimmed._values = values.narrow(0, 0, total)
        trimmed._weights = None if weights is None else weights.narrow(0, 0, total)
        return trimmed

    def num_read(self) -> int | None:
        """Return the number of values in the bags; None if that would wait for a GPU."""
        known: list[int] | None = getattr(self, "_length_per_key", None)
        if known is not None:
            return sum(known)
        if not validate.is_readable(self.values() if self._values is None else self._values):
            return None
        if getattr(self, "_num_read", None) is None:
            self._num_read = int(self.offsets()[-1])
        return self._num_read

    def device(self) -> torch.device:
        """Return the device of the tensors."""
        return self.values().device

    def pin_memory(self) -> Self:
        """Copy to page-locked memory, for asynchronous copies to a GPU."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from reuse until the work queued on a CUDA stream is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def size_in_bytes(self) -> int:
        """Return the size in bytes of all tensors that exist."""
        return sum(tensor.nbytes for tensor in self._tensors())

    @abstractmethod
    def validate(self) -> None:
        """Check all lengths and offsets; waits for a GPU."""

    @abstractmethod
    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Return the same bags with `function` applied to each tensor."""

    def _tensors(self) -> list[Tensor]:
        parts = self.values(), self.weights_or_none(), self.lengths_or_none(), self._offsets
        return [part for part in parts if part is not None]

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that `copy_` overwrites."""
        parts = {"values": self.values(), "lengths": self.lengths()}
        weights = self.weights_or_none()
        if weights is not None:
            parts["weights"] = weights
        return {name: tuple(part.shape) for name, part in parts.items()}

    def _copy_parts(self, source: Self, non_blocking: bool) -> None:
        """Overwrite all tensors with the tensors of `source`."""
        shapes, source_shapes = self._shapes(), source._shapes()
        if shapes != source_shapes:
            raise ValueError(
                f"{type(self).__name__}.copy_: parts and their shapes must be equal; "
                f"received {source_shapes} for {shapes}."
            )
        self.values().copy_(source.values(), non_blocking)
        self.lengths().copy_(source.lengths(), non_blocking)
        self._num_read = getattr(source, "_num_read", None)
        weights = self.weights_or_none()
        if self._offsets is not None:
            self._offsets.copy_(source.offsets(), non_blocking)
        if weights is not None:
            weights.copy_(source.weights(), non_blocking)


def empty_parts(
    bags: JaggedBase, device: torch.device | None = None
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Create values, weights (or None), lengths and offsets without bags, with given dtypes."""
    values, weights = bags.values(), bags.weights_or_none()
    return (
        values.new_empty((0, *values.shape[1:]), device=device),
        None if weights is None else weights.new_empty((0, *weights.shape[1:]), device=device),
        bags.lengths().new_empty(0, device=device),
        bags.lengths().new_zeros(1, device=device),
    )


def check_can_move(owner: str, values: Tensor, device: torch.device | str) -> None:
    """Check that values can be copied to a device.

    Raises:
        TypeError: If `device` is not a device.
        ValueError: If the values are on the meta device, which has no contents to copy.
    """
    target = cast(object, device)
    if not isinstance(target, torch.device | str | int) or isinstance(target, bool):
        wrong_type(f"{owner}.to: device", 'a torch.device, such as torch.device("cpu")', device)
    if validate.is_meta(values) and torch.device(device).type != "meta":
        validate.refuse_meta(f"{owner}.to({str(device)!r})", f"Build the {owner} on that device.")
