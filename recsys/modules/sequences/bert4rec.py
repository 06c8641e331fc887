"""BERT4Rec: attention in both directions, trained to find masked items.

Sun et al., "BERT4Rec: sequential recommendation with bidirectional encoder representations from
transformer", CIKM 2019, arXiv:1904.06690.

Shapes: `M` samples, `N` values of all histories, `D` columns.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from recsys.base.arguments import whole
from recsys.base.checked import checked
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.modules.sequences.positions import PositionEmbedding, check_dropout
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, ops

__all__ = ["BERT4Rec", "BERTBlock"]


@final
class BERTBlock(nn.Module):
    """Attention and two linear layers with GELU, each `layer_norm(x + dropout(f(x)))`.

    Args:
        dim: `D`, a multiple of the heads.
        max_length: Most values of a bag.
        num_heads: Number of heads.
        dropout: Share of the numbers that are set to 0 in training.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range, or the heads do not divide `dim`.

    Example:
        >>> x = JaggedTensor(torch.ones(3, 4), lengths=torch.tensor([2, 1]))
        >>> BERTBlock(4, max_length=8)(x).values().shape
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
        if whole("BERTBlock.dim", dim) % whole("BERTBlock.num_heads", num_heads):
            raise ValueError(
                f"BERTBlock.dim must be a multiple of num_heads={num_heads}; received {dim}."
            )
        self.num_heads = num_heads
        self.max_length = whole("BERTBlock.max_length", max_length)
        self.attention_in = nn.Linear(dim, 3 * dim, device=device)
        self.attention_out = nn.Linear(dim, dim, device=device)
        # layer norm follows each sum, as in BERT (arXiv:1810.04805); SASRec has it before
        self.attention_norm = nn.LayerNorm(dim, device=device)
        # the factor 4 is BERT's
        self.forward_in = nn.Linear(dim, 4 * dim, device=device)
        self.forward_out = nn.Linear(4 * dim, dim, device=device)
        self.forward_norm = nn.LayerNorm(dim, device=device)
        self.dropout = nn.Dropout(check_dropout("BERTBlock", dropout))

    def forward(self, x: JaggedTensor) -> JaggedTensor:
        """Return `[N, D]`.

        Args:
            x: `[N, D]`, at most `max_length` values in each bag.
        """
        x = x.trim()
        # trim() has removed values after the last bag, which belong to no history
        # docs/decisions/ragged.md, "Values after the last bag are never read"
        rows = x.values()
        parts = self.attention_in(rows).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        # a masked item is predicted from both sides
        read = ops.attention(
            *(ops.with_values(x, part) for part in parts), max_length=self.max_length, causal=False
        )
        read_rows = self.attention_out(read.values().flatten(1))
        rows = self.attention_norm(rows + self.dropout(read_rows))
        hidden = nn.functional.gelu(self.forward_in(rows))
        rows = self.forward_norm(rows + self.dropout(self.forward_out(hidden)))
        return ops.with_values(x, rows)


@final
class BERT4Rec(nn.Module):
    """Score all items at each position of a history.

    The arguments have the names of TorchRec's example. As in the example, the last layer has
    weights of its own; in the paper it has the embeddings of the items. `PositionEmbedding` scales
    embeddings by `sqrt(D)`, the paper does not. The table of items is in an `EmbeddingCollection`,
    which `DistributedModelParallel` shards.

    Args:
        vocab_size: Number of ids, with one for padding and one for the mask.
        max_len: Most values of a history; truncate longer ones with `ops.truncate`.
        emb_dim: `D`.
        nhead: Heads of each block; `emb_dim` is a multiple of it.
        num_layers: Number of blocks.
        dropout: Share of the numbers that are set to 0 in training.
        feature: Feature of the ids.
        num_special_rows: First ids that are not items, such as missing and unknown values.
        device: Device of the parameters.

    Raises:
        ValueError: A number is out of its range.

    Example:
        >>> ids = KeyedJaggedTensor(["item"], torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1]))
        >>> model = BERT4Rec(vocab_size=10, max_len=5, emb_dim=8, nhead=2, num_layers=1)
        >>> model(ids).shape, model.scores(ids).values().shape
        (torch.Size([2, 5, 10]), torch.Size([3, 10]))
    """

    @checked
    def __init__(
        self,
        vocab_size: int,
        max_len: int,
        emb_dim: int,
        nhead: int,
        num_layers: int,
        dropout: float = 0.1,
        *,
        feature: str = "item",
        num_special_rows: int = 0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        whole("BERT4Rec.num_layers", num_layers)
        self.max_len, self.feature = max_len, feature
        items = EmbeddingConfig(
            name="item_embedding",
            num_embeddings=vocab_size,
            embedding_dim=emb_dim,
            feature_names=[feature],
            init_fn=_init,
            num_special_rows=num_special_rows,
        )
        self.embedding_collection = EmbeddingCollection(tables=[items], device=device)
        self.positions = PositionEmbedding(emb_dim, max_len, dropout, from_end=True, device=device)
        self.norm = nn.LayerNorm(emb_dim, device=device)
        self.blocks = nn.Sequential(
            *(BERTBlock(emb_dim, max_len, nhead, dropout, device=device) for _ in range(num_layers))
        )
        self.out = nn.Linear(emb_dim, vocab_size, device=device)

    def forward(self, input: KeyedJaggedTensor) -> Tensor:
        """Return padded scores, `[M, max_len, vocab_size]`; 0 after the last value.

        Args:
            input: Ids of `feature`, at most `max_len` of each sample.
        """
        return ops.pad(self.scores(input), self.max_len)

    def scores(self, features: KeyedJaggedTensor) -> JaggedTensor:
        """Return the scores of all items at each value, `[N, vocab_size]`.

        Args:
            features: Ids of `feature`, at most `max_len` of each sample.
        """
        encoded = self.encode(features)
        return ops.with_values(encoded, self.out(encoded.values()))

    def encode(self, features: KeyedJaggedTensor) -> JaggedTensor:
        """Return the vector of each value before the last layer, `[N, D]`.

        Args:
            features: Ids of `feature`, at most `max_len` of each sample.
        """
        x = self.positions(self.embedding_collection(features)[self.feature])
        encoded: JaggedTensor = self.blocks(ops.with_values(x, self.norm(x.values())))
        return encoded


def _init(weight: Tensor) -> Tensor:
    # initializer_range of BERT's code
    return nn.init.normal_(weight, std=0.02)
