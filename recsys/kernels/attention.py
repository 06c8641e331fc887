"""Attention inside each bag of a jagged tensor: the choice among its implementations.

Shapes: `M` bags, `N` values of all bags, `H` heads, `D` columns of queries and keys, `V` columns of
values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recsys.kernels import ops
from recsys.kernels.attention_blocks import blocks_backward, blocks_forward, padded_forward
from recsys.kernels.attention_rules import AttentionRules, Bias, time_buckets

__all__ = ["AttentionRules", "Bias", "attend", "time_buckets", "why_not_triton"]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    rules: AttentionRules,
    bias: Bias,
) -> Tensor:
    """Return attention inside each bag.

    There are three ways. `torch.compile` and `torch.export` get one padded group, whose shapes do
    not depend on lengths. Triton's kernels serve all that `why_not_triton` does not refuse: they
    write no scores to memory, and the host does not wait for the device. Groups of bags, in
    operations of PyTorch, serve everything else: they read lengths on the host.

    Args:
        query: [N, H, D], floating.
        key: [N, H, D].
        value: [N, H, V].
        offsets: [M + 1], int32 or int64; the last is N.
        rules: The rules.
        bias: Terms of the scores.

    Returns:
        [N, H, V].

    Raises:
        ValueError: A bag has more than `max_length` values. Triton's kernels compute it in full, as
            they would have to wait for lengths.

    Example:
        >>> rules = AttentionRules(
        ...     kind="softmax", causal=True, scale=1.0, divisor=1.0, max_length=2
        ... )
        >>> x = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1)
        >>> nothing = Bias(None, None, None, None, None)
        >>> attend(0 * x, x, x, torch.tensor([0, 2, 3]), rules, nothing).flatten()
        tensor([1., 2., 5.])
    """
    if torch.compiler.is_compiling():
        return padded_forward(query, key, value, offsets, rules, bias)
    has_triton = not why_not_triton(query, key, value, bias)
    # autograd finds tensors among the arguments only, not those inside `bias`
    output: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        query, key, value, bias.position, bias.time, offsets, rules, bias, has_triton
    )
    return output


# -- choice of a way -------------------------------------------------------------------------------

_TRITON_DTYPES: Final = frozenset((torch.float32, torch.float16, torch.bfloat16))
_TRITON_COLUMNS: Final = frozenset((16, 32, 64, 128))

_TRITON_LIMITS: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor, Bias], bool]]] = {
    "tensors are not on a CUDA device": lambda q, k, v, bias: not q.is_cuda,
    "Triton is not installed or does not work, or RECSYS_KERNELS=torch": (
        lambda q, k, v, bias: not ops.HAS_TRITON
    ),
    "query, key and value have no common dtype of float32, float16 and bfloat16, and sums are "
    "float32": lambda q, k, v, bias: (
        q.dtype not in _TRITON_DTYPES or not q.dtype == k.dtype == v.dtype
    ),
    "columns of a head are not 16, 32, 64 or 128: a product of blocks needs a power of two from "
    "16, and more than 128 need more registers than there are": (
        lambda q, k, v, bias: not {q.shape[2], v.shape[2]} <= _TRITON_COLUMNS
    ),
    "under torch.use_deterministic_algorithms, gradients of positions may not be summed by "
    "atomics": lambda q, k, v, bias: (
        bias.position is not None
        and bias.position.requires_grad
        and torch.are_deterministic_algorithms_enabled()
    ),
}
"""Reasons for which Triton's kernels do not serve query, key, value and bias."""


def why_not_triton(query: Tensor, key: Tensor, value: Tensor, bias: Bias) -> str:
    """Return the reason for which Triton's kernels do not serve tensors; empty if they do.

    Args:
        query: [N, H, D].
        key: [N, H, D].
        value: [N, H, V].
        bias: Terms of the scores.

    Example:
        >>> x = torch.ones(3, 1, 16)
        >>> why_not_triton(x, x, x, Bias(None, None, None, None, None))
        'tensors are not on a CUDA device'
    """
    reasons = _TRITON_LIMITS.items()
    return next((why for why, applies in reasons if applies(query, key, value, bias)), "")


@final
class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        position: Tensor | None,
        time: Tensor | None,
        offsets: Tensor,
        rules: AttentionRules,
        bias: Bias,
        has_triton: bool,
    ) -> Tensor:
        out = log_sums = None
        if has_triton:
            from recsys.kernels import attention_triton

            log_sums, result = attention_triton.attention_forward(
                query, key, value, offsets, rules, bias
            )
            # only the backward pass of softmax reads its output; SiLU need not keep it
            out = None if log_sums is None else result
        else:
            result = blocks_forward(query, key, value, offsets, rules, bias)
        ctx.save_for_backward(query, key, value, position, time, offsets, log_sums, out)
        ctx.rules, ctx.bias, ctx.has_triton = rules, bias, has_triton
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, position, time, offsets, log_sums, out = ctx.saved_tensors
        parts = gradient, query, key, value, offsets
        # the saved tensors, as autograd checks that they were not written to since the forward pass
        bias = ctx.bias._replace(position=position, time=time)
        if ctx.has_triton:
            from recsys.kernels import attention_grad_triton

            of_position, of_time, *gradients = attention_grad_triton.attention_backward(
                *parts, log_sums, out, ctx.rules, bias
            )
        else:
            of_position, of_time, *gradients = blocks_backward(*parts, ctx.rules, bias)
        return *gradients, of_position, of_time, None, None, None, None
