"""Parameters and buffers that are views of one storage.

`AliasedStorage` detects views that were replaced. `detach_storage` gives a view in a state dict a
storage object of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from operator import is_

import torch.utils.dlpack
from torch import Tensor

__all__ = ["AliasedStorage", "detach_storage"]


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


def detach_storage(state_dict: MutableMapping[str, Tensor], name: str) -> None:
    """Replace a view in a state dict by a tensor of the same memory with a storage of its own.

    Tools that save state dicts, such as safetensors, accelerate and `torch.save`, take the storage
    for the tensor: they refuse or drop views of one storage, or write all of it.

    Args:
        state_dict: State dict, without gradients.
        name: Name of the tensor. A storage in shared memory stays, so that other processes that
            receive the tensor see its changes.

    Example:
        >>> both = torch.zeros(4)
        >>> state_dict = {"second": both[2:]}
        >>> detach_storage(state_dict, "second")
        >>> state_dict["second"].untyped_storage().nbytes(), both.untyped_storage().nbytes()
        (8, 16)
        >>> state_dict["second"].fill_(1.0)
        tensor([1., 1.])
        >>> both
        tensor([0., 0., 1., 1.])
    """
    tensor = state_dict[name]
    if type(tensor) is not Tensor or tensor.is_meta or tensor.requires_grad:
        return
    storage = tensor.untyped_storage()
    is_view = storage.nbytes() != tensor.numel() * tensor.itemsize
    if is_view and not (tensor.is_cpu and storage.is_shared()):
        state_dict[name] = torch.utils.dlpack.from_dlpack(tensor)
