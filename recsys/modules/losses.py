"""Losses for click models."""

import torch
from torch import nn

from recsys.base.arguments import check_input
from recsys.sparse.value_checks import check_labels


@torch.fx.wrap
def mean_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute the mean binary cross entropy over samples and tasks; 0 for an empty batch.

    Weights multiply the losses of their samples, and labels that a mask leaves out have the loss 0.
    The sum is divided by the number of samples and tasks, not by the sum of the weights or of the
    mask. So the gradients do not depend on the division of a batch among ranks. Scale weights to a
    mean of 1 to keep the learning rate.

    Args:
        logits: `[B]`, or `[B, T]` for T tasks.
        labels: `[B]` or `[B, T]`, in [0, 1], any dtype.
        weights: `[B]`, not negative; None for ones.
        mask: bool, of the shape of the labels, False for labels to leave out; None for none. Values
            of these labels are ignored, but must not be NaN.

    Returns:
        Scalar.

    Raises:
        ValueError: The shapes differ, or a label is NaN or not in [0, 1]. On CUDA, the latter is
            raised with a later batch; see `recsys.sparse.finish_value_checks`.

    Example:
        >>> logits, labels = torch.zeros(2, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> has_label = torch.tensor([[True, True], [True, False]])
        >>> round(mean_loss(logits, labels, mask=has_label).item(), 4)  # 3 of 4 log(2)
        0.5199
    """
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        check_input("mean_loss: logits", logits, torch.Tensor)
        check_input("mean_loss: labels", labels, torch.Tensor)
        for name, optional in (("weights", weights), ("mask", mask)):
            if optional is not None:
                check_input(f"mean_loss: {name}", optional, torch.Tensor)
    if logits.shape != labels.shape:
        raise ValueError(
            "labels must be one per sample, as the logits; received labels "
            f"{list(labels.shape)} and logits {list(logits.shape)}."
        )
    if weights is not None and weights.shape != logits.shape[:1]:
        raise ValueError(
            "sample_weights must be one per sample, as the logits; received weights "
            f"{list(weights.shape)} and logits {list(logits.shape)}."
        )
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        labels = check_labels(labels)
    if weights is not None:
        weights = weights.to(logits.dtype)
        if logits.dim() > 1:
            weights = weights.unsqueeze(-1)  # the same for all tasks
    if mask is not None:
        if mask.shape != labels.shape or mask.dtype != torch.bool:
            raise ValueError(
                "label_mask must be bool, of the shape of the labels; received "
                f"{mask.dtype} {list(mask.shape)} and labels {list(labels.shape)}."
            )
        weights = mask.to(logits.dtype) if weights is None else weights * mask
    loss = nn.functional.binary_cross_entropy_with_logits(
        logits, labels.to(logits.dtype), weight=weights, reduction="sum"
    )
    return loss / max(1, logits.numel())
