"""Area under the ROC curve: the chance that a positive is scored above a negative.

Ties count one half. Shapes: `N` samples, `K` bins, `R` ranks.
"""

from typing import final

import torch

from recsys.contact import explained
from recsys.kernels.arguments import whole
from recsys.kernels.checked import checked
from recsys.metrics.checks import check_group, check_predictions, instance
from recsys.metrics.ranking import Ranked, areas_under_roc, one_group
from recsys.metrics.sums import Sums
from recsys.metrics.windows import gather_rows


def auc(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the exact area under the ROC curve.

    Args:
        predictions: `[N]` scores of any scale; only their order matters.
        labels: `[N]`, 0 or 1.
        weights: `[N]`, not negative; `None` for ones.

    Returns:
        Scalar float64; NaN if only one class is present, or a value is NaN.

    Raises:
        TypeError: an input is no tensor.
        ValueError: the inputs differ in size or device.

    Example:
        >>> auc(torch.tensor([0.1, 0.4, 0.4, 0.8]), torch.tensor([0, 0, 1, 1])).item()
        0.875
    """
    scores_N, labels_N, weights_N = check_predictions(predictions, labels, weights)
    return areas_under_roc(Ranked(scores_N, labels_N, weights_N, one_group(scores_N)))[0]


def find_bins(predictions: torch.Tensor, num_bins: int) -> torch.Tensor:
    """Find the bin of each probability.

    Args:
        predictions: any shape; what is below 0 or above 1 is put into the first or last bin.
        num_bins: equal bins from 0 to 1.

    Returns:
        Alike, int64.
    """
    # Large numbers are no int64; a NaN becomes any number.
    return (predictions.clamp(0.0, 1.0) * num_bins).long().clamp(0, num_bins - 1)


def area_under_bins(positive_K: torch.Tensor, negative_K: torch.Tensor) -> torch.Tensor:
    """Compute the area under the ROC curve if samples of one bin are ties.

    Args:
        positive_K: `[..., K]` the weight of positives in bins of rising score.
        negative_K: alike, of negatives.

    Returns:
        `[...]`; NaN if only one class is present.
    """
    beaten_K = negative_K.cumsum(-1) - 0.5 * negative_K
    # Not one division by the product, which small and large weights take out of range.
    beaten_K /= negative_K.sum(-1, keepdim=True)
    return (positive_K * beaten_K).sum(-1) / positive_K.sum(-1)


@final
class AUC:
    """Exact area under the ROC curve over many batches and ranks.

    It keeps every sample; `BinnedAUC` does not.

    Example:
        >>> metric = AUC()
        >>> metric.update(torch.tensor([0.1, 0.4]), torch.tensor([0, 1]))
        >>> metric.update(torch.tensor([0.3]), torch.tensor([0]))
        >>> metric.compute().item()
        1.0
    """

    def __init__(self) -> None:
        self._samples: list[torch.Tensor] = []

    def update(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            predictions: `[N]` scores.
            labels: `[N]`, 0 or 1.
            weights: `[N]`; `None` for ones.

        Raises:
            TypeError: an input is no tensor.
            ValueError: the inputs differ in size or device.
        """
        self._samples.append(torch.stack(check_predictions(predictions, labels, weights)))

    def state(self) -> torch.Tensor:
        """Give everything seen so far.

        Returns:
            `[3, N]` float64: predictions, labels, weights.
        """
        if not self._samples:
            return torch.zeros(3, 0, dtype=torch.float64)
        if len(self._samples) > 1:
            self._samples = [torch.cat(self._samples, dim=1)]
        return self._samples[0]

    def merge(self, other: "AUC") -> None:
        """Add what another accumulator has seen.

        Args:
            other: is left as it was.

        Raises:
            TypeError: it is of another class.
        """
        self._samples.append(instance("other", other, AUC).state())

    def sync(self, group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Add what all ranks have seen; every rank must call it, and then holds the same state.

        Args:
            group: the ranks; `None` for all.

        Raises:
            TypeError: it is no process group.
        """
        import torch.distributed as dist

        check_group("group", group)
        mine = self.state()
        if not self._samples and dist.get_backend(group) == "nccl":
            mine = mine.cuda()  # A rank without samples does not know their device.
        count = torch.tensor([mine.size(1)], device=mine.device)
        counts = [torch.zeros_like(count) for _ in range(dist.get_world_size(group))]
        with explained(group, "gather samples of a metric"):
            dist.all_gather(counts, count, group=group)
            self._samples = [gather_rows(mine, torch.cat(counts).tolist(), group)]

    def compute(self) -> torch.Tensor:
        """Compute the area over everything seen.

        Returns:
            Scalar float64; NaN if only one class was seen.
        """
        predictions_N, labels_N, weights_N = self.state()
        return auc(predictions_N, labels_N, weights_N)


@final
class BinnedAUC(Sums):
    """Area under the ROC curve of probabilities, in memory that does not grow.

    Predictions that share a bin count as ties. The error is at most half the chance that a positive
    and a negative share one.

    The state is `[2, K]`: the weight of negatives and of positives in each bin.

    Args:
        num_bins: equal bins from 0 to 1.
        device: where the counts are kept: that of the predictions.

    Raises:
        TypeError: the number of bins is no whole number.
        ValueError: fewer than 2 bins.

    Example:
        >>> metric = BinnedAUC(num_bins=100)
        >>> metric.update(torch.tensor([0.2, 0.9]), torch.tensor([0, 1]))
        >>> metric.compute().item()
        1.0
    """

    @checked
    def __init__(self, num_bins: int = 10_000, device: torch.device | None = None) -> None:
        super().__init__(2, whole("num_bins", num_bins, least=2), device=device)

    def update(
        self, predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
    ) -> None:
        """Add a batch.

        Args:
            predictions: `[N]` probabilities.
            labels: `[N]`, 0 or 1.
            weights: `[N]`; `None` for ones.

        Raises:
            TypeError: an input is no tensor.
            ValueError: the inputs differ in size or device.
        """
        scores_N, labels_N, weights_N = check_predictions(predictions, labels, weights)
        num_bins = self._sums.size(1)
        bin_N = find_bins(scores_N, num_bins)
        weights_N = weights_N.masked_fill(scores_N.isnan(), torch.nan)
        self._sums[1].index_add_(0, bin_N, labels_N * weights_N)
        self._sums[0].index_add_(0, bin_N, (1.0 - labels_N) * weights_N)

    def compute(self) -> torch.Tensor:
        """Compute the area over everything seen.

        Returns:
            Scalar float64; NaN if only one class was seen.
        """
        return area_under_bins(self._sums[1], self._sums[0])
