"""Stand-alone accumulators of one metric over many batches and ranks."""

import abc
from typing import Self

import torch

from recsys.base.arguments import instance
from recsys.base.checked import checked
from recsys.base.contact import explained
from recsys.metrics.checks import check_predictions


class Accumulator(abc.ABC):
    """Base class of accumulators: `update` with batches, `merge` or `sync`, then `compute`."""

    def update(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        """Add a batch of `N` samples.

        Args:
            predictions: `[N]` probabilities; any scores for `AUC`.
            labels: `[N]`, 0 or 1.
            weights: `[N]`; `None` for ones.

        Raises:
            TypeError: An input is not a tensor.
            ValueError: The inputs differ in size or device.
        """
        self._add(*check_predictions(predictions, labels, weights))

    def merge(self, other: Self) -> None:
        """Add the state of another accumulator.

        Args:
            other: Accumulator with the same arguments; is not changed.

        Raises:
            TypeError: `other` is of another class.
            ValueError: Its state has another shape.
        """
        self._merge(instance("other", other, type(self)).state())

    @checked
    def sync(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Add the states of all ranks, so that all ranks hold the same state.

        Every rank must call it.

        Args:
            group: Process group; `None` for all ranks.

        Raises:
            TypeError: `group` is not a process group.
        """
        with explained(group, "synchronize a metric"):
            self._sync(group)

    @abc.abstractmethod
    def state(self) -> torch.Tensor:
        """Return the accumulated state.

        Returns:
            Float64 values, described by each class.
        """

    @abc.abstractmethod
    def _add(
        self, predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor
    ) -> None: ...

    @abc.abstractmethod
    def _merge(self, state: torch.Tensor) -> None: ...

    @abc.abstractmethod
    def _sync(self, group: "torch.distributed.ProcessGroup | None") -> None: ...


class Sums(Accumulator):
    """Accumulator whose state is one tensor of sums.

    Args:
        shape: Shape of the sums.
        device: Device of the sums and of the predictions.
    """

    def __init__(self, *shape: int, device: torch.device | None) -> None:
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def state(self) -> torch.Tensor:
        """Return the sums; sums of several ranks may be added."""
        return self._sums

    def _merge(self, state: torch.Tensor) -> None:
        if self._sums.shape != state.shape:
            raise ValueError(
                f"merged accumulators must have sums of one shape; received "
                f"{list(self._sums.shape)} and {list(state.shape)}. Give both the same arguments."
            )
        self._sums += state

    def _sync(self, group: "torch.distributed.ProcessGroup | None") -> None:
        import torch.distributed as dist

        dist.all_reduce(self._sums, group=group)
