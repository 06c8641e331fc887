"""What the two unsharded collections share: their tables, and the fused lookups over them.

Each table is a module with a real parameter, and the parameters of tables alike are views of
one storage that a `TableBatchedEmbedding` looks up at once. Much of what users do to modules
breaks such aliasing (`.to`, `.half`, deepcopy, pickle, `load_state_dict(assign=True)`,
`weight.data = ...`). So a `_Link` is compared with the parameters before every lookup, by
identity and address, at C speed; when it is stale, the
parameters win: they are gathered into new storages, and the tables' optimizer state moves along.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from operator import is_
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from recsys import step_stages
from recsys.kernels import ops
from recsys.kernels.bounds import NO_LIMIT, OVERWRITTEN, IdGuard, LateChecks
from recsys.kernels.lookup_batch import Batch
from recsys.kernels.support import shared_optimizer
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.tbe_layout import StorageLayout
from recsys.kernels.types import (
    BoundsCheckMode,
    PoolingType,
    TableSpec,
    UpdateMode,
)
from recsys.modules.eager import run_eagerly
from recsys.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    data_type_to_dtype,
)
from recsys.modules.embedding_init import draw_seed, init_rows
from recsys.modules.embedding_inputs import (
    FeatureSelector,
    are_checked_by_triton,
    make_safe,
    safe_features,
)
from recsys.modules.traced import add_collection, is_exporting, is_proxy, record
from recsys.optim.apply_optimizer_in_backward import (
    AttachedOptimizer,
    attached_optimizer,
    attachment_count,
    drop_hook,
    is_marked,
    mark,
)
from recsys.sparse import KeyedJaggedTensor
from recsys.sparse.keyed_jagged import check_features
from recsys.step_stages import Stage

__all__ = ["QUANTIZATION_NOTES", "EmbeddingTable", "LookupGroup", "TableCollection"]

QUANTIZATION_NOTES = ("_quantized_with", "_rows_after_pruning")
"""Attributes by which `recsys.inference.quant_prep` says how a collection will be quantized. They
go along when it is sharded."""


@final
class TableDict(nn.ModuleDict):
    """Tables by name, also by a name that a dict has for itself, such as `items`."""

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add a table, whatever attributes a ModuleDict has."""
        self._modules[name] = module  # type: ignore[assignment]

    def _get_name(self) -> str:
        return "ModuleDict"  # what it says of itself in print


@final
class EmbeddingTable(nn.Module):
    """One table of a collection: its parameter, under the name users know.

    Called, it looks up as the `nn.EmbeddingBag` or `nn.Embedding` of its name does; the collection
    looks up all of its tables at once, and is faster.

    Args:
        config: The table.
        weight: [num_embeddings, embedding_dim].
    """

    def __init__(self, config: BaseEmbeddingConfig, weight: Tensor) -> None:
        super().__init__()
        self.num_embeddings = config.num_embeddings
        self.embedding_dim = config.embedding_dim
        self.weight = nn.Parameter(weight)
        self._mode = config.pooling.name.lower() if isinstance(config, EmbeddingBagConfig) else ""

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look up ids of this table alone.

        Args:
            input: Ids, int32 or int64: [N] of bags that `offsets` delimits, or [B, L]. Any shape
                in a collection that does not pool.
            offsets: [B], where each bag begins; bags of [N] only.
            per_sample_weights: As `input`, of the table's dtype; sums of bags only.

        Returns:
            [B, embedding_dim], or [*input.shape, embedding_dim] without pooling.

        Raises:
            ValueError: The table is updated in the backward of its collection, and would miss this
                gradient.
            RuntimeError: An id is outside the table.

        Example:
            >>> import torch
            >>> from recsys import EmbeddingBagCollection, EmbeddingBagConfig
            >>> config = EmbeddingBagConfig(10, 4, "films", feature_names=["film"])
            >>> table = EmbeddingBagCollection(tables=[config]).embedding_bags["films"]
            >>> table(torch.tensor([1, 2, 3]), torch.tensor([0, 2])).shape
            torch.Size([2, 4])
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            self._check_gradients()
        if not self._mode:
            return nn.functional.embedding(input, self.weight)
        return nn.functional.embedding_bag(
            input, self.weight, offsets, mode=self._mode, per_sample_weights=per_sample_weights
        )

    @torch.jit.unused
    def _check_gradients(self) -> None:
        if torch.is_grad_enabled() and is_marked(self.weight):
            raise ValueError(
                "A table that is updated in backward trains by its collection; received a lookup "
                "of one table with gradients. Call the collection, or this under torch.no_grad()."
            )

    def _get_name(self) -> str:
        return "EmbeddingBag" if self._mode else "Embedding"  # what it says of itself in print

    def extra_repr(self) -> str:
        """Rows, columns and pooling, for repr."""
        size = f"{self.num_embeddings}, {self.embedding_dim}"
        return f"{size}, mode={self._mode!r}" if self._mode else size


