"""Fused lookups over the tables of an unsharded collection, and the check of their batches.

Tables with the same dtype, pooling and optimizer share one `TableBatchedEmbedding`. Their
parameters become views of its storage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from recsys.base import step_stages
from recsys.base.step_stages import Stage
from recsys.kernels.bounds import AsyncChecks
from recsys.kernels.huge_pages import new_array
from recsys.kernels.support import shared_optimizer
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.types import BoundsCheckMode, PoolingType, TableSpec, UpdateMode
from recsys.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from recsys.modules.ids.hashed_group import HashedGroup
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.aliased_storage import AliasedStorage
from recsys.modules.tables.batch_checker import (
    NO_FAULTS,
    BatchChecker,
    CheckedBatch,
    RowLimits,
)
from recsys.modules.tables.embedding_inputs import FeatureSelector, SelectedBags
from recsys.optim.apply_optimizer_in_backward import (
    AttachedOptimizer,
    attachment_count,
    drop_hook,
)
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import check_features

__all__ = ["TableGroup", "TableLookups", "TableSlot", "new_weights"]


@final
class TableSlot(NamedTuple):
    """One table of a collection, as its lookup is built from it."""

    number: int
    """Position in the collection."""
    config: BaseEmbeddingConfig
    pooling: PoolingType
    slots: dict[str, nn.Parameter]
    """The parameters of the table's module, which holds `weight`."""
    attached: AttachedOptimizer | None
    """The optimizer that updates the table in backward, if there is one."""
    hashed: TableIndex | None
    """The index of a table with hashed ids."""

    @property
    def weight(self) -> nn.Parameter:
        """The table's parameter."""
        return self.slots["weight"]

    def lookup_key(self) -> Hashable:
        """Return the properties in which the tables of one lookup must agree.

        Raises:
            ValueError: The kernels do not support the attached optimizer.
        """
        shape = self.weight.dtype, *_group_key(self.config, self.pooling)
        if self.attached is None:
            return shape
        try:
            spec = self.attached.spec()
        except ValueError as error:
            raise ValueError(
                f"Table '{self.config.name}' cannot own {self.attached}: {error}"
            ) from error
        mode = self.attached.update_mode
        shared = shared_optimizer(spec, self.weight.device, mode)
        # a lookup with one shared learning rate serves one attachment: rates may diverge later
        return *shape, shared, mode, id(self.attached) if shared == spec else None


