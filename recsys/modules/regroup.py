"""KTRegroupAsDict: columns of keyed tensors, regrouped for dense layers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recsys.base.arguments import wrong_type
from recsys.base.checked import checked
from recsys.modules.embedding_configs import DataType, data_type_to_dtype
from recsys.sparse import KeyedTensor
from recsys.sparse.recorded import recorded
from recsys.sparse.validate import is_proxy

__all__ = ["KTRegroupAsDict"]


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