@final
class LookupGroup:
    """Tables looked up in one go.

    Args:
        tables: Their numbers in the collection.
        selector: Picks the features that read them from a batch.
        tbe: The lookup.
        parameters: The tables' parameters, which alias the lookup's storage.
        guard: Checks ids.
        attached: The optimizer that each table owns; empty if they own none.
    """

    def __init__(
        self,
        tables: Sequence[int],
        selector: FeatureSelector,
        tbe: TableBatchedEmbedding,
        parameters: Sequence[nn.Parameter],
        guard: IdGuard,
        attached: Sequence[AttachedOptimizer],
    ) -> None:
        self.tables = tuple(tables)
        self.selector = selector
        self.tbe = tbe
        self.parameters = tuple(parameters)
        self.guard = guard
        self._owners: dict[AttachedOptimizer, list[int]] = {}
        for table, owner in enumerate(attached):
            self._owners.setdefault(owner, []).append(table)
        self._rates: list[float | None] = []  # of the owners, as the lookup knows them

    def lookup(
        self, indices: Tensor, offsets: Tensor, weights: Tensor | None, *, are_safe: bool
    ) -> Tensor:
        """Check ids, if nobody has, and look up: [B, sum of dims], or [N, D] without pooling."""
        if self._owners:
            self._follow_owners()
        if not are_safe:
            indices = self.guard(indices, offsets)
        with step_stages.running((Stage.LOOKUP, "")):
            output = self.tbe.forward(indices, offsets, weights, self.parameters)
        if step_stages.observers:
            step_stages.report_update(output, "")
        return output

    def _follow_owners(self) -> None:
        """Take over learning rates that were changed."""
        rates = [owner.param_groups[0].get("lr") for owner in self._owners]
        if rates != self._rates:
            for owner, tables in self._owners.items():
                self.tbe.set_learning_rate(owner.spec().learning_rate, tables)
            self._rates = rates
        if self.tbe.update_mode is UpdateMode.DEFERRED and torch.is_grad_enabled():
            raise ValueError(
                "Tables of an unsharded collection update themselves in backward; received "
                f"{next(iter(self._owners))} for table '{self.tbe.layout.tables[0].name}'. Wrap "
                "the model in DistributedModelParallel, which needs no other process, and step its "
                "fused_optimizer."
            )


@final
class _Link:
    """The lookups, and what the parameters looked like when they were built."""

    def __init__(self, tables: Sequence[EmbeddingTable], groups: Sequence[LookupGroup]) -> None:
        self.groups = tuple(groups)
        self.late = LateChecks()
        self.keys: list[str] | None = None  # of the batch seen last, and what reads them
        self.rows_K: Tensor | None = None
        self.reads_whole = False  # whether every lookup reads each of them once
        self._slots = [table._parameters for table in tables]
        self._weights = [table.weight for table in tables]
        self._pointers = list(map(Tensor.data_ptr, self._weights))
        self._attachments = attachment_count()

    def is_of(self, pointers: list[int]) -> bool:
        """Return whether the tables are at these addresses, and were when the link was made."""
        return self._pointers == pointers and self.is_current()

    def is_current(self) -> bool:
        weights = [slot["weight"] for slot in self._slots]
        return (
            all(map(is_, weights, self._weights))
            and list(map(Tensor.data_ptr, self._weights)) == self._pointers
            and attachment_count() == self._attachments
        )


def _complain(
    features: KeyedJaggedTensor,
    found: Tensor,
    groups: Sequence[LookupGroup],
    mode: BoundsCheckMode,
) -> None:
    """Raise, or warn of, what the device found wrong with a batch.

    Args:
        features: The batch.
        found: [2], whether bags are bad, and whether ids are.
        groups: The lookups that read it.
        mode: What happens to bad ids.
    """
    features.validate()
    if not bool(found[1]):  # as of bad bags, and nobody is told of ids that are ignored
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


