"""KeyedBags: sizes and positions of the features of a KeyedJaggedTensor.

Legend: `F` features (keys), `B` batch size (stride), `N` values of all bags together, `W` ranks.
"""

import contextlib
import itertools
from collections.abc import Callable
from typing import NamedTuple, Self

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.arguments import instance
from recsys.kernels.checked import checked, checked_late
from recsys.sparse import exchange, per_key_checks, rearrange, validate
from recsys.sparse.bags import Bags, check_can_move

InverseIndices = tuple[list[str], Tensor]
"""Keys, and the bag number that each sample reads, `[len(keys), samples]`."""

_SAMPLES = ("_stride", "_stride_per_key", "_stride_per_key_per_rank", "_inverse_indices")
_PER_KEY = ("_length_per_key", "_offset_per_key", "_index_per_key")


class Parts(NamedTuple):
    """All fields of a batch, as `KeyedJaggedTensor.parts()` returns them for hot paths.

    Attributes:
        keys: `F` features.
        values: `[N]`.
        weights: `[N]` or None.
        lengths: `[F * B]`, or the sum of the strides.
        offsets: one entry more than `lengths`.
        stride: as `KeyedJaggedTensor.stride()`.
        stride_per_key_per_rank: None if all features have the same batch size.
        length_per_key: None if unknown on the host.
        inverse_indices: None if there are none.
    """

    keys: list[str]
    values: Tensor
    weights: Tensor | None
    lengths: Tensor
    offsets: Tensor
    stride: int
    stride_per_key_per_rank: list[list[int]] | None
    length_per_key: list[int] | None
    inverse_indices: InverseIndices | None

    def ids_per_key(self) -> Tensor:
        """Return the number of ids of each feature, `[F]`, if features have one batch size."""
        if self.stride == 0:
            return self.lengths.new_zeros(len(self.keys))
        return self.lengths if self.stride == 1 else self.offsets[:: self.stride].diff()

    def are_ids_below(self, limit: int) -> bool:
        """Return whether all ids are in `[0, limit)`; waits for the device."""
        if not self.values.numel():
            return True
        low, high = torch.aminmax(self.values)
        return bool(low >= 0 and high < limit)


