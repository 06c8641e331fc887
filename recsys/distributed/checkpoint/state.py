"""State of a model and its optimizer, by names that do not depend on the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.tensor import DTensor

from recsys.base.arguments import path_of, wrong_type
from recsys.distributed.checkpoint.errors import CheckpointError
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.ranks.env import ShardingEnv
from recsys.distributed.shard import names_excluded_from_ddp, sharded_names
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.stages.lookup import LocalShard
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.state.table_shards import TableShards
from recsys.modules.ids.table_index import logs_are_saved
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.optim.keyed import KeyedOptimizer

_BLOCK_BYTES = 64 << 20


def checked_path(function: str, path: object, model: object, optimizer: object = None) -> Path:
    """Return the path; raise unless path, model and optimizer have the right types.

    Args:
        function: Name of the public function, for messages.
        path: Text or a pathlib.Path.
        model: An nn.Module.
        optimizer: A KeyedOptimizer, or None.

    Raises:
        TypeError: An argument has another type; the error names it.
        ValueError: The path is empty.
    """
    if isinstance(path, nn.Module):
        raise TypeError(
            f"{function}.path must be a path, as text or pathlib.Path; received a "
            f"{type(path).__name__}. The path is the first argument: {function}(path, model)."
        )
    checked = path_of(f"{function}.path", path)
    if not isinstance(model, nn.Module):
        wrong_type(f"{function}.model", "an nn.Module", model)
    if not isinstance(optimizer, KeyedOptimizer | None):
        raise TypeError(
            f"{function}.optimizer must be a KeyedOptimizer; received a "
            f"{type(optimizer).__qualname__}. Wrap a torch optimizer by KeyedOptimizerWrapper, and "
            "join several by CombinedOptimizer, both of recsys.optim.keyed."
        )
    return checked


def env_of(model: nn.Module) -> ShardingEnv:
    """Return the ranks that share the model: the ranks it is sharded over, otherwise all ranks."""
    for module in model.modules():
        if isinstance(env := getattr(module, "env", None), ShardingEnv):
            return env
    # a job may have ended its process group while rank 0 continues with its own model
    return ShardingEnv.default() if dist.is_initialized() else ShardingEnv.from_local()


def state_of(model: nn.Module, optimizer: KeyedOptimizer | None) -> dict[str, Any]:
    """Return the live values to save, or to load into.

    Raises:
        CheckpointError: State that a torch optimizer keeps for a shard has no position in the whole
            table.
    """
    with logs_are_saved():
        state: dict[str, Any] = {"model": model.state_dict()}
    if optimizer is not None:
        state["optimizer"] = {**optimizer.state_dict(), "state": _join_parts(model, optimizer)}
    return state


def own_values(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return the names of values that may differ from rank to rank though they are not sharded.

    These are buffers, such as the statistics of a batch norm, extra state of modules, and
    parameters that DistributedDataParallel ignores.

    Args:
        model: The model.
        names: Names in its state dict.
    """
    unwrapped = get_unwrapped_module(model)
    ignored = names_excluded_from_ddp(unwrapped) - sharded_names(unwrapped)
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name for name in names if name in ignored or name not in parameters}


def drop_own_values(model: nn.Module, state: dict[str, Any]) -> None:
    """Remove the values of a state that only rank 0 saves, whose buffers training continues with.

    Args:
        model: The model.
        state: Result of `state_of`, on another rank than rank 0.
    """
    values = state["model"]
    whole = (
        name for name, value in values.items() if not isinstance(value, ShardedTable | DTensor)
    )
    dropped = own_values(model, whole)
    state["model"] = {name: value for name, value in values.items() if name not in dropped}
    if "optimizer" in state:
        states = state["optimizer"]["state"]
        state["optimizer"]["state"] = {n: of for n, of in states.items() if n not in dropped}


def tables_without(model: nn.Module, optimizer: KeyedOptimizer | None) -> list[str]:
    """Return the tables whose optimizer state `optimizer` does not contain."""
    known = set() if optimizer is None else set(map(id, optimizer.params.values()))
    stateless = []
    for path, module in get_unwrapped_module(model).named_modules():
        stateful: Iterable[tuple[str, Tensor]] = ()
        if isinstance(module, ShardedCollection):
            state = module.fused_optimizer.state_dict()["state"]
            owned = module.fused_optimizer.params.items()
            stateful = (item for item in owned if state.get(item[0]))
        elif isinstance(module, TableCollection):
            tables = {id(weight): name for name, weight in module.table_weights().items()}
            states = module.optimizer_states()
            params = module.named_parameters()
            stateful = (item for item in params if states.get(tables.get(id(item[1]), "")))
        names = (name for name, parameter in stateful if id(parameter) not in known)
        stateless += [f"{path}.{name}" if path else name for name in names]
    return stateless


