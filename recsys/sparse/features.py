"""Views of the features of one jagged buffer."""

from __future__ import annotations

from functools import cached_property

from torch import Tensor


class FeatureViews:
    """Views of every feature's part of a buffer, cut for all features at once when first needed.

    A JaggedTensor per feature that slices for itself would make a thousand slices per buffer cost
    more than the lookup they feed: one `split_with_sizes` costs a third of that.

    Args:
        values: [N, ...] or [N], feature by feature.
        weights: [N], or None.
        lengths: Of the features' bags.
        sizes: Ids of each feature.
        strides: Bags of each feature.
        order: Which feature each part of `values` is of; None: they are in order.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        sizes: list[int],
        strides: list[int],
        order: list[int] | None = None,
    ) -> None:
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._sizes = sizes
        self._strides = strides
        self._order = order

    @cached_property
    def values(self) -> tuple[Tensor, ...]:
        """The values of each feature."""
        if self._order is None:
            return self._values.split_with_sizes(self._sizes)
        parts = self._values.split_with_sizes([self._sizes[i] for i in self._order])
        of_feature = dict(zip(self._order, parts, strict=True))
        return tuple(of_feature[i] for i in range(len(parts)))

    @cached_property
    def weights(self) -> tuple[Tensor, ...] | None:
        """The weights of each feature, or None if there are none."""
        return None if self._weights is None else self._weights.split_with_sizes(self._sizes)

    @cached_property
    def lengths(self) -> tuple[Tensor, ...]:
        """The lengths of each feature."""
        return self._lengths.split_with_sizes(self._strides)
