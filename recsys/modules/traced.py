"""A lookup as one registered operation, for what traces, compiles or exports a model.

`torch.fx`, `torch.compile` and `torch.export` see a collection's lookup as one call of
`torch.ops.recsys.look_up` on plain tensors: which ids a batch has is read when the program runs,
not when it is traced, so that ragged batches need no new compilation. The eager forward pass does
not come by here.

In a process in which the tables belong to a collection, the operation is that collection's own
lookup, with its checks and its kernels. A program that was exported, and loaded without the model,
looks up table by table with PyTorch's operations. `torch.onnx.export` records those of
`recsys.modules.onnx_lookup` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.nn import functional

from recsys.kernels.lookup_batch import sum_bags
from recsys.kernels.types import PoolingType
from recsys.modules.onnx_lookup import look_up_plainly
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.validate import is_proxy

if TYPE_CHECKING:
    from recsys.modules.embedding_tables import TableCollection

__all__ = [
    "add_collection",
    "is_exporting",
    "is_proxy",
    "is_traced",
    "look_up_bags",
    "look_up_sequences",
    "record",
]


def is_traced(features: object) -> bool:
    """Return whether a forward pass is only traced, compiled or exported now.

    Args:
        features: What the collection was called with; `torch.fx` passes a proxy.
    """
    return torch.compiler.is_compiling() or is_proxy(features)


def is_exporting() -> bool:
    """Return whether `torch.export` follows this call; under torch 2.11, too.

    There `torch.compile` takes `torch.compiler.is_exporting()` for true, but not what it returns.
    """
    return torch.compiler._is_exporting_flag


def record(function: Callable[..., Any], features: object, *arguments: object) -> Any:
    """Call a function of a batch; under `torch.fx`, make it one node of the graph.

    Args:
        function: Of the batch and the arguments; of a module, so that a graph can name it.
        features: The batch, or its proxy.
        arguments: What else it takes.
    """
    if isinstance(features, fx.Proxy):
        return features.tracer.create_proxy("call_function", function, (features, *arguments), {})
    return function(features, *arguments)


def look_up_bags(
    features: KeyedJaggedTensor,
    is_weighted: bool,
    tables: list[Tensor],
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    names: list[str],
    dims: list[int],
) -> KeyedTensor:
    """Look up bags in tables and pool them: the forward pass of an EmbeddingBagCollection.

    Args:
        features: One batch size for all keys.
        is_weighted: Whether its weights count.
        tables: `[R, D]` weights.
        read: `F` features.
        table_of: `F` numbers of tables.
        poolings: Of each table.
        names: `F` keys of the result.
        dims: `F` widths of the result.
    """
    _check_one_batch_size(features)
    weights: Tensor | None = None
    if is_weighted:
        weights = features.weights()
    found = _look_up_in_graph(
        tables,
        features.keys(),
        features.stride(),
        features.values(),
        features.lengths(),
        weights,
        read,
        table_of,
        poolings,
        False,
    )
    return KeyedTensor(names, dims, found[0])


def look_up_sequences(
    features: KeyedJaggedTensor,
    need_indices: bool,
    tables: list[Tensor],
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    names: list[str],
) -> dict[str, JaggedTensor]:
    """Look up ids in tables: the forward pass of an EmbeddingCollection.

    Args:
        features: One batch size for all keys.
        need_indices: Whether the result holds the ids, as weights.
        tables: `[R, D]` weights.
        read: `F` features.
        table_of: `F` numbers of tables.
        poolings: Of each table: NONE.
        names: `F` keys of the result.
    """
    _check_one_batch_size(features)
    keys, lengths = features.keys(), features.lengths()
    found = _look_up_in_graph(
        tables,
        keys,
        features.stride(),
        features.values(),
        lengths,
        None,
        read,
        table_of,
        poolings,
        need_indices,
    )
    lengths_KB = lengths.view(len(keys), -1)
    result: dict[str, JaggedTensor] = {}
    for i in range(len(read)):
        ids: Tensor | None = None
        if need_indices:
            ids = found[len(read) + i]
        result[names[i]] = JaggedTensor(found[i], ids, lengths_KB[keys.index(read[i])])
    return result


def _look_up_in_graph(
    tables: list[Tensor],
    keys: list[str],
    stride: int,
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    batch = tables, keys, stride, values, lengths, weights
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        is_for_onnx = torch.onnx.is_in_onnx_export()  # TorchScript cannot compile this
        if is_for_onnx:
            return look_up_plainly(*batch, read, table_of, poolings, need_indices)
    found: list[Tensor] = torch.ops.recsys.look_up(*batch, read, table_of, poolings, need_indices)
    return found


def _check_one_batch_size(features: KeyedJaggedTensor) -> None:
    if features.variable_stride_per_key():
        raise ValueError("A traced model takes batches with one batch size for all features.")


# -- the operation ---------------------------------------------------------------------------------

_LOOK_UP = (
    "Tensor[] tables, str[] keys, SymInt stride, Tensor values, Tensor lengths, Tensor? weights, "
    "str[] read, int[] table_of, str[] poolings, bool need_indices"
)
_LIBRARY = torch.library.Library("recsys", "FRAGMENT")
_LIBRARY.define(f"look_up({_LOOK_UP}) -> Tensor[]")
_LIBRARY.define(f"look_up_backward(Tensor[] gradients, {_LOOK_UP}) -> Tensor[]")

_collections: WeakSet[TableCollection] = WeakSet()
_found: WeakValueDictionary[tuple[Any, ...], TableCollection] = WeakValueDictionary()


def add_collection(collection: TableCollection) -> None:
    """Let traced lookups of a collection's tables be its own."""
    _collections.add(collection)


