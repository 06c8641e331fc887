"""TorchRec's tracker of changed rows, over `ChangedRows`, and its store of lookups."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from recsys.distributed.changed_rows import ChangedRows
from recsys.distributed.model_parallel import get_unwrapped_module
from recsys.distributed.sharded.collection import ShardedCollection
from recsys.modules.tables.embedding_tables import TableCollection


class UpdateMode(enum.Enum):
    """State of an id that several lookups contain: none, of the first, or of the last."""

    NONE = "none"
    FIRST = "first"
    LAST = "last"


class TrackingMode(enum.Enum):
    """States that a tracker returns with the rows; only `ID_ONLY` is supported."""

    ID_ONLY = "id_only"
    EMBEDDING = "embedding"
    MOMENTUM_LAST = "momentum_last"
    MOMENTUM_DIFF = "momentum_diff"
    ROWWISE_ADAGRAD = "rowwise_adagrad"


@dataclass
class UniqueRows:
    """Rows, each once.

    Args:
        ids: Row numbers, int64 `[K]`.
        states: Their states, `[K, ...]`, or None.
    """

    ids: Tensor
    states: Tensor | None


@dataclass
class IndexedLookup:
    """Ids of a batch.

    Args:
        batch_idx: Number of the batch.
        ids: Ids, `[N]`.
        states: Their states, `[N, ...]`, or None.
        compact: Without an effect.
    """

    batch_idx: int
    ids: Tensor
    states: Tensor | None
    compact: bool = False


@dataclass
class DeltaTrackerConfig:
    """Arguments of a `ModelDeltaTracker`: see there.

    Args:
        tracking_mode: `mode`.
        consumers: `consumers`.
        delete_on_read: Without an effect.
        auto_compact: Without an effect.
        fqns_to_skip: `fqns_to_skip`.
    """

    tracking_mode: TrackingMode = TrackingMode.ID_ONLY
    consumers: list[str] | None = None
    delete_on_read: bool = True
    auto_compact: bool = False
    fqns_to_skip: list[str] = field(default_factory=list)


class DeltaStore:
    """Ids of batches by table.

    Args:
        updateMode: State that is kept of an id.

    Attributes:
        per_fqn_lookups: Lookups of each table, by number of the batch.

    Example:
        >>> store = DeltaStore(UpdateMode.LAST)
        >>> store.append(0, "films", torch.tensor([5, 3]), torch.tensor([1.0, 2.0]))
        >>> store.append(1, "films", torch.tensor([5]), torch.tensor([9.0]))
        >>> store.get_unique()["films"]
        UniqueRows(ids=tensor([3, 5]), states=tensor([2., 9.]))
    """

    def __init__(self, updateMode: UpdateMode = UpdateMode.NONE) -> None:
        self.updateMode = updateMode
        self.per_fqn_lookups: dict[str, list[IndexedLookup]] = {}

    def append(
        self,
        batch_idx: int,
        fqn: str,
        ids: Tensor,
        states: Tensor | None = None,
        raw_ids: Tensor | None = None,
        runtime_meta: Tensor | None = None,
    ) -> None:
        """Add the ids of a batch. Numbers of the batches of a table ascend.

        Args:
            batch_idx: Number of the batch.
            fqn: Path of the table.
            ids: Ids, `[N]`.
            states: Their states, `[N, ...]`; None in mode NONE.
            raw_ids: Without an effect.
            runtime_meta: Without an effect.
        """
        self.per_fqn_lookups.setdefault(fqn, []).append(IndexedLookup(batch_idx, ids, states))

    def delete(self, up_to_idx: int | None = None) -> None:
        """Delete the batches before a number; None: all."""
        if up_to_idx is None:
            self.per_fqn_lookups = {}
            return
        for fqn, lookups in self.per_fqn_lookups.items():
            kept = [lookup for lookup in lookups if lookup.batch_idx >= up_to_idx]
            self.per_fqn_lookups[fqn] = kept

    def compact(self, start_idx: int, end_idx: int) -> None:
        """Join the batches of a range of numbers to one batch with the first number.

        Raises:
            ValueError: The range is empty, or states are missing or present against the mode.
        """
        if start_idx >= end_idx:
            raise ValueError(
                f"start_idx must be below end_idx; received {start_idx} and {end_idx}."
            )
        for fqn, lookups in self.per_fqn_lookups.items():
            inner = [lookup for lookup in lookups if start_idx <= lookup.batch_idx < end_idx]
            if len(inner) > 1:
                rows = self._unique(inner)
                self.per_fqn_lookups[fqn] = [
                    *(lookup for lookup in lookups if lookup.batch_idx < start_idx),
                    IndexedLookup(start_idx, rows.ids, rows.states),
                    *(lookup for lookup in lookups if lookup.batch_idx >= end_idx),
                ]

    def get_indexed_lookups(self, start_idx: int, end_idx: int) -> dict[str, list[IndexedLookup]]:
        """Return the batches of a range of numbers, by table."""
        return {
            fqn: [lookup for lookup in lookups if start_idx <= lookup.batch_idx < end_idx]
            for fqn, lookups in self.per_fqn_lookups.items()
        }

    def get_unique(self, from_idx: int = 0) -> dict[str, UniqueRows]:
        """Return the ids of batches from a number on, each once and ascending, by table.

        Raises:
            ValueError: States are missing or present against the mode.
        """
        return {
            fqn: self._unique([lookup for lookup in lookups if lookup.batch_idx >= from_idx])
            for fqn, lookups in self.per_fqn_lookups.items()
        }

    def _unique(self, lookups: Sequence[IndexedLookup]) -> UniqueRows:
        states = [lookup.states for lookup in lookups if lookup.states is not None]
        if len(states) != (0 if self.updateMode is UpdateMode.NONE else len(lookups)):
            raise ValueError(
                "states must be given with all ids, or with none in mode NONE; received "
                f"{len(states)} states of {len(lookups)} batches in mode {self.updateMode.name}."
            )
        if not lookups:
            return UniqueRows(torch.empty(0, dtype=torch.int64), None)
        ids = torch.cat([lookup.ids for lookup in lookups])
        if not states:
            return UniqueRows(ids.unique(), None)
        ordered, order = ids.sort(stable=True)
        differ, end = ordered[1:] != ordered[:-1], ordered.new_ones(1, dtype=torch.bool)
        parts = [differ, end] if self.updateMode is UpdateMode.LAST else [end, differ]
        chosen = order[torch.cat(parts)] if ids.numel() else order
        return UniqueRows(ids[chosen], torch.cat(states)[chosen])


class ModelDeltaTracker:
    """Rows of a model's tables that changed, for several consumers: `ChangedRows` by name.

    A row changes at its update, in training. Hashed ids count by their rows. Call it between two
    steps. Up to eight consumers can read a table.

    Args:
        model: The model, sharded or not.
        consumers: Names of the consumers; None: one, "default".
        delete_on_read: Without an effect: each consumer has marks of its own.
        auto_compact: Without an effect: a row has one mark.
        mode: `TrackingMode.ID_ONLY`. Values of the rows are in the model's state dict.
        fqns_to_skip: Parts of the paths of tables that are left out.

    Raises:
        ValueError: The mode is another one, or there are more than eight consumers.

    Example:
        >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> from recsys.optim import apply_optimizer_in_backward
        >>> films = EmbeddingBagConfig(9, 2, "films", feature_names=["film"])
        >>> model = EmbeddingBagCollection(tables=[films])
        >>> apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        >>> tracker = ModelDeltaTracker(model)
        >>> batch = KeyedJaggedTensor(["film"], torch.tensor([7, 3]), lengths=torch.tensor([2]))
        >>> model(batch).values().sum().backward()
        >>> tracker.get_unique_ids()
        {'embedding_bags.films': tensor([3, 7])}
    """

    DEFAULT_CONSUMER: ClassVar[str] = "default"

    def __init__(
        self,
        model: nn.Module,
        consumers: list[str] | None = None,
        delete_on_read: bool = True,
        auto_compact: bool = False,
        mode: TrackingMode = TrackingMode.ID_ONLY,
        fqns_to_skip: Iterable[str] = (),
    ) -> None:
        if mode is not TrackingMode.ID_ONLY:
            raise ValueError(
                f"ModelDeltaTracker.mode must be TrackingMode.ID_ONLY; received {mode}. Read the "
                "values of the rows from state_dict()."
            )
        self._model, self._skipped = model, set(fqns_to_skip)
        self._changed = {name: ChangedRows(model) for name in consumers or [self.DEFAULT_CONSUMER]}

    def get_unique_ids(self, consumer: str | None = None) -> dict[str, Tensor]:
        """Return the rows that changed since the consumer's last call, and forget them.

        Args:
            consumer: Name of the consumer; None: "default".

        Returns:
            Row numbers of the whole table, int64 `[K]`, ascending, by path of the table:
            of this rank's shards.

        Raises:
            ValueError: The consumer is unknown.
        """
        changed = self._of(consumer).take().items()
        named = {name.removesuffix(".weight"): rows for name, rows in changed}
        return {
            fqn: rows for fqn, rows in named.items() if self._skipped.isdisjoint(fqn.split("."))
        }

    def get_unique(
        self,
        consumer: str | None = None,
        top_percentage: float | None = 1.0,
        per_table_percentage: dict[str, tuple[float, str]] | None = None,
        sorted_by_indices: bool | None = True,
    ) -> dict[str, UniqueRows]:
        """Return the rows as `get_unique_ids`, with states None.

        Args:
            consumer: Name of the consumer; None: "default".
            top_percentage: Without an effect, as in TorchRec.
            per_table_percentage: Without an effect, as in TorchRec.
            sorted_by_indices: Without an effect: rows are ascending.
        """
        rows = self.get_unique_ids(consumer)
        return {fqn: UniqueRows(ids=ids, states=None) for fqn, ids in rows.items()}

    def clear(self, consumer: str | None = None) -> None:
        """Forget the changed rows of a consumer; None: of all consumers.

        Raises:
            ValueError: The consumer is unknown.
        """
        for changed in self._changed.values() if consumer is None else [self._of(consumer)]:
            changed.take()

    def step(self) -> None:
        """Do nothing: marks need no number of the batch."""

    def fqn_to_feature_names(self) -> dict[str, list[str]]:
        """Return the features of each table, by path of the table."""
        names = {}
        for path, module in self.get_tracked_modules().items():
            for config in module.configs():
                for name, _ in module.named_modules():
                    if name.partition(".")[2] == config.name:
                        names[f"{path}.{name}" if path else name] = list(config.feature_names)
        return names

    def get_tracked_modules(self) -> dict[str, TableCollection | ShardedCollection]:
        """Return the collections of tables, by path."""
        return {
            path: module
            for path, module in get_unwrapped_module(self._model).named_modules()
            if isinstance(module, TableCollection | ShardedCollection)
            and self._skipped.isdisjoint(path.split("."))
        }

    def _of(self, consumer: str | None) -> ChangedRows:
        name = self.DEFAULT_CONSUMER if consumer is None else consumer
        if name not in self._changed:
            raise ValueError(
                f"consumer must be one of {sorted(self._changed)}; received {name!r}. Name it in "
                "consumers."
            )
        return self._changed[name]
