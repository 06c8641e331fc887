"""Operations on jagged tensors: elementwise, reductions, products, attention, changes along time.

They read and return `JaggedTensor`, whose values are rows `[N, ...]` such as the embeddings of
`EmbeddingCollection`. They do not pad, are differentiable, accept any floating dtype and bags
without values, and can be exported by `torch.export`. Weights of a jagged tensor are not read, and
results have none. On a GPU, nothing may follow the values of the last bag.

Example:
    >>> import torch
    >>> from recsys.sparse import JaggedTensor, ops
    >>> films = JaggedTensor(torch.eye(3), lengths=torch.tensor([2, 1]))
    >>> users = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    >>> scores = ops.bmm(films, users.unsqueeze(2))
    >>> ops.sum(ops.mul(films, ops.softmax(scores))).round(decimals=2)
    tensor([[0.7300, 0.2700, 0.0000],
            [0.0000, 0.0000, 1.0000]])
"""

from recsys.sparse.ops.arithmetic import (
    add,
    bmm,
    div,
    expand,
    layer_norm,
    max,
    mean,
    mul,
    softmax,
    sub,
    sum,
)
from recsys.sparse.ops.attention import attention
from recsys.sparse.ops.bags import bags_of, positions, with_values
from recsys.sparse.ops.negatives import sample_negatives
from recsys.sparse.ops.nested import from_nested, to_nested
from recsys.sparse.ops.sequences import concat, flip, pad, select, slice, truncate

__all__ = [
    "add",
    "attention",
    "bags_of",
    "bmm",
    "concat",
    "div",
    "expand",
    "flip",
    "from_nested",
    "layer_norm",
    "max",
    "mean",
    "mul",
    "pad",
    "positions",
    "sample_negatives",
    "select",
    "slice",
    "softmax",
    "sub",
    "sum",
    "to_nested",
    "truncate",
    "with_values",
]