@final
class TableGroup:
    """Tables that one kernel looks up.

    Args:
        tables: The tables, with equal `lookup_key`.
        states: Optimizer state to restore, by table name.
        owner: Class of the collection, for messages.

    Attributes:
        tables: Positions of the tables in the collection.
        selector: Selects the group's features from a batch.
        tbe: The kernel.
        parameters: The tables' parameters, views of the kernel's storage.
    """

    def __init__(
        self,
        tables: Sequence[TableSlot],
        states: Mapping[str, Mapping[str, Tensor]],
        owner: str,
    ) -> None:
        first = tables[0]
        configs = [table.config for table in tables]
        device, attached = first.weight.device, first.attached
        layout = _layout(configs, device)
        self.tables = tuple(table.number for table in tables)
        self.parameters = tuple(table.weight for table in tables)
        self.tbe = TableBatchedEmbedding(
            layout.tables,
            feature_table_map=layout.feature_table_map,
            pooling=first.pooling,
            weights_dtype=first.weight.dtype,
            optimizer=None if attached is None else attached.spec(),
            update_mode=UpdateMode.GRADIENT if attached is None else attached.update_mode,
            device=device,
            weights=_common_storage(self.parameters, layout),
        )
        self._alias_parameters(configs, states, is_updated=attached is not None)
        indexes = [table.hashed for table in tables if table.hashed is not None]
        columns = [slice(None)] * len(indexes)
        self._hashed = HashedGroup(configs, indexes, columns, self.tbe) if indexes else None
        features = [feature for config in configs for feature in config.feature_names]
        names = [config.name for config in configs for _ in config.feature_names]
        self.selector = FeatureSelector(features, names, owner)
        self._owners: dict[AttachedOptimizer, list[int]] = {}
        for i, table in enumerate(tables):
            if table.attached is not None:
                self._owners.setdefault(table.attached, []).append(i)
        self._rates: list[float | None] = []  # learning rates that the kernel has, by owner

    @torch.no_grad()
    def _alias_parameters(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        states: Mapping[str, Mapping[str, Tensor]],
        *,
        is_updated: bool,
    ) -> None:
        """Make the parameters views of the kernel's storage, and restore optimizer state."""
        for parameter, view in zip(self.parameters, self.tbe.weights, strict=True):
            if parameter.data_ptr() != view.data_ptr():
                view.copy_(parameter)
            parameter.data = view
            if is_updated:
                drop_hook(parameter)
        self.tbe.marks.watch(self.parameters)
        for config, state in zip(configs, self.tbe.states, strict=True):
            for name, value in states.get(config.name, {}).items():
                if not value.is_meta:  # after `to_empty` of tables without state
                    state[name].copy_(value)

    def lookup(self, bags: SelectedBags, is_training: bool) -> Tensor:
        """Look up checked ids: [B, sum of dims], or [N, D] without pooling.

        Args:
            bags: The ids of the group's features.
            is_training: Whether the module is in training mode: new ids get rows of tables with
                hashed ids.
        """
        indices, offsets, weights = bags
        with contextlib.ExitStack() as until_read:
            if self._hashed is not None:
                is_training = is_training and torch.is_grad_enabled()
                sizes = self._hashed.sizes_of(offsets)
                if self._hashed.maps_at_lookup(is_training):
                    self._hashed.prepare_lookup()
                    rows = self._hashed.rows_to_read(indices.long(), sizes)
                    indices = until_read.enter_context(rows)
                else:
                    indices = self._hashed.rows_of(indices, sizes, is_training)
                    self._hashed.prepare_lookup()
            if self._owners:
                self._update_learning_rates()
            with step_stages.running((Stage.LOOKUP, "")):
                output = self.tbe.forward(indices, offsets, weights, self.parameters)
        if step_stages.observers:
            step_stages.report_update(output, "")
        if self._hashed is not None and output.requires_grad:
            self._hashed.hold(output)
        return output

    def _update_learning_rates(self) -> None:
        rates = [owner.param_groups[0].get("lr") for owner in self._owners]
        if rates != self._rates:
            for owner, tables in self._owners.items():
                self.tbe.set_learning_rate(owner.spec().learning_rate, tables)
            self._rates = rates
        if self.tbe.update_mode is UpdateMode.DEFERRED and torch.is_grad_enabled():
            raise ValueError(
                "Tables of an unsharded collection update themselves in backward; received "
                f"{next(iter(self._owners))} for table '{self.tbe.layout.tables[0].name}'. Wrap "
                "the model in DistributedModelParallel (one process is enough) and step its "
                "fused_optimizer."
            )


