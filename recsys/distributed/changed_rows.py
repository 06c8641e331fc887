"""Rows of a model's tables that changed, for consumers that save, publish or count changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.state.table_shards import TableShards
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.modules.hashed_ids import check_rows_in_memory
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.embedding_tables import TableCollection

__all__ = ["ChangedRows", "TablePart", "table_parts"]


@final
class TablePart(NamedTuple):
    """Rows of a table in a lookup of this rank."""

    name: str
    """Name of the weight in the state dict."""
    kernel: TableBatchedEmbedding
    place: int
    """Position of the table in the kernel."""
    rows: range
    columns: slice
    ids: TableIndex | None
    """Index of hashed ids, or None."""


@final
class ChangedRows:
    """Rows of all embedding tables that changed since they were last taken, for one consumer.

    A table is an unsharded one or this rank's shards of it, static or with hashed ids. A row
    changes when its weights or its optimizer state are written: by an update in backward, by
    `step()` of deferred tables, by a load, or when a hashed row gets a new id. A row with a hashed
    id also changes when a training batch uses it, as its last use is written. Rows that are marked
    may have equal values. All rows of a table count as changed after a load, a `reshard` of its
    collection, the sync of a `DMPCollection`, and a step of a torch optimizer that is not attached
    in backward. Writes through `parameter.data` are not seen.

    Each consumer has its own marks; a table can have eight. Marks cost one byte per row, and
    nothing without a consumer. Call the methods between two steps, in the thread that trains.

    Args:
        model: The model, sharded or not. Its tables may move to other ranks or devices later. It is
            not kept alive.

    Raises:
        ValueError: A table has eight consumers, or may have rows on the disk.

    Example:
        >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from recsys.optim import RowWiseAdagrad
        >>> from recsys.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
        >>> from recsys.sparse import KeyedJaggedTensor
        >>> films = EmbeddingBagConfig(9, 2, "films", feature_names=["film"])
        >>> model = EmbeddingBagCollection(tables=[films])
        >>> apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
        >>> changed = ChangedRows(model)
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([7, 3]), lengths=torch.tensor([2]))
        >>> model(batch).values().sum().backward()
        >>> changed.take()
        {'embedding_bags.films.weight': tensor([3, 7])}
        >>> changed.take()["embedding_bags.films.weight"].numel()
        0
    """

    def __init__(self, model: nn.Module) -> None:
        check_rows_in_memory(model, "A model whose changed rows are saved, published or counted")
        self._model = weakref.ref(model)  # chains of checkpoints must not keep a model alive
        self._all = False
        for part in table_parts(model):
            if not part.kernel.marks.knows(self):
                part.kernel.marks.add(self)

    def take(self) -> dict[str, Tensor]:
        """Return the rows that changed since the last call or the construction, and forget them.

        Returns:
            int64 `[K]` on the table's device by the name of the table's weight in the state dict:
            ascending row numbers of the whole table, of this rank's shards only. Ranks that own
            other columns of the same rows return equal rows. A table without a shard on this rank
            is missing.
        """
        taken: dict[int, list[Tensor]] = {}
        changed: dict[str, list[tuple[int, Tensor]]] = {}
        for part in self._parts():
            marks = part.kernel.marks
            if id(marks) not in taken:
                is_new = not marks.knows(self)  # a lookup that was built since
                if is_new:
                    marks.add(self)
                if is_new or self._all:
                    marks.mark_all(self)
                taken[id(marks)] = marks.take(self)
            changed.setdefault(part.name, []).append(
                (part.rows.start, taken[id(marks)][part.place])
            )
        self._all = False
        return {name: _rows_of(parts) for name, parts in changed.items()}

    def _parts(self) -> Iterator[TablePart]:
        model = self._model()
        return iter(()) if model is None else table_parts(model)

    def mark_all(self) -> None:
        """Have the next `take` return all rows, for example as the last rows were not saved."""
        self._all = True

    def close(self) -> None:
        """Free the marks; `take` must not be called any more."""
        for part in self._parts():
            part.kernel.marks.remove(self)


def _rows_of(parts: list[tuple[int, Tensor]]) -> Tensor:
    """Return the marked rows of a table's shards: columns of the same rows are joined."""
    by_row: dict[tuple[int, int], Tensor] = {}
    for first, marked in parts:
        key = first, marked.numel()
        by_row[key] = by_row[key] | marked if key in by_row else marked
    rows = [marked.nonzero().flatten().add_(first) for (first, _), marked in by_row.items()]
    return rows[0] if len(rows) == 1 else torch.cat(rows).unique()


def table_parts(model: nn.Module) -> Iterator[TablePart]:
    """Yield the parts of all embedding tables, sharded or not, that this rank has.

    Args:
        model: The model.
    """
    for path, module in get_unwrapped_module(model).named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, TableShards):
            for shard in module.shards:
                rect = shard.rect
                rows, columns = (
                    range(rect.row_start, rect.row_end),
                    slice(rect.col_start, rect.col_end),
                )
                name = f"{prefix}weight"
                yield TablePart(name, shard.kernel, shard.place, rows, columns, shard.index)
        elif isinstance(module, TableCollection):
            names = {id(param): name for name, param in module.named_parameters()}
            configs = module.configs()
            for group in module.marked_lookups():
                for place, (table, parameter) in enumerate(
                    zip(group.tables, group.parameters, strict=True)
                ):
                    name, config = prefix + names[id(parameter)], configs[table]
                    index = None if config.ids is None else module.table(config.name).index
                    rows = range(len(parameter))
                    yield TablePart(name, group.tbe, place, rows, slice(None), index)
