"""KeyedJaggedTensor: one jagged batch per feature, all in one buffer.

Legend: `F` features (keys), `B` batch size (stride), `N` values of all bags together, `W` ranks.

Features may have different batch sizes (deduplicated requests, or ranks that send different
amounts). Then each feature has its own stride, `stride_per_key_per_rank` says where they come
from, and `inverse_indices` may say which of its bags each sample reads. Everything else is alike.
"""

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self, cast

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.kernels.arguments import instance, wrong_type
from recsys.kernels.checked import checked, checked_late
from recsys.sparse import exchange, per_key_checks, rearrange, validate
from recsys.sparse.bags import Bags, check_can_move, empty_parts
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.recorded import recorded
from recsys.sparse.text import format_keyed_jagged, show_keyed_jagged
from recsys.sparse.value_checks import check_id_weights

InverseIndices = tuple[list[str], Tensor]
"""Keys, and for each (in that order) the bag that each sample reads: `[keys, samples]`."""

_SAMPLES = ("_stride", "_stride_per_key", "_stride_per_key_per_rank", "_inverse_indices")
_PER_KEY = ("_length_per_key", "_offset_per_key", "_index_per_key")


class Parts(NamedTuple):
    """What a batch is made of: `KeyedJaggedTensor.parts()`, for code on the hot path.

    Attributes:
        keys: `F` features.
        values: `[N]`.
        weights: `[N]` or None.
        lengths: `[F * B]`, or the sum of the strides.
        offsets: one more than lengths.
        stride: as `KeyedJaggedTensor.stride()`.
        stride_per_key_per_rank: None where all features have one batch size.
        length_per_key: None where it is not known on the host.
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
        """Return `[F]` ids of each feature; the features have one batch size."""
        if self.stride == 0:
            return self.lengths.new_zeros(len(self.keys))
        return self.lengths if self.stride == 1 else self.offsets[:: self.stride].diff()

    def are_ids_below(self, limit: int) -> bool:
        """Return whether all ids are in `[0, limit)`; waits for the device."""
        if not self.values.numel():
            return True
        low, high = torch.aminmax(self.values)
        return bool(low >= 0 and high < limit)


class KeyedJaggedTensor(Bags):
    """Jagged batches of several features, stored end to end in one buffer.

    Lengths and offsets derive from each other when first asked for; so do the per-key numbers,
    which are Python integers and therefore wait for a GPU (`sync()` does it at a chosen moment).

    Args:
        keys: the features, unique, in the order of the buffer.
        values: `[N]`, ids or values of all features end to end. What follows the last bag is never
            read: see `trim`.
        weights: `[N]`, one weight per value, or None.
        lengths: `[F * B]` (or `[F, B]`), int32 or int64: values in each bag, feature by feature.
        offsets: `[F * B + 1]`, int32 or int64. One of lengths and offsets is required.
        stride: `B`; found from lengths or offsets if None.
        stride_per_key_per_rank: `F` lists (or an integer tensor `[F, W]`) of the number of bags
            that came from each rank, when features have different batch sizes.
        stride_per_key: `F` batch sizes, when features have different ones and ranks do not matter.
        length_per_key: `F` numbers of values, where known; saves the wait for a GPU. Required on a
            GPU where values are longer than the bags.
        lengths_offset_per_key: `F + 1`, the running sum of `stride_per_key`, where known.
        offset_per_key: `F + 1`, the running sum of `length_per_key`, where known.
        index_per_key: position of each key, where known.
        jt_dict: the result of `to_dict()`, where known; only its keys are checked.
        inverse_indices: keys, and `[len(keys), samples]` the bag that each sample reads. Features
            without are not looked up for samples.

    Raises:
        TypeError: if lengths or offsets are not int32 or int64 tensors, or an argument has another
            wrong type.
        ValueError: if keys repeat, or shapes, devices or numbers do not fit together. On a GPU a
            `length_per_key` or `offset_per_key` is compared with the number of values only.

    Example:
        >>> KeyedJaggedTensor(
        ...     keys=["user", "films"],
        ...     values=torch.tensor([7, 8, 1, 2, 3]),
        ...     lengths=torch.tensor([1, 1, 3, 0]),
        ... )
        KeyedJaggedTensor(2 keys, stride 2, 5 values, int64, cpu)
            "user":
                [[7], [8]]
            "films":
                [[1, 2, 3], []]
    """

    __slots__ = ("_keys", *_SAMPLES, *_PER_KEY)

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
        lengths_offset_per_key: list[int] | None = None,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        jt_dict: dict[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> None:
        is_proxy = validate.is_proxy(values)
        if not is_proxy:
            lengths = validate.check_parts("KeyedJaggedTensor", values, weights, lengths, offsets)
        if not isinstance(cast(object, keys), list):
            per_key_checks.check_is_list("keys", keys, "a list of names")
        keys = list(keys)
        validate.check_unique("KeyedJaggedTensor", keys)
        if not is_proxy and lengths is not None and lengths.dim() != 1:
            lengths = validate.flatten_lengths(keys, lengths)
        num_bags = lengths.numel() if lengths is not None else offsets.numel() - 1  # type: ignore[union-attr]
        num_samples = None
        if inverse_indices is not None:
            num_samples = validate.check_inverse_indices(values, inverse_indices)
        self._stride, self._stride_per_key_per_rank = per_key_checks.check_strides(
            keys, num_bags, stride, stride_per_key, stride_per_key_per_rank, num_samples
        )
        if offset_per_key is not None:
            per_key_checks.check_is_list("offset_per_key", offset_per_key)
        if length_per_key is not None:
            per_key_checks.check_one_per_key("length_per_key", keys, length_per_key)
        if index_per_key is not None:
            per_key_checks.check_index_per_key("KeyedJaggedTensor", keys, index_per_key)
        if jt_dict is not None:
            if not isinstance(cast(object, jt_dict), Mapping):
                wrong_type("KeyedJaggedTensor.jt_dict", "a dict", jt_dict)
            per_key_checks.check_derived(
                "KeyedJaggedTensor", "jt_dict", sorted(jt_dict), sorted(keys), "a dict of the keys"
            )
        self._keys = keys
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._stride_per_key: list[int] | None = None
        self._inverse_indices = inverse_indices
        self._length_per_key = None if length_per_key is None else list(length_per_key)
        self._offset_per_key = None if offset_per_key is None else list(offset_per_key)
        self._index_per_key = index_per_key
        if lengths_offset_per_key is not None:
            per_key_checks.check_is_list("lengths_offset_per_key", lengths_offset_per_key)
            bounds = self.lengths_offset_per_key()
            per_key_checks.check_derived(
                "KeyedJaggedTensor",
                "lengths_offset_per_key",
                list(lengths_offset_per_key),
                bounds,
                "the running sum of the keys' batch sizes",
            )
        has_counts = length_per_key is not None or offset_per_key is not None
        if not is_proxy and validate.is_checked_in_full(values, lengths, offsets, has_counts):
            self.validate()
            self._num_read = self.num_read()
        if has_counts and not is_proxy:
            self._length_per_key = per_key_checks.check_counts(
                keys, values, self._length_per_key, self._offset_per_key
            )

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
        """Build from parts known to fit, without checks: for code on the hot path.

        Args:
            keys: as for the constructor; may repeat where a feature is read by several tables.
            values: as for the constructor.
            weights: as for the constructor.
            lengths: as for the constructor, `[F * B]`.
            offsets: as for the constructor.
            stride: `B`; with different batch sizes the largest, or the number of samples that
                `inverse_indices` covers.
            stride_per_key_per_rank: where features have different batch sizes, `F` lists.
            length_per_key: as for the constructor.
            offset_per_key: as for the constructor.
            index_per_key: as for the constructor.
            inverse_indices: as for the constructor.

        Returns:
            The keyed jagged tensor.

        Example:
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

    @staticmethod
    @recorded
    def from_lengths_sync(
        keys: list[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Build from lengths and derive the per-key numbers at once, waiting for a GPU.

        Arguments are the constructor's.

        Returns:
            A synced keyed jagged tensor.

        Raises:
            TypeError: as the constructor.
            ValueError: as the constructor; and if lengths add up to more than the number of values.

        Example:
            >>> kjt = KeyedJaggedTensor.from_lengths_sync(
            ...     ["a", "b"], torch.ones(3), torch.tensor([1, 0, 0, 2])
            ... )
            >>> kjt.length_per_key()
            [1, 2]
        """
        parts = keys, values, weights, lengths, None, stride, stride_per_key_per_rank
        return KeyedJaggedTensor(*parts, inverse_indices=inverse_indices).sync()

    @staticmethod
    @recorded
    def from_offsets_sync(
        keys: list[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | list[list[int]] | None = None,
        inverse_indices: InverseIndices | None = None,
    ) -> "KeyedJaggedTensor":
        """Build from offsets and derive the per-key numbers at once, waiting for a GPU.

        Arguments are the constructor's.

        Returns:
            A synced keyed jagged tensor.

        Raises:
            TypeError: as the constructor.
            ValueError: as the constructor.

        Example:
            >>> kjt = KeyedJaggedTensor.from_offsets_sync(
            ...     ["a", "b"], torch.ones(3), torch.tensor([0, 1, 1, 1, 3])
            ... )
            >>> kjt.offset_per_key()
            [0, 1, 3]
        """
        parts = keys, values, weights, None, offsets, stride, stride_per_key_per_rank
        return KeyedJaggedTensor(*parts, inverse_indices=inverse_indices).sync()

    @staticmethod
    @recorded
    @checked_late
    def from_jt_dict(
        jt_dict: Mapping[str, JaggedTensor], force_variable_stride: bool = False
    ) -> "KeyedJaggedTensor":
        """Put jagged tensors of several features end to end.

        Args:
            jt_dict: features by key, in order; all weighted or none, alike in dtypes and device.
                Different numbers of bags make features with different batch sizes.
            force_variable_stride: whether to keep a batch size per feature also if all are equal.

        Returns:
            The keyed jagged tensor.

        Raises:
            ValueError: if there is no feature, or features differ in dtype or weightedness.

        Example:
            >>> jt = JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> KeyedJaggedTensor.from_jt_dict({"a": jt, "b": jt}).lengths()
            tensor([1, 2, 1, 2])
        """
        return KeyedJaggedTensor(**rearrange.merged(jt_dict, force_variable_stride))

    @staticmethod
    @recorded
    @checked_late
    def concat(kjt_list: "Sequence[KeyedJaggedTensor]") -> "KeyedJaggedTensor":
        """Put the features of several keyed jagged tensors side by side.

        Args:
            kjt_list: at least one; keys distinct; all weighted or none; alike in dtypes, device
                and stride (unless their features have different batch sizes).

        Returns:
            A keyed jagged tensor with all keys, in order.

        Raises:
            ValueError: if the list is empty, keys repeat, or the parts do not fit together.

        Example:
            >>> a = KeyedJaggedTensor(["a"], torch.ones(1), lengths=torch.tensor([1, 0]))
            >>> b = KeyedJaggedTensor(["b"], torch.ones(2), lengths=torch.tensor([0, 2]))
            >>> KeyedJaggedTensor.concat([a, b]).keys()
            ['a', 'b']
        """
        return rearrange.concat(kjt_list)

    @staticmethod
    @checked
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor of no features.

        Args:
            is_weighted: whether it has (no) weights.
            device: where.
            values_dtype: torch's default dtype if None.
            weights_dtype: torch's default dtype if None.
            lengths_dtype: int32 or int64.

        Returns:
            A keyed jagged tensor with no keys and stride 0.

        Example:
            >>> KeyedJaggedTensor.empty().keys()
            []
        """
        jt = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        parts = jt.values(), jt.weights_or_none(), jt.lengths(), jt.offsets()
        return KeyedJaggedTensor.from_parts([], *parts, stride=0)

    @staticmethod
    @recorded
    @checked
    def empty_like(
        kjt: "KeyedJaggedTensor", device: torch.device | None = None
    ) -> "KeyedJaggedTensor":
        """Make a keyed jagged tensor of no features with the dtypes and stride of another.

        Args:
            kjt: the model.
            device: where; the model's device if None.

        Returns:
            A keyed jagged tensor with no keys.

        Example:
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(1), lengths=torch.tensor([1, 0]))
            >>> KeyedJaggedTensor.empty_like(kjt).stride()
            2
        """
        parts = empty_parts(kjt, device)
        return KeyedJaggedTensor.from_parts([], *parts, stride=kjt._stride)

    def parts(self) -> Parts:
        """Return all that `from_parts` takes, in its order and in one call, offsets included.

        Raises:
            ValueError: as `lengths()` and `offsets()`.

        Example:
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

    def keys(self) -> list[str]:
        """Return the features, in the order of the buffer."""
        return self._keys

    def stride(self) -> int:
        """Return the batch size.

        Where features have different ones, that is the largest, or the number of samples that
        `inverse_indices` covers.
        """
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Return the batch size of each feature, `F` integers."""
        if self._stride_per_key is None and self._stride_per_key_per_rank is not None:
            self._stride_per_key = [sum(sizes) for sizes in self._stride_per_key_per_rank]
        return self._stride_per_key or [self._stride] * len(self._keys)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return how many bags of each feature came from each rank.

        Returns:
            `F` lists of `W` integers where features have different batch sizes, else `[]`.
        """
        return self._stride_per_key_per_rank or []

    def variable_stride_per_key(self) -> bool:
        """Tell whether features may have different batch sizes."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> InverseIndices:
        """Return keys, and `[len(keys), samples]` the bag that each sample reads.

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

    def length_per_key(self) -> list[int]:
        """Return how many values each feature has; waits for a GPU the first time.

        Raises:
            ValueError: if the lengths add up to more than the number of values; on a GPU, to fewer.
        """
        if self._length_per_key is None:
            sizes_F = self.values_per_key()
            if validate.is_meta(sizes_F):
                return [rearrange.total_on_meta(self, [i]) for i in range(len(self._keys))]
            length_per_key: list[int] = sizes_F.tolist()
            per_key_checks.check_length_per_key(
                self._keys, length_per_key, self._values, source="lengths"
            )
            self._length_per_key = length_per_key
        return self._length_per_key

    def _counted_for(self, moved: Tensor) -> list[int] | None:
        """Return `length_per_key()`, if it fits, where values moved from the CPU to a device.

        It is not kept here: lengths in pinned memory may be overwritten by those of another batch.
        """
        bags = self._offsets if self._lengths is None else self._lengths
        if bags is None or not validate.is_readable(bags):
            return None
        if moved.device.type in ("cpu", "meta"):
            return None
        with contextlib.suppress(ValueError, RuntimeError, IndexError):
            if self._lengths is None:
                sizes_F = bags[self.lengths_offset_per_key()].diff()
            else:
                sizes_F = self.values_per_key()
            sizes: list[int] = sizes_F.tolist()
            per_key_checks.check_length_per_key(self._keys, sizes, self._values, "lengths")
            return sizes
        return None

    def length_per_key_or_none(self) -> list[int] | None:
        """Return `length_per_key()` if it is known already, else None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return where the values of each feature start, `F + 1` integers; may wait for a GPU.

        Raises:
            ValueError: if the lengths add up to more than the number of values; on a GPU, to fewer.
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

    def values_per_key(self) -> Tensor:
        """Return `length_per_key()` as a tensor where the lengths are, `[F]`; waits for nothing."""
        lengths = self.lengths()
        if self._stride_per_key_per_rank is None:
            return lengths.view(len(self._keys), self._stride).sum(1, dtype=lengths.dtype)
        bounds = torch.tensor(self.lengths_offset_per_key(), device=lengths.device)
        return ops.segment_sum(lengths, bounds)

    def sync(self) -> Self:
        """Derive the per-key numbers now, waiting for a GPU.

        Returns:
            Self.

        Raises:
            ValueError: if the lengths add up to more than the number of values; on a GPU, to fewer.

        Example:
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
        self._num_read = None
        return self

    def flatten_lengths(self) -> Self:
        """Return self: lengths are always one-dimensional here."""
        return self

    @checked_late
    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature as views of the buffer; waits for a GPU the first time."""
        return rearrange.feature(self, key)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return every feature as views of the buffer; waits for a GPU the first time.

        The views are made when first looked at, all at once, so that a thousand features of which
        few are read cost little.

        Args:
            compute_offsets: Ignored; offsets are computed from the lengths at their first use.

        Returns:
            JaggedTensor by key, in order.

        Raises:
            ValueError: if the lengths add up to more than the number of values; on a GPU, to fewer.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> kjt.to_dict()["b"].values()
            tensor([1., 1.])
        """
        return rearrange.features(self)

    @checked_late
    def split(self, segments: list[int]) -> "list[KeyedJaggedTensor]":
        """Split into runs of consecutive features; waits for a GPU the first time.

        Args:
            segments: how many features each part gets; adds up to `F`.

        Returns:
            One keyed jagged tensor per segment, views of this one.

        Raises:
            ValueError: if segments do not add up to `F`, or lengths to more than the values.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> [part.keys() for part in kjt.split([1, 1])]
            [['a'], ['b']]
        """
        return rearrange.split(self, segments)

    @checked_late
    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> "KeyedJaggedTensor":
        """Pick features in a new order.

        Args:
            indices: positions of the features to pick. Repeats are fine (a feature that several
                tables read); the result then has repeated keys, all naming the same data.
            indices_tensor: the same as an int32 or int64 tensor on this device, where the caller
                keeps one; saves a copy to the GPU.

        Returns:
            A keyed jagged tensor with `len(indices)` features. On a GPU no wait if the per-key
            numbers are known.

        Raises:
            IndexError: if an index is out of range.
            ValueError: if `indices_tensor` has another size; on CPU, if the lengths do not add up
                to the number of values.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]))
            >>> kjt.permute([1, 0]).values()
            tensor([1, 2, 0])
        """
        return rearrange.permute(self, indices, indices_tensor)

    @checked_late
    def with_values(self, values: Tensor) -> Self:
        """Return the same bags with other values, one for each of these.

        Args:
            values: `[N, ...]`, on the same device.

        Returns:
            A keyed jagged tensor that shares all else with this one.

        Raises:
            ValueError: `values` are more, fewer, or on another device.

        Example:
            >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([5, 6]), lengths=torch.tensor([2, 0]))
            >>> kjt.with_values(kjt.values() % 4).to_dict()["a"].to_dense()
            [tensor([1, 2]), tensor([], dtype=torch.int64)]
        """
        validate.check_replacement(values, self._values)
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
        """Copy to a device; what is known on the host stays known.

        What leaves the CPU knows its `length_per_key()`, at the price of adding up lengths that
        are copied anyway: whoever needs it on a GPU, such as `to_dict()`, need not wait for it.
        Lengths that do not fit the values are left to whoever reads them. Before you overwrite the
        lengths of the copy, call its `unsync()`.

        Args:
            device: where to.
            non_blocking: whether the host goes on while a GPU copies; what is not pinned is
                pinned first.
            dtype: a new dtype for the weights.

        Returns:
            A new keyed jagged tensor; parts already there are shared.

        Example:
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
            moved._length_per_key = self._counted_for(moved._values)
        return moved

    @checked_late
    def copy_(self, kjt: Self, non_blocking: bool = False) -> Self:
        """Overwrite the contents in place with those of another of the same sizes.

        Args:
            kjt: the source, with the same keys and strides.
            non_blocking: whether the copy may overlap.

        Returns:
            Self.

        Raises:
            ValueError: if keys, strides or shapes differ, or only one of both has weights or
                inverse indices.

        Example:
            >>> a = KeyedJaggedTensor(["a"], torch.zeros(2), lengths=torch.tensor([1, 1]))
            >>> b = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2, 0]))
            >>> a.copy_(b).lengths()
            tensor([2, 0])
        """
        instance("KeyedJaggedTensor.copy_: kjt", kjt, KeyedJaggedTensor)
        validate.check_same_features(self, kjt)
        self._copy_parts(kjt, non_blocking)
        if self._inverse_indices is not None:
            self._inverse_indices[1].copy_(kjt.inverse_indices()[1], non_blocking)
        self._length_per_key, self._offset_per_key = kjt._length_per_key, kjt._offset_per_key
        return self

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
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([3, -1]))
            >>> kjt.validate()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: KeyedJaggedTensor.lengths must not be negative; received ...
        """
        validate.check_keyed(self)

    def check_bags(self) -> None:
        """Check lengths, offsets and inverse indices, once, where reading them is free: on CPU.

        Lookups do so: nothing wrong in them may reach a kernel.

        Raises:
            ValueError: naming the first feature and bag at fault.

        Example:
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(3), offsets=torch.tensor([0, 3, 1, 3]))
            >>> kjt.check_bags()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            ValueError: KeyedJaggedTensor.offsets must not decrease; received ...
        """
        inverse = self.parts().inverse_indices  # lengths and offsets are checked as they are made
        if inverse is not None:
            validate.check_inverse_contents(self._keys, self.stride_per_key(), inverse)

    def dist_labels(self) -> list[str]:
        """Name the tensors an exchange sends: lengths, values, strides and weights if any."""
        return list(exchange.named_tensors(self))

    @checked
    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Say how many entries of each tensor go to each rank.

        Args:
            key_splits: how many consecutive features go to each rank.

        Returns:
            One list of `W` sizes per entry of `dist_labels()`.
        """
        return exchange.splits(self, key_splits)

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors an exchange sends, one per entry of `dist_labels()`."""
        return list(exchange.named_tensors(self).values())

    @classmethod
    def dist_init(
        cls,
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> Self:
        """Put together what all ranks sent, each tensor being the ranks' parts end to end.

        Args:
            keys: the features received, the same from every rank.
            tensors: as `dist_tensors()`, received.
            variable_stride_per_key: whether strides are among the tensors.
            num_workers: `W`.
            recat: the permutation from `[W][F]` to `[F][W]` order; of single bags where ranks have
                different batch sizes. None where the order is right already.
            stride_per_rank: batch size of each rank; required unless strides are sent.
            stagger: Ignored; `recat` has the order of the ranks.

        Returns:
            A synced keyed jagged tensor with the bags of all ranks.

        Raises:
            ValueError: if `stride_per_rank` or `recat` do not have as many entries as there are
                ranks or parts.

        Example:
            >>> kjt = KeyedJaggedTensor.dist_init(
            ...     keys=["a", "b"],
            ...     tensors=[torch.tensor([1, 0, 0, 1]), torch.tensor([7, 8])],
            ...     variable_stride_per_key=False,
            ...     num_workers=2,
            ...     recat=torch.tensor([0, 2, 1, 3]),
            ...     stride_per_rank=[1, 1],
            ... )
            >>> kjt.lengths()
            tensor([1, 0, 0, 1])
        """
        parts = exchange.receive(
            keys, tensors, variable_stride_per_key, num_workers, recat, stride_per_rank
        )
        return cls(keys, **parts).sync()

    def __repr__(self) -> str:
        return format_keyed_jagged(self)

    def __str__(self) -> str:
        return show_keyed_jagged(self)

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = super()._shapes()
        if self._inverse_indices is not None:
            shapes["inverse_indices"] = tuple(self._inverse_indices[1].shape)
        return shapes

    def _tensors(self) -> list[Tensor]:
        inverse = [] if self._inverse_indices is None else [self._inverse_indices[1]]
        return super()._tensors() + inverse

    def _map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return rearrange.map_tensors(self, function)


def check_features(
    features: KeyedJaggedTensor,
    owner: str,
    device: torch.device,
    *,
    is_pooled: bool,
    is_weighted: bool,
    names: Sequence[str] = (),
) -> tuple[KeyedJaggedTensor, Parts]:
    """Raise if a lookup cannot read a batch, whatever its ids are.

    Args:
        features: The batch.
        owner: Who asks, for messages.
        device: Where the tables are.
        is_pooled: Whether there is a row per sample, so that samples must be told.
        is_weighted: Whether ids are weighted.
        names: The features that are looked up.

    Returns:
        The batch, trimmed, and its parts.

    Raises:
        TypeError: No KeyedJaggedTensor, ids that are not int32 or int64, or weights no floats.
        ValueError: Ids or weights of more than one dim, a batch on another device, a weighted
            lookup without weights, different batch sizes without inverse indices, a weight that is
            NaN or infinite (on CUDA, in an earlier batch), or, on the CPU, lengths, offsets or
            inverse indices that do not fit.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise TypeError(
            f"{owner} takes a KeyedJaggedTensor; received {validate.described(features)}. Build "
            "one: KeyedJaggedTensor(keys=[...], values=ids, lengths=...)."
        )
    # on a CPU, lengths and offsets are checked when one makes the other
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
            f"{tuple(values.shape)}. Flatten them: several ids of a sample are one bag."
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
    features: KeyedJaggedTensor, parts: Parts, is_pooled: bool, names: Sequence[str]
) -> None:
    inverse, strides = parts.inverse_indices, features.stride_per_key()
    if inverse is not None:
        validate.check_inverse_contents(parts.keys, strides, inverse)
        missing = set(names).difference(inverse[0])
        if is_pooled and missing:
            raise ValueError(
                "KeyedJaggedTensor.inverse_indices must cover every key that is looked up; "
                f"received none for {validate.preview(sorted(missing))}."
            )
    if not features.variable_stride_per_key():
        return
    if inverse is None:
        if is_pooled:
            raise ValueError(
                "A batch with a batch size per feature needs inverse_indices, which say the row of "
                "each sample: without them pooled embeddings have no common batch size; received "
                f"stride_per_key={strides[:10]} and none. Pass inverse_indices to the "
                "KeyedJaggedTensor."
            )
    elif is_pooled and inverse[1].shape[1] and not all(strides):
        key = parts.keys[strides.index(0)]
        raise ValueError(
            f"Each sample reads a bag of every feature; received inverse_indices of "
            f"{inverse[1].shape[1]} samples and no bag of feature '{key}'. Give it an empty bag."
        )