@final
class TableLookups(AliasedStorage):
    """All lookups of a collection, valid as long as its parameters stay the same.

    Args:
        tables: The tables, in the collection's order.
        states: Optimizer state to restore, by table name.
        owner: Class of the collection, for messages.
        bounds_check_mode: Handling of ids outside their table.
        device: Where the tables are.

    Attributes:
        groups: The lookups.
        late: Checks of earlier batches that a device has not finished.

    Raises:
        ValueError: The tables are on several devices, or a table has an unsupported optimizer.
    """

    def __init__(
        self,
        tables: Sequence[TableSlot],
        states: Mapping[str, Mapping[str, Tensor]],
        owner: str,
        bounds_check_mode: BoundsCheckMode,
        device: torch.device,
    ) -> None:
        devices = {str(table.weight.device) for table in tables}
        if len(devices) > 1:
            raise ValueError(
                f"The tables of one {owner} must be on one device; received {sorted(devices)}. "
                "Move the whole collection."
            )
        keys = [table.lookup_key() for table in tables]
        self.groups = tuple(
            TableGroup([tables[t] for t in members], states, owner)
            for members in _positions_by_key(keys)
        )
        super().__init__([table.slots for table in tables])
        self.late = AsyncChecks()
        self._attachments = attachment_count()
        self._owner, self._device = owner, device
        readers = [
            (feature, table.config.name, table.config.num_embeddings)
            for table in tables
            if table.hashed is None
            for feature in table.config.feature_names
        ]
        self._features = [name for table in tables for name in table.config.feature_names]
        is_pooled = any(table.pooling is not PoolingType.NONE for table in tables)
        self._is_pooled = is_pooled
        self.checker = BatchChecker(readers, bounds_check_mode, device, is_pooled=is_pooled)
        # of the last batch: keys, their limits, and whether each is read once
        self._keys: list[str] | None = None
        self._limits: RowLimits
        self._reads_whole = False

    def is_current(self) -> bool:
        """Return whether parameters and attached optimizers have not changed."""
        return super().is_current() and attachment_count() == self._attachments

    def states(self) -> Iterable[tuple[int, dict[str, Tensor]]]:
        """Yield the position of each table and its live optimizer state."""
        for group in self.groups:
            yield from zip(group.tables, group.tbe.states, strict=True)

    def moved_views(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return `fn` for tensors, applied once per storage for the tables' parameters.

        Applying `fn` to each table would need the memory twice: for the moved tables, and for the
        storage into which the next lookup gathers them.
        """
        places = {
            id(p): (group, i) for group in self.groups for i, p in enumerate(group.parameters)
        }
        moved: dict[TableGroup, list[Tensor]] = {}

        def view(tensor: Tensor) -> Tensor:
            if id(tensor) not in places:
                return fn(tensor)
            group, i = places[id(tensor)]
            if group not in moved:
                moved[group] = group.tbe.layout.table_views(fn(group.tbe.storage))
            return moved[group][i]

        return view

    def check_batch(self, features: KeyedJaggedTensor, *, is_weighted: bool) -> CheckedBatch:
        """Return a batch that can be looked up; on CUDA, errors are raised with a later batch.

        Args:
            features: The batch.
            is_weighted: Whether the lookup multiplies rows by weights.
        """
        features, bags = check_features(
            features,
            self._owner,
            self._device,
            is_pooled=self._is_pooled,
            is_weighted=is_weighted,
            names=self._features,
        )
        if bags.keys != self._keys:
            for group in self.groups:
                group.selector.route(bags.keys, self._device)
            self._keys, self._limits = list(bags.keys), self.checker.limits_of(bags.keys)
            self._reads_whole = all(group.selector.reads_whole(bags.keys) for group in self.groups)
        has_one_size = bags.stride_per_key_per_rank is None
        needs_sizes = not (self._is_pooled and has_one_size and self._reads_whole)
        checked = self.checker.check(features, bags, self._limits, needs_sizes=needs_sizes)
        if checked.faults is NO_FAULTS:
            return checked
        flags = self.checker.flags_to_check_late(checked.faults)
        if flags.is_cuda:
            self.late.read_arrived()
            # no reference to `self`, which would keep the tables alive until a garbage collection
            self.late.add(flags, partial(self.checker.report, checked))
        elif bool(flags.any()):
            self.checker.report(checked)
        return checked


def new_weights(
    configs: Sequence[BaseEmbeddingConfig],
    poolings: Sequence[PoolingType],
    device: torch.device,
) -> list[Tensor]:
    """Allocate tables; tables that share a lookup are views of one storage."""
    weights: dict[int, Tensor] = {}
    keys = [
        (data_type_to_dtype(config.data_type), *_group_key(config, pooling))
        for config, pooling in zip(configs, poolings, strict=True)
    ]
    for members in _positions_by_key(keys):
        layout = _layout([configs[t] for t in members], device)
        flat = new_array(layout.num_elements, keys[members[0]][0], device)
        weights.update(zip(members, layout.table_views(flat), strict=True))
    return [weights[t] for t in range(len(configs))]


def _positions_by_key(keys: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def _group_key(config: BaseEmbeddingConfig, pooling: PoolingType) -> tuple[PoolingType, int, bool]:
    """Return the pooling, dim and kind of ids that the tables of a lookup share."""
    # pooled tables have any dim
    dim = config.embedding_dim if pooling is PoolingType.NONE else 0
    return pooling, dim, config.ids is None


def _layout(configs: Sequence[BaseEmbeddingConfig], device: torch.device) -> StorageLayout:
    return StorageLayout(
        [TableSpec(name=c.name, num_rows=c.num_embeddings, dim=c.embedding_dim) for c in configs],
        [i for i, config in enumerate(configs) for _ in config.feature_names],
        device,
    )


def _common_storage(parameters: Sequence[Tensor], layout: StorageLayout) -> Tensor | None:
    """Return the flat storage if all parameters are views of it in this layout, else None."""
    first = parameters[layout.storage_order[0]]
    if first.is_meta:
        return None
    storage = first.untyped_storage()
    base = first.data_ptr()
    for t, parameter in enumerate(parameters):
        address = base + layout.first_element[t] * parameter.element_size()
        if (
            parameter.data_ptr() != address
            or parameter.untyped_storage().data_ptr() != storage.data_ptr()
            or not parameter.is_contiguous()
        ):
            return None
    flat = torch.empty(0, dtype=first.dtype, device=first.device)
    return flat.set_(storage, first.storage_offset(), (layout.num_elements,))  # type: ignore[call-overload, no-any-return]
