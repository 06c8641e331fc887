"""KeyedJaggedTensor: the sparse features of a batch, in one buffer.

Shapes: `F` features (keys), `B` batch size (stride), `N` values of all bags together, `W` ranks.

Features may have different batch sizes, for example after requests were deduplicated. Each feature
then has its own stride, `stride_per_key_per_rank` has the number of bags from each rank, and
`inverse_indices` the bag that each sample reads.
"""

from collections.abc import Mapping, Sequence
from typing import Self, cast

import torch
from torch import Tensor

from recsys.base.arguments import instance, wrong_type
from recsys.base.checked import checked, checked_late
from recsys.kernels import ops
from recsys.sparse import exchange, per_key_checks, rearrange, validate
from recsys.sparse.bags import check_can_move, empty_parts
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed_bags import InverseIndices, KeyedBags
from recsys.sparse.recorded import recorded
from recsys.sparse.text import format_keyed_jagged, show_keyed_jagged


class KeyedJaggedTensor(KeyedBags):
    """Variable-length lists of ids (bags) for several features and a batch of samples.

    The ids of all bags are concatenated in one tensor, `values`: first all samples of the first
    key, then all samples of the second key, and so on. `lengths` has the number of ids of each bag.
    Two features and two samples look like this:

        keys     "user"      "films"
        bags     [7]  [8]    [1, 2, 3]  []
        values    7    8      1  2  3
        lengths   1    1      3          0

    Pass lengths or offsets; the other is computed at its first use. So are `length_per_key()` and
    `offset_per_key()`. They are Python integers, so the first call waits for a GPU; call `sync()`
    to choose the moment.

    Args:
        keys: Feature names, unique, in the order of `values`.
        values: `[N]`, the ids (or other values) of all bags. Values after the last bag are ignored;
            see `trim`.
        weights: `[N]`, one weight per value, or None.
        lengths: `[F * B]` or `[F, B]`, int32 or int64: number of values of each bag.
        offsets: `[F * B + 1]`, int32 or int64: running sum of `lengths` with a leading 0. Lengths
            or offsets are required.
        stride: The batch size `B`; None computes it from lengths or offsets.
        stride_per_key_per_rank: Number of bags of each feature from each rank, `F` lists or an
            integer tensor `[F, W]`, for features with different batch sizes.
        stride_per_key: Batch size of each feature, as a shorter form without ranks.
        length_per_key: Number of values of each feature, if known, which avoids waiting for a GPU.
            Required on a GPU if `values` is longer than the sum of the lengths.
        lengths_offset_per_key: Running sum of `stride_per_key`, `F + 1`, if known.
        offset_per_key: Running sum of `length_per_key`, `F + 1`, if known.
        index_per_key: Position of each key, if known.
        jt_dict: The result of `to_dict()`, if known. Only its keys are checked.
        inverse_indices: Keys, and the bag number that each sample reads, `[len(keys), samples]`,
            for features with different batch sizes. Pooled lookups need it for each feature.

    Raises:
        TypeError: If lengths or offsets are not int32 or int64 tensors, or another argument has a
            wrong type.
        ValueError: If keys repeat, or shapes, devices or sizes are inconsistent. On a GPU,
            `length_per_key` and `offset_per_key` are compared with the number of values only.

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
        self._stride_per_key = None
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
        """Build from lengths and call `sync()`, which waits for a GPU.

        The arguments are the same as for the constructor.

        Returns:
            A keyed jagged tensor with known `length_per_key` and `offset_per_key`.

        Raises:
            TypeError: As the constructor.
            ValueError: As the constructor, and if the sum of the lengths exceeds the number of
                values.

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
        """Build from offsets and call `sync()`, which waits for a GPU.

        The arguments are the same as for the constructor.

        Returns:
            A keyed jagged tensor with known `length_per_key` and `offset_per_key`.

        Raises:
            TypeError: As the constructor.
            ValueError: As the constructor.

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
        """Concatenate the jagged tensors of several features.

        Args:
            jt_dict: Jagged tensors by key, in order, with the same dtypes and device; all or none
                with weights. Different numbers of bags are different batch sizes.
            force_variable_stride: Store a batch size per feature even if all are equal.

        Returns:
            The keyed jagged tensor.

        Raises:
            ValueError: If `jt_dict` is empty, dtypes or devices differ, or only some have weights.

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
        """Concatenate the features of several keyed jagged tensors.

        Args:
            kjt_list: One or more, with different keys and the same dtypes, device and stride
                (unless their features have different batch sizes); all or none with weights.

        Returns:
            A keyed jagged tensor with all keys, in order.

        Raises:
            ValueError: If the list is empty, keys repeat, or the parts are inconsistent.

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
        """Build a keyed jagged tensor without features.

        Args:
            is_weighted: If True, `weights` is an empty tensor instead of None.
            device: Device of the tensors.
            values_dtype: dtype of the values; None for the default dtype of torch.
            weights_dtype: dtype of the weights; None for the default dtype of torch.
            lengths_dtype: int32 or int64.

        Returns:
            A keyed jagged tensor with no keys and stride 0.

        Example:
            >>> KeyedJaggedTensor.empty().keys()
            []
        """
        jt = JaggedTensor.empty(is_weighted, device, values_dtype, weights_dtype, lengths_dtype)
        keys: list[str] = []
        parts = jt.values(), jt.weights_or_none(), jt.lengths(), jt.offsets()
        return KeyedJaggedTensor(keys, *parts)

    @staticmethod
    @recorded
    @checked
    def empty_like(
        kjt: "KeyedJaggedTensor", device: torch.device | None = None
    ) -> "KeyedJaggedTensor":
        """Build a keyed jagged tensor without features, with the dtypes and stride of another.

        Args:
            kjt: The other keyed jagged tensor.
            device: Device of the tensors; None for the device of `kjt`.

        Returns:
            A keyed jagged tensor with no keys.

        Example:
            >>> kjt = KeyedJaggedTensor(["a"], torch.ones(1), lengths=torch.tensor([1, 0]))
            >>> KeyedJaggedTensor.empty_like(kjt).stride()
            2
        """
        parts = empty_parts(kjt, device)
        return KeyedJaggedTensor.from_parts([], *parts, stride=kjt._stride)

    @checked_late
    def __getitem__(self, key: str) -> JaggedTensor:
        """Return one feature as views of the buffer; the first call waits for a GPU."""
        return rearrange.feature(self, key)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return all features as views of the buffer; the first call waits for a GPU.

        The views are created together at the first access, so unused features cost little.

        Args:
            compute_offsets: Ignored; offsets are computed from the lengths at their first use.

        Returns:
            JaggedTensor by key, in order.

        Raises:
            ValueError: As `length_per_key()`.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.ones(3), lengths=torch.tensor([1, 2]))
            >>> kjt.to_dict()["b"].values()
            tensor([1., 1.])
        """
        return rearrange.features(self)

    @checked_late
    def split(self, segments: list[int]) -> "list[KeyedJaggedTensor]":
        """Split into groups of consecutive features; the first call waits for a GPU.

        Args:
            segments: Number of features of each group; the sum must be `F`.

        Returns:
            One keyed jagged tensor per group, as views of this one.

        Raises:
            ValueError: If the sum of `segments` is not `F`, or as `length_per_key()`.

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
        """Select features in a new order.

        Args:
            indices: Positions of the features. Positions may repeat, for a feature that several
                tables read; the result then has repeated keys.
            indices_tensor: `indices` as an int32 or int64 tensor on this device, if available.
                Avoids a copy to the GPU.

        Returns:
            A keyed jagged tensor with `len(indices)` features. It does not wait for a GPU if
            `length_per_key` is known.

        Raises:
            IndexError: If an index is out of range.
            ValueError: If `indices_tensor` has another size, or, on a CPU, as `length_per_key()`.

        Example:
            >>> kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]))
            >>> kjt.permute([1, 0]).values()
            tensor([1, 2, 0])
        """
        return rearrange.permute(self, indices, indices_tensor)

    @checked_late
    def with_values(self, values: Tensor) -> Self:
        """Replace the values and keep the bags.

        Args:
            values: `[N, ...]`, on the same device.

        Returns:
            A keyed jagged tensor that shares all other tensors with this one.

        Raises:
            ValueError: If the number or the device of the values differs.

        Example:
            >>> kjt = KeyedJaggedTensor(["a"], torch.tensor([5, 6]), lengths=torch.tensor([2, 0]))
            >>> kjt.with_values(kjt.values() % 4).to_dict()["a"].to_dense()
            [tensor([1, 2]), tensor([], dtype=torch.int64)]
        """
        old_values = self._values
        if values.shape[:1] != old_values.shape[:1] or values.device != old_values.device:
            raise ValueError(
                f"values must be {len(old_values)} on {old_values.device}; received "
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
            device: The target device.
            non_blocking: Do not wait for the copy. Unpinned tensors are pinned first.
            dtype: A new dtype for the weights.

        Returns:
            A new keyed jagged tensor. Tensors that are on the device already are shared.

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
            moved._length_per_key = self._known_after_move(moved._values.device)
        return moved

    @checked_late
    def copy_(self, kjt: Self, non_blocking: bool = False) -> Self:
        """Overwrite the contents in place with the contents of a batch of the same sizes.

        Args:
            kjt: The source, with the same keys and strides.
            non_blocking: Do not wait for the copy.

        Returns:
            Self.

        Raises:
            ValueError: If keys, strides or shapes differ, or only one batch has weights or inverse
                indices.

        Example:
            >>> a = KeyedJaggedTensor(["a"], torch.zeros(2), lengths=torch.tensor([1, 1]))
            >>> b = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2, 0]))
            >>> a.copy_(b).lengths()
            tensor([2, 0])
        """
        instance("KeyedJaggedTensor.copy_: kjt", kjt, KeyedJaggedTensor)
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

    def dist_labels(self) -> list[str]:
        """Return the names of the tensors to exchange: lengths, values, strides, weights."""
        return list(exchange.named_tensors(self))

    @checked
    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Return the number of entries of each tensor to send to each rank.

        Args:
            key_splits: The number of consecutive features to send to each rank.

        Returns:
            A list of `W` sizes for each name of `dist_labels()`.
        """
        return exchange.splits(self, key_splits)

    def dist_tensors(self) -> list[Tensor]:
        """Return the tensors to exchange, in the order of `dist_labels()`."""
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
        """Build from the tensors that all ranks sent, concatenated by rank.

        Args:
            keys: The received features, the same from every rank.
            tensors: The received tensors, in the order of `dist_tensors()`.
            variable_stride_per_key: True if `tensors` contains strides.
            num_workers: The number of ranks, `W`.
            recat: Permutation from `[W][F]` to `[F][W]` order. It permutes single bags if ranks
                have different batch sizes. None if no permutation is needed.
            stride_per_rank: Batch size of each rank; required unless strides are sent.
            stagger: Ignored; `recat` has the order of the ranks.

        Returns:
            A keyed jagged tensor with the bags of all ranks, and with known `length_per_key`.

        Raises:
            ValueError: If `stride_per_rank` or `recat` has a wrong number of entries.

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
