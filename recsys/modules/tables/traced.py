"""The lookup of a collection as one registered operation, for tracing, compilation and export.

`torch.fx`, `torch.compile` and `torch.export` record a collection's lookup as one call of
`torch.ops.recsys.look_up` on plain tensors. The program reads the ids of a batch at run time, so
ragged batches need no new compilation. The eager forward pass does not use the operation.

If the tables belong to a collection of the process, the operation runs that collection's lookup,
with its checks and kernels. A program that is loaded without the model looks up table by table with
PyTorch's operations. `torch.onnx.export` records the operations of `onnx_lookup.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.nn import functional

from recsys.kernels.lookup_batch import sum_bags
from recsys.kernels.types import PoolingType
from recsys.modules.tables.onnx_lookup import look_up_plainly
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from recsys.sparse.validate import is_proxy

if TYPE_CHECKING:
    from recsys.modules.tables.embedding_tables import TableCollection

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
    """Return whether a forward pass is being traced, compiled or exported.

    Args:
        features: The argument of the collection; `torch.fx` passes a proxy.
    """
    return torch.compiler.is_compiling() or is_proxy(features)


def is_exporting() -> bool:
    """Return whether `torch.export` traces this call.

    `torch.compile` of torch 2.11 assumes that `torch.compiler.is_exporting()` is true.
    """
    return torch.compiler._is_exporting_flag


def record(function: Callable[..., Any], features: object, *arguments: object) -> Any:
    """Call a function with a batch; `torch.fx` records it as one node of the graph.

    Args:
        function: A function of a Python module, which a graph can import.
        features: The batch, or its proxy.
        arguments: Further arguments.
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
        is_weighted: Multiply rows by the weights of the batch.
        tables: `[R, D]` weights.
        read: `F` features.
        table_of: `F` positions of tables.
        poolings: Pooling of each table.
        names: `F` keys of the result.
        dims: `F` widths of the result.
    """
    weights: Tensor | None = None
    if is_weighted:
        weights = features.weights()
    outputs = _look_up_in_graph(features, weights, tables, read, table_of, poolings, False)
    return KeyedTensor(names, dims, outputs[0])


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
        need_indices: Return the ids as weights.
        tables: `[R, D]` weights.
        read: `F` features.
        table_of: `F` positions of tables.
        poolings: NONE for each table.
        names: `F` keys of the result.
    """
    keys = features.keys()
    outputs = _look_up_in_graph(features, None, tables, read, table_of, poolings, need_indices)
    lengths_KB = features.lengths().view(len(keys), -1)
    result: dict[str, JaggedTensor] = {}
    for i in range(len(read)):
        ids: Tensor | None = None
        if need_indices:
            ids = outputs[len(read) + i]
        result[names[i]] = JaggedTensor(outputs[i], ids, lengths_KB[keys.index(read[i])])
    return result


