"""Conversions between batch types as modules and functions.

Each calls a method of a batch type.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from recsys.base.arguments import check_input
from recsys.base.checked import checked_late
from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor


class ComputeKJTToJTDict(nn.Module):
    """`KeyedJaggedTensor.to_dict` as a module.

    Example:
        >>> import torch
        >>> kjt = KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.tensor([1, 2]))
        >>> ComputeKJTToJTDict()(kjt)["b"].values()
        tensor([1, 2])
    """

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return each feature by its key.

        Args:
            keyed_jagged_tensor: the features.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            check_input(
                "ComputeKJTToJTDict.keyed_jagged_tensor", keyed_jagged_tensor, KeyedJaggedTensor
            )
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """`KeyedJaggedTensor.from_jt_dict` as a module.

    Example:
        >>> import torch
        >>> jt = JaggedTensor(torch.arange(3), lengths=torch.tensor([1, 2]))
        >>> ComputeJTDictToKJT()({"a": jt, "b": jt}).keys()
        ['a', 'b']
    """

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Concatenate features.

        Args:
            jt_dict: features by key, in order, with the same dtypes and device; all or none with
                weights.

        Raises:
            ValueError: `jt_dict` is empty, dtypes differ, or only some features have weights.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


@checked_late
def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """Concatenate keys of several keyed tensors, by group: `KeyedTensor.regroup`.

    Args:
        keyed_tensors: sources with different keys and the same shape otherwise.
        groups: the keys of each result, in order; a key may be in several groups.

    Returns:
        One `[B, sum of widths]` per group; differentiable.

    Raises:
        KeyError: no source has a key.
        ValueError: two sources have a key, `key_dim` differs, or a group is empty.

    Example:
        >>> import torch
        >>> kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> regroup_kts([kt], [["b", "a"]])
        [tensor([[2., 3., 1.]])]
    """
    return KeyedTensor.regroup(keyed_tensors, groups)


permute_multi_embedding = regroup_kts


@checked_late
def pad_vbe_kjt_lengths(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Pad all features with empty bags to the largest batch size.

    Args:
        features: features with different batch sizes.

    Returns:
        The same ids and weights with one batch size and without inverse indices. Bag `b` of a
        feature stays bag `b`. Features with one batch size are returned unchanged.

    Example:
        >>> import torch
        >>> kjt = KeyedJaggedTensor(
        ...     ["a", "b"],
        ...     torch.arange(6),
        ...     lengths=torch.tensor([1, 2, 3]),
        ...     stride_per_key_per_rank=[[1], [2]],
        ... )
        >>> pad_vbe_kjt_lengths(kjt).lengths()
        tensor([1, 0, 2, 3])
    """
    if not features.variable_stride_per_key():
        return features
    bags = features.lengths().split(features.stride_per_key())
    return KeyedJaggedTensor.from_parts(
        features.keys(),
        features.values(),
        features.weights_or_none(),
        pad_sequence(list(bags), batch_first=True).flatten(),
        stride=max(features.stride_per_key()),
    )
