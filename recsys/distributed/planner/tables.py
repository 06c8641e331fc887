"""A table as the planner sees it, and the memory that a part of it takes."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Self, TypeAlias, cast, final

from recsys.distributed.placement.plan import EmbeddingComputeKernel, ShardingType
from recsys.distributed.planner.constants import UVM_CACHING_RATIO
from recsys.distributed.planner.pooling_stats import IdSkew, uniform_distinct
from recsys.distributed.planner.types import ParameterConstraints
from recsys.optim.specs import TableOptimizer

UVM_KERNELS = (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.FUSED_UVM_CACHING)
"""The kernels of tables in host memory that a GPU reads."""

# what FBGEMM's cache keeps for each slot and each row
_CACHE_SLOT_BYTES, _CACHE_ROW_BYTES = 16, 4


@final
class Bytes(NamedTuple):
    """Memory of one rank. Where ranks compute on the CPU, all of it counts as the device's."""

    device: int
    host: int = 0

    def __add__(self, other: Bytes) -> Bytes:  # type: ignore[override]
        return Bytes(self.device + other.device, self.host + other.host)


_NOTHING = Bytes(0)


class Summable:
    """Base of dataclasses that are added field by field."""

    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        names = [part.name for part in fields(cast(Any, self))]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class Storage(Summable):
    """Memory of one rank, by what it is for.

    Attributes:
        weights: of the table.
        state: of its optimizer.
        gradients: of the whole table, where it has no optimizer or is a replica; of touched rows,
            where its optimizer is deferred.
        cache: of rows in device memory whose table is in host memory.
        buffers: ids, outputs and their gradients of the batches under way.
    """

    weights: Bytes = _NOTHING
    state: Bytes = _NOTHING
    gradients: Bytes = _NOTHING
    cache: Bytes = _NOTHING
    buffers: Bytes = _NOTHING

    @property
    def total(self) -> Bytes:
        """All of it."""
        return self.weights + self.state + self.gradients + self.cache + self.buffers


Block: TypeAlias = tuple[int, int, int]
"""So many shards of rows x columns."""