def _look_up_in_graph(
    features: KeyedJaggedTensor,
    weights: Tensor | None,
    tables: list[Tensor],
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    if features.variable_stride_per_key():
        raise ValueError("A traced model takes batches with one batch size for all features.")
    keys, stride = features.keys(), features.stride()
    batch = tables, keys, stride, features.values(), features.lengths(), weights
    if not torch.jit.is_scripting():  # type: ignore[attr-defined]
        is_for_onnx = torch.onnx.is_in_onnx_export()  # TorchScript cannot compile this
        if is_for_onnx:
            return look_up_plainly(*batch, read, table_of, poolings, need_indices)
    outputs: list[Tensor] = torch.ops.recsys.look_up(*batch, read, table_of, poolings, need_indices)
    return outputs


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
    """Register a collection for traced lookups of its tables."""
    _collections.add(collection)


def _collection_of(tables: Sequence[Tensor], *reads: Sequence[object]) -> TableCollection | None:
    """Return the collection of this process that owns the tables, or None."""
    pointers = [*map(Tensor.data_ptr, tables)]
    key = (*pointers, *map(tuple, reads))
    collection = _found.get(key)
    if collection is not None and collection.is_linked_to(pointers):
        return collection
    for other in _collections:
        weights = other.table_weights().values()
        if [*map(Tensor.data_ptr, weights)] == pointers and other.reads() == key[-3:]:
            _found[key] = other
            return other
    return None


class _Call(NamedTuple):
    """The arguments of `look_up`."""

    tables: list[Tensor]
    keys: list[str]
    stride: int
    values: Tensor
    lengths: Tensor
    weights: Tensor | None
    read: list[str]
    table_of: list[int]
    poolings: list[str]
    need_indices: bool

    def batch(self) -> KeyedJaggedTensor:
        """Return the batch."""
        return KeyedJaggedTensor.from_parts(
            self.keys, self.values, self.weights, self.lengths, stride=self.stride
        )

    def collection(self) -> TableCollection | None:
        """Return the collection that owns the tables, or None."""
        return _collection_of(self.tables, self.read, self.table_of, self.poolings)


# disabled, as a graph may break at the operation; its body must not be compiled then
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_up(*arguments: Any) -> list[Tensor]:
    call = _Call(*arguments)
    collection = call.collection()
    with torch.no_grad():
        if collection is None:
            return _table_by_table(call)
        output = collection.forward(
            call.batch()
        )  # hooks of the module run where the module is called
        if isinstance(output, KeyedTensor):
            return [output.values()]
        rows = [jagged.values().clone() for jagged in output.values()]  # outputs must not overlap
        return rows + [jagged.weights().clone() for jagged in output.values() if call.need_indices]


def _table_by_table(call: _Call) -> list[Tensor]:
    parts = call.batch().to_dict()
    outputs: list[Tensor] = []
    for feature, table in zip(call.read, call.table_of, strict=True):
        bags, weight, pooling = parts[feature], call.tables[table], call.poolings[table]
        if pooling == PoolingType.NONE.name:
            outputs.append(functional.embedding(bags.values(), weight).float())
            continue
        summed = sum_bags(weight, bags.values(), bags.offsets(), bags.weights_or_none())
        if pooling == PoolingType.MEAN.name:
            summed = summed / bags.lengths().clamp(min=1).unsqueeze(1)
        outputs.append(summed)
    if call.poolings[0] == PoolingType.NONE.name:
        return outputs + [parts[f].values().clone() for f in call.read if call.need_indices]
    return [torch.cat(outputs, dim=1)]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _look_up_backward(gradients: list[Tensor], *arguments: Any) -> list[Tensor]:
    """Return the fp32 gradient of all tables end to end, and of the weights if there are any.

    The tables' gradients are one tensor, as outputs of an operation must not overlap.
    """
    call = _Call(*arguments)
    collection = call.collection()
    if collection is not None:
        with torch.no_grad():
            return collection.gradients(call.batch(), gradients)
    with torch.enable_grad():
        leaves = [table.detach().requires_grad_() for table in call.tables]
        inputs = list(leaves)
        if call.weights is not None:
            inputs.append(call.weights.detach().requires_grad_())
            call = call._replace(weights=inputs[-1])
        outputs = _table_by_table(call._replace(tables=leaves, need_indices=False))
        of_inputs = torch.autograd.grad(outputs, inputs, gradients[: len(outputs)])
        flat = torch.cat([gradient.flatten().float() for gradient in of_inputs[: len(leaves)]])
        return [flat, *of_inputs[len(leaves) :]]


def _shapes(*arguments: Any) -> list[Tensor]:
    call = _Call(*arguments)
    dims = [call.tables[table].shape[1] for table in call.table_of]
    new = partial(call.values.new_empty, dtype=torch.float32)
    if call.poolings[0] != PoolingType.NONE.name:
        return [new(call.stride, sum(dims))]
    sizes: dict[str, Any] = {}
    if len(call.keys) == 1:
        sizes[call.keys[0]] = call.values.shape[0]
    for feature in call.read:
        if feature not in sizes:
            sizes[feature] = torch.library.get_ctx().new_dynamic_size()
    rows = [new(sizes[feature], dim) for feature, dim in zip(call.read, dims, strict=True)]
    return rows + [call.values.new_empty(sizes[f]) for f in call.read if call.need_indices]


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
    results = torch.ops.recsys.look_up_backward(gradients, *parts)
    pieces = results[0].split([table.numel() for table in tables])
    of_tables = [
        piece.view(table.shape).to(table.dtype) for piece, table in zip(pieces, tables, strict=True)
    ]
    of_weights = None if weights is None else results[1]
    return of_tables, None, None, None, None, of_weights, *(None for _ in ctx.rest)


_LIBRARY.impl("look_up", _look_up, "CompositeExplicitAutograd")
_LIBRARY.impl("look_up_backward", _look_up_backward, "CompositeExplicitAutograd")
torch.library.register_fake("recsys::look_up", _shapes, lib=_LIBRARY)
torch.library.register_fake("recsys::look_up_backward", _shapes_backward, lib=_LIBRARY)
torch.library.register_autograd("recsys::look_up", _backward, setup_context=_keep, lib=_LIBRARY)
