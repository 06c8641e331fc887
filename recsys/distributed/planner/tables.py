"""Tables as the planner sees them, and the memory of their shards."""

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
"""Compute kernels of tables in host memory that a GPU reads."""

# bookkeeping of FBGEMM's cache for each slot and each row
_CACHE_SLOT_BYTES, _CACHE_ROW_BYTES = 16, 4


@final
class Bytes(NamedTuple):
    """Bytes of one rank. On ranks without a GPU, all memory counts as device memory."""

    device: int
    host: int = 0

    def __add__(self, other: Bytes) -> Bytes:  # type: ignore[override]
        return Bytes(self.device + other.device, self.host + other.host)


_NOTHING = Bytes(0)


class Summable:
    """Base of dataclasses that are added field by field."""

    # slots of a subclass save nothing if its base has a `__dict__`
    __slots__ = ()

    def __add__(self, other: Self) -> Self:
        names = [part.name for part in fields(cast(Any, self))]
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in names})


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory(Summable):
    """Memory of one rank by purpose.

    Attributes:
        weights: Weights of the table.
        state: Optimizer state, and the index of hashed ids.
        gradients: Gradients: of the whole table if it is a replica or has no optimizer; of touched
            rows if its optimizer is deferred.
        cache: Cache in device memory for a table in host memory.
        buffers: Ids, outputs and output gradients of the batches in flight.
    """

    weights: Bytes = _NOTHING
    state: Bytes = _NOTHING
    gradients: Bytes = _NOTHING
    cache: Bytes = _NOTHING
    buffers: Bytes = _NOTHING

    @property
    def total(self) -> Bytes:
        """Sum over all purposes."""
        return self.weights + self.state + self.gradients + self.cache + self.buffers


Block: TypeAlias = tuple[int, int, int]
"""Number of identical shards, their rows, and their columns."""


