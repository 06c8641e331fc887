"""Containers in the form that TorchScript compiles.

TorchScript compiles classes without bases that use a part of Python. So each container has a form
here: the same attributes, and the methods that models call on batches of one size. `add_forms`
registers the forms under the containers' own names, when `recsys.sparse` is imported. A scripted
module then takes and returns containers; its Python callers pass and receive the real classes.

Static methods are functions of their own to TorchScript. It asks such a function for
`__prepare_scriptable__`, which returns the form's function.

TorchScript is in maintenance: torch 2.13 does not support it from Python 3.14 on, and torch 2.14
warns that it is deprecated.
"""

# TorchScript reads the annotations as they stand, and of attributes only those of `typing`
# ruff: noqa: UP006, UP035, UP045

import sys
from functools import partial
from typing import Any, List, Optional

import torch
from torch import Tensor
from torch._jit_internal import _qualified_name, createResolutionCallbackFromClosure
from torch.jit import _state, annotate
from torch.jit.frontend import get_default_args_for_class, get_jit_class_def

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.script_modules import without_torchscript_warnings


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(lengths.dtype)])


def _selected(tensor: Tensor, sizes: list[int], indices: list[int]) -> Tensor:
    """Return the parts of a tensor with these sizes that indices name, one after another."""
    parts = tensor.split(sizes)
    return torch.cat([parts[i] for i in indices] + [tensor[:0]])


def _check_split(keys: list[str], segments: list[int]) -> None:
    if sum(segments) != len(keys):
        raise ValueError(
            "KeyedJaggedTensor.split: segments must be counts that add up to the number of "
            f"keys, {len(keys)}; received {segments}."
        )


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

    def lengths_or_none(self) -> Tensor | None:
        return self._lengths

    def offsets(self) -> Tensor:
        offsets = self._offsets
        if offsets is None:
            offsets = _offsets_of(self.lengths())
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        return self._offsets

    def to_dense(self) -> list[Tensor]:
        sizes = annotate(list[int], self.lengths().tolist())
        return list(self._values.split(sizes))

    def device(self) -> torch.device:
        return self._values.device

    def to(self, device: torch.device, non_blocking: bool = False) -> JaggedTensor:
        weights = self._weights
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
        return JaggedTensor(
            self._values.to(device, non_blocking=non_blocking),
            weights,
            self.lengths().to(device, non_blocking=non_blocking),
            None,
        )


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

    def lengths_or_none(self) -> Tensor | None:
        return self._lengths

    def offsets(self) -> Tensor:
        offsets = self._offsets
        if offsets is None:
            offsets = _offsets_of(self.lengths())
            self._offsets = offsets
        return offsets

    def offsets_or_none(self) -> Tensor | None:
        return self._offsets

    def stride(self) -> int:
        return self._stride

    def stride_per_key(self) -> list[int]:
        strides = self._stride_per_key
        if strides is None:
            strides = [self._stride for _ in self._keys]
        return strides  # type: ignore[no-any-return]

    def variable_stride_per_key(self) -> bool:
        return self._stride_per_key_per_rank is not None

    def check_one_batch_size(self) -> None:
        if self.variable_stride_per_key():
            raise ValueError("A scripted model takes batches with one batch size for all features.")

    def device(self) -> torch.device:
        return self._values.device

    def index_per_key(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for i, key in enumerate(self._keys):
            found[key] = i
        return found

    def length_per_key(self) -> list[int]:
        known = self._length_per_key
        if known is None:
            self.check_one_batch_size()
            known = annotate(list[int], self.lengths().view(len(self._keys), -1).sum(1).tolist())
            self._length_per_key = known
        return known  # type: ignore[no-any-return]

    def length_per_key_or_none(self) -> list[int] | None:
        return self._length_per_key  # type: ignore[no-any-return]

    def offset_per_key(self) -> list[int]:
        found = [0]
        for size in self.length_per_key():
            found.append(found[-1] + size)
        return found

    def __getitem__(self, key: str) -> JaggedTensor:
        if key not in self._keys:
            raise KeyError(f"KeyedJaggedTensor has no key {key}; received keys {self._keys}.")
        place = self._keys.index(key)
        sizes = self.length_per_key()
        start, end = sum(sizes[:place]), sum(sizes[: place + 1])
        weights: Tensor | None = None
        if self._weights is not None:
            weights = self.weights()[start:end]
        lengths = self.lengths().view(len(self._keys), self._stride)[place]
        return JaggedTensor(self._values[start:end], weights, lengths)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        found: dict[str, JaggedTensor] = {}
        for key in self._keys:
            found[key] = self[key]
        return found

    def permute(
        self, indices: list[int], indices_tensor: Tensor | None = None
    ) -> KeyedJaggedTensor:
        sizes, size = self.length_per_key(), len(self._keys)
        for i in indices:
            if i < 0 or i >= size:
                raise IndexError(
                    f"KeyedJaggedTensor.permute: indices must be in 0..{size - 1}; received {i}."
                )
        weights: Tensor | None = None
        if self._weights is not None:
            weights = _selected(self.weights(), sizes, indices)
        bags = [self._stride for _ in self._keys]
        return KeyedJaggedTensor(
            [self._keys[i] for i in indices],
            _selected(self._values, sizes, indices),
            weights,
            _selected(self.lengths(), bags, indices),
            None,
            self._stride,
        )

    def split(self, segments: list[int]) -> List[KeyedJaggedTensor]:
        _check_split(self._keys, segments)
        found = annotate(List[KeyedJaggedTensor], [])
        start = 0
        for size in segments:
            found.append(self.permute(list(range(start, start + size)), None))
            start += size
        return found  # type: ignore[no-any-return]

    def with_values(self, values: Tensor) -> KeyedJaggedTensor:
        self.check_one_batch_size()
        return KeyedJaggedTensor(
            self._keys, values, self._weights, self.lengths(), None, self._stride
        )

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedJaggedTensor:
        self.check_one_batch_size()
        weights = self._weights
        if weights is not None:
            weights = weights.to(device, non_blocking=non_blocking)
        return KeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            weights,
            self.lengths().to(device, non_blocking=non_blocking),
            None,
            self._stride,
        )


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

    def offset_per_key(self) -> list[int]:
        found = [0]
        for size in self._length_per_key:
            found.append(found[-1] + size)
        return found

    def device(self) -> torch.device:
        return self._values.device

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(f"KeyedTensor has no key {key}; received keys {self._keys}.")
        place = self._keys.index(key)
        start = sum(self._length_per_key[:place])
        return self._values.narrow(self._key_dim, start, self._length_per_key[place])

    def to_dict(self) -> dict[str, Tensor]:
        columns = self._values.split(self._length_per_key, self._key_dim)
        found: dict[str, Tensor] = {}
        for i, key in enumerate(self._keys):
            found[key] = columns[i]
        return found

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)


