"""TorchScript support of the batch types.

TorchScript compiles classes without base classes, in a subset of Python. Each batch type therefore
has a form, here or in `script_forms`, with the same attributes and the methods that models call.
`add_forms` registers the forms under the names of the batch types when `recsys.sparse` is imported.
Scripted modules then accept and return batch types; their Python callers use the real classes.

TorchScript compiles static methods as functions. It calls `__prepare_scriptable__` of a function
for another one to compile in its place.

TorchScript is in maintenance: torch 2.13 does not support it on Python 3.14, and torch 2.14 warns
that it is deprecated.
"""

import inspect
import sys
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._jit_internal import _qualified_name, createResolutionCallbackFromClosure
from torch.jit import _state, annotate
from torch.jit.frontend import get_default_args_for_class, get_jit_class_def

from recsys.sparse.jagged import JaggedTensor
from recsys.sparse.keyed import KeyedTensor
from recsys.sparse.keyed_jagged import KeyedJaggedTensor
from recsys.sparse.script_forms import _JaggedForm, _KeyedJaggedForm
from recsys.sparse.script_modules import without_torchscript_warnings


class _KeyedForm:
    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ):
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key

    def offset_per_key(self) -> list[int]:
        offsets = [0]
        for size in self._length_per_key:
            offsets.append(offsets[-1] + size)
        return offsets

    def size_in_bytes(self) -> int:
        return self._values.numel() * self._values.element_size()

    def __getitem__(self, key: str) -> Tensor:
        if key not in self._keys:
            raise KeyError(f"KeyedTensor has no key {key}; received keys {self._keys}.")
        place = self._keys.index(key)
        start = sum(self._length_per_key[:place])
        return self._values.narrow(self._key_dim, start, self._length_per_key[place])

    def to_dict(self) -> dict[str, Tensor]:
        columns = self._values.split(self._length_per_key, self._key_dim)
        tensors: dict[str, Tensor] = {}
        for i, key in enumerate(self._keys):
            tensors[key] = columns[i]
        return tensors

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(
            self._keys,
            self._length_per_key,
            values,
            self._key_dim,
            self._offset_per_key,
            self._index_per_key,
        )


def _jagged_like(jt: JaggedTensor, device: torch.device | None = None) -> JaggedTensor:
    where = jt.device() if device is None else device
    weights = jt.weights_or_none()
    if weights is not None:
        weights = weights[:0].to(where)
    lengths = jt.lengths()[:0].to(where)
    return JaggedTensor(jt.values()[:0].to(where), weights, lengths, lengths.new_zeros(1))


def _keyed_jagged_like(
    kjt: KeyedJaggedTensor, device: torch.device | None = None
) -> KeyedJaggedTensor:
    parts = JaggedTensor(kjt.values(), kjt.weights_or_none(), kjt.lengths())
    jagged = _jagged_like(parts, device)
    return KeyedJaggedTensor(
        annotate(list[str], []),
        jagged.values(),
        jagged.weights_or_none(),
        jagged.lengths(),
        jagged.offsets(),
        kjt.stride(),
    )


def _cat_weights(caller: str, weights: list[Tensor], num_parts: int) -> Tensor | None:
    if len(weights) == 0:
        return None
    if len(weights) != num_parts:
        raise ValueError(f"{caller}: all parts must have weights, or none.")
    return torch.cat(weights)


def _from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    keys = annotate(list[str], [])
    values, lengths = annotate(list[Tensor], []), annotate(list[Tensor], [])
    weights, strides = annotate(list[Tensor], []), annotate(list[int], [])
    for key, jt in jt_dict.items():
        keys.append(key)
        total = int(jt.lengths().sum())
        values.append(jt.values()[:total])
        lengths.append(jt.lengths())
        strides.append(jt.lengths().numel())
        if jt.weights_or_none() is not None:
            weights.append(jt.weights()[:total])
    all_weights = _cat_weights("KeyedJaggedTensor.from_jt_dict", weights, len(keys))
    stride_per_key: list[int] | None = None
    if min(strides) != max(strides):
        stride_per_key = strides
    return KeyedJaggedTensor(
        keys,
        torch.cat(values),
        all_weights,
        torch.cat(lengths),
        stride_per_key=stride_per_key,
    )


