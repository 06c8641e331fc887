"""Fused lookups over the tables of an unsharded collection, and the check of their batches.

Tables with the same dtype, pooling and optimizer share one `TableBatchedEmbedding`. Their
parameters become views of its storage.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn

from recsys import step_stages
from recsys.kernels import ops
from recsys.kernels.bounds import NO_LIMIT, OVERWRITTEN, IdGuard, LateChecks
from recsys.kernels.support import shared_optimizer
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.types import BoundsCheckMode, PoolingType, TableSpec, UpdateMode
from recsys.modules.aliased_storage import AliasedStorage
from recsys.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype
from recsys.modules.embedding_inputs import (
    FeatureSelector,
    are_checked_by_triton,
    make_safe,
    safe_features,
)
from recsys.optim.apply_optimizer_in_backward import (
    AttachedOptimizer,
    attachment_count,
    drop_hook,
)
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_bags import check_features
from recsys.step_stages import Stage

__all__ = ["LookupGroup", "TableLookups", "TableSlot", "new_weights"]


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

    @property
    def weight(self) -> nn.Parameter:
        """The table's parameter."""
        return self.slots["weight"]

    def lookup_key(self) -> Hashable:
        """Return the properties in which the tables of one lookup must agree.

        Raises:
            ValueError: The kernels do not support the attached optimizer.
        """
        shape = self.weight.dtype, self.pooling, _lookup_dim(self.config, self.pooling)
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
class LookupGroup:
    """Tables that one kernel looks up.

    Args:
        tables: The tables, with equal `lookup_key`.
        states: Optimizer state to restore, by table name.
        owner: Class of the collection, for messages.
        bounds_check_mode: Handling of ids outside their table.

    Attributes:
        tables: Positions of the tables in the collection.
        selector: Selects the group's features from a batch.
        tbe: The kernel.
        parameters: The tables' parameters, views of the kernel's storage.
        guard: Checks ids.
    """

    def __init__(
        self,
        tables: Sequence[TableSlot],
        states: Mapping[str, Mapping[str, Tensor]],
        owner: str,
        bounds_check_mode: BoundsCheckMode,
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
        features = [feature for config in configs for feature in config.feature_names]
        readers = [config for config in configs for _ in config.feature_names]
        names = [config.name for config in readers]
        num_rows = [config.num_embeddings for config in readers]
        self.guard = IdGuard(num_rows, features, names, bounds_check_mode, device)
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
        for config, state in zip(configs, self.tbe.states, strict=True):
            for name, value in states.get(config.name, {}).items():
                if not value.is_meta:  # after `to_empty` of tables without state
                    state[name].copy_(value)

    def lookup(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, *, are_safe: bool
    ) -> Tensor:
        """Look up checked ids: [B, sum of dims], or [N, D] without pooling.

        Args:
            indices: [N] ids.
            offsets: [F * B + 1].
            weights: [N], or None.
            are_safe: The ids have been checked already.
        """
        if self._owners:
            self._update_learning_rates()
        if not are_safe:
            indices = self.guard(indices, offsets)
        with step_stages.running((Stage.LOOKUP, "")):
            output = self.tbe.forward(indices, offsets, weights, self.parameters)
        if step_stages.observers:
            step_stages.report_update(output, "")
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
            LookupGroup([tables[t] for t in members], states, owner, bounds_check_mode)
            for members in _positions_by_key(keys)
        )
        super().__init__([table.slots for table in tables])
        self.late = LateChecks()
        self._attachments = attachment_count()
        self._owner, self._mode, self._device = owner, bounds_check_mode, device
        reads = [
            (f, table.config.num_embeddings) for table in tables for f in table.config.feature_names
        ]
        self._features = [feature for feature, _ in reads]
        self._num_rows = dict(reads)
        self._has_one_size = all(self._num_rows[feature] == rows for feature, rows in reads)
        # of the last batch: keys, rows of the table that each reads, whether each is read once
        self._keys: list[str] | None = None
        self._rows_K: Tensor | None = None
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
        moved: dict[LookupGroup, list[Tensor]] = {}

        def view(tensor: Tensor) -> Tensor:
            if id(tensor) not in places:
                return fn(tensor)
            group, i = places[id(tensor)]
            if group not in moved:
                moved[group] = group.tbe.layout.table_views(fn(group.tbe.storage))
            return moved[group][i]

        return view

    def check_batch(
        self,
        features: KeyedJaggedTensor,
        *,
        is_pooled: bool,
        is_weighted: bool,
        keeps_ids: bool = False,
    ) -> tuple[KeyedJaggedTensor, bool]:
        """Validate a batch; on CUDA, errors are raised with a later batch.

        Args:
            features: The batch.
            is_pooled: The output has one row per sample.
            is_weighted: The lookup multiplies rows by weights.
            keeps_ids: The output includes the ids, also bad ones.

        Returns:
            The batch with readable bags, and whether its ids are known to be readable.
        """
        features, bags = check_features(
            features,
            self._owner,
            self._device,
            is_pooled=is_pooled,
            is_weighted=is_weighted,
            names=self._features,
        )
        if bags.values.is_cpu:
            return features, False
        if bags.keys != self._keys:
            self._set_keys(bags.keys)
        has_one_size = bags.stride_per_key_per_rank is None
        if is_pooled and has_one_size and self._reads_whole:  # then no size is needed
            bags = bags._replace(length_per_key=None)
        is_usual = has_one_size and bags.inverse_indices is None
        is_checked = is_usual and not keeps_ids and are_checked_by_triton(bags, self._mode)
        if self._rows_K is None or not is_checked:
            safe, is_bad = safe_features(features, bags.length_per_key)
            if is_bad is not None:
                self.late.read_arrived()
                self.late.add(is_bad, features.validate)
            return safe, False
        self.late.read_arrived()
        found, bags, _ = make_safe(bags, self._rows_K)
        reported = found[:1] if self._mode is BoundsCheckMode.IGNORE else found
        # no reference to `self`, which would keep the tables alive until a garbage collection
        self.late.add(reported, partial(_report, features, found, self.groups, self._mode))
        return KeyedJaggedTensor.from_parts(**bags._asdict()), True

    def _set_keys(self, keys: list[str]) -> None:
        """Find the rows of the table that reads each key.

        There are none if tables of several sizes read a key, or if a feature is missing, which
        `FeatureSelector.select` reports.
        """
        self._keys, self._rows_K = list(keys), None
        self._reads_whole = all(group.selector.reads_whole(keys) for group in self.groups)
        if self._has_one_size and self._num_rows.keys() <= set(keys):
            rows = [self._num_rows.get(key, NO_LIMIT) for key in keys]
            self._rows_K = ops.upload(rows, self._device)