class KeyedBags(Bags):
    """Bags of several features: fields, accessors and copies of KeyedJaggedTensor."""

    __slots__ = ("_keys", *_SAMPLES, *_PER_KEY)

    _keys: list[str]
    _values: Tensor
    _stride: int
    _stride_per_key: list[int] | None
    _stride_per_key_per_rank: list[list[int]] | None
    _inverse_indices: InverseIndices | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None

    @classmethod
    def from_parts(
        cls,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None = None,
        *,
        stride: int,
        stride_per_key_per_rank: list[list[int]] | None = None,
        length_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> Self:
        """Build from consistent parts, without checks, for hot paths.

        Args:
            keys: as for the constructor, but may repeat.
            values: as for the constructor.
            weights: as for the constructor.
            lengths: as for the constructor, `[F * B]`.
            offsets: as for the constructor.
            stride: as `stride()` returns it.
            stride_per_key_per_rank: `F` lists, if features have different batch sizes.
            length_per_key: as for the constructor.
            offset_per_key: as for the constructor.
            index_per_key: as for the constructor.
            inverse_indices: as for the constructor.

        Returns:
            The keyed jagged tensor.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor.from_parts(
            ...     ["a"], torch.ones(2), None, torch.tensor([2, 0]), stride=2
            ... )
        """
        kjt = cls.__new__(cls)
        kjt._keys = keys
        kjt._values = values
        kjt._weights = weights
        kjt._lengths = lengths
        kjt._offsets = offsets
        kjt._stride = stride
        kjt._stride_per_key = None
        kjt._stride_per_key_per_rank = stride_per_key_per_rank
        kjt._inverse_indices = inverse_indices
        kjt._length_per_key = length_per_key
        kjt._offset_per_key = offset_per_key
        kjt._index_per_key = index_per_key
        return kjt

    def keys(self) -> list[str]:
        """Return the features, in the order of the buffer."""
        return self._keys

    def parts(self) -> Parts:
        """Return all fields in the order of `from_parts`, with lengths and offsets computed.

        Raises:
            ValueError: as `lengths()` and `offsets()`.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> kjt.parts().offsets
            tensor([0, 1, 3])
        """
        lengths, offsets = self._lengths, self._offsets
        return Parts(
            self._keys,
            self._values,
            self._weights,
            self.lengths() if lengths is None else lengths,
            self.offsets() if offsets is None else offsets,
            self._stride,
            self._stride_per_key_per_rank,
            self._length_per_key,
            self._inverse_indices,
        )

    @checked_late
    def with_values(self, values: Tensor) -> Self:
        """Replace the values and keep the bags.

        Args:
            values: `[N, ...]`, on the same device.

        Returns:
            A keyed jagged tensor that shares all other tensors with this one.

        Raises:
            ValueError: if the number or the device of the values differs.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([5, 6]), lengths=torch.tensor([2, 0]))
            >>> kjt.with_values(kjt.values() % 4).to_dict()["a"].to_dense()
            [tensor([1, 2]), tensor([], dtype=torch.int64)]
        """
        given = self._values
        if values.shape[:1] != given.shape[:1] or values.device != given.device:
            raise ValueError(
                f"values must be {len(given)} on {given.device}; received "
                f"{tuple(values.shape)} on {values.device}."
            )
        replaced = self._map(lambda tensor: tensor)
        replaced._values = values
        return replaced

    @checked_late
    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Copy to a device.

        A copy from the CPU to a GPU has a known `length_per_key()`, so methods such as `to_dict()`
        do not wait for the GPU. Call `unsync()` of the copy before you overwrite its lengths.

        Args:
            device: the target device.
            non_blocking: do not wait for the copy. Unpinned tensors are pinned first.
            dtype: a new dtype for the weights.

        Returns:
            A new keyed jagged tensor. Tensors that are on the device already are shared.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> KeyedJaggedTensor.empty().to("cpu").device()
            device(type='cpu')
        """
        check_can_move("KeyedJaggedTensor", self._values, device)
        if dtype is not None:
            instance("KeyedJaggedTensor.to: dtype", dtype, torch.dtype, "a torch.dtype")
        moved = self._map(lambda tensor: ops.copy_to(tensor, device, non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        if self._length_per_key is None:
            moved._length_per_key = self._known_after_move(moved._values.device)
        return moved

    @checked_late
    def copy_(self, kjt: Self, non_blocking: bool = False) -> Self:
        """Overwrite the contents in place with the contents of a batch of the same sizes.

        Args:
            kjt: the source, with the same keys and strides.
            non_blocking: do not wait for the copy.

        Returns:
            Self.

        Raises:
            ValueError: if keys, strides or shapes differ, or only one batch has weights or inverse
                indices.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> a = KeyedJaggedTensor(["a"], torch.zeros(2), lengths=torch.tensor([1, 1]))
            >>> b = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2, 0]))
            >>> a.copy_(b).lengths()
            tensor([2, 0])
        """
        instance("KeyedJaggedTensor.copy_: kjt", kjt, KeyedBags, "a KeyedJaggedTensor")
        if kjt.keys() != self.keys() or kjt.stride_per_key() != self.stride_per_key():
            preview = validate.preview
            raise ValueError(
                "KeyedJaggedTensor.copy_: keys and strides must be equal; received "
                f"{preview(kjt.keys())}, {preview(kjt.stride_per_key())} for "
                f"{preview(self.keys())}, {preview(self.stride_per_key())}."
            )
        self._copy_parts(kjt, non_blocking)
        if self._inverse_indices is not None:
            self._inverse_indices[1].copy_(kjt.inverse_indices()[1], non_blocking)
        self._length_per_key, self._offset_per_key = kjt._length_per_key, kjt._offset_per_key
        return self

    # -- batch sizes -------------------------------------------------------------------------------

    def stride(self) -> int:
        """Return the batch size.

        If features have different batch sizes, this is the number of samples of
        `inverse_indices`, or else the largest batch size.
        """
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Return the batch size of each feature, `F` integers."""
        if self._stride_per_key is None and self._stride_per_key_per_rank is not None:
            self._stride_per_key = [sum(sizes) for sizes in self._stride_per_key_per_rank]
        return self._stride_per_key or [self._stride] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the number of bags of each feature that each rank contributed.

        Returns:
            `F` lists of `W` integers; `[]` if all features have the same batch size.
        """
        return self._stride_per_key_per_rank or []

    def variable_stride_per_key(self) -> bool:
        """Return whether features may have different batch sizes."""
        return self._stride_per_key_per_rank is not None

    def lengths_offset_per_key(self) -> list[int]:
        """Return the position of the first bag of each feature, and the end: `F + 1` integers."""
        return [0, *itertools.accumulate(self.stride_per_key())]

    def inverse_indices(self) -> InverseIndices:
        """Return keys, and the bag number that each sample reads, `[len(keys), samples]`.

        Raises:
            ValueError: if there are none.
        """
        if self._inverse_indices is None:
            validate.refuse_missing("KeyedJaggedTensor", "inverse_indices")
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return `inverse_indices()`, or None if there are none."""
        return self._inverse_indices

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key."""
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    # -- numbers of values -------------------------------------------------------------------------

    def values_per_key(self) -> Tensor:
        """Return the number of values of each feature, `[F]`, without waiting for a GPU."""
        lengths = self.lengths()
        if self._stride_per_key_per_rank is None:
            return lengths.view(len(self._keys), self._stride).sum(1, dtype=lengths.dtype)
        bounds = torch.tensor(self.lengths_offset_per_key(), device=lengths.device)
        return ops.segment_sum(lengths, bounds)

    def length_per_key(self) -> list[int]:
        """Return the number of values of each feature; the first call waits for a GPU.

        Raises:
            ValueError: if the sum of the lengths exceeds the number of values; on a GPU, if the two
                differ.
        """
        if self._length_per_key is None:
            sizes_F = self.values_per_key()
            if validate.is_meta(sizes_F):
                return [rearrange.total_on_meta(self, [i]) for i in range(len(self._keys))]
            self._length_per_key = self._checked_sizes(sizes_F)
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return `length_per_key()` if it is known, else None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the position of the first value of each feature, and the end: `F + 1` integers.

        The first call waits for a GPU.

        Raises:
            ValueError: as `length_per_key()`.
        """
        if self._offset_per_key is None:
            self._offset_per_key = [0, *itertools.accumulate(self.length_per_key())]
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return `offset_per_key()` if it is known, else None."""
        return self._offset_per_key

    def sync(self) -> Self:
        """Compute `length_per_key` and `offset_per_key` now, which waits for a GPU.

        Returns:
            Self.

        Raises:
            ValueError: as `length_per_key()`.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(1), lengths=torch.tensor([1]))
            >>> kjt.sync().offset_per_key_or_none()
            [0, 1]
        """
        self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Discard `length_per_key` and `offset_per_key`; call it before you overwrite lengths."""
        self._length_per_key = None
        self._offset_per_key = None
        self._num_read = None
        return self

    def _checked_sizes(self, sizes_F: Tensor) -> list[int]:
        sizes: list[int] = sizes_F.tolist()
        per_key_checks.check_length_per_key(self._keys, sizes, self._values, "lengths")
        return sizes

    def _known_after_move(self, device: torch.device) -> list[int] | None:
        """Return `length_per_key()` for a copy on a GPU, or None if the lengths are invalid.

        It is not stored in this batch, because a loader may reuse pinned lengths.
        """
        bags = self._offsets if self._lengths is None else self._lengths
        if bags is None or not validate.is_readable(bags) or device.type in ("cpu", "meta"):
            return None
        with contextlib.suppress(ValueError, RuntimeError, IndexError):
            if self._lengths is None:
                return self._checked_sizes(bags[self.lengths_offset_per_key()].diff())
            return self._checked_sizes(self.values_per_key())
        return None

    # -- checks and exchanges ----------------------------------------------------------------------

    def validate(self) -> None:
        """Check all lengths, offsets and inverse indices; waits for a GPU.

        Raises:
            ValueError: if one is invalid, with its feature and bag.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([3, -1]))
            >>> kjt.validate()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: KeyedJaggedTensor.lengths must not be negative; received ...
        """
        validate.check_keyed(self)

    def check_bags(self) -> None:
        """Check lengths, offsets and inverse indices on a CPU, where reading them is free.

        Lookups call it before they pass a batch to a kernel.

        Raises:
            ValueError: if one is invalid, with its feature and bag.

        Example:
            >>> from recsys import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(3), offsets=torch.tensor([0, 3, 1, 3]))
            >>> kjt.check_bags()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: KeyedJaggedTensor.offsets must not decrease; received ...
        """
        inverse = self.parts().inverse_indices  # computing lengths and offsets checks them
        if inverse is not None:
            validate.check_inverse_contents(self._keys, self.stride_per_key(), inverse)

    def flatten_lengths(self) -> Self:
        """Return self: lengths are always one-dimensional."""
        return self

    def clear_storage(self) -> int:
        """Free the memory of all tensors and return its bytes; the batch becomes unusable."""
        size = self.size_in_bytes()
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        return size

    def dist_labels(self) -> list[str]:
        """Return the names of the tensors to exchange: lengths, values, strides, weights."""
        return list(exchange.named_tensors(self))

    @checked
    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return the number of entries of each tensor to send to each rank.

        Args:
            key_splits: the number of consecutive features to send to each rank.

        Returns:
            A list of `W` sizes for each name of `dist_labels()`.
        """
        return exchange.splits(self, key_splits)

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors to exchange, in the order of `dist_labels()`."""
        return list(exchange.named_tensors(self).values())

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        inverse = self._inverse_indices
        mapped = self.from_parts(
            self._keys,
            function(self._values),
            None if self._weights is None else function(self._weights),
            None if self._lengths is None else function(self._lengths),
            None if self._offsets is None else function(self._offsets),
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            length_per_key=self._length_per_key,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
            inverse_indices=None if inverse is None else (inverse[0], function(inverse[1])),
        )
        mapped._num_read = getattr(self, "_num_read", None)
        return mapped

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super()._shapes()
        if self._inverse_indices is not None:
            shapes["inverse_indices"] = tuple(self._inverse_indices[1].shape)
        return shapes

    def _tensors(self) -> list[Tensor]:
        inverse = [] if self._inverse_indices is None else [self._inverse_indices[1]]
        return super()._tensors() + inverse
