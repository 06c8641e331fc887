"""Cross networks: explicit products of features, whose degree grows by one per layer.

From Wang et al., "DCN V2: Improved Deep & Cross Network" (WWW 2021, arXiv:2008.13535). Each layer
adds to its input the network's input times a learned function of the layer's input.
`VectorCrossNet` is from Wang et al., "Deep & Cross Network" (2017, arXiv:1708.05123).

Shapes: `B` samples, `N` features, `E` experts, `R` rank.
"""

from collections.abc import Callable

import torch
from torch import nn

from recsys.base.arguments import check_input
from recsys.base.checked import checked


def _xavier(num: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(
        nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))) for _ in range(num)
    )


def _zeros(num: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList(nn.Parameter(torch.zeros(shape)) for _ in range(num))


class _CrossNetwork(nn.Module):
    """Base of cross networks: checks of the sizes and of the input."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        if min(sizes.values()) < 1:
            received = ", ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(f"cross network sizes must be at least 1; received {received}.")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layers.

        Args:
            input: `[B, N]`.

        Returns:
            `[B, N]`.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(f"{type(self).__name__}.input", input, torch.Tensor)
        return self._cross(input)

    def _cross(self, input_BN: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class CrossNet(_CrossNetwork):
    """`x_next = x_0 * (W x + b) + x` with full matrices `W`.

    Args:
        in_features: `N`.
        num_layers: Layers; the output has products of up to `num_layers + 1` features.

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> CrossNet(in_features=4, num_layers=2)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__(in_features=in_features, num_layers=num_layers)
        # names and shapes match existing checkpoints
        self.kernels = _xavier(num_layers, in_features, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

    def _cross(self, input_BN: torch.Tensor) -> torch.Tensor:
        output_BN = input_BN
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            output_BN = input_BN * (output_BN @ kernel.T + bias.flatten()) + output_BN
        return output_BN


class LowRankCrossNet(_CrossNetwork):
    """`x_next = x_0 * (W V x + b) + x`: each matrix is a product of two narrow ones.

    Args:
        in_features: `N`.
        num_layers: Layers; the output has products of up to `num_layers + 1` features.
        low_rank: Columns of `W` and rows of `V`; below `N / 2` this saves computation.

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> LowRankCrossNet(in_features=4, num_layers=2, low_rank=1)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__(in_features=in_features, num_layers=num_layers, low_rank=low_rank)
        self.W_kernels = _xavier(num_layers, in_features, low_rank)
        self.V_kernels = _xavier(num_layers, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features)

    def _cross(self, input_BN: torch.Tensor) -> torch.Tensor:
        output_BN = input_BN
        for wide, narrow, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            output_BN = input_BN * (output_BN @ narrow.T @ wide.T + bias) + output_BN
        return output_BN


class VectorCrossNet(_CrossNetwork):
    """`x_next = x_0 * (w^T x) + b + x`: each layer scales all features by one scalar.

    Args:
        in_features: `N`.
        num_layers: Layers; the output has products of up to `num_layers + 1` features.

    Raises:
        ValueError: A size is below 1.

    Example:
        >>> VectorCrossNet(in_features=4, num_layers=2)(torch.ones(3, 4)).shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__(in_features=in_features, num_layers=num_layers)
        self.kernels = _xavier(num_layers, in_features, 1)
        self.bias = _zeros(num_layers, in_features, 1)

    def _cross(self, input_BN: torch.Tensor) -> torch.Tensor:
        output_BN = input_BN
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            output_BN = input_BN * (output_BN @ kernel) + bias.flatten() + output_BN
        return output_BN


class LowRankMixtureCrossNet(_CrossNetwork):
    """Low-rank layers with several experts, weighted by gates that read the layer's input.

    `x_next = sum_e G_e(x) * x_0 * (U_e g(C_e g(V_e x)) + b) + x`. The gates `G` are a softmax
    over one linear layer per expert, shared by all cross layers; one expert needs no gate.

    Args:
        in_features: `N`.
        num_layers: Layers; the output has products of up to `num_layers + 1` features.
        num_experts: `E`.
        low_rank: `R`, the columns of each `U`.
        activation: `g`, a function or a module.

    Raises:
        ValueError: A size is below 1.

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
        super().__init__(
            in_features=in_features, num_layers=num_layers, low_rank=low_rank,
            num_experts=num_experts,
        )  # fmt: skip
        self._num_experts = num_experts
        self.U_kernels = _xavier(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _xavier(num_layers, num_experts, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features, 1)
        num_gates = num_experts if num_experts > 1 else 0
        self.gates = nn.ModuleList(nn.Linear(in_features, 1, bias=False) for _ in range(num_gates))
        self._activation = activation
        self.C_kernels = _xavier(num_layers, num_experts, low_rank, low_rank)

    def _cross(self, input_BN: torch.Tensor) -> torch.Tensor:
        output_BN = input_BN
        for wide, core, narrow, bias in zip(
            self.U_kernels, self.C_kernels, self.V_kernels, self.bias, strict=True
        ):
            narrow_EBR = self._activation(output_BN @ narrow.transpose(1, 2))
            core_EBR = self._activation(narrow_EBR @ core.transpose(1, 2))
            experts_EBN = core_EBR @ wide.transpose(1, 2)
            # expert weights of a sample sum to 1, so the bias is not weighted
            output_BN = (
                input_BN * (self._weigh(output_BN, experts_EBN) + bias.flatten()) + output_BN
            )
        return output_BN

    def _weigh(self, input_BN: torch.Tensor, experts_EBN: torch.Tensor) -> torch.Tensor:
        if self._num_experts == 1:
            return experts_EBN[0]
        scores_BE = torch.cat([gate(input_BN) for gate in self.gates], dim=1)
        return torch.einsum("be,ebn->bn", torch.softmax(scores_BE, dim=1), experts_EBN)
