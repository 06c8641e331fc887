"""Views of the features of one jagged buffer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(eq=False, repr=False)
class FeatureViews:
    """Views of all features of a buffer, created together at the first access.

    One `split_with_sizes` costs a third of one slice per feature; a thousand slices can cost more
    than the lookup that reads them.

    Args:
        buffer: [N, ...] or [N] values, feature by feature.
        buffer_weights: [N], or None.
        buffer_lengths: Lengths of the bags, feature by feature.
        sizes: Number of ids of each feature.
        strides: Number of bags of each feature.
        order: The feature of each part of `buffer`; None if the parts are in order.
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