def _report(
    features: KeyedJaggedTensor,
    found: Tensor,
    groups: Sequence[LookupGroup],
    mode: BoundsCheckMode,
) -> None:
    """Raise an error, or warn, about a batch that failed a check on the device.

    Args:
        features: The batch.
        found: [2], whether bags are bad, and whether ids are bad.
        groups: The lookups that read the batch.
        mode: Handling of bad ids.
    """
    features.validate()
    if not bool(found[1]):  # as for bad bags, and for ids that are ignored
        return
    bags = [group.selector.select(features, None) for group in groups]
    were_bad = [
        group.guard.complain(of_group.indices, of_group.offsets)
        for group, of_group in zip(groups, bags, strict=True)
    ]
    if not any(were_bad):
        if mode is BoundsCheckMode.FATAL:
            raise IndexError(OVERWRITTEN)
        warnings.warn(f"{OVERWRITTEN} Row 0 is read instead.", UserWarning, stacklevel=5)


def new_weights(
    configs: Sequence[BaseEmbeddingConfig],
    poolings: Sequence[PoolingType],
    device: torch.device,
) -> list[Tensor]:
    """Allocate tables; tables that share a lookup are views of one storage."""
    weights: dict[int, Tensor] = {}
    keys = [
        (data_type_to_dtype(config.data_type), pooling, _lookup_dim(config, pooling))
        for config, pooling in zip(configs, poolings, strict=True)
    ]
    for members in _positions_by_key(keys):
        layout = _layout([configs[t] for t in members], device)
        flat = torch.empty(layout.num_elements, dtype=keys[members[0]][0], device=device)
        weights.update(zip(members, layout.table_views(flat), strict=True))
    return [weights[t] for t in range(len(configs))]


def _positions_by_key(keys: Sequence[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for position, key in enumerate(keys):
        groups.setdefault(key, []).append(position)
    return list(groups.values())


def _lookup_dim(config: BaseEmbeddingConfig, pooling: PoolingType) -> int:
    """Return the dim that the tables of a lookup share; 0 for pooled tables of any dim."""
    return config.embedding_dim if pooling is PoolingType.NONE else 0


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
