"""Conversions between batch types, as modules and functions."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from recsys.base.arguments import check_input, wrong_type
from recsys.base.checked import checked, checked_late
from recsys.modules.embedding_configs import DataType, data_type_to_dtype
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.recorded import recorded
from recsys.sparse.validate import is_proxy


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
            keyed_jagged_tensor: The features.
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
            jt_dict: Features by key, in order, with the same dtypes and device; all or none with
                weights.

        Raises:
            ValueError: `jt_dict` is empty, dtypes differ, or only some features have weights.
        """
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


@checked
def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """Concatenate keys of several keyed tensors, by group: `KeyedTensor.regroup`.

    Args:
        keyed_tensors: Sources with different keys and the same shape otherwise.
        groups: The keys of each result, in order; a key may be in several groups.

    Returns:
        One `[B, sum of widths]` per group; differentiable.

    Raises:
        KeyError: No source has a key.
        ValueError: Two sources have a key, `key_dim` differs, or a group is empty.

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
        features: Features with different batch sizes.

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


class KTRegroupAsDict(nn.Module):
    """Regroup the keys of several keyed tensors into named tensors.

    The module form of `KeyedTensor.regroup_as_dict`. The positions of columns are cached for each
    order of keys. Pending outputs of sharded modules are awaited.

    Args:
        groups: The keys of each result, in order; a key may be in several groups.
        keys: The name of each result.
        emb_dtype: Dtype of the results; None: the dtype of the inputs.

    Raises:
        TypeError: A group is not a list of keys.
        ValueError: Names and groups differ in number, a name repeats, or a group is empty.

    Example:
        >>> import torch
        >>> regroup = KTRegroupAsDict([["b", "a"], ["c"]], ["user", "item"])
        >>> user = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> item = KeyedTensor(["c"], [1], torch.tensor([[4.0]]))
        >>> regroup([user, item])
        {'user': tensor([[2., 3., 1.]]), 'item': tensor([[4.]])}
    """

    @checked
    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: DataType | None = None,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys) or len(set(keys)) != len(keys):
            raise ValueError(
                f"KTRegroupAsDict.keys must name each group, each once; received the keys {keys} "
                f"for {len(groups)} groups."
            )
        empty = [key for key, group in zip(keys, groups, strict=True) if not group]
        if empty:
            raise ValueError(
                f"KTRegroupAsDict: every group needs at least one key; received none for {empty}."
            )
        self._groups = [list(group) for group in groups]
        self._keys = list(keys)
        self._dtype = None if emb_dtype is None else data_type_to_dtype(emb_dtype)

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """Regroup the keys.

        Args:
            keyed_tensors: Inputs, which may be pending. They differ in their keys only.

        Returns:
            [B, sum of widths] by name; differentiable.

        Raises:
            KeyError: No input has a key.
            ValueError: There is no input, two inputs have the same key, or `key_dim` differs.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            _check_sources(keyed_tensors)
        return _regrouped(keyed_tensors, self._groups, self._keys, self._dtype)

    def extra_repr(self) -> str:
        """Show the groups."""
        return ", ".join(f"{k}={g}" for k, g in zip(self._keys, self._groups, strict=True))


@recorded
def _regrouped(
    keyed_tensors: list[KeyedTensor],
    groups: list[list[str]],
    keys: list[str],
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    grouped = KeyedTensor.regroup_as_dict(list(keyed_tensors), groups, keys)
    if dtype is None:
        return grouped
    converted: dict[str, Tensor] = {}
    for key, tensor in grouped.items():
        converted[key] = tensor.to(dtype)
    return converted


def _check_sources(keyed_tensors: object) -> None:
    if is_proxy(keyed_tensors):
        return
    if isinstance(keyed_tensors, Tensor | str) or not isinstance(keyed_tensors, Iterable):
        wrong_type("KTRegroupAsDict: keyed_tensors", "a list of KeyedTensors", keyed_tensors)
