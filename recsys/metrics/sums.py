"""What accumulators of sums have in common: their states add up, over batches as over ranks."""

from typing import Self

import torch

from recsys.contact import explained
from recsys.metrics.checks import check_group, instance


class Sums:
    """An accumulator whose whole state is one tensor of sums.

    Args:
        shape: of the sums.
        device: where they are kept: that of the predictions.
    """

    def __init__(self, *shape: int, device: torch.device | None) -> None:
        self._sums = torch.zeros(shape, dtype=torch.float64, device=device)

    def state(self) -> torch.Tensor:
        """Give everything seen so far; states of several ranks may be summed.

        Returns:
            The float64 sums that the class describes.
        """
        return self._sums

    def merge(self, other: Self) -> None:
        """Add what another accumulator has seen.

        Args:
            other: is made as this one was; is left as it was.

        Raises:
            TypeError: it is of another class.
            ValueError: its sums have another shape.
        """
        instance("other", other, type(self))
        if self._sums.shape != other._sums.shape:
            raise ValueError(
                f"merged accumulators must have sums of one shape; received "
                f"{list(self._sums.shape)} and {list(other._sums.shape)}. Make both alike."
            )
        self._sums += other._sums

    def sync(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Add what all ranks have seen; every rank must call it, and then holds the same state.

        Args:
            group: the ranks; `None` for all.

        Raises:
            TypeError: it is no process group.
        """
        import torch.distributed as dist

        check_group("group", group)
        with explained(group, "add up a metric"):
            dist.all_reduce(self._sums, group=group)