class ShardSpec(NamedTuple):
    """Shape and location of one shard, or of a whole table.

    Attributes:
        rows: Rows of the shard.
        cols: Columns of the shard.
        kernel: Compute kernel.
        in_node: Whether all row shards of these columns are on the ranks of one node.
        row_parts: Number of row shards.
    """

    rows: int
    cols: int
    kernel: EmbeddingComputeKernel
    in_node: bool = False
    row_parts: int = 1


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedTable:
    """A table to place.

    Attributes:
        path: Path of its module.
        name: Name of the table.
        rows: Rows of the table.
        dim: Columns of the table.
        element_bytes: Bytes of one weight.
        optimizer: Optimizer that updates the table in backward, if it is known.
        trains: Whether the weights require gradients.
        writes_row_gradients: Whether an update writes the gradients of touched rows to memory, as
            the `torch` backend does.
        ids_per_sample: Ids that are sent per sample of the planner's batch, over all features.
        num_features: Number of features that read the table.
        draws_per_sample: Ids per sample before each rank deduplicates them; None if it does not.
        bags_per_sample: Bags per sample over all features, including the empty bags of features
            with smaller batches; None: one for each feature.
        skews: Share of the ids and skew of each feature; empty: ids are uniform.
        is_pooled: Whether bags are pooled; otherwise each id has an output row.
        is_mean: Whether bags are averaged.
        is_weighted: Whether ids have weights.
        is_alone: Whether all other tables of its module can only be replicated.
        wire_bytes: Bytes of an output value and of its gradient when sent.
        num_regions: Parts that rows with hashed ids can be split into; 0: ids are row numbers.
        index_row_bytes: Bytes of the index of hashed ids for each row.
        sends_wide_ids: Whether ids, lengths and weights of its module are sent as 8 bytes each.
        constraints: Constraints from the user.
        kernels: Compute kernels of each sharding type that may be chosen.
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
    num_regions: int = 0
    index_row_bytes: int = 0
    sends_wide_ids: bool = False
    constraints: ParameterConstraints
    kernels: Mapping[ShardingType, Sequence[EmbeddingComputeKernel]]

    @property
    def full_name(self) -> str:
        """Path of the module, a dot and the name of the table."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def same_options(self) -> Hashable:
        """Return a key that is equal for tables with the same options at the same costs.

        Valid only while both tables exist, since it contains the identities of some members.
        """
        return id(self.constraints), id(self.kernels), _FACTS(self)

    @property
    def has_gradient(self) -> bool:
        """True if backward produces a gradient of the table's size."""
        # it includes the zeros of rows without ids:
        # docs/decisions/optimizers.md, "A table without an optimizer is a plain parameter"
        return self.trains and self.optimizer is None

    @property
    def is_quantized(self) -> bool:
        """True if the rows are quantized, and so a buffer of the module instead of a parameter."""
        return any(EmbeddingComputeKernel.QUANT in kernels for kernels in self.kernels.values())

    def load(self, samples: int) -> tuple[float, float]:
        """Return the numbers of ids and bags of some samples."""
        bags = self.num_features if self.bags_per_sample is None else self.bags_per_sample
        return samples * self.ids_per_sample, float(samples * bags)

    def row_parts(self, blocks: Iterable[Block]) -> int:
        """Return the number of row shards; the mean if it differs between columns."""
        columns = 0
        for count, rows, cols in blocks:
            columns += count * cols * (rows > 0)
        return max(columns // self.dim, 1)

    def touched(self, rows: int, ids: float) -> float:
        """Return the expected number of distinct rows of a shard among the ids that it receives.

        Frequent and rare rows are assumed to be spread evenly over the shards, and the features
        that share the table to be independent.
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
        counts = Counter(skews) if len(skews) > 1 else {skews[0]: 1}  # counting is slow
        for (part, skew), times in counts.items():
            part *= draws
            distinct = uniform_distinct(self.rows, part) if skew is None else skew.distinct(part)
            missed *= (1 - distinct / self.rows) ** times
        return share * self.rows * (1 - missed)

    @property
    def cached_share(self) -> float:
        """Share of the rows that a cache in device memory holds."""
        chosen = self.constraints.cache_params and self.constraints.cache_params.load_factor
        return chosen or UVM_CACHING_RATIO

    @property
    def hit_rate(self) -> float:
        """Share of ids found in the cache if it holds the most frequent rows.

        A cache that several features share is assumed to serve each of them as if it were alone.
        """
        if not self.skews:
            return self.cached_share
        held = self.cached_share * self.rows
        return sum(
            part * (self.cached_share if skew is None else skew.hit_rate(held))
            for part, skew in self.skews
        )

    def storage_of(self, shard: ShardSpec, gradients: int = 0, buffers: int = 0) -> RankMemory:
        """Return the memory of a shard.

        Args:
            shard: Shard of this table.
            gradients: Bytes of gradients in device memory, without the gradient of a table
                without an optimizer.
            buffers: Bytes of buffers in device memory.
        """
        rows, cols, kernel = shard[:3]
        weights = rows * cols * self.element_bytes
        by_element = rows * cols * self._state_bytes("element")
        by_row = rows * (self._state_bytes("row") + self.index_row_bytes)
        by_row += self._state_bytes("table")
        state, cache, in_host = Bytes(by_element + by_row), 0, kernel in UVM_KERNELS
        if in_host:
            state = Bytes(by_row, by_element)  # FBGEMM keeps row states on the device
        if kernel is EmbeddingComputeKernel.FUSED_UVM_CACHING:
            slot = cols * self.element_bytes + _CACHE_SLOT_BYTES
            cache = int(self.cached_share * rows * slot) + rows * _CACHE_ROW_BYTES
        gradient = weights if self.has_gradient else 0
        return RankMemory(
            weights=Bytes(0, weights) if in_host else Bytes(weights),
            state=state,
            gradients=Bytes(gradients, gradient) if in_host else Bytes(gradients + gradient),
            cache=Bytes(cache),
            buffers=Bytes(buffers),
        )

    @property
    def id_bytes(self) -> int:
        """Bytes of an id, of a length, and of a weight when it is sent."""
        # 64-bit words for tables of 2^31 rows:
        # docs/decisions/exchange.md, "One payload behind one header"
        return 4 if self.rows < 2**31 and not self.sends_wide_ids else 8

    @property
    def gradient_bytes(self) -> int:
        """Bytes of a replica's gradient; with a flag per row if untouched rows must not move."""
        spec = self.optimizer and self.optimizer.spec
        flags = 4 * self.rows if spec is not None and spec.moves_without_gradient else 0
        return 4 * self.rows * self.dim + flags

    def state_bytes_per_row(self, cols: int) -> int:
        """Return the bytes of optimizer state of one row that has `cols` columns."""
        return cols * self._state_bytes("element") + self._state_bytes("row")

    def _state_bytes(self, per: Literal["element", "row", "table"]) -> int:
        """Return the bytes of optimizer state for each "element", each "row", or the "table"."""
        if self.optimizer is None:
            return 0
        return 4 * list(self.optimizer.spec.rule.state.values()).count(per)

    def adds_up_rows(self, cols: int) -> bool:
        """Return whether ranks that own some of the columns must first sum one value per row."""
        # such as the mean square of row-wise Adagrad:
        # docs/decisions/optimizers.md, "Column shards keep the fused row-wise Adagrad"
        return cols < self.dim and self.optimizer is not None and self.optimizer.exchanges_row_state

    @property
    def whole(self) -> Bytes:
        """Memory of the whole table on one rank."""
        kernel = next(iter(self.kernels.values()), (EmbeddingComputeKernel.FUSED,))[0]
        return self.storage_of(ShardSpec(self.rows, self.dim, kernel)).total

    def allows(self, sharding_type: ShardingType, kernel: EmbeddingComputeKernel) -> bool:
        """Return whether the table's ids and its optimizer support a sharding type and a kernel."""
        optimizer = self.optimizer
        # replicas would have to agree on evictions:
        # docs/decisions/hashed_ids.md,
        # "Rows addressed by ids, instead of a remap in front of the table"
        if self.num_regions and sharding_type is ShardingType.DATA_PARALLEL:
            return False  # replicas would give their rows to different ids
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
# constraints and kernels are not hashable; `same_options` compares their identities
_NO_FACTS = {"path", "name", "constraints", "kernels"}
_FACTS = operator.attrgetter(*(f.name for f in fields(PlannedTable) if f.name not in _NO_FACTS))
