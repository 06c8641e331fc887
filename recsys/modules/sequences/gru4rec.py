"""GRU4Rec: a recurrent network over a history.

Hidasi et al., "Session-based recommendations with recurrent neural networks", ICLR 2016,
arXiv:1511.06939.

Shapes: `M` bags, `N` values of all bags, `D` columns.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from recsys.base.arguments import check_input, whole
from recsys.base.checked import checked
from recsys.modules.sequences.positions import check_dropout
from recsys.sparse import JaggedTensor, ops

__all__ = ["GRU4Rec"]


@final
class GRU4Rec(nn.Module):
    """Encoder of a history: a vector after each value, from it and the earlier ones.

    Histories are not padded: the network reads the first values of all histories together, then the
    second ones, and so on. `torch.compile` and `torch.export` pad to `max_length`.

    Args:
        dim: `D`.
        max_length: Most values of a history, for `torch.compile` and `torch.export`.
        num_layers: Number of layers of the network.
        hidden: Columns of the layers; None for `dim`.
        dropout: Share of the numbers that are set to 0 in training, of the input and between
            layers.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([3, 0, 2]))
        >>> GRU4Rec(8, max_length=50)(x).values().shape
        torch.Size([5, 8])
    """

    @checked
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_layers: int = 1,
        hidden: int | None = None,
        dropout: float = 0.2,
        *,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        hidden = dim if hidden is None else whole("GRU4Rec.hidden", hidden)
        check_dropout("GRU4Rec", dropout)
        self.max_length = whole("GRU4Rec.max_length", max_length)
        self.dropout = nn.Dropout(dropout)
        self.gru = nn.GRU(
            whole("GRU4Rec.dim", dim),
            hidden,
            whole("GRU4Rec.num_layers", num_layers),
            # read by the padded form only: a PackedSequence has its own order
            batch_first=True,
            # torch warns of a dropout between layers if there is one layer
            dropout=dropout if num_layers > 1 else 0.0,
            device=device,
        )
        self.linear = nn.Linear(hidden, dim, device=device)

    def forward(self, x: JaggedTensor, times: Tensor | None = None) -> JaggedTensor:
        """Return `[N, D]` vectors, with the lengths of `x`.

        Args:
            x: `[N, D]` embeddings, the earliest first.
            times: Not read.

        Raises:
            TypeError: `x` is not a `JaggedTensor`.
        """
        check_input("GRU4Rec.x", x, JaggedTensor)
        x = x.trim()
        rows = self.dropout(x.values())
        if torch.compiler.is_compiling():
            # the number of steps of a PackedSequence depends on the data and cannot be traced
            fits = (x.lengths() <= self.max_length).all()
            # longer histories would be cut by the padding; the host does not wait for this check
            torch._assert_async(fits, f"Bags must have at most {self.max_length} values.")
            padded, _ = self.gru(ops.pad(ops.with_values(x, rows), self.max_length))
            # row of a value in the padded [M * max_length, D]
            places = ops.bags_of(x) * self.max_length + ops.positions(x).values()
            return ops.with_values(x, self.linear(padded.flatten(0, 1).index_select(0, places)))
        # nn.GRU refuses a batch without steps
        if not rows.shape[0]:
            return ops.with_values(x, self.linear(rows.new_zeros(0, self.gru.hidden_size)))
        places = ops.positions(x).values()
        # the second argsort inverts the first: the rank of each bag, the longest first
        longest_first = x.lengths().argsort(descending=True, stable=True).argsort()
        # position first, then rank: in each step the first n rows belong to the n longest bags
        order = (places * x.lengths().shape[0] + longest_first[ops.bags_of(x)]).argsort()
        # the count of each position is the batch size of its step; torch reads these on the host
        packed = PackedSequence(rows.index_select(0, order), places.bincount().cpu())
        read: Tensor = self.gru(packed)[0].data
        return ops.with_values(x, self.linear(read.index_select(0, order.argsort())))
