"""Cross networks: explicit products of features, one degree more per layer.

From Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021, arXiv:2008.13535). Every layer
adds to its input the first input times a learned function of the layer's input. `VectorCrossNet` is
the first form of it, from Wang et al., "Deep & Cross Network" (2017, arXiv:1708.05123).

Shapes: `B` samples, `N` features, `E` experts, `R` rank.
"""

from collections.abc import Callable

import torch
from torch import nn

from recsys.kernels.arguments import check_input
from recsys.kernels.checked import checked


def _check_sizes(
    in_features: int, num_layers: int, low_rank: int = 1, num_experts: int = 1
) -> None:
    if min(in_features, num_layers, low_rank, num_experts) < 1:
        raise ValueError(
            f"cross network sizes must be at least 1; received in_features {in_features}, "
            f"num_layers {num_layers}, low_rank {low_rank}, num_experts {num_experts}."
        )


def _xavier(num: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))) for _ in range(num)
    )


def _zeros(num: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(num))


class CrossNet(nn.Module):
    """`x_next = x_0 * (W x + b) + x` with full matrices `W`.

    Args:
        in_features: `N`.
        num_layers: layers; the output holds products of up to `num_layers + 1` features.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> CrossNet(in_features=4, num_layers=2)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _check_sizes(in_features, num_layers)
        self._num_layers = num_layers
        # Shapes and names are those of checkpoints that users already have.
        self.kernels = _xavier(num_layers, in_features, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross the features.

        Args:
            input: `[B, N]`.

        Returns:
            `[B, N]`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.input", input, torch.Tensor)
        output_BN = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            output_BN = input * (output_BN @ kernel.T + bias.T) + output_BN
        return output_BN


class LowRankCrossNet(nn.Module):
    """`x_next = x_0 * (W V x + b) + x`: each matrix is a product of two narrow ones.

    Args:
        in_features: `N`.
        num_layers: layers; the output holds products of up to `num_layers + 1` features.
        low_rank: columns of `W` and rows of `V`; saves work below `N / 2`.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> LowRankCrossNet(in_features=4, num_layers=2, low_rank=1)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        _check_sizes(in_features, num_layers, low_rank)
        self._num_layers = num_layers
        self._low_rank = low_rank
        self.W_kernels = _xavier(num_layers, in_features, low_rank)
        self.V_kernels = _xavier(num_layers, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross the features.

        Args:
            input: `[B, N]`.

        Returns:
            `[B, N]`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.input", input, torch.Tensor)
        output_BN = input
        for wide, narrow, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            output_BN = input * (output_BN @ narrow.T @ wide.T + bias) + output_BN
        return output_BN


class VectorCrossNet(nn.Module):
    """`x_next = x_0 * (w^T x) + b + x`: each layer weighs all features by one number.

    Args:
        in_features: `N`.
        num_layers: layers; the output holds products of up to `num_layers + 1` features.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> VectorCrossNet(in_features=4, num_layers=2)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _check_sizes(in_features, num_layers)
        self._num_layers = num_layers
        self.kernels = _xavier(num_layers, in_features, 1)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross the features.

        Args:
            input: `[B, N]`.

        Returns:
            `[B, N]`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.input", input, torch.Tensor)
        output_BN = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            output_BN = input * (output_BN @ kernel) + bias.T + output_BN
        return output_BN


class LowRankMixtureCrossNet(nn.Module):
    """Low-rank layers of several experts each, weighed by gates that see the layer's input.

    `x_next = sum_e G_e(x) * x_0 * (U_e g(C_e g(V_e x)) + b) + x`. The gates `G` are a softmax
    over one linear layer per expert, which all cross layers share; one expert needs no gate.

    Args:
        in_features: `N`.
        num_layers: layers; the output holds products of up to `num_layers + 1` features.
        num_experts: `E`.
        low_rank: `R`, columns of each `U`.
        activation: `g`, a function or a module.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> net = LowRankMixtureCrossNet(in_features=4, num_layers=2, num_experts=3, low_rank=2)
        >>> net(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[torch.Tensor], torch.Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        _check_sizes(in_features, num_layers, low_rank, num_experts)
        self._num_layers = num_layers
        self._num_experts = num_experts
        self._low_rank = low_rank
        self._in_features = in_features
        self.U_kernels = _xavier(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _xavier(num_layers, num_experts, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features, 1)
        num_gates = num_experts if num_experts > 1 else 0
        self.gates = nn.ModuleList(nn.Linear(in_features, 1, bias=False) for _ in range(num_gates))
        self._activation = activation
        self.C_kernels = _xavier(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Cross the features.

        Args:
            input: `[B, N]`.

        Returns:
            `[B, N]`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.input", input, torch.Tensor)
        output_BN = input
        for wide, core, narrow, bias in zip(
            self.U_kernels, self.C_kernels, self.V_kernels, self.bias, strict=True
        ):
            narrow_EBR = self._activation(output_BN @ narrow.transpose(1, 2))
            core_EBR = self._activation(narrow_EBR @ core.transpose(1, 2))
            experts_EBN = core_EBR @ wide.transpose(1, 2)
            # The weights of a sample's experts add up to 1, so that the bias needs none.
            output_BN = input * (self._weigh(output_BN, experts_EBN) + bias.T) + output_BN
        return output_BN

    def _weigh(self, input_BN: torch.Tensor, experts_EBN: torch.Tensor) -> torch.Tensor:
        if self._num_experts == 1:
            return experts_EBN[0]
        scores_BE = torch.cat([gate(input_BN) for gate in self.gates], dim=1)
        return torch.einsum("be,ebn->bn", torch.softmax(scores_BE, dim=1), experts_EBN)
