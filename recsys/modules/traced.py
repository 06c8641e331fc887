"""A lookup as one registered operation, for what traces, compiles or exports a model.

`torch.fx`, `torch.compile` and `torch.export` see a collection's lookup as one call of
`torch.ops.recsys.look_up_bags` or `look_up_ids` on plain tensors: which ids a batch has is read
when the program runs, not when it is traced, so that ragged batches need no new compilation. The
eager forward pass does not come by here.

In a process in which the tables belong to a collection, the operation is that collection's own
lookup, with its checks and its kernels. A program that was exported, and loaded without the model,
looks up table by table with PyTorch's operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor, fx
from torch.nn import functional

from recsys.kernels.tbe_torch import sum_bags
from recsys.kernels.types import PoolingType
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

if TYPE_CHECKING:
    from recsys.modules.embedding_tables import TableCollection

__all__ = ["is_traced", "record"]


def is_traced(features: object) -> bool:
    """Return whether a forward pass is only traced, compiled or exported now.

    Args:
        features: What the collection was called with; `torch.fx` passes a proxy.
    """
    return torch.compiler.is_compiling() or isinstance(features, fx.Proxy)


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
    weights: Tensor | None = None
    if is_weighted:
        weights = features.weights()
    found = torch.ops.recsys.look_up(
        tables,
        features.keys(),
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
    keys, lengths = features.keys(), features.lengths()
    found = torch.ops.recsys.look_up(
        tables, keys, features.values(), lengths, None, read, table_of, poolings, need_indices
    )
    lengths_KB = lengths.view(len(keys), -1)
    result: dict[str, JaggedTensor] = {}
    for i in range(len(read)):
        ids: Tensor | None = None
        if need_indices:
            ids = found[len(read) + i]
        result[names[i]] = JaggedTensor(found[i], ids, lengths_KB[keys.index(read[i])])
    return result


# -- the operation ---------------------------------------------------------------------------------

_LOOK_UP = (
    "Tensor[] tables, str[] keys, Tensor values, Tensor lengths, Tensor? weights, str[] read, "
    "int[] table_of, str[] poolings, bool need_indices"
)
_LIBRARY = torch.library.Library("recsys", "FRAGMENT")
_LIBRARY.define(f"look_up({_LOOK_UP}) -> Tensor[]")
_LIBRARY.define(f"look_up_backward(Tensor[] gradients, {_LOOK_UP}) -> Tensor[]")

_collections: WeakSet[TableCollection] = WeakSet()
_found: WeakValueDictionary[tuple[Any, ...], TableCollection] = WeakValueDictionary()


def add_collection(collection: TableCollection) -> None:
    """Let traced lookups of a collection's tables be its own."""
    _collections.add(collection)


def _collection_of(
    tables: Sequence[Tensor], *reads: Sequence[object]
) -> TableCollection | None:
    """Return the collection whose tables these are, if it lives in this process."""
    key = (*map(Tensor.data_ptr, tables), *map(tuple, reads))
    found = _found.get(key)
    if found is None or found.traced_key() != key:
        found = next((other for other in _collections if other.traced_key() == key), None)
        if found is not None:
            _found[key] = found
    return found


def _batch(
    keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None
) -> KeyedJaggedTensor:
    stride = lengths.numel() // len(keys)
    return KeyedJaggedTensor.from_parts(keys, values, weights, lengths, stride=stride)


def _look_up(
    tables: list[Tensor],
    keys: list[str],
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    batch = _batch(keys, values, lengths, weights)
    own = _collection_of(tables, read, table_of, poolings)
    with torch.no_grad():
        if own is None:
            return _table_by_table(tables, batch, read, table_of, poolings, need_indices)
        found = own(batch)
        if isinstance(found, KeyedTensor):
            return [found.values()]
        rows = [jagged.values() for jagged in found.values()]
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


def _look_up_backward(
    gradients: list[Tensor],
    tables: list[Tensor],
    keys: list[str],
    values: Tensor,
    lengths: Tensor,
    weights: Tensor | None,
    read: list[str],
    table_of: list[int],
    poolings: list[str],
    need_indices: bool,
) -> list[Tensor]:
    """Return the gradients of the tables, and of the weights if there are any."""
    own = _collection_of(tables, read, table_of, poolings)
    if own is not None:
        with torch.no_grad():
            return own.gradients(_batch(keys, values, lengths, weights), gradients)
    with torch.enable_grad():
        leaves = [table.detach().requires_grad_() for table in tables]
        inputs = list(leaves)
        if weights is not None:
            weights = weights.detach().requires_grad_()
            inputs.append(weights)
        batch = _batch(keys, values, lengths, weights)
        found = _table_by_table(leaves, batch, read, table_of, poolings, False)
        return list(torch.autograd.grad(found, inputs, gradients[: len(found)]))


def _shapes(
    tables: list[Tensor],
    keys: list[str],
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
        return [new(lengths.shape[0] // len(keys), sum(dims))]
    sizes = {keys[0]: values.shape[0]} if len(keys) == 1 else {}
    for feature in read:
        if feature not in sizes:
            sizes[feature] = torch.library.get_ctx().new_dynamic_size()
    rows = [new(sizes[feature], dim) for feature, dim in zip(read, dims, strict=True)]
    return rows + [values.new_empty(sizes[feature]) for feature in read if need_indices]


def _shapes_backward(
    gradients: list[Tensor], tables: list[Tensor], *parts: Any
) -> list[Tensor]:
    weights = parts[3]
    return [torch.empty_like(part) for part in (*tables, weights) if part is not None]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Sequence[Tensor]) -> None:
    tables, keys, values, lengths, weights, *rest = inputs
    ctx.save_for_backward(*tables, values, lengths, weights)
    ctx.keys, ctx.rest = keys, rest


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    *tables, values, lengths, weights = ctx.saved_tensors
    parts = tables, ctx.keys, values, lengths, weights, *ctx.rest
    found = torch.ops.recsys.look_up_backward(gradients, *parts)
    of_weights = None if weights is None else found[-1]
    return found[: len(tables)], None, None, None, of_weights, *(None for _ in ctx.rest)


_LIBRARY.impl("look_up", _look_up, "CompositeExplicitAutograd")
_LIBRARY.impl("look_up_backward", _look_up_backward, "CompositeExplicitAutograd")
torch.library.register_fake("recsys::look_up", _shapes, lib=_LIBRARY)
torch.library.register_fake("recsys::look_up_backward", _shapes_backward, lib=_LIBRARY)
torch.library.register_autograd("recsys::look_up", _backward, setup_context=_keep, lib=_LIBRARY)
