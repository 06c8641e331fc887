"""Fields and sizes of a KeyedJaggedTensor, and the checks of a batch before a lookup.

Shapes: `F` features (keys), `B` batch size (stride), `N` values of all bags together, `W` ranks.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.sparse import per_key_checks, rearrange, validate
from recsys.sparse.bags import JaggedBase
from recsys.sparse.value_checks import check_id_weights

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
        offsets: One entry more than `lengths`.
        stride: As `KeyedJaggedTensor.stride()`.
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


class KeyedBags(JaggedBase):
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
            keys: As for the constructor, but may repeat.
            values: As for the constructor.
            weights: As for the constructor.
            lengths: As for the constructor, `[F * B]`.
            offsets: As for the constructor.
            stride: As `stride()` returns it.
            stride_per_key_per_rank: `F` lists, if features have different batch sizes.
            length_per_key: As for the constructor.
            offset_per_key: As for the constructor.
            index_per_key: As for the constructor.
            inverse_indices: As for the constructor.

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
            ValueError: As `lengths()` and `offsets()`.

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
            ValueError: If there are none.
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
            ValueError: If the sum of the lengths exceeds the number of values; on a GPU, if the two
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
            ValueError: As `length_per_key()`.
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
            ValueError: As `length_per_key()`.

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
        if torch.compiler.is_compiling():  # sizes are symbols, which cannot be compared
            for size in sizes:
                torch._check(size >= 0)
            torch._check(sum(sizes) <= self._values.shape[0])
            return sizes
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

    # -- checks ------------------------------------------------------------------------------------

    def validate(self) -> None:
        """Check all lengths, offsets and inverse indices; waits for a GPU.

        Raises:
            ValueError: If one is invalid, with its feature and bag.

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
            ValueError: If one is invalid, with its feature and bag.

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


_Batch = TypeVar("_Batch", bound=KeyedBags)


def check_features(
    features: _Batch,
    owner: str,
    device: torch.device,
    *,
    is_pooled: bool,
    is_weighted: bool,
    names: Sequence[str] = (),
) -> tuple[_Batch, Parts]:
    """Check that a lookup can read a batch; the range of the ids is checked elsewhere.

    Args:
        features: The batch.
        owner: Name of the module, for error messages.
        device: Device of the tables.
        is_pooled: True if the lookup returns one row per sample.
        is_weighted: True if the lookup needs weights.
        names: The features to look up.

    Returns:
        The batch, trimmed, and its parts.

    Raises:
        TypeError: `features` is not a KeyedJaggedTensor, ids are not int32 or int64, or weights are
            not floating.
        ValueError: Ids or weights have more than one dim, the batch is on another device, or
            weights or inverse indices are missing. A weight is NaN or infinite (on CUDA, in an
            earlier batch). On the CPU, lengths, offsets or inverse indices are inconsistent.
    """
    if not isinstance(features, KeyedBags):
        raise TypeError(
            f"{owner} takes a KeyedJaggedTensor; received {validate.described(features)}. Build "
            "one: KeyedJaggedTensor(keys=[...], values=ids, lengths=...)."
        )
    # on a CPU, parts() checks lengths and offsets
    parts = features.parts()
    known = parts.length_per_key
    num_read = getattr(features, "_num_read", None) if known is None else sum(known)
    if num_read is not None and num_read < parts.values.shape[0]:
        features = features.trim()
        parts = features.parts()
    values = parts.values
    if values.dtype is not torch.int64 and values.dtype is not torch.int32:
        raise TypeError(
            f"{owner} looks up ids, which must be int32 or int64; received {values.dtype} for the "
            f"features {validate.preview(parts.keys)}. Convert them with .long()."
        )
    if values.dim() != 1:
        raise ValueError(
            f"{owner} looks up ids, which must have one dim, [ids]; received values of shape "
            f"{tuple(values.shape)}. Flatten them: the ids of a sample are one bag."
        )
    if values.device != device:
        raise ValueError(
            f"{owner} has its tables on {device}; received a batch on {values.device}. Move one of "
            "them with .to()."
        )
    if is_weighted:
        weights = parts.weights
        if weights is None:
            raise ValueError(
                f"{owner} was built with is_weighted=True and needs one weight per id; received a "
                "batch without weights. Pass weights= to the KeyedJaggedTensor."
            )
        if weights.dim() != 1:
            raise ValueError(
                f"{owner} multiplies each id's row by a number, so weights must have one dim, "
                f"[ids]; received weights of shape {tuple(weights.shape)}."
            )
        if not weights.is_floating_point():
            raise TypeError(
                f"{owner} needs weights of a floating dtype; received {weights.dtype}. Convert "
                "them with .float()."
            )
        safe = check_id_weights(owner, weights, parts.offsets, parts.keys, features.stride_per_key)
        parts = parts._replace(weights=safe)
    if parts.stride_per_key_per_rank is not None or parts.inverse_indices is not None:
        _check_samples(features, parts, is_pooled, names)
    return features, parts


def _check_samples(
    features: KeyedBags, parts: Parts, is_pooled: bool, names: Sequence[str]
) -> None:
    inverse, strides = parts.inverse_indices, features.stride_per_key()
    if inverse is not None:
        validate.check_inverse_contents(parts.keys, strides, inverse)
    if not is_pooled:
        return
    if inverse is None:
        raise ValueError(
            "A pooled lookup of features with different batch sizes needs inverse_indices; "
            f"received stride_per_key={strides[:10]} and none. Pass inverse_indices= to the "
            "KeyedJaggedTensor."
        )
    missing = set(names).difference(inverse[0])
    if missing:
        raise ValueError(
            "KeyedJaggedTensor.inverse_indices must cover every key that is looked up; "
            f"received none for {validate.preview(sorted(missing))}."
        )
    if features.variable_stride_per_key() and inverse[1].shape[1] and not all(strides):
        key = parts.keys[strides.index(0)]
        raise ValueError(
            f"Each sample needs a bag of every feature; received inverse_indices of "
            f"{inverse[1].shape[1]} samples and no bag of feature '{key}'. Add an empty bag."
        )