def _collection_of(tables: Sequence[Tensor], *reads: Sequence[object]) -> TableCollection | None:
    """Return the collection whose tables these are, if it lives in this process."""
    pointers = [*map(Tensor.data_ptr, tables)]
    key = (*pointers, *map(tuple, reads))
    found = _found.get(key)
    if found is not None and found.is_linked_to(pointers):
        return found
    for other in _collections:
        weights = other.table_weights().values()
        if [*map(Tensor.data_ptr, weights)] == pointers and other.reads() == key[-3:]:
            _found[key] = other
            return other
    return None


# disabled, for where a graph breaks at the operation: what it calls is not compiled then
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_up(
    tables: list[Tensor],
    keys: list[str],
    stride: int,
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    batch = KeyedJaggedTensor.from_parts(keys, values, weights, lengths, stride=stride)
    own = _collection_of(tables, read, table_of, poolings)
    with torch.no_grad():
        if own is None:
            return _table_by_table(tables, batch, read, table_of, poolings, need_indices)
        found = own.forward(batch)  # hooks of the module run where it is called
        if isinstance(found, KeyedTensor):
            return [found.values()]
        rows = [jagged.values().clone() for jagged in found.values()]  # apart from each other
        return rows + [jagged.weights().clone() for jagged in found.values() if need_indices]


def _table_by_table(
    tables: Sequence[Tensor],
    batch: KeyedJaggedTensor,
    read: Sequence[str],
    table_of: Sequence[int],
    poolings: Sequence[str],
    need_indices: bool,
) -> list[Tensor]:
    parts = batch.to_dict()
    found: list[Tensor] = []
    for feature, table in zip(read, table_of, strict=True):
        bags = parts[feature]
        if poolings[table] == PoolingType.NONE.name:
            found.append(functional.embedding(bags.values(), tables[table]).float())
            continue
        weights, lengths = bags.weights_or_none(), bags.lengths()
        summed = sum_bags(tables[table], bags.values(), bags.offsets(), weights)
        if poolings[table] == PoolingType.MEAN.name:
            summed = summed / lengths.clamp(min=1).unsqueeze(1)
        found.append(summed)
    if poolings[0] == PoolingType.NONE.name:
        return found + [parts[feature].values().clone() for feature in read if need_indices]
    return [torch.cat(found, dim=1)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_up_backward(
    gradients: list[Tensor],
    tables: list[Tensor],
    keys: list[str],
    stride: int,
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    """Return the gradient of all tables end to end, fp32, and of the weights if there are any.

    What an operation returns may not overlap: not a gradient for each table.
    """
    own = _collection_of(tables, read, table_of, poolings)
    if own is not None:
        with torch.no_grad():
            batch = KeyedJaggedTensor.from_parts(keys, values, weights, lengths, stride=stride)
            return own.gradients(batch, gradients)
    with torch.enable_grad():
        leaves = [table.detach().requires_grad_() for table in tables]
        inputs = list(leaves)
        if weights is not None:
            weights = weights.detach().requires_grad_()
            inputs.append(weights)
        batch = KeyedJaggedTensor.from_parts(keys, values, weights, lengths, stride=stride)
        found = _table_by_table(leaves, batch, read, table_of, poolings, False)
        of_inputs = torch.autograd.grad(found, inputs, gradients[: len(found)])
        flat = torch.cat([gradient.flatten().float() for gradient in of_inputs[: len(tables)]])
        return [flat, *of_inputs[len(tables) :]]


def _shapes(
    tables: list[Tensor],
    keys: list[str],
    stride: int,
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    dims = [tables[table].shape[1] for table in table_of]
    new = partial(values.new_empty, dtype=torch.float32)
    if poolings[0] != PoolingType.NONE.name:
        return [new(stride, sum(dims))]
    sizes: dict[str, Any] = {keys[0]: values.shape[0]} if len(keys) == 1 else {}
    for feature in read:
        if feature not in sizes:
            sizes[feature] = torch.library.get_ctx().new_dynamic_size()
    rows = [new(sizes[feature], dim) for feature, dim in zip(read, dims, strict=True)]
    return rows + [values.new_empty(sizes[feature]) for feature in read if need_indices]


def _shapes_backward(gradients: list[Tensor], tables: list[Tensor], *parts: Any) -> list[Tensor]:
    weights = parts[4]
    flat = tables[0].new_empty(sum(table.numel() for table in tables), dtype=torch.float32)
    return [flat] if weights is None else [flat, torch.empty_like(weights)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    tables, keys, stride, values, lengths, weights, *rest = inputs
    ctx.save_for_backward(*tables, values, lengths, weights)
    ctx.keys, ctx.stride, ctx.rest = keys, stride, rest


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    *tables, values, lengths, weights = ctx.saved_tensors
    parts = tables, ctx.keys, ctx.stride, values, lengths, weights, *ctx.rest
    found = torch.ops.recsys.look_up_backward(gradients, *parts)
    pieces = found[0].split([table.numel() for table in tables])
    of_tables = [
        piece.view(table.shape).to(table.dtype) for piece, table in zip(pieces, tables, strict=True)
    ]
    of_weights = None if weights is None else found[1]
    return of_tables, None, None, None, None, of_weights, *(None for _ in ctx.rest)


_LIBRARY.impl("look_up", _look_up, "CompositeExplicitAutograd")
_LIBRARY.impl("look_up_backward", _look_up_backward, "CompositeExplicitAutograd")
torch.library.register_fake("recsys::look_up", _shapes, lib=_LIBRARY)
torch.library.register_fake("recsys::look_up_backward", _shapes_backward, lib=_LIBRARY)
torch.library.register_autograd("recsys::look_up", _backward, setup_context=_keep, lib=_LIBRARY)
