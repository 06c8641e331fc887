"""Learned embeddings of positions. Shapes: `M` bags, `N` values of all bags, `D` columns."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.sparse import JaggedTensor, ops
from recsys.sparse.validate import is_readable

__all__ = ["PositionEmbedding", "check_dropout"]


@final
class PositionEmbedding(nn.Module):
    """Scale values by `sqrt(D)`, add a learned vector of their positions, and apply dropout.

    Args:
        dim: `D`.
        max_length: Most values of a bag.
        dropout: Share of the numbers that are set to 0 in training.
        from_end: Count positions from the last value of each bag, so that the latest value has the
            same vector in histories of all lengths.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> x = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([2, 1]))
        >>> PositionEmbedding(4, max_length=8)(x).values().shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(
        self,
        dim: int,
        max_length: int,
        dropout: float = 0.0,
        *,
        from_end: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        whole("PositionEmbedding.dim", dim)
        whole("PositionEmbedding.max_length", max_length)
        self.from_end = from_end
        self.positions = nn.Embedding(max_length, dim, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.dropout = nn.Dropout(check_dropout("PositionEmbedding", dropout))

    def forward(self, x: JaggedTensor, num_targets: Tensor | None = None) -> JaggedTensor:
        """Return `[N, D]` values with positions.

        Args:
            x: `[N, D]`, at most `max_length` values in each bag.
            num_targets: int64 `[M]`, values at the end of each bag that have the position of the
                first of them; None for none.

        Raises:
            ValueError: On a CPU, a bag is longer.
        """
        lengths, most = x.lengths(), self.positions.num_embeddings
        # on a GPU nn.Embedding asserts the range, without a wait of the host
        if is_readable(lengths) and lengths.numel() and int(lengths.max()) > most:
            raise ValueError(
                f"Bags must have at most max_length={most} values; received "
                f"{int(lengths.max())}. Truncate them with recsys.sparse.ops.truncate."
            )
        places = ops.positions(x, from_end=self.from_end).values()
        if num_targets is not None:
            first = (x.lengths() - num_targets).index_select(0, ops.bags_of(x))
            # candidates are alternatives: each has the position after the history
            places = places.minimum(first)
        rows = x.trim().values()
        # the factor is of arXiv:1706.03762, section 3.4. `to` keeps rows of 16 bits from promotion
        rows = rows * rows.shape[1] ** 0.5 + self.positions(places).to(rows.dtype)
        return ops.with_values(x, self.dropout(rows))


def check_dropout(owner: str, dropout: float) -> float:
    """Return a share of dropout.

    Raises:
        ValueError: It is not in [0, 1).
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"{owner}.dropout must be in [0, 1); received {dropout}.")
    return dropout
