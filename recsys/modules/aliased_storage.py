"""Detection of replaced tensors in modules whose tensors are views of a shared storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import is_

from torch import Tensor

__all__ = ["AliasedStorage"]


class AliasedStorage:
    """Record of module tensors that alias the storage of a lookup.

    Users break the aliasing with `.to`, `.half`, deepcopy, pickle, `load_state_dict(assign=True)`
    and `weight.data = ...`. Compare by identity and address before each lookup; if the record is
    stale, build the lookup from the modules' tensors again.

    Args:
        slots: The dicts in which the modules hold the tensors: `_parameters` or `_buffers`.

    Attributes:
        addresses: `data_ptr` of each tensor, in the order of the slots.

    Example:
        >>> import torch
        >>> table = torch.nn.Embedding(2, 3)
        >>> storage = AliasedStorage([table._parameters])
        >>> storage.is_current()
        True
        >>> table.weight.data = torch.zeros(2, 3)
        >>> storage.is_current()
        False
    """

    def __init__(self, slots: Iterable[Mapping[str, Tensor | None]]) -> None:
        self._slots = [(tensors, name) for tensors in slots for name in tensors]
        self._tensors = self._read()
        self.addresses = list(map(Tensor.data_ptr, self._tensors))

    def is_current(self) -> bool:
        """Return whether the modules still hold the recorded tensors at the recorded addresses."""
        tensors = self._read()
        return (
            all(map(is_, tensors, self._tensors))
            and list(map(Tensor.data_ptr, tensors)) == self.addresses
        )

    def _read(self) -> list[Tensor]:
        return [tensors[name] for tensors, name in self._slots]  # type: ignore[misc]
