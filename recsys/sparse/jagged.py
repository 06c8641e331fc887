"""JaggedTensor: a batch of variable-length lists.

Shapes: `M` bags (lists), `N` values of all bags together.
"""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from recsys.base.arguments import number, whole
from recsys.base.checked import checked, checked_late
from recsys.kernels import ops
from recsys.sparse import validate
from recsys.sparse.bags import JaggedBase, check_can_move, empty_parts
from recsys.sparse.features import FeatureViews
from recsys.sparse.recorded import recorded
from recsys.sparse.text import format_jagged, show_jagged


class JaggedTensor(JaggedBase):
    """A batch of variable-length lists (bags), such as the ids of one feature.

    The values of all bags are concatenated in one tensor. `lengths` has the number of values of
    each bag, `offsets` the position of the first value of each bag. Pass lengths or offsets; the
    other is computed at its first use.

    Args:
        values: `[N]`, or `[N, ...]` for rows, of any dtype: the values of all bags. Values after
            the last bag are ignored; see `trim`.
        weights: `[N]` or `[N, ...]`, one weight per value, or None.
        lengths: `[M]`, int32 or int64: number of values of each bag.
        offsets: `[M + 1]`, int32 or int64: running sum of `lengths` with a leading 0. Lengths or
            offsets are required.

    Raises:
        TypeError: If lengths or offsets are not int32 or int64 tensors.
        ValueError: If shapes, devices or sizes are inconsistent.

    Example:
        >>> JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
        JaggedTensor(3 bags, 3 values, int64, cpu)
            [[1, 2], [], [3]]
    """

    __slots__ = ("_index", "_views")

    _values: Tensor | None  # type: ignore[assignment]  # None: a view that does not exist yet
    _views: FeatureViews | None
    _index: int  # position of the feature in the views

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        is_proxy = validate.is_proxy(values)
        if not is_proxy:
            lengths = validate.check_parts("JaggedTensor", values, weights, lengths, offsets)
        if not is_proxy and lengths is not None and lengths.dim() != 1:
            raise ValueError(
                f"JaggedTensor.lengths must be 1-D; received shape {tuple(lengths.shape)}."
            )
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._views = None
        if not is_proxy and validate.is_checked_in_full(values, lengths, offsets):
            self.validate()
            self._num_read = self.num_read()

    @staticmethod
    def from_parts(
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> "JaggedTensor":
        """Build from consistent parts, without checks, for hot paths.

        Args:
            values: As for the constructor.
            weights: As for the constructor.
            lengths: As for the constructor.
            offsets: As for the constructor.

        Returns:
            The jagged tensor.

        Example:
            >>> JaggedTensor.from_parts(torch.ones(2), lengths=torch.tensor([2])).to_dense()
            [tensor([1., 1.])]
        """
        jt = JaggedTensor.__new__(JaggedTensor)
        jt._values = values
        jt._weights = weights
        jt._lengths = lengths
        jt._offsets = offsets
        jt._views = None
        return jt

    @staticmethod
    def from_views(keys: Sequence[str], views: FeatureViews) -> "dict[str, JaggedTensor]":
        """Build the features of a buffer; their tensors are created at the first access.

        One call for all features is a third faster than one call per feature.

        Args:
            keys: Names of the features, in the order of the buffer.
            views: Views of the buffer.

        Returns:
            JaggedTensor by key, in order.

        Example:
            >>> one = torch.ones(1, dtype=torch.int64)
            >>> views = FeatureViews(one, None, one, sizes=[1], strides=[1])
            >>> JaggedTensor.from_views(["a"], views)["a"].to_dense()
            [tensor([1])]
        """
        new, features = JaggedTensor.__new__, {}
        for index, key in enumerate(keys):
            jt = features[key] = new(JaggedTensor)
            jt._values = jt._weights = jt._lengths = jt._offsets = None
            jt._views = views
            jt._index = index
        return features

    @staticmethod
    @checked
    def empty(
        is_weighted: bool = False,
        device: torch.device | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> "JaggedTensor":
        """Build a jagged tensor without bags.

        Args:
            is_weighted: If True, `weights` is an empty tensor instead of None.
            device: Device of the tensors.
            values_dtype: dtype of the values; None for the default dtype of torch.
            weights_dtype: dtype of the weights; None for the default dtype of torch.
            lengths_dtype: int32 or int64.

        Returns:
            A jagged tensor with 0 bags.

        Example:
            >>> JaggedTensor.empty().lengths()
            tensor([], dtype=torch.int32)
        """
        return JaggedTensor(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
            offsets=torch.zeros(1, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    @recorded
    @checked
    def empty_like(jt: "JaggedTensor", device: torch.device | None = None) -> "JaggedTensor":
        """Build a jagged tensor without bags, with the dtypes of another.

        Args:
            jt: The other jagged tensor.
            device: Device of the tensors; None for the device of `jt`.

        Returns:
            A jagged tensor with 0 bags.

        Example:
            >>> jt = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([2]))
            >>> JaggedTensor.empty_like(jt).values()
            tensor([], dtype=torch.int64)
        """
        return JaggedTensor.from_parts(*empty_parts(jt, device))

    @staticmethod
    @recorded
    @checked
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> "JaggedTensor":
        """Build from a list of tensors, one per bag.

        Args:
            values: One `[length, ...]` tensor per bag.
            weights: One tensor per bag, or None.

        Returns:
            A jagged tensor with `len(values)` bags.

        Raises:
            ValueError: If the list is empty, or weights and values have different lengths.

        Example:
            >>> JaggedTensor.from_dense([torch.tensor([1, 2]), torch.tensor([3])]).lengths()
            tensor([2, 1], dtype=torch.int32)
        """
        if not values:
            raise ValueError(
                "JaggedTensor.from_dense needs at least one bag; received an empty list. "
                "Use JaggedTensor.empty()."
            )
        bag_lengths = [len(bag) for bag in values]
        if weights is not None and [len(bag) for bag in weights] != bag_lengths:
            raise ValueError(
                "JaggedTensor.from_dense: weights must have the lengths of values; received "
                f"lengths {[len(bag) for bag in weights]} for {bag_lengths}."
            )
        return JaggedTensor(
            torch.cat(values),
            None if weights is None else torch.cat(weights),
            lengths=torch.tensor(bag_lengths, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    @recorded
    @checked
    def from_dense_lengths(
        values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> "JaggedTensor":
        """Build from a padded tensor: bag `i` has the first `lengths[i]` values of row `i`.

        Args:
            values: `[M, width, ...]`.
            lengths: `[M]`, each at most `width`.
            weights: `[M, width, ...]` or None.

        Returns:
            A jagged tensor with `M` bags.

        Raises:
            ValueError: If the shapes do not match, or a length exceeds the width.

        Example:
            >>> padded = torch.tensor([[1, 2], [3, 0]])
            >>> JaggedTensor.from_dense_lengths(padded, torch.tensor([2, 1])).values()
            tensor([1, 2, 3])
        """
        if values.dim() < 2 or lengths.shape != values.shape[:1]:
            raise ValueError(
                "JaggedTensor.from_dense_lengths: values must be [M, width, ...] and lengths [M]; "
                f"received values of shape {list(values.shape)} and lengths of shape "
                f"{list(lengths.shape)}."
            )
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            name = "JaggedTensor.from_dense_lengths"
            longest = int(lengths.max()) if validate.is_readable(lengths) and len(lengths) else 0
            if longest > values.shape[1]:
                raise ValueError(
                    f"{name}: lengths must be at most the width of values, {values.shape[1]}; "
                    f"received {longest}."
                )
            if validate.is_meta(values):
                validate.refuse_meta(f"{name}()", "Use JaggedTensor.from_parts.")
        kept = torch.arange(values.shape[1], device=values.device) < lengths.unsqueeze(1)
        return JaggedTensor(
            values[kept], None if weights is None else weights[kept], lengths=lengths
        )

    def values(self) -> Tensor:
        """Return the values of all bags, concatenated: `[N, ...]`."""
        if self._values is None:
            assert self._views is not None
            self._values = self._views.values[self._index]
        return self._values

    def weights_or_none(self) -> Tensor | None:
        """Return the weights, `[N, ...]`, or None if there are none."""
        if self._weights is None and self._views is not None:
            weights = self._views.weights
            self._weights = None if weights is None else weights[self._index]
        return self._weights

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they are known, else None; computes nothing."""
        if self._lengths is None and self._views is not None:
            self._lengths = self._views.lengths[self._index]
        return self._lengths

    def to_dense(self) -> list[Tensor]:
        """Return one `[length, ...]` tensor per bag; waits for a GPU."""
        return self._split(self.values())

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return one tensor of weights per bag, or None; waits for a GPU."""
        weights = self.weights_or_none()
        return None if weights is None else self._split(weights)

    @checked_late
    def to_padded_dense(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor:
        """Return one row per bag, padded or truncated to one length.

        Args:
            desired_length: Number of columns; None for the longest bag, which waits for a GPU.
            padding_value: Value of the padding.

        Returns:
            `[M, desired_length]` or `[M, desired_length, ...]`.

        Example:
            >>> jt = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
            >>> jt.to_padded_dense(padding_value=-1)
            tensor([[ 1,  2],
                    [ 3, -1]])
        """
        return self._pad(self.values(), desired_length, padding_value)

    @checked_late
    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """Return one padded row of weights per bag, as `to_padded_dense`, or None."""
        weights = self.weights_or_none()
        return None if weights is None else self._pad(weights, desired_length, padding_value)

    @checked_late
    def to(self, device: torch.device | str, non_blocking: bool = False) -> "JaggedTensor":
        """Copy to a device.

        Args:
            device: The target device.
            non_blocking: Do not wait for the copy. Unpinned tensors are pinned first.

        Returns:
            A new jagged tensor. Tensors that are on the device already are shared.

        Example:
            >>> JaggedTensor.empty().to("cpu").device()
            device(type='cpu')
        """
        check_can_move("JaggedTensor", self.values(), device)
        return self._map(lambda tensor: ops.copy_to(tensor, device, non_blocking))

    @checked_late
    def copy_(self, jt: "JaggedTensor", non_blocking: bool = False) -> "JaggedTensor":
        """Overwrite the contents in place with the contents of a jagged tensor of the same sizes.

        Args:
            jt: The source.
            non_blocking: Do not wait for the copy.

        Returns:
            Self.

        Raises:
            ValueError: If shapes differ, or only one jagged tensor has weights.

        Example:
            >>> jt = JaggedTensor(torch.zeros(2), lengths=torch.tensor([1, 1]))
            >>> jt.copy_(JaggedTensor(torch.ones(2), lengths=torch.tensor([2, 0]))).to_dense()
            [tensor([1., 1.]), tensor([])]
        """
        self._copy_parts(jt, non_blocking)
        return self

    def validate(self) -> None:
        """Check all lengths and offsets; waits for a GPU.

        Raises:
            ValueError: If one is invalid, with its bag.

        Example:
            >>> JaggedTensor(torch.ones(2), lengths=torch.tensor([3, -1])).validate()
            Traceback (most recent call last):
            ValueError: JaggedTensor.lengths must not be negative; received length -1 at bag 1.
        """
        parts = self.values(), self.lengths_or_none(), self._offsets
        validate.check_contents("JaggedTensor", *parts)

    def __repr__(self) -> str:
        return format_jagged(self)

    def __str__(self) -> str:
        return show_jagged(self)

    def __getstate__(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        return self.values(), self.weights_or_none(), self.lengths_or_none(), self._offsets

    def __setstate__(
        self, state: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
    ) -> None:
        self._values, self._weights, self._lengths, self._offsets = state
        self._views = None

    _state = property(__getstate__, __setstate__)  # TorchScript copies this attribute

    def _map(self, function: Callable[[Tensor], Tensor]) -> "JaggedTensor":
        parts = (None if part is None else function(part) for part in self.__getstate__())
        return JaggedTensor.from_parts(*parts)  # type: ignore[arg-type]

    def _split(self, tensor: Tensor) -> list[Tensor]:
        if validate.is_meta(tensor):
            validate.refuse_meta("JaggedTensor.to_dense()", "Use to_padded_dense(desired_length).")
        lengths = self.lengths().tolist()
        total = sum(lengths)
        validate.check_total("JaggedTensor", total, tensor)
        return list(tensor.narrow(0, 0, total).split_with_sizes(lengths))

    def _pad(self, tensor: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if desired_length is not None and not isinstance(
            cast(object, desired_length), torch.SymInt
        ):
            desired_length = whole("desired_length", desired_length, least=0)
        if type(padding_value) is not float:
            number("padding_value", padding_value)
        lengths = self.lengths()  # checks the offsets, too
        if validate.is_meta(tensor):
            if desired_length is None:
                validate.refuse_meta("JaggedTensor.to_padded_dense()", "Pass desired_length=.")
            return tensor.new_empty((lengths.numel(), desired_length, *tensor.shape[1:]))
        if desired_length is None:
            desired_length = int(lengths.max()) if lengths.numel() else 0
        return ops.jagged_to_padded_dense(tensor, self.offsets(), desired_length, padding_value)
