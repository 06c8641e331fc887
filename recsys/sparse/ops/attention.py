"""Attention between the values of each bag.

Shapes: `M` bags, `N` values of all bags, `H` heads, `D` columns of queries and keys, `V` columns of
values.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from recsys.base.arguments import finite, shown, whole
from recsys.base.checked import checked_late
from recsys.kernels.attention import AttentionRules, Bias, attend
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.ops.bags import check_bags, check_equal_lengths, fail, with_values
from recsys.sparse.recorded import recorded

__all__ = ["attention"]


@recorded
@checked_late
def attention(
    query: JaggedTensor,
    key: JaggedTensor,
    value: JaggedTensor,
    *,
    max_length: int,
    kind: Literal["softmax", "silu"] = "softmax",
    causal: bool = True,
    scale: float | None = None,
    divisor: float | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times: Tensor | None = None,
    query_times: Tensor | None = None,
    num_targets: Tensor | None = None,
) -> JaggedTensor:
    """Return attention of each value over the values of its bag, without padding.

    Memory grows with the number of values, in the backward pass, too. A score is
    `scale * <query, key> + bias`; "softmax" turns the scores of a query into shares that add up
    to 1, "silu" each score `x` into `x * sigmoid(x) / divisor`, as in HSTU (Zhai et al., "Actions
    speak louder than words", ICML 2024). Sums are float32 for float16 and bfloat16.
    `torch.compile` and `torch.export` pad to `max_length`. CUDA tensors use Triton's kernels if D
    and V are 16, 32, 64 or 128; these do not wait for the device and do not check `max_length`.

    Args:
        query: `[N, H, D]`.
        key: `[N, H, D]`, with the lengths of `query`.
        value: `[N, H, V]`, with the lengths of `query`.
        max_length: Most values of a bag.
        kind: "softmax" or "silu".
        causal: True to read only the value itself and earlier ones.
        scale: Factor of the scores; None for `D ** -0.5`.
        divisor: Divisor of "silu"; None for `max_length`.
        position_bias: `[H, 2P - 1]`, a learned term by distance: entry `P - 1 + d` for a key that
            is `d` positions earlier. Longer distances use the first or last entry.
        time_bias: `[H, T]`, a learned term by distance in time: entry `b` for a distance that has
            `b` bits, that is 0, 1, 2 to 3, 4 to 7, and so on, and the last for all longer ones.
        times: int64 `[N]`, the time of each value in any unit; with `time_bias`.
        query_times: int64 `[N]`, the times at which queries are made; None for `times`.
        num_targets: int64 `[M]`, numbers of values at the end of each bag whose keys are read by
            their own queries alone, such as candidates that are ranked after one history.

    Returns:
        `[N, H, V]`, with the lengths of `query`.

    Raises:
        ValueError: Shapes do not match, a bag is longer than `max_length`, or arguments do not
            fit together.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 3.0, 5.0]).view(3, 1, 1)
        >>> x = JaggedTensor(x, lengths=torch.tensor([2, 1]))
        >>> zero = JaggedTensor(torch.zeros(3, 1, 1), lengths=x.lengths())
        >>> attention(zero, x, x, max_length=8).values().flatten()
        tensor([1., 2., 5.])
    """
    query, key, value = query.trim(), key.trim(), value.trim()
    check_equal_lengths(query, key)
    check_equal_lengths(query, value)
    parts = query.values(), key.values(), value.values()
    shapes = [list(part.shape) for part in parts]
    if any(len(shape) != 3 for shape in shapes) or parts[0].shape != parts[1].shape:
        fail(f"attention needs query and key [N, H, D] and value [N, H, V]; received {shapes}")
    heads, columns = parts[0].shape[1:]
    if parts[2].shape[1] != heads:
        fail(f"query and value must have equal numbers of heads; received {shapes}")
    if kind not in ("softmax", "silu"):
        fail(f"kind must be 'softmax' or 'silu'; received {shown(kind)}")
    _check_bias("position_bias", position_bias, heads)
    _check_bias("time_bias", time_bias, heads)
    if position_bias is not None and not position_bias.shape[1] % 2:
        fail(f"position_bias must have 2P - 1 columns; received {position_bias.shape[1]}")
    if (time_bias is None) != (times is None):
        fail("time_bias and times must be given together; received one of them")
    for name, tensor in (("times", times), ("query_times", query_times)):
        if tensor is not None and tensor.is_floating_point():
            fail(
                f"{name} must be whole numbers, as floats lose seconds; received "
                f"{str(tensor.dtype).removeprefix('torch.')}. Convert them to int64 in a unit "
                "without fractions"
            )
    if num_targets is not None:
        check_bags(num_targets, query)
    rules = AttentionRules(
        kind=kind,
        causal=causal,
        scale=columns**-0.5 if scale is None else finite("attention: scale", scale),
        divisor=float(max_length) if divisor is None else finite("attention: divisor", divisor),
        max_length=whole("attention: max_length", max_length),
    )
    bias = Bias(
        position_bias, time_bias, times if query_times is None else query_times, times, num_targets
    )
    return with_values(query, attend(*parts, query.offsets(), rules, bias))


def _check_bias(name: str, table: Tensor | None, heads: int) -> None:
    if table is not None and (table.dim() != 2 or table.shape[0] != heads or not table.shape[1]):
        fail(f"{name} must have a row for each of {heads} heads; received {list(table.shape)}")