class Part(NamedTuple):
    """A part of a table, or all of it.

    Attributes:
        rows: of the part.
        cols: of the part.
        kernel: where it lives.
        in_node: whether all row parts of its columns are on the ranks of one node.
        row_parts: that the rows of its columns are split into.
    """

    rows: int
    cols: int
    kernel: EmbeddingComputeKernel
    in_node: bool = False
    row_parts: int = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTable:
    """A table that is to be placed.

    Attributes:
        path: of its module.
        name: of the table.
        rows: of the table.
        dim: columns of the table.
        element_bytes: of one weight.
        optimizer: what updates it in backward, if it is known.
        trains: whether its weights require gradients.
        writes_row_gradients: whether an update writes the gradients of touched rows to memory, as
            the `torch` backend does.
        ids_per_sample: that travel, over all its features; a sample is one of the planner's batch.
        num_features: that read it.
        draws_per_sample: ids before each is left once per rank; None: all travel.
        bags_per_sample: over all its features, empty ones of features with fewer samples included;
            None: one of each feature.
        skews: of its features, each with its share of the ids; none: ids are spread evenly.
        is_pooled: whether bags are pooled, else every id has a row of its own in the output.
        is_mean: whether bags are averaged.
        is_weighted: whether ids have weights.
        is_alone: whether the other tables of its module, if any, may only be replicated.
        wire_bytes: of a value on its way there, and of its gradient on its way back.
        constraints: the user's.
        kernels: the sharding types that may be chosen, each with its kernels.
    """

    path: str
    name: str
    rows: int
    dim: int
    element_bytes: int
    optimizer: TableOptimizer | None
    trains: bool
    ids_per_sample: float
    num_features: int
    draws_per_sample: float | None = None
    bags_per_sample: float | None = None
    skews: tuple[tuple[float, IdSkew | None], ...] = ()
    is_pooled: bool = True
    is_mean: bool = False
    writes_row_gradients: bool = False
    is_weighted: bool = False
    is_alone: bool = False
    wire_bytes: tuple[float, float] = (4.0, 4.0)
    constraints: ParameterConstraints
    kernels: Mapping[ShardingType, Sequence[EmbeddingComputeKernel]]

    @property
    def full_name(self) -> str:
        """Path of the module, a dot and the name of the table."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def same_options(self) -> Hashable:
        """Return what is the same for tables that may be placed in the same ways at the same cost.

        Only while both tables exist: parts of it are known by their identity.
        """
        return id(self.constraints), id(self.kernels), _FACTS(self)

    @property
    def has_gradient(self) -> bool:
        """Whether backward leaves a gradient of the table's size."""
        return self.trains and self.optimizer is None

    @property
    def is_quantized(self) -> bool:
        """Whether its rows are quantized: a buffer of its module, and no parameter."""
        return any(EmbeddingComputeKernel.QUANT in kernels for kernels in self.kernels.values())

    def load(self, samples: int) -> tuple[float, float]:
        """Return the ids and bags of so many samples."""
        bags = self.num_features if self.bags_per_sample is None else self.bags_per_sample
        return samples * self.ids_per_sample, float(samples * bags)

    def row_parts(self, blocks: Iterable[Block]) -> int:
        """Return into how many parts shards split the rows; the mean, where columns differ."""
        columns = 0
        for count, rows, cols in blocks:
            columns += count * cols * (rows > 0)
        return max(columns // self.dim, 1)

    def touched(self, rows: int, ids: float) -> float:
        """Return how many of a part's rows are expected among the ids that reach it.

        Hot and cold rows are taken to be spread evenly over parts, and the rows of one feature to
        be those of another by chance.
        """
        if not (rows and ids):
            return 0.0
        share = rows / self.rows
        draws = ids / share
        if self.draws_per_sample is not None and self.ids_per_sample:
            draws *= self.draws_per_sample / self.ids_per_sample
        if not self.skews:
            return share * uniform_distinct(self.rows, draws)
        missed, skews = 1.0, self.skews
        alike = Counter(skews) if len(skews) > 1 else {skews[0]: 1}  # counting is slow
        for (part, skew), times in alike.items():
            part *= draws
            found = uniform_distinct(self.rows, part) if skew is None else skew.distinct(part)
            missed *= (1 - found / self.rows) ** times
        return share * self.rows * (1 - missed)

    @property
    def cached_share(self) -> float:
        """Share of the rows that a cache in device memory holds."""
        chosen = self.constraints.cache_params and self.constraints.cache_params.load_factor
        return chosen or UVM_CACHING_RATIO

    @property
    def hit_rate(self) -> float:
        """Share of ids that this cache answers if it holds the rows that were most frequent.

        A cache that several features share is taken to serve each as if it were alone.
        """
        if not self.skews:
            return self.cached_share
        held = self.cached_share * self.rows
        return sum(
            part * (self.cached_share if skew is None else skew.hit_rate(held))
            for part, skew in self.skews
        )

    def storage_of(self, part: Part, gradients: int = 0, buffers: int = 0) -> Storage:
        """Return what a part takes.

        Args:
            part: of this table.
            gradients: bytes of gradients on the device, besides that of a table without optimizer.
            buffers: bytes of buffers on the device.
        """
        rows, cols, kernel = part[:3]
        weights = rows * cols * self.element_bytes
        by_element = rows * cols * self._state_bytes("element")
        by_row = rows * self._state_bytes("row") + self._state_bytes("table")
        state, cache, in_host = Bytes(by_element + by_row), 0, kernel in UVM_KERNELS
        if in_host:
            state = Bytes(by_row, by_element)  # FBGEMM keeps row states on the device
        if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING:
            slot = cols * self.element_bytes + _CACHE_SLOT_BYTES
            cache = int(self.cached_share * rows * slot) + rows * _CACHE_ROW_BYTES
        gradient = weights if self.has_gradient else 0
        return Storage(
            weights=Bytes(0, weights) if in_host else Bytes(weights),
            state=state,
            gradients=Bytes(gradients, gradient) if in_host else Bytes(gradients + gradient),
            cache=Bytes(cache),
            buffers=Bytes(buffers),
        )

    @property
    def id_bytes(self) -> int:
        """Bytes of an id on its way."""
        return 4 if self.rows < 2**31 else 8

    @property
    def gradient_bytes(self) -> int:
        """The sum of replicas' gradients, and of each row whether it was touched, if it matters."""
        spec = self.optimizer and self.optimizer.spec
        flags = 4 * self.rows if spec is not None and spec.moves_without_gradient else 0
        return 4 * self.rows * self.dim + flags

    def state_bytes_per_row(self, cols: int) -> int:
        """Bytes of optimizer state of a row of so many columns."""
        return cols * self._state_bytes("element") + self._state_bytes("row")

    def _state_bytes(self, per: Literal["element", "row", "table"]) -> int:
        """Return the bytes of optimizer state for each "element", each "row", or the "table"."""
        if self.optimizer is None:
            return 0
        return 4 * list(self.optimizer.spec.rule.state.values()).count(per)

    def adds_up_rows(self, cols: int) -> bool:
        """Return whether owners of so many columns must add up one value per row first."""
        return cols < self.dim and self.optimizer is not None and self.optimizer.exchanges_row_state

    @property
    def whole(self) -> Bytes:
        """The whole table on one rank."""
        kernel = next(iter(self.kernels.values()), (EmbeddingComputeKernel.FUSED,))[0]
        return self.storage_of(Part(self.rows, self.dim, kernel)).total

    def allows(self, sharding_type: ShardingType, kernel: EmbeddingComputeKernel) -> bool:
        """Return whether the table's optimizer can work under a sharding type."""
        optimizer = self.optimizer
        if optimizer is None:
            return True
        if sharding_type is ShardingType.DATA_PARALLEL:
            return optimizer.may_replicate
        if sharding_type not in _SPLIT_COLUMNS:
            return True
        managed = kernel in UVM_KERNELS  # its lookups only fuse updates
        return optimizer.may_split_columns and not (managed and optimizer.exchanges_row_state)


_SPLIT_COLUMNS = frozenset(
    (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)
)
_NO_FACTS = {"path", "name", "constraints", "kernels"}
_FACTS = operator.attrgetter(*(f.name for f in fields(PlannedTable) if f.name not in _NO_FACTS))
