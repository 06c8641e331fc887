"""Log loss, and log loss against a model that knows the base rate only.

Normalized entropy is from He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook"
(ADKDD 2014): below 1 the predictions say more than the base rate does, and unlike log loss it
can be compared between data sets of different base rates. Shape: `N` samples.
"""

import math
from typing import final

import torch

from recsys.kernels.checked import checked
from recsys.metrics.checks import check_predictions, check_tensor
from recsys.metrics.sums import Sums

EPSILON = 1e-12
LOG_EPSILON = math.log(EPSILON)
"""Predictions are kept this far from 0 and 1, so that one sure mistake does not cost infinity."""


def log_loss(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute the mean binary cross entropy.

    Args:
        predictions: `[N]` probabilities.
        labels: `[N]`, 0 or 1.
        weights: `[N]`; `None` for ones.

    Returns:
        Scalar float64, in nats per sample; NaN without samples.

    Raises:
        TypeError: an input is no tensor.
        ValueError: the inputs differ in size or device.

    Example:
        >>> round(log_loss(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])).item(), 4)
        0.6931
    """
    return _measure(predictions, labels, weights).log_loss()


def normalized_entropy(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute log loss divided by the entropy of the labels' own base rate.

    Args:
        predictions: `[N]` probabilities.
        labels: `[N]`, 0 or 1.
        weights: `[N]`; `None` for ones.

    Returns:
        Scalar float64. Infinite if only one class is present.

    Raises:
        TypeError: an input is no tensor.
        ValueError: the inputs differ in size or device.

    Example:
        >>> normalized_entropy(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])).item()
        1.0
    """
    return _measure(predictions, labels, weights).compute()


@final
class NormalizedEntropy(Sums):
    """Log loss, base rate and normalized entropy over many batches and ranks.

    The state is `[3]`: summed loss, weight of positives, weight of negatives.

    Args:
        device: where the sums are kept: that of the predictions.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
        >>> metric.compute().item(), metric.base_rate().item()
        (1.0, 0.5)
    """

    @checked
    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(3, device=device)

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
        probs_N, labels_N, weights_N = check_predictions(predictions, labels, weights)
        loss_N = cross_entropy(probs_N, labels_N)
        self._sums += torch.stack(
            [
                (loss_N * weights_N).sum(),
                (labels_N * weights_N).sum(),
                ((1.0 - labels_N) * weights_N).sum(),
            ]
        )

    def log_loss(self) -> torch.Tensor:
        """Compute the mean loss.

        Returns:
            Scalar float64, nats per sample; NaN without samples.
        """
        return self._sums[0] / self._sums[1:].sum()

    def base_rate(self) -> torch.Tensor:
        """Compute the share of positives.

        Returns:
            Scalar float64; NaN without samples.
        """
        return self._sums[1] / self._sums[1:].sum()

    def compute(self) -> torch.Tensor:
        """Compute the normalized entropy.

        Returns:
            Scalar float64; infinite if only one class was seen.
        """
        return normalize_entropy(self._sums[0], self._sums[1], self._sums[2])


def _measure(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> NormalizedEntropy:
    check_tensor("predictions", predictions)
    metric = NormalizedEntropy(predictions.device)
    metric.update(predictions, labels, weights)
    return metric


def cross_entropy(probs_N: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Compute the binary cross entropy of each sample.

    Args:
        probs_N: `[..., N]` probabilities, float32 or float64.
        labels_N: `[..., N]`, from 0 to 1, alike.

    Returns:
        `[..., N]`, in nats, alike.
    """
    positive_N = probs_N.clamp(min=EPSILON).log_()
    # Not the logarithm of 1 - p, which float32 does not have for a small p.
    negative_N = probs_N.neg().log1p_().clamp_(min=LOG_EPSILON)
    return torch.lerp(negative_N, positive_N, labels_N, out=positive_N).neg_()


def positive_cross_entropy(probs_N: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Compute what labels of 1 add to the cross entropy; arguments as of `cross_entropy`."""
    return -labels_N * probs_N.clamp(min=EPSILON).log_()


def normalize_entropy(
    log_loss: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor
) -> torch.Tensor:
    """Divide a mean log loss by the entropy of the base rate.

    Args:
        log_loss: any shape, summed over samples.
        positives: alike, the weight of positives.
        negatives: alike, the weight of negatives. A sum of its own: the weight of all less that of
            positives is not exactly 0 without negatives.

    Returns:
        Alike; infinite for one class only, NaN for no weight.
    """
    weight = positives + negatives
    normalized: torch.Tensor = log_loss / weight / _entropy(positives / weight, negatives / weight)
    return normalized


def normalize_by_mean(
    log_loss: torch.Tensor,
    positives: torch.Tensor,
    negatives: torch.Tensor,
    predicted: torch.Tensor,
    predicted_negatives: torch.Tensor,
) -> torch.Tensor:
    """Divide a mean log loss by that of always predicting the mean prediction.

    Args:
        log_loss: any shape, summed over samples.
        positives: alike, the weight of positives.
        negatives: alike, the weight of negatives.
        predicted: alike, the summed predictions.
        predicted_negatives: alike, 1 less the predictions, summed.

    Returns:
        Alike; infinite if the mean prediction is right for sure, NaN for no weight.
    """
    weight = predicted + predicted_negatives
    mean, rest = predicted / weight, predicted_negatives / weight
    loss_positive = _log_of_share(mean, rest).clamp(min=LOG_EPSILON) * positives
    loss_negative = _log_of_share(rest, mean).clamp(min=LOG_EPSILON) * negatives
    return -log_loss / (loss_positive + loss_negative)


def _log_of_share(share: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of a share, which `rest` makes one; exact if the rest is small."""
    return torch.where(share > 0.5, torch.log1p(-rest), share.log())


def _entropy(share: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Return the entropy of two shares that make one: exactly 0 if one of them is."""
    of_share = torch.where(share > 0.5, -share * torch.log1p(-rest), torch.special.entr(share))
    of_rest = torch.where(rest > 0.5, -rest * torch.log1p(-share), torch.special.entr(rest))
    return of_share + of_rest
