"""Log loss, and log loss relative to always predicting the base rate.

Normalized entropy is defined by He et al., "Practical Lessons from Predicting Clicks on Ads at
Facebook" (ADKDD 2014). Below 1, predictions are better than the base rate alone. Unlike log loss,
it is comparable between data sets of different base rates. Shapes: `N` samples.
"""

import math
from typing import final

import torch

from recsys.base.arguments import instance
from recsys.base.checked import checked
from recsys.metrics.sums import Sums

EPSILON = 1e-12
LOG_EPSILON = math.log(EPSILON)
"""Minimum of the logarithms: one certain mistake does not make the loss infinite."""


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
        TypeError: An input is not a tensor.
        ValueError: The inputs differ in size or device.

    Example:
        >>> round(log_loss(torch.tensor([0.5, 0.5]), torch.tensor([0, 1])).item(), 4)
        0.6931
    """
    return _measure(predictions, labels, weights).log_loss()


def normalized_entropy(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """Compute log loss divided by the entropy of the labels' base rate.

    Args:
        predictions: `[N]` probabilities.
        labels: `[N]`, 0 or 1.
        weights: `[N]`; `None` for ones.

    Returns:
        Scalar float64. Infinite if only one class is present.

    Raises:
        TypeError: An input is not a tensor.
        ValueError: The inputs differ in size or device.

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
        device: Device of the sums and of the predictions.

    Example:
        >>> metric = NormalizedEntropy()
        >>> metric.update(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
        >>> metric.compute().item(), metric.base_rate().item()
        (1.0, 0.5)
    """

    @checked
    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(3, device=device)

    def log_loss(self) -> torch.Tensor:
        """Compute the mean loss.

        Returns:
            Scalar float64, in nats per sample; NaN without samples.
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
            Scalar float64; infinite if only one class is present.
        """
        return normalize_entropy(*self._sums)

    def _add(
        self, predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor
    ) -> None:
        values = (cross_entropy(predictions_N, labels_N), labels_N, 1.0 - labels_N)
        self._sums += torch.stack([(value_N * weights_N).sum() for value_N in values])


def _measure(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor | None
) -> NormalizedEntropy:
    metric = NormalizedEntropy(
        instance("predictions", predictions, torch.Tensor, "a tensor").device
    )
    metric.update(predictions, labels, weights)
    return metric


def cross_entropy(probs_N: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Compute the binary cross entropy of each sample.

    Args:
        probs_N: `[..., N]` probabilities, float32 or float64.
        labels_N: `[..., N]`, from 0 to 1, of the same dtype.

    Returns:
        `[..., N]`, in nats, of the same dtype.
    """
    positive_N = probs_N.clamp(min=EPSILON).log_()
    # log1p: float32 rounds 1 - p to 1 for a small p.
    negative_N = probs_N.neg().log1p_().clamp_(min=LOG_EPSILON)
    return torch.lerp(negative_N, positive_N, labels_N, out=positive_N).neg_()


def positive_cross_entropy(probs_N: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    """Compute the positive part of the cross entropy; same arguments as `cross_entropy`."""
    return -labels_N * probs_N.clamp(min=EPSILON).log_()


def normalize_entropy(
    log_loss: torch.Tensor, positives: torch.Tensor, negatives: torch.Tensor
) -> torch.Tensor:
    """Divide a mean log loss by the entropy of the base rate.

    Args:
        log_loss: Loss summed over samples, any shape.
        positives: Weight of the positives, same shape.
        negatives: Weight of the negatives, same shape. Do not subtract the positives from the
            total weight: without negatives, rounding would make the difference nonzero.

    Returns:
        Same shape; infinite for a single class, NaN without weight.
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
    """Divide a mean log loss by the log loss of always predicting the mean prediction.

    Args:
        log_loss: Loss summed over samples, any shape.
        positives: Weight of the positives, same shape.
        negatives: Weight of the negatives, same shape.
        predicted: Sum of the predictions, same shape.
        predicted_negatives: Sum of one minus the predictions, same shape.

    Returns:
        Same shape; infinite if the mean prediction is certain and right, NaN without weight.
    """
    weight = predicted + predicted_negatives
    mean, rest = predicted / weight, predicted_negatives / weight
    loss_positive = _log_of_share(mean, rest).clamp(min=LOG_EPSILON) * positives
    loss_negative = _log_of_share(rest, mean).clamp(min=LOG_EPSILON) * negatives
    return -log_loss / (loss_positive + loss_negative)


def _log_of_share(share: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Compute `log(share)`, where `share + rest` is 1; exact for a small rest."""
    return torch.where(share > 0.5, torch.log1p(-rest), share.log())


def _entropy(share: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of two shares whose sum is 1; exactly 0 if one of them is 0."""
    share_part = torch.where(share > 0.5, -share * torch.log1p(-rest), torch.special.entr(share))
    rest_part = torch.where(rest > 0.5, -rest * torch.log1p(-share), torch.special.entr(rest))
    return share_part + rest_part
