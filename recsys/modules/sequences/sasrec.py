"""SASRec: self-attention over a history.

Kang and McAuley, "Self-attentive sequential recommendation", ICDM 2018, arXiv:1808.09781.

Shapes: `N` values of all bags, `D` columns, `H` heads.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import check_input, whole
from recsys.base.checked import checked
from recsys.modules.sequences.positions import PositionEmbedding, check_dropout
from recsys.sparse import JaggedTensor, ops

__all__ = ["SASRec", "SASRecBlock"]


@final
class SASRecBlock(nn.Module):
    """Attention and two linear layers, each `x + dropout(f(layer_norm(x)))`.

    Args:
        dim: `D`, a multiple of the heads.
        max_length: Most values of a bag.
        num_heads: `H`.
        dropout: Share of the numbers that are set to 0 in training.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range, or the heads do not divide `dim`.

    Example:
        >>> x = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([2, 1]))
        >>> SASRecBlock(4, max_length=8)(x).values().shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_heads: int = 1,
        dropout: float = 0.0,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if whole("SASRecBlock.dim", dim) % whole("SASRecBlock.num_heads", num_heads):
            raise ValueError(
                f"SASRecBlock.dim must be a multiple of num_heads={num_heads}; received {dim}."
            )
        self.num_heads = num_heads
        self.max_length = whole("SASRecBlock.max_length", max_length)
        self.attention_norm = nn.LayerNorm(dim, device=device)
        self.attention_in = nn.Linear(dim, 3 * dim, device=device)
        self.forward_norm = nn.LayerNorm(dim, device=device)
        # D hidden columns and no layer after the attention, as in the paper
        self.forward_in = nn.Linear(dim, dim, device=device)
        self.forward_out = nn.Linear(dim, dim, device=device)
        self.dropout = nn.Dropout(check_dropout("SASRecBlock", dropout))

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """Return `[N, D]`.

        Args:
            x: `[N, D]`, at most `max_length` values in each bag.
        """
        x = x.trim()
        rows = x.values()
        projected = self.attention_in(self.attention_norm(rows))
        parts = projected.unflatten(1, (3, self.num_heads, -1)).unbind(1)
        # causal by default: a value must not read the item that it predicts
        read = ops.attention(
            *(ops.with_values(x, part) for part in parts), max_length=self.max_length
        )
        rows = rows + self.dropout(read.values().flatten(1))
        hidden = self.forward_in(self.forward_norm(rows)).relu()
        return ops.with_values(x, rows + self.dropout(self.forward_out(self.dropout(hidden))))


@final
class SASRec(nn.Module):
    """Encoder of a history: a vector after each value, from it and the earlier ones.

    Args:
        dim: `D`.
        max_length: Most values of a history; truncate longer ones with `ops.truncate`.
        num_blocks: Number of blocks.
        num_heads: Heads of each block; `dim` is a multiple of it.
        dropout: Share of the numbers that are set to 0 in training.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([3, 0, 2]))
        >>> SASRec(8, max_length=50)(x).values().shape
        torch.Size([5, 8])
    """

    @checked
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        whole("SASRec.num_blocks", num_blocks)
        self.max_length = max_length
        # from the end, as the paper pads at the front: its last position is the latest item
        self.positions = PositionEmbedding(dim, max_length, dropout, from_end=True, device=device)
        self.blocks = nn.Sequential(
            *(
                SASRecBlock(dim, max_length, num_heads, dropout, device=device)
                for _ in range(num_blocks)
            )
        )
        self.norm = nn.LayerNorm(dim, device=device)

    def forward(self, x: JaggedTensor, times: Tensor | None = None) -> JaggedTensor:
        """Return `[N, D]` vectors, with the lengths of `x`.

        Args:
            x: `[N, D]` embeddings, the earliest first.
            times: Not read.

        Raises:
            TypeError: `x` is not a `JaggedTensor`.
        """
        check_input("SASRec.x", x, JaggedTensor)
        x = self.blocks(self.positions(x))
        return ops.with_values(x, self.norm(x.values()))