def _concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    keys = annotate(list[str], [])
    weights = annotate(list[Tensor], [])
    per_rank, is_variable = annotate(list[list[int]], []), False
    for kjt in kjt_list:
        if kjt.inverse_indices_or_none() is not None:
            raise ValueError("KeyedJaggedTensor.concat, scripted, takes no inverse indices.")
        is_variable = is_variable or kjt.variable_stride_per_key()
        if kjt.variable_stride_per_key():
            per_rank.extend(kjt.stride_per_key_per_rank())
        else:
            per_rank.extend([[size] for size in kjt.stride_per_key()])
        for key in kjt.keys():  # noqa: SIM118
            if key in keys:
                raise ValueError(
                    "KeyedJaggedTensor.concat: parts must have keys of their own; received "
                    f"{key} twice."
                )
            keys.append(key)
        if kjt.weights_or_none() is not None:
            weights.append(kjt.weights()[: sum(kjt.length_per_key())])
    all_weights = _cat_weights("KeyedJaggedTensor.concat", weights, len(kjt_list))
    values = torch.cat([kjt.values()[: sum(kjt.length_per_key())] for kjt in kjt_list])
    lengths = torch.cat([kjt.lengths() for kjt in kjt_list])
    if is_variable:
        return KeyedJaggedTensor(
            keys, values, all_weights, lengths, stride_per_key_per_rank=per_rank
        )
    strides = [kjt.stride() for kjt in kjt_list]
    if min(strides) != max(strides):
        raise ValueError(
            "KeyedJaggedTensor.concat: all parts must have the same stride (batch size)."
        )
    return KeyedJaggedTensor(keys, values, all_weights, lengths, stride=strides[0])


def _regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    columns: dict[str, Tensor] = {}
    for keyed in keyed_tensors:
        for key, column in keyed.to_dict().items():
            if key in columns:
                raise ValueError(f"KeyedTensor.regroup: two sources have the key {key}.")
            columns[key] = column
    regrouped = annotate(list[Tensor], [])
    for group in groups:
        parts = annotate(list[Tensor], [])
        for key in group:
            if key not in columns:
                raise KeyError(f"KeyedTensor.regroup: no source has the key {key}.")
            parts.append(columns[key])
        regrouped.append(torch.cat(parts, keyed_tensors[0].key_dim()))
    return regrouped  # type: ignore[no-any-return]


_FORMS: dict[type, Any] = {
    JaggedTensor: _JaggedForm,
    KeyedJaggedTensor: _KeyedJaggedForm,
    KeyedTensor: _KeyedForm,
}
_SHARED = (
    *("device", "keys", "values", "weights_or_none", "lengths_or_none", "offsets_or_none"),
    *("stride", "variable_stride_per_key", "inverse_indices_or_none", "key_dim"),
    *("length_per_key_or_none", "offset_per_key_or_none"),
)
"""Methods that TorchScript compiles from the containers: a form has them unless it defines them."""
_STATIC_FORMS: dict[Any, Any] = {
    JaggedTensor.empty: inspect.unwrap(JaggedTensor.empty),
    JaggedTensor.empty_like: _jagged_like,
    KeyedJaggedTensor.empty: inspect.unwrap(KeyedJaggedTensor.empty),
    KeyedJaggedTensor.empty_like: _keyed_jagged_like,
    KeyedJaggedTensor.from_jt_dict: _from_jt_dict,
    KeyedJaggedTensor.concat: _concat,
    KeyedTensor.regroup: _regroup,
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
        function.__prepare_scriptable__ = partial(_same, form)
    for kind, form in _FORMS.items():
        if _state._get_script_class(kind) is not None:
            continue
        for name in _SHARED:
            if hasattr(kind, name) and not hasattr(form, name):
                setattr(form, name, getattr(kind, name))
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
    """Return the name resolver of a form.

    TorchScript itself resolves a list of the class that it is compiling.
    """
    resolve = createResolutionCallbackFromClosure(form.__init__)
    list_name = f"List[{kind.__name__}]"
    return lambda text: None if text == list_name else resolve(text)
