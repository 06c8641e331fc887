"""The state of a KeyedJaggedTensor: its parts, what derives from them, and where they live.

Legend: `F` features (keys), `B` batch size (stride), `N` values of all bags together, `W` ranks.
Bags lie feature by feature: bag `f * B + b` is feature `f` of sample `b`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Self

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.sparse import validate

InverseIndices = tuple[list[str], Tensor]
"""Keys, and for each (in that order) the bag that each sample reads: `[keys, samples]`."""


class KeyedBuffer:
    """The parts of a KeyedJaggedTensor; lengths, offsets and per-key numbers derive lazily, once.

    Users meet it as `KeyedJaggedTensor`, whose docstring describes the arguments.
    """

    __slots__ = (
        "__weakref__",
        "_index_per_key",
        "_inverse_indices",
        "_keys",
        "_length_per_key",
        "_lengths",
        "_offset_per_key",
        "_offsets",
        "_stride",
        "_stride_per_key",
        "_stride_per_key_per_rank",
        "_values",
        "_weights",
    )

    _keys: list[str]
    _values: Tensor
    _weights: Tensor | None
    _lengths: Tensor | None
    _offsets: Tensor | None
    _stride: int
    _stride_per_key: list[int] | None
    _stride_per_key_per_rank: list[list[int]] | None
    _inverse_indices: InverseIndices | None
    _length_per_key: list[int] | None
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None

    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        *,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        validate.check_parts("KeyedJaggedTensor", values, weights, lengths, offsets)
        if lengths is not None and lengths.dtype not in validate.INT_DTYPES:
            lengths = lengths.long()  # there are none: `torch.tensor([])` is fp32
        keys = list(keys)
        validate.check_unique("KeyedJaggedTensor", keys)
        if lengths is not None and lengths.dim() != 1:
            if lengths.dim() != 2 or lengths.shape[0] != len(keys):
                raise ValueError(
                    "KeyedJaggedTensor.lengths must be [keys * samples] or [keys, samples]; "
                    f"received shape {tuple(lengths.shape)} for {len(keys)} keys."
                )
            lengths = lengths.reshape(-1)
        num_bags = (
            lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
        )
        if isinstance(stride_per_key_per_rank, Tensor):
            stride_per_key_per_rank = stride_per_key_per_rank.tolist()
        if stride_per_key_per_rank:
            stride_per_key = [sum(per_rank) for per_rank in stride_per_key_per_rank]
        elif stride_per_key is not None:
            stride_per_key_per_rank = [[size] for size in stride_per_key]
        if inverse_indices is not None and stride_per_key is None and keys:
            # Samples are then counted by the inverse indices and bags by the strides.
            size = validate.check_stride(keys, num_bags, stride)
            stride_per_key = [size] * len(keys)
            stride_per_key_per_rank = [[size] for _ in keys]
        if stride_per_key is None:
            self._stride = validate.check_stride(keys, num_bags, stride)
        else:
            self._stride = validate.check_stride_per_key(keys, num_bags, stride, stride_per_key)
        if inverse_indices is not None:
            validate.check_inverse_indices(keys, values, inverse_indices)
            self._stride = inverse_indices[1].shape[1]
        if offset_per_key is not None and length_per_key is None:
            length_per_key = [b - a for a, b in itertools.pairwise(offset_per_key)]
        if index_per_key is not None and len(index_per_key) != len(keys):
            raise ValueError(
                "KeyedJaggedTensor.index_per_key must have one entry per key; received "
                f"{len(index_per_key)} for {len(keys)} keys."
            )
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride_per_key = stride_per_key
        self._stride_per_key_per_rank = stride_per_key_per_rank or None
        self._inverse_indices = inverse_indices
        self._length_per_key = length_per_key
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        if length_per_key is not None:
            validate.check_length_per_key(keys, length_per_key, values)
        told_twice = length_per_key is not None or (lengths is not None and offsets is not None)
        if validate.is_debug() or (told_twice and validate.is_readable(values)):
            self.validate()

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
        stride_per_key: list[int] | None = None,
        length_per_key: list[int] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> Self:
        """Build from parts known to fit, without checks: for code on the hot path.

        Args:
            keys: as for the constructor; may repeat where a feature is read by several tables.
            values: as for the constructor.
            weights: as for the constructor.
            lengths: as for the constructor, `[F * B]`.
            offsets: as for the constructor.
            stride: `B`; with different batch sizes the largest, or the number of samples that
                `inverse_indices` covers.
            stride_per_key_per_rank: as for the constructor; required with `stride_per_key`.
            stride_per_key: `F` sums over ranks; required with `stride_per_key_per_rank`.
            length_per_key: as for the constructor.
            inverse_indices: as for the constructor.

        Returns:
            The keyed jagged tensor.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
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
        kjt._stride_per_key = stride_per_key
        kjt._stride_per_key_per_rank = stride_per_key_per_rank
        kjt._inverse_indices = inverse_indices
        kjt._length_per_key = length_per_key
        kjt._offset_per_key = None
        kjt._index_per_key = None
        return kjt

    def keys(self) -> list[str]:
        """Return the features, in the order of the buffer."""
        return self._keys

    def values(self) -> Tensor:
        """Return the values of all features end to end, `[N]`."""
        return self._values

    def weights(self) -> Tensor:
        """Return the weights, `[N]`.

        Raises:
            ValueError: if there are none.
        """
        if self._weights is None:
            raise ValueError("KeyedJaggedTensor has no weights. Ask with weights_or_none().")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, `[N]`, or None if there are none."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values in each bag, `[F * B]` (or the sum of the strides).

        Raises:
            ValueError: on CPU, if the offsets decrease.
        """
        if self._lengths is None:
            assert self._offsets is not None
            lengths = self._offsets.diff()
            self._check_lengths(lengths, self._offsets)
            self._lengths = lengths
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they are at hand, without deriving them."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return where each bag starts, and the end of the last, `[F * B + 1]`.

        Raises:
            ValueError: on CPU, if a length is negative, or they do not add up to the number of
                values.
        """
        if self._offsets is None:
            lengths = self.lengths()
            offsets = ops.complete_cumsum(lengths)
            self._check_lengths(lengths)
            self._offsets = offsets
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they are at hand, without deriving them."""
        return self._offsets

    def stride(self) -> int:
        """Return the batch size.

        Where features have different ones, that is the largest, or the number of samples that
        `inverse_indices` covers.
        """
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Return the batch size of each feature, `F` integers."""
        if self._stride_per_key is None:
            return [self._stride] * len(self._keys)
        return self._stride_per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return how many bags of each feature came from each rank.

        Returns:
            `F` lists of `W` integers where features have different batch sizes, else `[]`.
        """
        return self._stride_per_key_per_rank or []

    def variable_stride_per_key(self) -> bool:
        """Tell whether features may have different batch sizes."""
        return self._stride_per_key is not None

    def inverse_indices(self) -> InverseIndices:
        """Return keys, and `[len(keys), samples]` the bag that each sample reads.

        Raises:
            ValueError: if there are none.
        """
        if self._inverse_indices is None:
            raise ValueError(
                "KeyedJaggedTensor has no inverse indices. Ask with inverse_indices_or_none()."
            )
        return self._inverse_indices

    def inverse_indices_or_none(self) -> InverseIndices | None:
        """Return `inverse_indices()`, or None if there are none."""
        return self._inverse_indices

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key."""
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def length_per_key(self) -> list[int]:
        """Return how many values each feature has; waits for a GPU the first time.

        Raises:
            ValueError: if the lengths do not add up to the number of values.
        """
        if self._length_per_key is None:
            length_per_key: list[int] = self.values_per_key().tolist()
            validate.check_length_per_key(self._keys, length_per_key, self._values)
            self._length_per_key = length_per_key
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return `length_per_key()` if it is known already, else None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where the values of each feature start, `F + 1` integers; may wait for a GPU.

        Raises:
            ValueError: if the lengths do not add up to the number of values.
        """
        if self._offset_per_key is None:
            self._offset_per_key = [0, *itertools.accumulate(self.length_per_key())]
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return `offset_per_key()` if it is known already, else None."""
        return self._offset_per_key

    def lengths_offset_per_key(self) -> list[int]:
        """Return where the bags of each feature start, `F + 1` integers."""
        return [0, *itertools.accumulate(self.stride_per_key())]

    def sync(self) -> Self:
        """Derive the per-key numbers now, waiting for a GPU.

        Returns:
            Self.

        Raises:
            ValueError: if the lengths do not add up to the number of values.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(1), lengths=torch.tensor([1]))
            >>> kjt.sync().offset_per_key_or_none()
            [0, 1]
        """
        self.offset_per_key()
        return self

    def unsync(self) -> Self:
        """Forget the per-key numbers, e.g. before the lengths are overwritten; returns self."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def flatten_lengths(self) -> Self:
        """Return self: lengths are always one-dimensional here."""
        return self

    def device(self) -> torch.device:
        """Return where the tensors are."""
        return self._values.device

    def to(
        self,
        device: torch.device | str,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Copy to a device; what is known on the host stays known.

        Args:
            device: where to.
            non_blocking: whether the copy may overlap (from pinned memory).
            dtype: a new dtype for the weights.

        Returns:
            A new keyed jagged tensor; parts already there are shared.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> KeyedJaggedTensor.empty().to("cpu").device()
            device(type='cpu')
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def pin_memory(self) -> Self:
        """Copy to page-locked memory, from where copies to a GPU can overlap."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the memory from reuse until work queued on a CUDA stream is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def copy_(self, kjt: Self, non_blocking: bool = False) -> Self:
        """Overwrite the contents in place with those of another of the same sizes.

        Args:
            kjt: the source, with the same keys and strides.
            non_blocking: whether the copy may overlap.

        Returns:
            Self.

        Raises:
            ValueError: if keys or strides differ.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> a = KeyedJaggedTensor(["a"], torch.zeros(2), lengths=torch.tensor([1, 1]))
            >>> b = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2, 0]))
            >>> a.copy_(b).lengths()
            tensor([2, 0])
        """
        if kjt._keys != self._keys or kjt.stride_per_key() != self.stride_per_key():
            raise ValueError(
                "KeyedJaggedTensor.copy_: keys and strides must be equal; received "
                f"{validate.preview(kjt._keys)}, {validate.preview(kjt.stride_per_key())} for "
                f"{validate.preview(self._keys)}, {validate.preview(self.stride_per_key())}."
            )
        self._values.copy_(kjt._values, non_blocking)
        self.lengths().copy_(kjt.lengths(), non_blocking)
        if self._offsets is not None:
            self._offsets.copy_(kjt.offsets(), non_blocking)
        if self._weights is not None:
            self._weights.copy_(kjt.weights(), non_blocking)
        if self._inverse_indices is not None:
            self._inverse_indices[1].copy_(kjt.inverse_indices()[1], non_blocking)
        self._length_per_key, self._offset_per_key = kjt._length_per_key, kjt._offset_per_key
        return self

    def size_in_bytes(self) -> int:
        """Return the size in bytes of all parts at hand."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def clear_storage(self) -> int:
        """Free the memory of all parts at once, returning its bytes; not to be read after."""
        size = self.size_in_bytes()
        for tensor in self._tensors():
            tensor.untyped_storage().resize_(0)
        return size

    def validate(self) -> None:
        """Check every length, offset and inverse index; waits for a GPU.

        Raises:
            ValueError: naming the first feature and bag at fault.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([3, -1]))
            >>> kjt.validate()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: KeyedJaggedTensor.lengths must not be negative; received ...
        """
        validate.check_contents(
            "KeyedJaggedTensor",
            self._values,
            self._lengths,
            self._offsets,
            self._keys,
            self.stride_per_key(),
        )
        known, actual = self._length_per_key, self.values_per_key().tolist()
        if known is not None and known != actual:
            raise ValueError(
                "KeyedJaggedTensor.length_per_key must agree with lengths; received "
                f"{validate.preview(known)} for {validate.preview(actual)}."
            )
        if self._inverse_indices is not None:
            keys, rows = self._inverse_indices
            validate.check_inverse_contents(self._keys, self.stride_per_key(), (keys, rows.cpu()))

    def check_bags(self) -> None:
        """Check lengths, offsets and inverse indices, once, where reading them is free: on CPU.

        Lookups do so: nothing wrong in them may reach a kernel.

        Raises:
            ValueError: naming the first feature and bag at fault.

        Example:
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(3), offsets=torch.tensor([0, 3, 1, 3]))
            >>> kjt.check_bags()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: KeyedJaggedTensor.offsets must not decrease; received ...
        """
        self.lengths()
        self.offsets()
        if self._inverse_indices is not None:
            validate.check_inverse_contents(
                self._keys, self.stride_per_key(), self._inverse_indices
            )

    def _check_lengths(self, lengths: Tensor, offsets: Tensor | None = None) -> None:
        validate.check_lengths(
            "KeyedJaggedTensor",
            self._values,
            lengths,
            offsets,
            keys=self._keys,
            stride_per_key=self.stride_per_key(),
        )

    def values_per_key(self) -> Tensor:
        """Return `length_per_key()` as a tensor where the lengths are, `[F]`; waits for nothing."""
        lengths = self.lengths()
        if self._stride_per_key is None:
            return lengths.view(len(self._keys), self._stride).sum(1, dtype=lengths.dtype)
        bounds = torch.tensor(self.lengths_offset_per_key(), device=lengths.device)
        return ops.segment_sum(lengths, bounds)

    def with_values(self, values: Tensor) -> Self:
        """Return the same bags with other values, one for each of these.

        Args:
            values: ``[N, ...]``, on the same device.

        Returns:
            A keyed jagged tensor that shares all else with this one.

        Raises:
            ValueError: ``values`` are more, fewer, or on another device.

        Example:
            >>> import torch
            >>> from recsys.sparse import KeyedJaggedTensor
            >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([5, 6]), lengths=torch.tensor([2, 0]))
            >>> kjt.with_values(kjt.values() % 4).to_dict()["a"].to_dense()
            [tensor([1, 2]), tensor([], dtype=torch.int64)]
        """
        mine = self._values
        if values.shape[:1] != mine.shape[:1] or values.device != mine.device:
            raise ValueError(
                f"values must be {len(mine)} on {mine.device}; received "
                f"{tuple(values.shape)} on {values.device}."
            )
        return self._map(lambda tensor: values if tensor is mine else tensor)

    def _strides_per_rank(self) -> list[list[int]]:
        return self._stride_per_key_per_rank or [[size] for size in self.stride_per_key()]

    def _tensors(self) -> Iterator[Tensor]:
        inverse = None if self._inverse_indices is None else self._inverse_indices[1]
        parts = (self._values, self._weights, self._lengths, self._offsets, inverse)
        return (part for part in parts if part is not None)

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        kjt = self.from_parts(
            self._keys,
            function(self._values),
            None if self._weights is None else function(self._weights),
            None if self._lengths is None else function(self._lengths),
            None if self._offsets is None else function(self._offsets),
            stride=self._stride,
            stride_per_key_per_rank=self._stride_per_key_per_rank,
            stride_per_key=self._stride_per_key,
            length_per_key=self._length_per_key,
            inverse_indices=None
            if self._inverse_indices is None
            else (self._inverse_indices[0], function(self._inverse_indices[1])),
        )
        kjt._offset_per_key, kjt._index_per_key = self._offset_per_key, self._index_per_key
        return kjt
