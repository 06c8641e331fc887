"""The containers as TorchScript has them.

TorchScript compiles classes without bases and with few of Python's means, so each container has a
form here that it can compile: the same attributes, and the methods that models call. `add_forms`
compiles these under the containers' own names. A scripted module then takes a container and
returns one; from Python it is called with the real classes, and returns them.

TorchScript is in maintenance: torch 2.13 does not support it from Python 3.14 on.
"""

# TorchScript reads the annotations as they stand, and of attributes only those of `typing`
# ruff: noqa: UP045

import warnings
from typing import Any, Optional

import torch
from torch import Tensor
from torch._jit_internal import _qualified_name, createResolutionCallbackFromClosure
from torch.jit import _state, annotate
from torch.jit.frontend import get_default_args_for_class, get_jit_class_def

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor


class _JaggedTensor:
    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ):
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        self._views = annotate(Optional[Tensor], None)

    def values(self) -> Tensor:
        return self._values

    def weights(self) -> Tensor:
        weights = self._weights
        if weights is None:
            raise ValueError("JaggedTensor has no weights.")
        return weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def lengths(self) -> Tensor:
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None
            lengths = offsets.diff()
            self._lengths = lengths
        return lengths

    def offsets(self) -> Tensor:
        offsets = self._offsets
        if offsets is None:
            lengths = self.lengths()
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])
            self._offsets = offsets
        return offsets

    def device(self) -> torch.device:
        return self._values.device


class _KeyedJaggedTensor:
    def __init__(
        self,
        keys: list[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
    ):
        self._keys: list[str] = keys
        self._values: Tensor = values
        self._weights: Tensor | None = weights
        self._lengths: Tensor | None = lengths
        self._offsets: Tensor | None = offsets
        if stride is None:
            bags = 0
            if lengths is not None:
                bags = lengths.numel()
            elif offsets is not None:
                bags = offsets.numel() - 1
            stride = bags // max(len(keys), 1)
        self._stride: int = stride
        self._stride_per_key = annotate(Optional[list[int]], None)
        self._stride_per_key_per_rank = annotate(Optional[list[list[int]]], None)
        self._inverse_indices = annotate(Optional[tuple[list[str], Tensor]], None)
        self._length_per_key = annotate(Optional[list[int]], None)
        self._offset_per_key = annotate(Optional[list[int]], None)
        self._index_per_key = annotate(Optional[dict[str, int]], None)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def weights(self) -> Tensor:
        weights = self._weights
        if weights is None:
            raise ValueError("KeyedJaggedTensor has no weights.")
        return weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def lengths(self) -> Tensor:
        lengths = self._lengths
        if lengths is None:
            offsets = self._offsets
            assert offsets is not None
            lengths = offsets.diff()
            self._lengths = lengths
        return lengths

    def offsets(self) -> Tensor:
        offsets = self._offsets
        if offsets is None:
            lengths = self.lengths()
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])
            self._offsets = offsets
        return offsets

    def stride(self) -> int:
        return self._stride

    def variable_stride_per_key(self) -> bool:
        return self._stride_per_key_per_rank is not None

    def device(self) -> torch.device:
        return self._values.device

    def length_per_key(self) -> list[int]:
        known = self._length_per_key
        if known is None:
            known = annotate(list[int], self.lengths().view(len(self._keys), -1).sum(1).tolist())
            self._length_per_key = known
        return known  # type: ignore[no-any-return]

    def __getitem__(self, key: str) -> JaggedTensor:
        place = self._keys.index(key)
        sizes = self.length_per_key()
        start, end = sum(sizes[:place]), sum(sizes[: place + 1])
        weights: Tensor | None = None
        if self._weights is not None:
            weights = self.weights()[start:end]
        lengths = self.lengths().view(len(self._keys), -1)[place]
        return JaggedTensor(self._values[start:end], weights, lengths)

    def to_dict(self) -> dict[str, JaggedTensor]:
        found: dict[str, JaggedTensor] = {}
        for key in self._keys:
            found[key] = self[key]
        return found


class _KeyedTensor:
    def __init__(
        self, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1
    ):
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key = annotate(Optional[list[int]], None)
        self._index_per_key = annotate(Optional[dict[str, int]], None)

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def key_dim(self) -> int:
        return self._key_dim

    def length_per_key(self) -> list[int]:
        return self._length_per_key

    def device(self) -> torch.device:
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        place = self._keys.index(key)
        start = sum(self._length_per_key[:place])
        return self._values.narrow(self._key_dim, start, self._length_per_key[place])

    def to_dict(self) -> dict[str, Tensor]:
        columns = self._values.split(self._length_per_key, self._key_dim)
        found: dict[str, Tensor] = {}
        for i, key in enumerate(self._keys):
            found[key] = columns[i]
        return found


def add_forms() -> None:
    """Let TorchScript compile modules that take or return containers; a second call does nothing.

    Example:
        >>> class Bags(torch.nn.Module):
        ...     def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        ...         return features.lengths()
        >>> add_forms()
        >>> features = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2, 0]))
        >>> torch.jit.script(Bags())(features)
        tensor([2, 0])
    """
    forms: dict[type, Any] = {
        JaggedTensor: _JaggedTensor,
        KeyedJaggedTensor: _KeyedJaggedTensor,
        KeyedTensor: _KeyedTensor,
    }
    for kind, form in forms.items():
        if _state._get_script_class(kind) is not None:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            compiled = torch._C._jit_script_class_compile(
                _qualified_name(kind),
                get_jit_class_def(form, kind.__name__),
                get_default_args_for_class(form),
                createResolutionCallbackFromClosure(form.values),
            )
        _state._add_script_class(kind, compiled)