def parts_of_value(value: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
    """Return offsets and values of this rank's shards; a plain tensor is one shard."""
    if isinstance(value, ShardedTable):
        return [(offsets, part) for offsets, part in value.local_shards()]
    return [((0,) * value.dim(), value.detach())]


def values_with_rows(weight: str, state: Mapping[str, Any]) -> dict[tuple[str, ...], Tensor]:
    """Return the values of a table that change with its rows, by their keys in the state.

    Included: weight, row-wise optimizer state, id index. Excluded: the sketch of `AtLeast`, which
    changes even if rows do not.

    Args:
        weight: Name of its weight.
        state: State of the model and its optimizer.
    """
    table = state["model"][weight]
    values: dict[tuple[str, ...], Tensor] = {("model", weight): table}
    for key in ("ids", "last_used", "seen"):
        name = f"{weight.removesuffix('weight')}index.{key}"
        if name in state["model"]:
            values["model", name] = state["model"][name]
    for key, value in state.get("optimizer", {}).get("state", {}).get(weight, {}).items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == table.shape[0]:
            values["optimizer", "state", weight, key] = value
    return values


def flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of nested state by their names in a checkpoint."""
    values: dict[str, Any] = flatten_state_dict(dict(state))[0]
    return values


def in_blocks(value: Any) -> Any:
    """Return nested state with each large tensor split into row blocks of at most 64 MiB.

    The blocks of a table start at the same rows under every plan. So a few rows can be read without
    the rest, and a range of rows of all columns without reading a block twice. Writing a value on a
    GPU needs little memory of the host.
    """
    if isinstance(value, dict):
        return {name: in_blocks(member) for name, member in value.items()}
    if type(value) not in (Tensor, nn.Parameter, ShardedTable) or value.dim() == 0:
        return value
    row_bytes = max(value.shape[1:].numel() * value.element_size(), 1)
    step = max(_BLOCK_BYTES // row_bytes, 1)
    is_sharded = isinstance(value, ShardedTable)
    if value.shape[0] <= step or not (is_sharded or value.layout is torch.strided):
        return value
    whole = [((0,) * value.dim(), value)]
    shards = []
    for (first, *columns), part in value.local_shards() if is_sharded else whole:
        end = first + part.shape[0]
        starts = [first, *range(first - first % step + step, end, step)] if end > first else []
        for start, stop in zip(starts, [*starts[1:], end], strict=False):
            shards.append(((start, *columns), part[start - first : stop - first]))
    return ShardedTable(value.shape, shards, dtype=value.dtype, device=value.device)


def whole_names(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, str]:
    """Return the names of the optimizer's parameters; for a shard, the name of the whole table."""
    parts = _parts_of(model, optimizer)
    return {name: parts[name].whole if name in parts else name for name in optimizer.params}


# -- torch optimizers of sharded tables ------------------------------------------------------------


@final
class _Part(NamedTuple):
    """A parameter that is a shard of a table."""

    whole: str
    """Name of the whole table in the optimizer."""
    table: TableShards
    shard: LocalShard


def _parts_of(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, _Part]:
    """Return the optimizer's parameters that are shards of tables, by name."""
    places = {
        id(shard.parameter): (f"_{i}" if i else "", table, shard)
        for table in model.modules()
        if isinstance(table, TableShards) and table.table.rects
        for i, shard in enumerate(table.shards)
    }
    return {
        name: _Part(name.removesuffix(places[id(param)][0]), *places[id(param)][1:])
        for name, param in optimizer.params.items()
        if id(param) in places
    }


def _join_parts(model: nn.Module, optimizer: KeyedOptimizer) -> dict[str, dict[str, Any]]:
    """Return the optimizer's live state, with the state of shards joined to whole tables."""
    state = optimizer.state_dict()["state"]
    parts = _parts_of(model, optimizer)
    joined = {name: values for name, values in state.items() if name not in parts}
    shards: dict[tuple[str, str, tuple[int, ...]], list[tuple[tuple[int, ...], Tensor]]] = {}
    for name, (whole, table, shard) in parts.items():
        for key, value in state.get(name, {}).items():
            if isinstance(value, dict | list | tuple):
                raise CheckpointError(
                    f"State {key!r} of {name!r}, a part of a table, must be a tensor or a number "
                    f"to be saved for the whole table; received a {type(value).__name__}. "
                    "Save without the optimizer, or attach one by apply_optimizer_in_backward."
                )
            if not isinstance(value, Tensor) or value.dim() == 0:
                joined.setdefault(whole, {})[key] = value
                continue
            is_of_rows = value.dim() == 1 and shard.rect.num_cols == table.table.dim
            dims = 1 if is_of_rows else 2
            if value.shape != shard.parameter.shape[:dims]:
                raise CheckpointError(
                    f"State {key!r} of {name!r} must have one value per element, or per row of "
                    f"whole width, to be saved for the whole table; received shape "
                    f"{tuple(value.shape)} for a part of shape {tuple(shard.parameter.shape)}. "
                    "Save without the optimizer, or attach one by apply_optimizer_in_backward."
                )
            size, offsets = table.table.shape[:dims], shard.rect.offsets[:dims]
            shards.setdefault((whole, key, size), []).append((offsets, value))
    for (whole, key, size), rank_parts in shards.items():
        like = rank_parts[0][1]
        table_state = ShardedTable(size, rank_parts, dtype=like.dtype, device=like.device)
        joined.setdefault(whole, {})[key] = table_state
    return joined


def load_optimizer(model: nn.Module, optimizer: KeyedOptimizer, loaded: dict[str, Any]) -> None:
    """Load the loaded state into the optimizer; joined tensors have been filled in place."""
    state = optimizer.state_dict()["state"]
    parts = _parts_of(model, optimizer)
    wholes = {part.whole for part in parts.values()}
    filled = {n: values for n, values in loaded["state"].items() if n not in wholes}
    for name in parts.keys() & state.keys():
        values = loaded["state"][parts[name].whole]
        filled[name] = {
            key: state[name][key] if isinstance(value, ShardedTable) else value
            for key, value in values.items()
        }
    optimizer.load_state_dict({**loaded, "state": filled})
