"""Cross networks: explicit products of features, one degree more per layer.

From Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021). Every layer adds to its input
the first input times a learned function of the layer's input.

Shapes: ``B`` samples, ``N`` features.
"""

import torch
from torch import nn


def _check_sizes(in_features: int, num_layers: int, low_rank: int = 1) -> None:
    if in_features < 1 or num_layers < 1 or low_rank < 1:
        raise ValueError(
            "cross network sizes must be at least 1; received "
            f"in_features {in_features}, num_layers {num_layers}, low_rank {low_rank}."
        )


class CrossNet(nn.Module):
    """``x_next = x_0 * (W x + b) + x`` with full matrices ``W``.

    Args:
        in_features: ``N``.
        num_layers: layers; the output holds products of up to ``num_layers + 1`` features.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> CrossNet(in_features=4, num_layers=2)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _check_sizes(in_features, num_layers)
        self._num_layers = num_layers
        # Shapes and names are those of checkpoints that users already have.
        self.kernels = nn.ParameterList(
            nn.Parameter(nn.init.xavier_normal_(torch.empty(in_features, in_features)))
            for _ in range(num_layers)
        )
        self.bias = nn.ParameterList(
            nn.Parameter(torch.zeros(in_features, 1)) for _ in range(num_layers)
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross the features.

        Args:
            input: ``[B, N]``.

        Returns:
            ``[B, N]``.
        """
        output_BN = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            output_BN = input * (output_BN @ kernel.T + bias.T) + output_BN
        return output_BN


class LowRankCrossNet(nn.Module):
    """``x_next = x_0 * (W V x + b) + x``: each matrix is a product of two narrow ones.

    Args:
        in_features: ``N``.
        num_layers: layers; the output holds products of up to ``num_layers + 1`` features.
        low_rank: columns of ``W`` and rows of ``V``; saves work below ``N / 2``.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> LowRankCrossNet(in_features=4, num_layers=2, low_rank=1)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        _check_sizes(in_features, num_layers, low_rank)
        self._num_layers = num_layers
        self._low_rank = low_rank
        self.W_kernels = nn.ParameterList(
            nn.Parameter(nn.init.xavier_normal_(torch.empty(in_features, low_rank)))
            for _ in range(num_layers)
        )
        self.V_kernels = nn.ParameterList(
            nn.Parameter(nn.init.xavier_normal_(torch.empty(low_rank, in_features)))
            for _ in range(num_layers)
        )
        self.bias = nn.ParameterList(
            nn.Parameter(torch.zeros(in_features)) for _ in range(num_layers)
        )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross the features.

        Args:
            input: ``[B, N]``.

        Returns:
            ``[B, N]``.
        """
        output_BN = input
        for wide, narrow, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            output_BN = input * (output_BN @ narrow.T @ wide.T + bias) + output_BN
        return output_BN
