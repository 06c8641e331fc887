"""Stacks of linear layers. Shapes: `B` samples."""

import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.activation import SwishLayerNorm

Activation = Callable[[torch.Tensor], torch.Tensor]
"""A function, or a module."""


def check_sizes(
    owner: str, in_size: int, layer_sizes: Sequence[int], name: str = "in_features"
) -> None:
    """Check the sizes of layers.

    Args:
        owner: The module's class, for messages.
        in_size: Columns of the input; 0 for none.
        layer_sizes: Columns of each layer's output.
        name: The argument of `in_size`.

    Raises:
        ValueError: A size is too small.
    """
    whole(f"{owner}.{name}", in_size, least=0)
    for place, size in enumerate(layer_sizes):
        whole(f"{owner}.layer_sizes[{place}]", size)


class Perceptron(nn.Module):
    """One linear layer and its activation.

    Args:
        in_size: Columns of the input; with 0 the output is a learned constant.
        out_size: Columns of the output.
        bias: Add a learned constant.
        activation: Applied to the layer's output.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        batch_norm: Apply a `BatchNorm1d` between layer and activation.
        dropout: Fraction of the outputs that is zeroed in training, in [0, 1).

    Raises:
        ValueError: `dropout` is out of range.

    Example:
        >>> Perceptron(3, 2)(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        whole("Perceptron.in_size", in_size, least=0)
        whole("Perceptron.out_size", out_size)
        if not 0 <= dropout < 1:
            raise ValueError(
                f"dropout must be in [0, 1); received {dropout}. It is the fraction of zeroed "
                "outputs."
            )
        # names match existing checkpoints
        with warnings.catch_warnings():
            if in_size == 0:
                warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
            self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        if in_size == 0 and bias:  # torch initializes it to 0, where the gradient of relu is 0
            nn.init.uniform_(self._linear.bias, -1, 1)
        self._norm = nn.BatchNorm1d(out_size, device=device, dtype=dtype) if batch_norm else None
        self._activation_fn = activation
        self._dropout = nn.Dropout(dropout) if dropout else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            input: `[B, in_size]`.

        Returns:
            `[B, out_size]`.
        """
        output: torch.Tensor = self._linear(input)
        if self._norm is not None:
            output = self._norm(output)
        output = self._activation_fn(output)
        if self._dropout is not None:
            output = self._dropout(output)
        return output


class MLP(nn.Module):
    """Sequence of linear layers with activations.

    Args:
        in_size: Columns of the input; with 0 the output of the first layer is a learned constant.
        layer_sizes: Columns of each layer's output; without layers the output is the input.
        bias: Add a learned constant in each layer.
        activation: A function; a module, shared by all layers; a module class, or a function
            without arguments that returns a module, called once per layer; or `"relu"`,
            `"sigmoid"` or `"swish_layernorm"`.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        activation_on_last: Apply the activation in the last layer too. Without it, the last layer
            has no batch norm and no dropout.
        batch_norm: Apply a `BatchNorm1d` before each activation.
        dropout: Fraction of each layer's outputs that is zeroed in training, in [0, 1).

    Raises:
        ValueError: The activation name is unknown, a layer size is below 1, the input size is below
            0, or `dropout` is out of range.

    Example:
        >>> MLP(3, [8, 2], activation="sigmoid")(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    @checked
    def __init__(
        self,
        in_size: int,
        layer_sizes: list[int],
        bias: bool = True,
        activation: str | Callable[[], nn.Module] | Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
        *,
        batch_norm: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_sizes("MLP", in_size, layer_sizes, "in_size")
        layers = []
        for place, (size_in, size_out) in enumerate(
            zip([in_size, *layer_sizes], layer_sizes, strict=False)
        ):
            active = activation_on_last or place < len(layer_sizes) - 1
            function = _activation(activation, size_out, device) if active else nn.Identity()
            layers.append(
                Perceptron(
                    size_in, size_out, bias, function, device, dtype,
                    batch_norm=batch_norm and active, dropout=dropout if active else 0.0,
                )
            )  # fmt: skip
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Apply all layers.

        Args:
            input: `[B, in_size]`.

        Returns:
            `[B, layer_sizes[-1]]`.
        """
        output: torch.Tensor = self._mlp(input)
        return output


_NAMED: dict[str, Activation] = {"relu": torch.relu, "sigmoid": torch.sigmoid}


def _activation(
    activation: str | Callable[[], nn.Module] | Activation,
    size: int,
    device: torch.device | None,
) -> Activation:
    """Return the activation of one layer."""
    if activation == "swish_layernorm":
        return SwishLayerNorm(size, device)
    if isinstance(activation, str):
        if activation not in _NAMED:
            raise ValueError(
                f"activation must be one of {', '.join([*_NAMED, 'swish_layernorm'])}, a function "
                f"or a module; received {activation!r}. Pass for example torch.nn.GELU()."
            )
        return _NAMED[activation]
    if isinstance(activation, type) or _takes_nothing(activation):
        return cast(Callable[[], nn.Module], activation)()
    return cast(Activation, activation)


def _takes_nothing(function: Callable[..., object]) -> bool:
    """Return whether a function builds activations, instead of being an activation."""
    try:
        return not inspect.signature(function).parameters
    except ValueError:  # functions written in C, such as torch.relu, have no signature
        return False
