"""KeyedJaggedTensor: one jagged batch per feature, all in one buffer.

Legend: `F` features (keys), `B` batch size (stride), `N` values of all bags together, `W` ranks.

Features may have different batch sizes (deduplicated requests, or ranks that send different
amounts). Then each feature has its own stride, `stride_per_key_per_rank` says where they come
from, and `inverse_indices` may say which of its bags each sample reads. Everything else is alike.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from recsys.kernels import ops
from recsys.sparse import validate
from recsys.sparse.exchange import KeyedExchange
from recsys.sparse.features import FeatureViews
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed_buffer import InverseIndices
from recsys.sparse.text import format_keyed_jagged, show_keyed_jagged

_T = TypeVar("_T")


class KeyedJaggedTensor(KeyedExchange):
    """Jagged batches of several features, stored end to end in one buffer.

    Lengths and offsets derive from each other when first asked for; so do the per-key numbers,
    which are Python integers and therefore wait for a GPU (`sync()` does it at a chosen moment).

    Args:
        keys: the features, unique, in the order of the buffer.
        values: `[N]`, ids or values of all features end to end.
        weights: `[N]`, one weight per value, or None.
        lengths: `[F * B]` (or `[F, B]`), int32 or int64: values in each bag, feature by feature.
        offsets: `[F * B + 1]`, int32 or int64. One of lengths and offsets is required.
        stride: `B`; found from lengths or offsets if None.
        stride_per_key_per_rank: `F` lists (or an integer tensor `[F, W]`) of the number of bags
            that came from each rank, when features have different batch sizes.
        stride_per_key: `F` batch sizes, when features have different ones and ranks do not matter.
        length_per_key: `F` numbers of values, where known; saves the wait for a GPU.
        offset_per_key: `F + 1`, the running sum of `length_per_key`, where known.
        index_per_key: position of each key, where known.
        inverse_indices: keys, and `[len(keys), samples]` the bag that each sample reads.

    Raises:
        TypeError: if lengths or offsets are not int32 or int64 tensors.
        ValueError: if keys repeat, or shapes, devices or numbers do not fit together.

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

    __slots__ = ()

    @staticmethod
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
            ValueError: as the constructor; and if lengths do not add up to the number of values.

        Example:
            >>> kjt = KeyedJaggedTensor.from_lengths_sync(
            ...     ["a", "b"], torch.ones(3), torch.tensor([1, 0, 0, 2])
            ... )
            >>> kjt.length_per_key()
            [1, 2]
        """
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
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
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            offsets=offsets,
            stride=stride,
            stride_per_key_per_rank=stride_per_key_per_rank,
            inverse_indices=inverse_indices,
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> "KeyedJaggedTensor":
        """Put jagged tensors of several features end to end.

        Args:
            jt_dict: features by key, in order; all weighted or none, alike in dtypes and device.
                Different numbers of bags make features with different batch sizes.

        Returns:
            The keyed jagged tensor.

        Raises:
            ValueError: if there is no feature, or features differ in dtype or weightedness.

        Example:
            >>> jt = JaggedTensor(torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> KeyedJaggedTensor.from_jt_dict({"a": jt, "b": jt}).lengths()
            tensor([1, 2, 1, 2])
        """
        parts = list(jt_dict.values())
        _check_mergeable("KeyedJaggedTensor.from_jt_dict", parts)
        lengths = [jt.lengths() for jt in parts]
        strides = [part.numel() for part in lengths]
        is_uniform = len(set(strides)) == 1
        return KeyedJaggedTensor(
            list(jt_dict),
            torch.cat([jt.values() for jt in parts]),
            _cat_weights(parts),
            lengths=torch.cat(lengths),
            stride=strides[0] if is_uniform else None,
            stride_per_key=None if is_uniform else strides,
        )

    @staticmethod
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
        return KeyedJaggedTensor(
            [],
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
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
        weights = kjt._weights
        return KeyedJaggedTensor.from_parts(
            [],
            kjt._values.new_empty(0, device=device),
            None if weights is None else weights.new_empty(0, device=device),
            kjt.lengths().new_empty(0, device=device),
            stride=kjt._stride,
        )

    @staticmethod
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
        # A part without keys has nothing to add, whatever its stride and dtypes.
        kjt_list = [kjt for kjt in kjt_list if kjt._keys] or kjt_list[:1]
        _check_mergeable("KeyedJaggedTensor.concat", kjt_list)
        keys = _chain(kjt._keys for kjt in kjt_list)
        validate.check_unique("KeyedJaggedTensor.concat", keys)
        is_variable = any(kjt.variable_stride_per_key() for kjt in kjt_list)
        strides = {kjt._stride for kjt in kjt_list}
        if len(strides) > 1 and not is_variable:
            raise ValueError(
                "KeyedJaggedTensor.concat: all parts must have the same stride (batch size); "
                f"received {[kjt._stride for kjt in kjt_list]}."
            )
        lengths_per_key = [kjt._length_per_key for kjt in kjt_list]
        return KeyedJaggedTensor.from_parts(
            keys,
            torch.cat([kjt._values for kjt in kjt_list]),
            _cat_weights(kjt_list),
            torch.cat([kjt.lengths() for kjt in kjt_list]),
            stride=max(strides),
            stride_per_key_per_rank=_chain(kjt._strides_per_rank() for kjt in kjt_list)
            if is_variable
            else None,
            stride_per_key=_chain(kjt.stride_per_key() for kjt in kjt_list)
            if is_variable
            else None,
            length_per_key=_chain(lengths_per_key) if None not in lengths_per_key else None,  # type: ignore[arg-type]
            inverse_indices=_concat_inverse_indices(kjt_list),
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature as views of the buffer; waits for a GPU the first time."""
        index = self.index_per_key().get(key)
        if index is None:
            raise KeyError(
                f"KeyedJaggedTensor has no key {key!r}; received keys "
                f"{validate.preview(self._keys)}."
            )
        start, length = self.offset_per_key()[index], self.length_per_key()[index]
        if self._stride_per_key is None:
            first_bag, stride = index * self._stride, self._stride
        else:
            first_bag, stride = sum(self._stride_per_key[:index]), self._stride_per_key[index]
        return JaggedTensor.from_parts(
            self._values.narrow(0, start, length),
            None if self._weights is None else self._weights.narrow(0, start, length),
            self.lengths().narrow(0, first_bag, stride),
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return every feature as views of the buffer; waits for a GPU the first time.

        The views are cut when first looked at, all at once, so that a thousand features of which
        few are read cost little.

        Args:
            compute_offsets: kept for callers: offsets derive from lengths when first asked for.

        Returns:
            JaggedTensor by key, in order.

        Raises:
            ValueError: if the lengths do not add up to the number of values.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> kjt.to_dict()["b"].values()
            tensor([1., 1.])
        """
        views = FeatureViews(
            self._values,
            self._weights,
            self.lengths(),
            self.length_per_key(),
            self.stride_per_key(),
        )
        return JaggedTensor.from_views(self._keys, views)

    def split(self, segments: list[int]) -> "list[KeyedJaggedTensor]":
        """Cut into runs of consecutive features; waits for a GPU the first time.

        Args:
            segments: how many features each part gets; adds up to `F`.

        Returns:
            One keyed jagged tensor per segment, views of this one.

        Raises:
            ValueError: if segments do not add up to `F`, or lengths not to the number of values.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> [part.keys() for part in kjt.split([1, 1])]
            [['a'], ['b']]
        """
        if sum(segments) != len(self._keys) or min(segments, default=0) < 0:
            raise ValueError(
                "KeyedJaggedTensor.split: segments must be counts that add up to the number of "
                f"keys, {len(self._keys)}; received {list(segments)}."
            )
        ends = list(itertools.accumulate(segments))
        runs = [slice(end - size, end) for size, end in zip(segments, ends, strict=True)]
        length_per_key, strides = self.length_per_key(), self._stride_per_key
        sizes = [sum(length_per_key[run]) for run in runs]
        if strides is None:
            num_bags = [size * self._stride for size in segments]
        else:
            num_bags = [sum(strides[run]) for run in runs]
        values = self._values.split_with_sizes(sizes)
        lengths = self.lengths().split_with_sizes(num_bags)
        weights = (
            [None] * len(runs) if self._weights is None else self._weights.split_with_sizes(sizes)
        )
        return [
            KeyedJaggedTensor.from_parts(
                self._keys[run],
                values[i],
                weights[i],
                lengths[i],
                stride=self._stride,
                stride_per_key_per_rank=self._strides_per_rank()[run] if strides else None,
                stride_per_key=strides[run] if strides else None,
                length_per_key=length_per_key[run],
                inverse_indices=self._inverse_indices,
            )
            for i, run in enumerate(runs)
        ]

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
        if indices and not 0 <= min(indices) <= max(indices) < len(self._keys):
            raise IndexError(
                f"KeyedJaggedTensor.permute: indices must be in 0..{len(self._keys) - 1}; received "
                f"{validate.preview([i for i in indices if not 0 <= i < len(self._keys)])}."
            )
        if indices_tensor is None:
            indices_tensor = torch.tensor(indices, dtype=torch.int32, device=self._values.device)
        elif indices_tensor.numel() != len(indices):
            raise ValueError(
                "KeyedJaggedTensor.permute: indices_tensor must hold the same as indices; received "
                f"{indices_tensor.numel()} entries for {len(indices)}."
            )
        if validate.is_readable(self._values):
            # a kernel given lengths that do not add up would read past the end
            self.length_per_key()
        length_per_key, total = self._length_per_key, None
        if length_per_key is not None:
            length_per_key = [length_per_key[i] for i in indices]
            total = sum(length_per_key)
        strides, strides_per_rank = self._stride_per_key, None
        if strides is None:
            lengths_FB = self.lengths().view(len(self._keys), self._stride)
            lengths, values, weights = ops.permute_2d(
                indices_tensor, lengths_FB, self._values, self._weights, total
            )
            lengths = lengths.view(-1)
        else:
            _, values, weights = ops.permute_1d(
                indices_tensor, self.values_per_key(), self._values, self._weights, total
            )
            strides_F = torch.tensor(strides, dtype=torch.int32, device=values.device)
            strides = [strides[i] for i in indices]
            strides_per_rank = [self._strides_per_rank()[i] for i in indices]
            _, lengths, _ = ops.permute_1d(
                indices_tensor, strides_F, self.lengths(), None, sum(strides)
            )
        return KeyedJaggedTensor.from_parts(
            [self._keys[i] for i in indices],
            values,
            weights,
            lengths,
            stride=self._stride,
            stride_per_key_per_rank=strides_per_rank,
            stride_per_key=strides,
            length_per_key=length_per_key,
            inverse_indices=self._inverse_indices,
        )

    def __repr__(self) -> str:
        return format_keyed_jagged(self)

    def __str__(self) -> str:
        return show_keyed_jagged(self)


def _check_mergeable(
    caller: str, parts: Sequence[JaggedTensor] | Sequence[KeyedJaggedTensor]
) -> None:
    if not parts:
        raise ValueError(f"{caller} needs at least one part; received none.")
    if len({part.weights_or_none() is None for part in parts}) > 1:
        weighted = [part.weights_or_none() is not None for part in parts]
        raise ValueError(
            f"{caller}: all parts must have weights, or none; received weighted: {weighted}."
        )
    dtypes = {part.values().dtype for part in parts}
    if len(dtypes) > 1:
        raise ValueError(
            f"{caller}: all parts must have values of the same dtype; received "
            f"{sorted(map(str, dtypes))}. Convert with values.to(...)."
        )


def _cat_weights(parts: Sequence[JaggedTensor] | Sequence[KeyedJaggedTensor]) -> Tensor | None:
    weights = [part.weights_or_none() for part in parts]
    return None if weights[0] is None else torch.cat(weights)  # type: ignore[arg-type]


def _concat_inverse_indices(kjt_list: Sequence[KeyedJaggedTensor]) -> InverseIndices | None:
    inverse = [kjt.inverse_indices_or_none() for kjt in kjt_list]
    if all(part is None for part in inverse):
        return None
    present = [part for part in inverse if part is not None]
    if len(present) != len(inverse) or len({part[1].shape[1] for part in present}) > 1:
        raise ValueError(
            "KeyedJaggedTensor.concat: all parts must have inverse indices for the same number of "
            "samples, or none; received "
            f"{[None if part is None else tuple(part[1].shape) for part in inverse]}."
        )
    return _chain(part[0] for part in present), torch.cat([part[1] for part in present])


def _chain(lists: "Iterable[list[_T]]") -> "list[_T]":
    chained: list[_T] = []
    for part in lists:
        chained += part
    return chained
