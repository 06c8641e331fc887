"""Features of a model's jagged inputs, and the tables that look them up.

A model may select, rename, hash or clamp ids before a lookup. The tables of a feature are therefore
found by a trial: the model runs on marked ids, and each lookup records the marks that it receives.

Shapes: `K` keys of a batch, `B` batch size, `N` ids.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from recsys.inference.quant.collection import QuantizedCollection
from recsys.inference.quant.options import rows_left
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

__all__ = [
    "InputFeature",
    "arguments_by_name",
    "features_of_inputs",
    "is_jagged",
    "jagged_inputs",
    "name_of",
]


@final
@dataclass(frozen=True)
class InputFeature:
    """A feature of a jagged input."""

    name: str
    rows: int | None
    """Ids must be from 0 to `rows - 1`; None: any id, as its table has hashed ids, no table looks
    them up, or the model changes them."""
    table: str | None
    """The table that looks them up; of several tables, the one with the fewest rows."""
    module: str | None
    """The path of the table's module in the model."""


def features_of_inputs(
    model: nn.Module, inputs: Sequence[object]
) -> dict[str, tuple[InputFeature, ...]]:
    """Return the features of each jagged input, in order, by the input's name.

    The model runs four times or less, or several times per feature if it fails on marked ids. Rows
    of a feature are known if its ids reach a table unchanged: a quantized collection, an
    `nn.Embedding` or an `nn.EmbeddingBag`.

    Args:
        model: A quantized model in evaluation mode; not changed.
        inputs: Example arguments with one sample or more. An input is named after its argument; in
            a container, after its position too, such as `batches_0`. The only feature of a
            JaggedTensor has the name of the input.

    Example:
        >>> from recsys.inference import quantize_embeddings
        >>> from recsys.modules.embedding_configs import EmbeddingBagConfig
        >>> from recsys.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(9, 4, "films", feature_names=["film"])]
        >>> model = quantize_embeddings(nn.Sequential(EmbeddingBagCollection(tables=tables)))
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([3]), lengths=torch.tensor([1]))
        >>> features_of_inputs(model, [batch])["input"]
        (InputFeature(name='film', rows=9, table='films', module='0'),)
    """
    jagged = jagged_inputs(model, inputs)
    slots = [(name, key) for name, batch in jagged.items() for key in _keys(name, batch)]
    taggable = [i for i, (name, _) in enumerate(slots) if _has_ids(jagged[name])]
    lookups = _try_marks(model, inputs, slots, taggable)
    if lookups is None:
        lookups = {}
        for i in taggable:
            lookups |= _try_marks(model, inputs, slots, [i]) or {}
    by_input: dict[str, list[InputFeature]] = {name: [] for name in jagged}
    for i, (name, key) in enumerate(slots):
        feature = InputFeature(key, None, None, None)
        for rows, table, path in lookups.get(i, ()):
            if feature.rows is None or (rows is not None and rows < feature.rows):
                feature = replace(feature, rows=rows, table=table, module=path)
        by_input[name].append(feature)
    return {name: tuple(features) for name, features in by_input.items()}


def jagged_inputs(
    model: nn.Module, inputs: Sequence[object]
) -> dict[str, JaggedTensor | KeyedJaggedTensor]:
    """Return the jagged tensors among example arguments, by the name of the input."""
    leaves, _ = pytree.tree_flatten_with_path(arguments_by_name(model, inputs), is_leaf=is_jagged)
    return {name_of(path): leaf for path, leaf in leaves if is_jagged(leaf)}


def arguments_by_name(model: nn.Module, inputs: Sequence[object]) -> dict[str, object]:
    """Return the arguments of a model by the names of its parameters.

    Raises:
        TypeError: The model takes another number of arguments.
    """
    try:
        inspect.signature(model.forward).bind(*inputs)
    except TypeError as error:
        raise TypeError(
            f"inputs must be the arguments of {type(model).__name__}.forward, in order; "
            f"received {len(inputs)}: {error}."
        ) from None
    names = []
    for name, parameter in inspect.signature(model.forward).parameters.items():
        is_last = parameter.kind is inspect.Parameter.VAR_POSITIONAL
        names += [f"{name}_{i}" for i in range(len(inputs))] if is_last else [name]
    return dict(zip(names, inputs, strict=False))


def is_jagged(value: object) -> bool:
    """Return whether a value is a JaggedTensor or a KeyedJaggedTensor."""
    return isinstance(value, JaggedTensor | KeyedJaggedTensor)


def name_of(path: Iterable[Any]) -> str:
    """Return the name of an input for its path of a pytree."""
    return "_".join(map(_text, path))


def _text(key: Any) -> str:
    if isinstance(key, pytree.GetAttrKey):
        return key.name.removeprefix("_")
    return re.sub(r"\W", "_", str(getattr(key, "key", getattr(key, "idx", key))))


# -- trial with marked ids -------------------------------------------------------------------------


class _Lookup(NamedTuple):
    """A lookup that received the ids of a feature."""

    rows: int | None
    """None: of hashed ids."""
    table: str
    path: str


_Slots = Sequence[tuple[str, str]]
"""Input and key of each feature of all inputs."""
_Found = dict[int, set[_Lookup]]
"""The lookups of features, by position in the slots."""


