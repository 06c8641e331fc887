"""What every metric asks of its inputs."""

import torch


def check_predictions(
    predictions_N: torch.Tensor, labels_N: torch.Tensor, weights_N: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bring predictions, labels and weights to one shape and precision.

    Values are not looked at: on a GPU that would wait for the device in every step.

    Args:
        predictions_N: any shape with `N` values.
        labels_N: as many values, 0 or 1.
        weights_N: as many values; `None` for ones.

    Returns:
        The three, detached, `[N]` float64.

    Raises:
        ValueError: they differ in size or device.
    """
    given = {"predictions": predictions_N, "labels": labels_N}
    if weights_N is not None:
        given["weights"] = weights_N
    if len({tensor.numel() for tensor in given.values()}) > 1:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in given.items())
        raise ValueError(
            f"predictions, labels and weights must have equally many values; received {sizes}. "
            "Pass one of each per sample."
        )
    if len({tensor.device for tensor in given.values()}) > 1:
        devices = ", ".join(f"{name} on {tensor.device}" for name, tensor in given.items())
        raise ValueError(
            f"predictions, labels and weights must be on one device; received {devices}. "
            "Move them with .to(device)."
        )
    predictions = predictions_N.detach().reshape(-1).double()
    labels = labels_N.detach().reshape(-1).double()
    if weights_N is None:
        return predictions, labels, torch.ones_like(predictions)
    return predictions, labels, weights_N.detach().reshape(-1).double()