def _from_lengths_sync(
    keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, values, weights, lengths)


def _from_offsets_sync(
    keys: list[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, values, weights, offsets=offsets)


def _concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    keys = annotate(list[str], [])
    weights = annotate(list[Tensor], [])
    for kjt in kjt_list:
        kjt.check_one_batch_size()  # type: ignore[attr-defined]
        for key in kjt.keys():  # noqa: SIM118
            if key in keys:
                raise ValueError(
                    "KeyedJaggedTensor.concat: parts must have keys of their own; received "
                    f"{key} twice."
                )
            keys.append(key)
        if kjt.stride() != kjt_list[0].stride():
            raise ValueError(
                "KeyedJaggedTensor.concat: all parts must have the same stride (batch size)."
            )
        if kjt.weights_or_none() is not None:
            weights.append(kjt.weights())
    if len(weights) != 0 and len(weights) != len(kjt_list):
        raise ValueError("KeyedJaggedTensor.concat: all parts must have weights, or none.")
    all_weights: Tensor | None = None
    if len(weights) > 0:
        all_weights = torch.cat(weights)
    return KeyedJaggedTensor(
        keys,
        torch.cat([kjt.values() for kjt in kjt_list]),
        all_weights,
        torch.cat([kjt.lengths() for kjt in kjt_list]),
        stride=kjt_list[0].stride(),
    )


def _regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    columns: dict[str, Tensor] = {}
    for keyed in keyed_tensors:
        for key, column in keyed.to_dict().items():
            if key in columns:
                raise ValueError(f"KeyedTensor.regroup: two sources have the key {key}.")
            columns[key] = column
    found = annotate(list[Tensor], [])
    for group in groups:
        parts = annotate(list[Tensor], [])
        for key in group:
            if key not in columns:
                raise KeyError(f"KeyedTensor.regroup: no source has the key {key}.")
            parts.append(columns[key])
        found.append(torch.cat(parts, keyed_tensors[0].key_dim()))
    return found  # type: ignore[no-any-return]


def _regroup_as_dict(
    keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for key, tensor in zip(keys, _regroup(keyed_tensors, groups)):  # noqa: B905
        found[key] = tensor
    return found


_FORMS: dict[type, Any] = {
    JaggedTensor: _JaggedTensor,
    KeyedJaggedTensor: _KeyedJaggedTensor,
    KeyedTensor: _KeyedTensor,
}
_STATIC_FORMS = {
    KeyedJaggedTensor.from_lengths_sync: _from_lengths_sync,
    KeyedJaggedTensor.from_offsets_sync: _from_offsets_sync,
    KeyedJaggedTensor.concat: _concat,
    KeyedTensor.regroup: _regroup,
    KeyedTensor.regroup_as_dict: _regroup_as_dict,
}


def add_forms() -> None:
    """Register the forms of the containers with TorchScript; a second call does nothing.

    Example:
        >>> class Bags(torch.nn.Module):
        ...     def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        ...         return features.lengths()
        >>> features = KeyedJaggedTensor(["a"], torch.ones(2), lengths=torch.tensor([2, 0]))
        >>> torch.jit.script(Bags())(features)
        tensor([2, 0])
    """
    if sys.version_info >= (3, 14):
        return
    for function, form in _STATIC_FORMS.items():
        function.__prepare_scriptable__ = partial(_same, form)  # type: ignore[attr-defined]
    for kind, form in _FORMS.items():
        if _state._get_script_class(kind) is not None:
            continue
        with without_torchscript_warnings():
            compiled = torch._C._jit_script_class_compile(
                _qualified_name(kind),
                get_jit_class_def(form, kind.__name__),
                get_default_args_for_class(form),
                _resolver(kind, form),
            )
        _state._add_script_class(kind, compiled)


def _same(function: Any) -> Any:
    return function


def _resolver(kind: type, form: Any) -> Any:
    """Return what looks up the names in a form.

    A list of the class itself is left to TorchScript: only it knows a class while it compiles it.
    """
    resolve = createResolutionCallbackFromClosure(form.values)
    own = f"List[{kind.__name__}]"
    return lambda text: None if text == own else resolve(text)
