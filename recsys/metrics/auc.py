"""Area under the ROC curve: the probability that a positive is scored above a negative.

Ties count one half. Shapes: `N` samples, `K` bins.
"""

from typing import final

import torch

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.metrics.checks import check_predictions
from recsys.metrics.ranking import Ranked, areas_under_roc, one_group
from recsys.metrics.sums import Accumulator, Sums
from recsys.metrics.windows import gather_rows


def auc(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the exact area under the ROC curve.

    Args:
        predictions: `[N]` scores of any scale; only their order counts.
        labels: `[N]`, 0 or 1.
        weights: `[N]`, not negative; `None` for ones.

    Returns:
        Scalar float64; NaN if only one class is present, or a value is NaN.

    Raises:
        TypeError: An input is not a tensor.
        ValueError: The inputs differ in size or device.

    Example:
        >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
        0.875
    """
    scores_N, labels_N, weights_N = check_predictions(predictions, labels, weights)
    return areas_under_roc(Ranked(scores_N, labels_N, weights_N, one_group(scores_N)))[0]


def find_bins(predictions: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Find the bin of each probability.

    Args:
        predictions: Probabilities, any shape; others go into the first or the last bin.
        num_bins: Number of equal bins from 0 to 1.

    Returns:
        Bin numbers, of the same shape, int64.
    """
    # Clamped twice: large numbers overflow int64, and a NaN becomes an arbitrary number.
    return (predictions.clamp(0.0, 1.0) * num_bins).long().clamp(0, num_bins - 1)


def area_under_bins(positive_K: torch.Tensor, negative_K: torch.Tensor) -> torch.Tensor:
    """Compute the area under the ROC curve where samples of a bin are ties.

    Args:
        positive_K: `[..., K]` weight of the positives in each bin, in ascending order of scores.
        negative_K: `[..., K]` weight of the negatives.

    Returns:
        `[...]`; NaN if only one class is present.
    """
    beaten_K = negative_K.cumsum(-1) - 0.5 * negative_K
    # Two divisions: the product of both sums may underflow or overflow.
    beaten_K /= negative_K.sum(-1, keepdim=True)
    return (positive_K * beaten_K).sum(-1) / positive_K.sum(-1)


@final
class AUC(Accumulator):
    """Exact area under the ROC curve over many batches and ranks.

    Memory grows with the samples; `BinnedAUC` needs constant memory. The state is `[3, N]`:
    predictions, labels and weights.

    Example:
        >>> metric = AUC()
        >>> metric.update(torch.tensor([0.1, 0.4]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([0.3]), torch.tensor([0]))
        >>> metric.compute().item()
        1.0
    """

    def __init__(self) -> None:
        self._samples: list[torch.Tensor] = []

    def state(self) -> torch.Tensor:
        """Return all samples."""
        if not self._samples:
            return torch.zeros(3, 0, dtype=torch.float64)
        if len(self._samples) > 1:
            self._samples = [torch.cat(self._samples, dim=1)]
        return self._samples[0]

    def compute(self) -> torch.Tensor:
        """Compute the area under the curve of all samples.

        Returns:
            Scalar float64; NaN if only one class is present.
        """
        return auc(*self.state())

    def _add(self, *columns_N: torch.Tensor) -> None:
        self._samples.append(torch.stack(columns_N))

    def _merge(self, state: torch.Tensor) -> None:
        self._samples.append(state)

    def _sync(self, group: "torch.distributed.ProcessGroup | None") -> None:
        import torch.distributed as dist

        mine = self.state()
        if not self._samples and dist.get_backend(group) == "nccl":
            mine = mine.cuda()  # A rank without samples does not know their device.
        count = torch.tensor([mine.size(1)], device=mine.device)
        counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
        dist.all_gather(counts, count, group=group)
        self._samples = [gather_rows(mine, torch.cat(counts).tolist(), group)]


@final
class BinnedAUC(Sums):
    """Area under the ROC curve of probabilities, in constant memory.

    Predictions that share a bin count as ties. The error is at most half the probability that a
    positive and a negative share a bin. The state is `[2, K]`: the weight of negatives and of
    positives in each bin.

    Args:
        num_bins: Number of equal bins from 0 to 1.
        device: Device of the counts and of the predictions.

    Raises:
        TypeError: `num_bins` is not a whole number.
        ValueError: `num_bins` is less than 2.

    Example:
        >>> metric = BinnedAUC(num_bins=100)
        >>> metric.update(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
        >>> metric.compute().item()
        1.0
    """

    @checked
    def __init__(self, num_bins: int = 10_000, device: torch.device | None = None) -> None:
        super().__init__(2, whole("num_bins", num_bins, least=2), device=device)

    def compute(self) -> torch.Tensor:
        """Compute the area under the curve of all samples.

        Returns:
            Scalar float64; NaN if only one class is present.
        """
        return area_under_bins(self._sums[1], self._sums[0])

    def _add(
        self, predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor
    ) -> None:
        bin_N = find_bins(predictions_N, self._sums.size(1))
        weights_N = weights_N.masked_fill(predictions_N.isnan(), torch.nan)
        self._sums[1].index_add_(0, bin_N, labels_N * weights_N)
        self._sums[0].index_add_(0, bin_N, (1.0 - labels_N) * weights_N)
