"""Memory that code allocates, on any device: also on `meta`."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Allocations(TorchDispatchMode):
    """Keep the storages of all results of operations, except the storages of `known` tensors."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._found: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._found[storage._cdata] = storage
        return out

    @property
    def num_bytes(self) -> int:
        """The sum, with freed memory: storages are kept, so that none is counted twice."""
        return sum(storage.nbytes() for storage in self._found.values())
