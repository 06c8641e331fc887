"""Views of the features of one jagged buffer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(eq=False, repr=False)
class FeatureViews:
    """Views of every feature's part of a buffer, made for all features at once when first needed.

    A JaggedTensor per feature that slices for itself would make a thousand slices per buffer cost
    more than the lookup they feed: one `split_with_sizes` costs a third of that.

    Args:
        buffer: [N, ...] or [N] values, feature by feature.
        buffer_weights: [N], or None.
        buffer_lengths: Of the features' bags.
        sizes: Ids of each feature.
        strides: Bags of each feature.
        order: Which feature each part of `buffer` is of; None: they are in order.
    """

    buffer: Tensor
    buffer_weights: Tensor | None
    buffer_lengths: Tensor
    sizes: list[int]
    strides: list[int]
    order: list[int] | None = None

    @cached_property
    def values(self) -> tuple[Tensor, ...]:
        """The values of each feature."""
        if self.order is None:
            return self.buffer.split_with_sizes(self.sizes)
        parts = self.buffer.split_with_sizes([self.sizes[i] for i in self.order])
        of_feature = dict(zip(self.order, parts, strict=True))
        return tuple(of_feature[i] for i in range(len(parts)))

    @cached_property
    def weights(self) -> tuple[Tensor, ...] | None:
        """The weights of each feature, or None if there are none."""
        weights = self.buffer_weights
        return None if weights is None else weights.split_with_sizes(self.sizes)

    @cached_property
    def lengths(self) -> tuple[Tensor, ...]:
        """The lengths of each feature."""
        return self.buffer_lengths.split_with_sizes(self.strides)