def _try_marks(
    model: nn.Module, inputs: Sequence[object], slots: _Slots, marked: Sequence[int]
) -> _Found | None:
    """Return the lookups of some features whose ids arrive unchanged; None if the model fails."""
    lookups: list[_Found] = []
    for sign in (1, -1):  # a model may replace ids above or below the range of a table
        trial = _Trial(model, inputs, slots, set(marked), sign)
        try:
            lookups.append(trial.run())
        except Exception:  # of the model, for example for an id that it reads by itself
            return None
    above, below = lookups
    return {i: above[i] & below[i] for i in above.keys() & below.keys()}


@final
class _Trial:
    """A run of a model on marked ids.

    Args:
        model: The model.
        inputs: Example arguments.
        slots: The features of all inputs.
        marked: The features whose ids are marked; others keep the ids of the example.
        sign: 1 for marks above the rows of any table, -1 for negative marks.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[object],
        slots: _Slots,
        marked: set[int],
        sign: int,
    ) -> None:
        self._model = model
        self._sign = sign
        self._ends = [0]
        """The marks of the i-th feature are from `_ends[i]` up to `_ends[i + 1]`."""
        self._found: _Found = {}
        jagged = jagged_inputs(model, inputs)
        batches = iter([self._marked(name, batch, slots, marked) for name, batch in jagged.items()])
        leaves, structure = pytree.tree_flatten(list(inputs), is_leaf=is_jagged)
        leaves = [next(batches) if is_jagged(leaf) else leaf for leaf in leaves]
        self._inputs = pytree.tree_unflatten(leaves, structure)

    def run(self) -> _Found:
        """Run the model and return the lookups by feature."""
        with ExitStack() as stack, torch.no_grad():
            for path, module in self._model.named_modules():
                if isinstance(module, QuantizedCollection | nn.Embedding | nn.EmbeddingBag):
                    hook = partial(self._record, path)
                    handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                    stack.callback(handle.remove)
            self._model(*self._inputs)
        return self._found

    def _marked(
        self,
        name: str,
        batch: JaggedTensor | KeyedJaggedTensor,
        slots: _Slots,
        marked: set[int],
    ) -> JaggedTensor | KeyedJaggedTensor:
        """Return a batch with marked ids; each feature has at least one id per sample."""
        feature_slots = [i for i, (owner, _) in enumerate(slots) if owner == name]
        if not _has_ids(batch):
            self._ends += [self._ends[-1]] * len(feature_slots)
            return batch
        lengths_KB = batch.lengths().view(len(feature_slots), -1)
        num_ids = lengths_KB.sum(1, keepdim=True)
        lengths = lengths_KB.where(num_ids > 0, 1).flatten()
        values = []
        first = _first_mark(batch.values().dtype)
        for i, ids in zip(
            feature_slots, batch.values().split(num_ids.flatten().tolist()), strict=True
        ):
            count = len(ids) or lengths_KB.shape[1]
            start = self._ends[-1]
            self._ends.append(start + count)
            marks = torch.arange(start, start + count, device=ids.device, dtype=ids.dtype) + first
            feature_ids = ids if len(ids) else marks.new_zeros(count)
            values.append(marks * self._sign if i in marked else feature_ids)
        ids = torch.cat(values)
        weights = batch.weights_or_none()
        if weights is not None:
            weights = torch.ones(len(ids), dtype=weights.dtype, device=weights.device)
        if isinstance(batch, KeyedJaggedTensor):
            return KeyedJaggedTensor(batch.keys(), ids, weights, lengths)
        return JaggedTensor(ids, weights, lengths)

    def _record(
        self, path: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Record the marks that a lookup receives, and replace all ids by 0."""
        name, features = (None, args[0]) if args else next(iter(kwargs.items()))
        if isinstance(features, KeyedJaggedTensor):
            assert isinstance(module, QuantizedCollection)
            for key, batch in features.to_dict().items():
                for config in module.configs():
                    if key in config.feature_names:
                        rows = rows_left(config) if config.ids is None else None
                        lookup = _Lookup(rows, config.name, path)
                        self._note(batch.values(), lookup)
            zeros: object = features.with_values(torch.zeros_like(features.values()))
        elif isinstance(features, Tensor) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            self._note(features.flatten(), _Lookup(module.num_embeddings, path, path))
            zeros = torch.zeros_like(features)
        else:
            return args, kwargs
        return ((zeros, *args[1:]), kwargs) if name is None else (args, {**kwargs, name: zeros})

    def _note(self, values: Tensor, lookup: _Lookup) -> None:
        marks = values * self._sign - _first_mark(values.dtype)
        marks = marks[(marks >= 0) & (marks < self._ends[-1])]
        ends = torch.tensor(self._ends[1:], device=marks.device)
        for i in torch.searchsorted(ends, marks, right=True).unique().tolist():
            self._found.setdefault(i, set()).add(lookup)


def _first_mark(dtype: torch.dtype) -> int:
    return 1 << 30 if dtype is torch.int32 else 1 << 62


def _keys(name: str, batch: JaggedTensor | KeyedJaggedTensor) -> list[str]:
    return batch.keys() if isinstance(batch, KeyedJaggedTensor) else [name]


def _has_ids(batch: JaggedTensor | KeyedJaggedTensor) -> bool:
    """Return whether the ids of a batch can be marked."""
    if isinstance(batch, KeyedJaggedTensor) and batch.variable_stride_per_key():
        return False
    is_id = batch.values().dtype in (torch.int32, torch.int64) and batch.values().dim() == 1
    return is_id and batch.lengths().numel() > 0
