"""Views of the features of one jagged buffer."""

from torch import Tensor


class FeatureViews:
    """Views of every feature's part of a buffer, cut for all features at once when first needed.

    A JaggedTensor per feature that slices for itself would make a thousand slices per buffer cost
    more than the lookup they feed: one `split_with_sizes` costs a third of that.
    """

    __slots__ = ("_lengths", "_sizes", "_strides", "_values", "_weights")

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor,
        sizes: list[int],
        strides: list[int],
    ) -> None:
        self._values: Tensor | tuple[Tensor, ...] = values
        self._weights: Tensor | tuple[Tensor, ...] | None = weights
        self._lengths: Tensor | tuple[Tensor, ...] = lengths
        self._sizes = sizes
        self._strides = strides

    def values(self, index: int) -> Tensor:
        """Return the values of one feature."""
        if isinstance(self._values, Tensor):
            self._values = self._values.split_with_sizes(self._sizes)
        return self._values[index]

    def weights(self, index: int) -> Tensor | None:
        """Return the weights of one feature."""
        if self._weights is None:
            return None
        if isinstance(self._weights, Tensor):
            self._weights = self._weights.split_with_sizes(self._sizes)
        return self._weights[index]

    def lengths(self, index: int) -> Tensor:
        """Return the lengths of one feature."""
        if isinstance(self._lengths, Tensor):
            self._lengths = self._lengths.split_with_sizes(self._strides)
        return self._lengths[index]
