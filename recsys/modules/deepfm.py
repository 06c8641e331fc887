"""Factorization machines, and a deep network with the same input.

From Rendle, "Factorization Machines" (ICDM 2010), and Guo et al., "DeepFM" (IJCAI 2017,
arXiv:1703.04247).

Shapes: `B` samples, `N` columns of all embeddings of a sample together.
"""

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from recsys.base.arguments import check_input, wrong_type
from recsys.base.checked import checked
from recsys.sparse.recorded import recorded


@recorded
def _concatenated(embeddings: list[torch.Tensor]) -> torch.Tensor:
    """Flatten each embedding to `[B, columns]` and concatenate them: `[B, N]`."""
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        if isinstance(cast(object, embeddings), str | bytes):
            wrong_type("embeddings", "a list of tensors", embeddings)
        check_input("embeddings", embeddings, Sequence)
        for place, embedding in enumerate(embeddings):
            check_input(f"embeddings[{place}]", embedding, torch.Tensor)
    if len(embeddings) == 0 or min([embedding.dim() for embedding in embeddings]) < 2:
        raise ValueError(
            "embeddings must be a list of at least one tensor [B, ...]; received shapes "
            f"{[embedding.shape for embedding in embeddings]}."
        )
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)


class DeepFM(nn.Module):
    """Apply a dense module to the concatenated embeddings of a sample.

    Args:
        dense_module: Maps `[B, N]` to the output, such as an MLP.

    Example:
        >>> deep = DeepFM(nn.Linear(10, 2))
        >>> deep([torch.ones(3, 4), torch.ones(3, 2, 3)]).shape
        torch.Size([3, 2])
    """

    @checked
    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Apply the dense module.

        Args:
            embeddings: `[B, ...]` each, with `N` columns together after flattening.

        Returns:
            The output of the dense module.

        Raises:
            ValueError: There is no embedding, or one has fewer than two dims.
        """
        output: torch.Tensor = self.dense_module(_concatenated(embeddings))
        return output


class FactorizationMachine(nn.Module):
    """Sum of the products of all pairs of columns, in linear time.

    `sum_{i<j} v_i v_j = ((sum_i v_i)^2 - sum_i v_i^2) / 2`: Rendle's equation for pairs of
    features, with one factor per column. Pairs of columns of the same embedding are included.

    Example:
        >>> FactorizationMachine()([torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0]])])
        tensor([[11.]])
    """

    def forward(self, embeddings: list[torch.Tensor]) -> torch.Tensor:
        """Compute the sum.

        Args:
            embeddings: `[B, ...]` each.

        Returns:
            `[B, 1]`.

        Raises:
            ValueError: There is no embedding, or one has fewer than two dims.
        """
        values_BN = _concatenated(embeddings)
        square_of_sum = values_BN.sum(dim=1, keepdim=True).square()
        sum_of_squares = values_BN.square().sum(dim=1, keepdim=True)
        return (square_of_sum - sum_of_squares) * 0.5
