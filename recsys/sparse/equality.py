"""Comparison of jagged tensors."""

import torch

from recsys.sparse import validate
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.tree import Leaves, leaves_of_jagged, leaves_of_keyed_jagged


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return whether two jagged tensors have the same bags, values and weights.

    Args:
        jt_1: A jagged tensor.
        jt_2: Another jagged tensor.

    Returns:
        True if values, weights and lengths are equal. False if an argument is not a JaggedTensor.

    Example:
        >>> a = JaggedTensor(torch.ones(2), lengths=torch.tensor([1, 1]))
        >>> b = JaggedTensor(torch.ones(2), offsets=torch.tensor([0, 1, 2]))
        >>> jt_is_equal(a, b)
        True
    """
    if not isinstance(jt_1, JaggedTensor) or not isinstance(jt_2, JaggedTensor):
        return False
    return _have_equal_leaves(leaves_of_jagged(jt_1), leaves_of_jagged(jt_2))


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Return whether two keyed jagged tensors have the same features, bags, values and weights.

    Args:
        kjt_1: A keyed jagged tensor.
        kjt_2: Another keyed jagged tensor.

    Returns:
        True if keys (in order), values, weights, lengths, strides and inverse indices are equal.
        False if an argument is not a KeyedJaggedTensor.

    Example:
        >>> a = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([1, 1]))
        >>> b = KeyedJaggedTensor(["a"], torch.ones(2), offsets=torch.tensor([0, 1, 2]))
        >>> kjt_is_equal(a, b)
        True
    """
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    return _have_equal_leaves(leaves_of_keyed_jagged(kjt_1), leaves_of_keyed_jagged(kjt_2))


def _have_equal_leaves(one: tuple[Leaves, object], other: tuple[Leaves, object]) -> bool:
    (leaves_1, context_1), (leaves_2, context_2) = one, other
    if any(leaf.is_meta for leaf in (*leaves_1.values(), *leaves_2.values())):
        validate.refuse_meta("Comparing KeyedJaggedTensor or JaggedTensor", "Compare real tensors.")
    return context_1 == context_2 and all(
        torch.equal(leaf, leaves_2[name]) for name, leaf in leaves_1.items()
    )
