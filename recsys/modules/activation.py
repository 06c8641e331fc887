"""Activations that `torch.nn` does not have."""

import torch
from torch import nn

from recsys.base.arguments import whole
from recsys.base.checked import checked


class SwishLayerNorm(nn.Module):
    """Gate the input by the sigmoid of its own layer norm: `x * sigmoid(layer_norm(x))`.

    Args:
        input_dims: Sizes of the normalized dimensions, which are the last ones.
        device: Device of the parameters.

    Example:
        >>> SwishLayerNorm(4)(torch.zeros(2, 4)).shape
        torch.Size([2, 4])
    """

    @checked
    def __init__(
        self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None
    ) -> None:
        super().__init__()
        for size in [input_dims] if isinstance(input_dims, int) else input_dims:
            whole("SwishLayerNorm.input_dims", size)
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the gate.

        Args:
            input: `[..., *input_dims]`.

        Returns:
            The same shape.
        """
        gated: torch.Tensor = input * self.norm(input)
        return gated
