"""HSTU: hierarchical sequential transduction units.

Zhai et al., "Actions speak louder than words: trillion-parameter sequential transducers for
generative recommendations", ICML 2024, arXiv:2402.17152.

Shapes: `M` bags, `N` values of all bags, `D` columns, `H` heads.
"""

from __future__ import annotations

from typing import Final, final

import torch
from torch import Tensor, nn

from recsys.base.arguments import check_input, whole
from recsys.base.checked import checked
from recsys.modules.sequences.positions import PositionEmbedding, check_dropout
from recsys.sparse import JaggedTensor, ops

__all__ = ["HSTU", "HSTULayer"]

# numbers of bits of a distance in int64, 0 to 63
_TIME_BUCKETS: Final = 64


@final
class HSTULayer(nn.Module):
    """One unit: `x + f(layer_norm(attention) * u)`.

    Queries, keys, values and gates `u` are `silu` of a linear layer of `layer_norm(x)`. Shares of
    attention are `silu(scores + bias) / max_length`, instead of a softmax, so that they keep the
    number of values that a query likes. The bias is learned by distance, and by distance in time.

    Args:
        dim: `D`.
        max_length: Most values of a bag.
        num_heads: `H`.
        head_dim: Columns of a head's queries, keys and values; None for `dim // num_heads`.
        dropout: Share of the numbers that are set to 0 in training.
        has_time: Whether scores have a bias by distance in time.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> x = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([2, 1]))
        >>> HSTULayer(4, max_length=8)(x, None, None).values().shape
        torch.Size([3, 4])
    """

    @checked
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_heads: int = 1,
        head_dim: int | None = None,
        dropout: float = 0.0,
        *,
        has_time: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.max_length = whole("HSTULayer.max_length", max_length)
        self.num_heads = whole("HSTULayer.num_heads", num_heads)
        head_dim = dim // num_heads if head_dim is None else head_dim
        self.head_dim = whole("HSTULayer.head_dim", head_dim)
        self.norm = nn.LayerNorm(dim, device=device)
        inner = num_heads * head_dim
        self.linear_in = nn.Linear(dim, 4 * inner, device=device)
        self.output_norm = nn.LayerNorm(inner, device=device)
        self.linear_out = nn.Linear(inner, dim, device=device)
        self.dropout = nn.Dropout(check_dropout("HSTULayer", dropout))
        # distances from -(max_length - 1) to max_length - 1; causal attention reads those from 0
        self.position_bias = _table(num_heads, 2 * max_length - 1, device)
        self.time_bias = _table(num_heads, _TIME_BUCKETS, device) if has_time else None

    def forward(
        self, x: JaggedTensor, times: Tensor | None, num_targets: Tensor | None
    ) -> JaggedTensor:
        """Return `[N, D]`.

        Args:
            x: `[N, D]`, at most `max_length` values in each bag.
            times: int64 `[N]`, with `has_time`.
            num_targets: int64 `[M]`, values at the end of each bag that read the values before
                them and themselves, not each other; None for none.
        """
        x = x.trim()
        rows = x.values()
        projected = nn.functional.silu(self.linear_in(self.norm(rows)))
        gates, *parts = projected.view(rows.shape[0], 4, self.num_heads, self.head_dim).unbind(1)
        read = ops.attention(
            *(ops.with_values(x, part) for part in parts),
            # longer bags raise an error on a CPU; Triton's kernels compute them in full
            # docs/decisions/triton.md, "Attention inside bags"
            max_length=self.max_length,
            kind="silu",
            position_bias=self.position_bias,
            time_bias=self.time_bias,
            # ops.attention refuses times without a bias; callers may give them to any encoder
            times=times if self.time_bias is not None else None,
            num_targets=num_targets,
        )
        # attention without a softmax has no bound: the paper normalizes it to stabilize training
        gated = self.output_norm(read.values().flatten(1)) * gates.flatten(1)
        return ops.with_values(x, rows + self.linear_out(self.dropout(gated)))


@final
class HSTU(nn.Module):
    """Encoder of a history: a vector after each value, from it and the earlier ones.

    Args:
        dim: `D`.
        max_length: Most values of a history; truncate longer ones with `ops.truncate`.
        num_layers: Number of layers.
        num_heads: Heads of each layer.
        head_dim: Columns of a head; None for `dim // num_heads`.
        dropout: Share of the numbers that are set to 0 in training.
        has_time: Whether to read times.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> x = JaggedTensor(torch.randn(5, 8), lengths=torch.tensor([3, 0, 2]))
        >>> HSTU(8, max_length=50, num_heads=2)(x).values().shape
        torch.Size([5, 8])
    """

    @checked
    def __init__(
        self,
        dim: int,
        max_length: int,
        num_layers: int = 2,
        num_heads: int = 1,
        head_dim: int | None = None,
        dropout: float = 0.2,
        *,
        has_time: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        whole("HSTU.num_layers", num_layers)
        self.max_length, self.has_time = max_length, has_time
        self.positions = PositionEmbedding(dim, max_length, dropout, device=device)
        self.layers = nn.ModuleList(
            HSTULayer(
                dim, max_length, num_heads, head_dim, dropout, has_time=has_time, device=device
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(dim, device=device)

    def forward(
        self, x: JaggedTensor, times: Tensor | None = None, num_targets: Tensor | None = None
    ) -> JaggedTensor:
        """Return `[N, D]` vectors, with the lengths of `x`.

        Args:
            x: `[N, D]` embeddings, the earliest first.
            times: int64 `[N]`, the time of each value in any unit, with `has_time`.
            num_targets: int64 `[M]`, candidates at the end of each history. Each reads the
                history and itself. None for none.

        Raises:
            TypeError: `x` is not a `JaggedTensor`.
            ValueError: `has_time` is True and times are missing, or are floats.
        """
        check_input("HSTU.x", x, JaggedTensor)
        if self.has_time and times is None:
            raise ValueError("HSTU with has_time=True needs times; received None.")
        x = self.positions(x, num_targets)
        for layer in self.layers:
            x = layer(x, times, num_targets)
        return ops.with_values(x, self.norm(x.values()))


def _table(num_heads: int, columns: int, device: torch.device | None) -> nn.Parameter:
    table = torch.empty(num_heads, columns, device=device)
    return nn.Parameter(nn.init.normal_(table, std=0.02))
