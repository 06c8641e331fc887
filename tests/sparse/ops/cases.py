"""Random jagged tensors, and the list of matrices of their bags beside them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from recsys.sparse import JaggedTensor

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])


@st.composite
def cases(draw, columns: tuple[int, ...] = (3,), least_bags: int = 1, most: int = 5):
    """Return a jagged tensor of float64 values and its bags."""
    lengths = draw(st.lists(st.integers(0, most), min_size=least_bags, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    values = torch.randn(sum(lengths), *columns, generator=generator, dtype=torch.float64)
    spare = draw(st.integers(0, 2))  # values after the last bag
    buffer = torch.cat([values, torch.full((spare, *columns), 9.0, dtype=torch.float64)])
    dtype = draw(st.sampled_from([torch.int32, torch.int64]))
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    if draw(st.booleans()):
        x = JaggedTensor(buffer, lengths=torch.tensor(lengths, dtype=dtype))
    else:
        x = JaggedTensor(buffer, offsets=offsets)
    return x, list(values.split(lengths))


def cast(x: JaggedTensor, dtype: torch.dtype) -> JaggedTensor:
    """Return the jagged tensor with values of another dtype."""
    return JaggedTensor(x.values().to(dtype), lengths=x.lengths())


def gradients(x: JaggedTensor, function) -> Tensor:
    """Return the gradient of the values, by random factors of the results."""
    values = x.trim().values().clone().requires_grad_()
    result = function(JaggedTensor(values, lengths=x.lengths()))
    out = result.values() if isinstance(result, JaggedTensor) else result
    torch.manual_seed(0)
    if out.numel():
        (out * torch.randn_like(out)).sum().backward()
    return torch.zeros_like(values) if values.grad is None else values.grad


def dense_gradients(bags: list[Tensor], function) -> Tensor:
    """Return the same gradient, computed bag by bag in `function(bags)`."""
    parts = [bag.clone().requires_grad_() for bag in bags]
    out = function(parts)
    torch.manual_seed(0)
    if out.requires_grad:
        (out * torch.randn_like(out)).sum().backward()
    return torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in parts])