class TableCollection(nn.Module):
    """Tables as parameters, and fused lookups over them.

    Args:
        configs: The tables, which `check_tables` returned.
        poolings: Pooling of each.
        device: Where the tables live; None: torch's default device.
        bounds_check_mode: What to do with ids outside their table.

    Attributes:
        init_seed: The seed of the initial values.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingType],
        device: torch.device | None,
        bounds_check_mode: BoundsCheckMode,
    ) -> None:
        super().__init__()
        self._configs = list(configs)
        self._poolings = tuple(poolings)
        reads = [(f, t) for t, config in enumerate(self._configs) for f in config.feature_names]
        # lists, which TorchScript reads
        self._read, self._table_of = [f for f, _ in reads], [t for _, t in reads]
        self._pooling_names = [pooling.name for pooling in poolings]
        self._bounds_check_mode = BoundsCheckMode[bounds_check_mode.name]
        self._device = torch.get_default_device() if device is None else torch.device(device)
        self._attached: dict[str, AttachedOptimizer] = {}
        self._saved_states: dict[str, dict[str, Tensor]] = {}
        self._link: _Link | None = None
        self.init_seed = draw_seed()
        add_collection(self)

    def _new_tables(self) -> TableDict:
        """Return the table modules, in the collection's order, with initial values."""
        weights: dict[int, Tensor] = {}
        dtypes = [data_type_to_dtype(config.data_type) for config in self._configs]
        keys = list(zip(dtypes, self._poolings, self._lookup_dims(), strict=True))
        for key in dict.fromkeys(keys):
            members = [t for t, other in enumerate(keys) if other == key]
            layout = self._layout(members, self._device)
            flat = torch.empty(layout.num_elements, dtype=key[0], device=self._device)
            weights.update(zip(members, layout.table_views(flat), strict=True))
        tables = TableDict()
        for t, config in enumerate(self._configs):
            tables[config.name] = EmbeddingTable(config, weights[t])
        return tables

    def _tables(self) -> list[EmbeddingTable]:
        raise NotImplementedError

    def configs(self) -> list[BaseEmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._configs)

    def poolings(self) -> tuple[PoolingType, ...]:
        """Return how each table's bags are reduced; NONE in a collection that does not pool."""
        return self._poolings

    def table_weights(self) -> dict[str, nn.Parameter]:
        """Table name to weight, in order."""
        return {
            config.name: table.weight
            for config, table in zip(self._configs, self._tables(), strict=True)
        }

    @property
    @torch.jit.unused
    def bounds_check_mode(self) -> BoundsCheckMode:
        """What happens to ids outside their table."""
        return self._bounds_check_mode

    @property
    @torch.jit.unused
    def device(self) -> torch.device:
        """Where the tables live."""
        tables = self._tables()
        return tables[0].weight.device if tables else self._device

    def reset_parameters(self) -> None:
        """Draw new initial values for all tables, from the global generator."""
        self.init_seed = draw_seed()
        self._fill()

    def initial_rows(
        self,
        table_index: int,
        row_start: int,
        row_end: int,
        device: torch.device | None = None,
    ) -> Tensor:
        """Return the initial values of some rows of a table, also of one never allocated.

        Args:
            table_index: Number of the table in the collection.
            row_start: First row.
            row_end: One past the last row.
            device: Where they are drawn; None: on the CPU.

        Returns:
            [row_end - row_start, embedding_dim] in the table's dtype.
        """
        config = self._configs[table_index]
        dim, dtype = config.embedding_dim, data_type_to_dtype(config.data_type)
        rows = torch.empty(row_end - row_start, dim, dtype=dtype, device=device or "cpu")
        return init_rows(self.init_seed, table_index, row_start, row_end, dim, config, rows)

    def optimizer_states(self) -> dict[str, dict[str, Tensor]]:
        """Per table that owns an optimizer its state by name; live, so that copying in loads it."""
        return {
            self._configs[t].name: group.tbe.states[i]
            for group in self._current_link().groups
            for i, t in enumerate(group.tables)
            if group.tbe.optimizer is not None
        }

    def check_ids(self) -> None:
        """On CUDA: wait, and raise now if an earlier batch had bad lengths, or bad ids."""
        self._current_link().late.read_all()
        for group in self._current_link().groups:
            group.guard.check()

    def _fill(self) -> None:
        for t, (config, table) in enumerate(zip(self._configs, self._tables(), strict=True)):
            weight = table.weight.detach()
            if not weight.is_meta:
                rows, dim = weight.shape
                init_rows(self.init_seed, t, 0, rows, dim, config, weight)

    # -- traced, see `traced` -------------------------------------------------------------------

    def _traced(
        self,
        function: Callable[..., Any],
        features: KeyedJaggedTensor,
        option: bool,
        names: list[str],
        *dims: list[int],
    ) -> Any:
        """Return what a function of `traced` makes of a batch, or of the proxy of one."""
        weights = [table.weight for table in self._tables()]
        # not as attributes, which are proxies under `torch.fx`
        updates = any(is_marked(table._parameters["weight"]) for table in self._tables())
        varies = not is_proxy(features) and features.variable_stride_per_key()
        if not (is_exporting() or is_proxy(features)):
            if updates or varies:
                return run_eagerly(self, features)
        elif varies:
            raise ValueError(
                f"An exported {type(self).__name__} takes batches with one batch size for all "
                "features; received one with a batch size per feature. Export the part of the "
                "model that comes after the lookup."
            )
        elif updates and self.training:
            raise ValueError(
                f"The tables of {type(self).__name__} are updated in backward, which a graph does "
                "not do. Call eval() to export a model that is served; to train, call the model, "
                "or torch.compile it."
            )
        reads = self.reads()
        parts = option, weights, *map(list, reads), names, *dims
        return record(function, features, *parts)

    def reads(self) -> tuple[tuple[str, ...], tuple[int, ...], tuple[str, ...]]:
        """Return the features that are read, the number of each one's table, and the poolings."""
        return tuple(self._read), tuple(self._table_of), tuple(self._pooling_names)

    def is_linked_to(self, pointers: list[int]) -> bool:
        """Return whether the lookups are made, of tables at these addresses."""
        return self._link is not None and self._link.is_of(pointers)

    def gradients(self, batch: KeyedJaggedTensor, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradient of all tables end to end, and of a batch's weights if it has any.

        Args:
            batch: What was looked up, with weights only if they count.
            gradients: Of what was found, as the traced lookup returned it.

        Returns:
            fp32 [sum of R*D], and [N].
        """
        if any(is_marked(table.weight) for table in self._tables()):
            raise ValueError(
                f"The tables of {type(self).__name__} are updated in backward, which a program "
                "does not do. Train the model itself, and run programs under torch.no_grad()."
            )
        weights = batch.weights_or_none()
        groups, of_tables = self._groups(), dict[int, Tensor]()
        of_weights = [] if weights is None else [torch.zeros_like(weights)]
        for group in groups:
            bags, tbe = group.selector.select(batch, weights), group.tbe
            part = Batch(group.guard(bags.indices, bags.offsets), bags.offsets, bags.weights)
            grad = self._gradient_of(group, gradients)
            flat = tbe.dense_gradients(grad, part)
            of_tables.update(zip(group.tables, tbe.layout.table_views(flat), strict=True))
            for total in of_weights:
                numbers = batch.with_values(torch.arange(total.numel(), device=total.device))
                places = group.selector.select(numbers, None).indices
                total.index_add_(0, places, tbe.weight_gradients(grad, part).to(total.dtype))
        order = groups[0].tbe.layout.storage_order
        if len(groups) > 1 or order != tuple(range(len(order))):
            flat = torch.cat([of_tables[t].flatten() for t in range(len(of_tables))])
        return [flat, *of_weights]

    def _gradient_of(self, group: LookupGroup, gradients: Sequence[Tensor]) -> Tensor:
        """Return the gradients of what a lookup found, of those of all that was found."""
        raise NotImplementedError

    # -- lookups ------------------------------------------------------------------------------

    def _groups(self) -> tuple[LookupGroup, ...]:
        link = self._link
        if link is None or not link.is_current():
            link = self._current_link()
        return link.groups

    def _checked(
        self,
        features: KeyedJaggedTensor,
        *,
        is_pooled: bool,
        is_weighted: bool,
        keeps_ids: bool = False,
    ) -> tuple[KeyedJaggedTensor, bool]:
        """Check a batch; on CUDA what is wrong with it is raised with a later one.

        Args:
            features: The batch.
            is_pooled: Whether there is a row per sample.
            is_weighted: Whether ids are weighted.
            keeps_ids: Whether its ids, also bad ones, are asked for later.

        Returns:
            The batch, with bags that can be read; and whether its ids can be read, too.
        """
        features, bags = check_features(
            features,
            type(self).__name__,
            self.device,
            is_pooled=is_pooled,
            is_weighted=is_weighted,
            names=self._read,
        )
        if bags.values.is_cpu:
            return features, False
        link, mode = self._current_link(), self._bounds_check_mode
        rows_K = self._rows_of(link, bags.keys)
        has_one_size = bags.stride_per_key_per_rank is None
        if is_pooled and has_one_size and link.reads_whole:  # then no size is asked for
            bags = bags._replace(length_per_key=None)
        is_usual = has_one_size and bags.inverse_indices is None
        if rows_K is None or keeps_ids or not (is_usual and are_checked_by_triton(bags, mode)):
            safe, is_bad = safe_features(features, bags.length_per_key)
            if is_bad is not None:
                link.late.read_arrived()
                link.late.add(is_bad, features.validate)
            return safe, False
        link.late.read_arrived()
        found, bags, _ = make_safe(bags, rows_K)
        is_told = found[:1] if mode is BoundsCheckMode.IGNORE else found
        # not `self`: tables must not live until a garbage collection finds them in a cycle
        link.late.add(is_told, partial(_complain, features, found, link.groups, mode))
        return KeyedJaggedTensor.from_parts(**bags._asdict()), True

    def _rows_of(self, link: _Link, keys: list[str]) -> Tensor | None:
        """Return [K] rows of the table that reads each key; note whether lookups read the whole.

        None if tables of several sizes do, or keys lack a feature: who selects it will say so.
        """
        if keys != link.keys:
            sizes: dict[str, set[int]] = {}
            for config in self._configs:
                for feature in config.feature_names:
                    sizes.setdefault(feature, set()).add(config.num_embeddings)
            link.keys, link.rows_K = list(keys), None
            link.reads_whole = all(group.selector.reads_whole(keys) for group in link.groups)
            is_one_size = all(len(of_feature) == 1 for of_feature in sizes.values())
            if is_one_size and sizes.keys() <= set(keys):
                rows = [min(sizes.get(key, {NO_LIMIT})) for key in keys]
                link.rows_K = ops.upload(rows, self.device)
        return link.rows_K

    def _current_link(self) -> _Link:
        if self._link is None or not self._link.is_current():
            self._remember()
            self._link = _Link(self._tables(), self._build_groups())
            self._saved_states = {}
        return self._link

    def _remember(self) -> None:
        """Keep what the parameters or the old lookups know and new ones would not."""
        if self._link is not None:
            self._saved_states = {
                self._configs[t].name: group.tbe.states[i]
                for group in self._link.groups
                for i, t in enumerate(group.tables)
            }
        for config, table in zip(self._configs, self._tables(), strict=True):
            attached = attached_optimizer(table.weight)
            if attached is not None:
                self._attached[config.name] = attached
            elif config.name in self._attached:
                # a new parameter took the place of one whose table owns an optimizer
                mark(table.weight, self._attached[config.name])

    def _build_groups(self) -> list[LookupGroup]:
        tables = self._tables()
        devices = {str(table.weight.device) for table in tables}
        if len(devices) > 1:
            raise ValueError(
                f"The tables of one {type(self).__name__} must be on one device; received "
                f"{sorted(devices)}. Move the whole collection."
            )
        owned = [self._attached.get(config.name) for config in self._configs]
        keys = [
            (table.weight.dtype, pooling, dim, self._owner_key(config.name, attached))
            for config, table, pooling, dim, attached in zip(
                self._configs, tables, self._poolings, self._lookup_dims(), owned, strict=True
            )
        ]
        return [
            self._build_group([t for t, other in enumerate(keys) if other == key], owned)
            for key in dict.fromkeys(keys)
        ]

    def _build_group(
        self, members: Sequence[int], owned: Sequence[AttachedOptimizer | None]
    ) -> LookupGroup:
        configs = [self._configs[t] for t in members]
        parameters = [self._tables()[t].weight for t in members]
        attached = owned[members[0]]
        device = parameters[0].device
        layout = self._layout(members, device)
        tbe = TableBatchedEmbedding(
            layout.tables,
            feature_table_map=layout.feature_table_map,
            pooling=self._poolings[members[0]],
            weights_dtype=parameters[0].dtype,
            optimizer=None if attached is None else attached.spec(),
            update_mode=UpdateMode.GRADIENT if attached is None else attached.update_mode,
            device=device,
            weights=_common_storage(parameters, layout),
        )
        with torch.no_grad():
            for parameter, view in zip(parameters, tbe.weights, strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    view.copy_(parameter)
                parameter.data = view
                if attached is not None:
                    drop_hook(parameter)
            for config, states in zip(configs, tbe.states, strict=True):
                for name, value in self._saved_states.get(config.name, {}).items():
                    if not value.is_meta:  # `to_empty` of tables that never had a state
                        states[name].copy_(value)
        features = [feature for config in configs for feature in config.feature_names]
        readers = [config for config in configs for _ in config.feature_names]
        guard = IdGuard(
            [config.num_embeddings for config in readers],
            features,
            [config.name for config in readers],
            self._bounds_check_mode,
            device,
        )
        selector = FeatureSelector(
            features, [config.name for config in readers], type(self).__name__
        )
        owners = [owner for t in members if (owner := owned[t]) is not None]
        return LookupGroup(members, selector, tbe, parameters, guard, owners)

    def _owner_key(self, table: str, attached: AttachedOptimizer | None) -> Hashable:
        """Return what tables that share a lookup must have in common in what updates them."""
        if attached is None:
            return None
        try:
            spec = attached.spec()
        except ValueError as error:
            raise ValueError(f"Table '{table}' cannot own {attached}: {error}") from error
        mode = attached.update_mode
        shared = shared_optimizer(spec, self.device, mode)
        # where rates are shared, tables of different attachments may not come to differ in theirs
        return shared, mode, id(attached) if shared == spec else None

    def _layout(self, members: Sequence[int], device: torch.device) -> StorageLayout:
        configs = [self._configs[t] for t in members]
        return StorageLayout(
            [
                TableSpec(name=c.name, num_rows=c.num_embeddings, dim=c.embedding_dim)
                for c in configs
            ],
            [i for i, config in enumerate(configs) for _ in config.feature_names],
            device,
        )

    def _lookup_dims(self) -> list[int]:
        """Return what besides pooling keeps tables apart: without pooling, their dim."""
        return [
            config.embedding_dim if pooling is PoolingType.NONE else 0
            for config, pooling in zip(self._configs, self._poolings, strict=True)
        ]

    # -- what breaks aliasing -----------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Linked first, so that `share_memory_` shares the storage the lookups use, and the
        # optimizers of parameters about to be replaced are remembered.
        self._current_link()
        return super()._apply(self._whole(fn), recurse)  # type: ignore[no-any-return, no-untyped-call]

    def _whole(self, fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what gives, for a table, its part of what `fn` makes of its lookup's storage.

        Tables that were moved one by one would fill a device twice: once as they are, and once in
        the storage into which the next lookup gathers them.
        """
        link = self._link
        groups = link.groups if link is not None and link.is_current() else ()
        places = {id(p): (group, i) for group in groups for i, p in enumerate(group.parameters)}
        moved: dict[LookupGroup, list[Tensor]] = {}

        def part(tensor: Tensor) -> Tensor:
            if id(tensor) not in places:
                return fn(tensor)
            group, i = places[id(tensor)]
            if group not in moved:
                moved[group] = group.tbe.layout.table_views(fn(group.tbe.storage))
            return moved[group][i]

        return part

    def _load_from_state_dict(self, *args: Any) -> None:
        self._remember()
        super()._load_from_state_dict(*args)

    def _portable_state(self) -> dict[str, Any]:
        """Return `__dict__` with the optimizer state of the lookups in place of these."""
        self._remember()
        state = self.__dict__.copy()
        state["_link"] = None
        state["_saved_states"] = {
            table: {name: value.clone() for name, value in states.items()}
            for table, states in self._saved_states.items()
        }
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        new = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        copied = self._whole(torch.clone)
        with torch.no_grad():
            for table in self._tables():
                if type(weight := table.weight) is nn.Parameter:
                    parameter = nn.Parameter(copied(weight), weight.requires_grad)
                    memo.setdefault(id(weight), parameter)
        new.__setstate__(copy.deepcopy(self._portable_state(), memo))
        return new

    def __getstate__(self) -> dict[str, Any]:
        state = self._portable_state()
        for table in self._tables():
            weight = table.weight
            if not weight.untyped_storage().is_shared() and not weight.is_meta:
                # A pickled view brings its whole storage along, once per table: hand out
                # copies. The next lookup gathers them again.
                weight.data = weight.data.clone()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        add_collection(self)
        self._remember()


def _common_storage(parameters: Sequence[Tensor], layout: StorageLayout) -> Tensor | None:
    """Return the flat storage that all parameters are views of in that layout, if any."""
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
