"""Whether jagged tensors hold the same data."""

import torch
from torch import Tensor

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor


def jt_is_equal(jt_1: JaggedTensor, jt_2: JaggedTensor) -> bool:
    """Tell whether two jagged tensors hold the same bags, values and weights.

    Args:
        jt_1: one.
        jt_2: the other.

    Returns:
        Whether values, weights and lengths are equal, whichever of lengths and offsets was given.

    Example:
        >>> a = JaggedTensor(torch.ones(2), lengths=torch.tensor([1, 1]))
        >>> b = JaggedTensor(torch.ones(2), offsets=torch.tensor([0, 1, 2]))
        >>> jt_is_equal(a, b)
        True
    """
    return (
        torch.equal(jt_1.values(), jt_2.values())
        and torch.equal(jt_1.lengths(), jt_2.lengths())
        and _equal_or_none(jt_1.weights_or_none(), jt_2.weights_or_none())
    )


def kjt_is_equal(kjt_1: KeyedJaggedTensor, kjt_2: KeyedJaggedTensor) -> bool:
    """Tell whether two keyed jagged tensors hold the same features, bags, values and weights.

    Args:
        kjt_1: one.
        kjt_2: the other.

    Returns:
        Whether keys (in order), values, weights, lengths, strides and inverse indices are equal,
        whichever of lengths and offsets was given.

    Example:
        >>> a = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([1, 1]))
        >>> b = KeyedJaggedTensor(["a"], torch.ones(2), offsets=torch.tensor([0, 1, 2]))
        >>> kjt_is_equal(a, b)
        True
    """
    inverse_1, inverse_2 = kjt_1.inverse_indices_or_none(), kjt_2.inverse_indices_or_none()
    return (
        kjt_1.keys() == kjt_2.keys()
        and kjt_1.stride_per_key() == kjt_2.stride_per_key()
        and kjt_1.stride_per_key_per_rank() == kjt_2.stride_per_key_per_rank()
        and torch.equal(kjt_1.values(), kjt_2.values())
        and torch.equal(kjt_1.lengths(), kjt_2.lengths())
        and _equal_or_none(kjt_1.weights_or_none(), kjt_2.weights_or_none())
        and (inverse_1 and inverse_1[0]) == (inverse_2 and inverse_2[0])
        and _equal_or_none(inverse_1 and inverse_1[1], inverse_2 and inverse_2[1])
    )


def _equal_or_none(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether both are None, or both are equal tensors."""
    if a is None or b is None:
        return a is b
    return torch.equal(a, b)
