"""EmbeddingBagCollection: pooled embeddings of many tables on one device.

Shapes: `F` features, `B` batch size, `D` columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recsys.base.checked import checked
from recsys.kernels.types import BoundsCheckMode
from recsys.modules.embedding_configs import EmbeddingBagConfig, check_tables
from recsys.modules.embedding_interfaces import EmbeddingBagCollectionInterface
from recsys.modules.tables.embedding_inputs import expand_bags, is_on_meta
from recsys.modules.tables.embedding_table import EmbeddingTable
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.modules.tables.table_lookups import TableGroup
from recsys.modules.tables.traced import is_traced, look_up_bags
from recsys.sparse import KeyedJaggedTensor, KeyedTensor

__all__ = ["EmbeddingBagCollection"]


class EmbeddingBagCollection(TableCollection, EmbeddingBagCollectionInterface):
    """Pooled lookup of bags of ids in many tables at once.

    Tables of the same dtype and pooling share one fused lookup. Each table's weight is an ordinary
    parameter, `embedding_bags[table].weight`, which any torch optimizer trains. With
    `apply_optimizer_in_backward`, backward updates the table instead.

    Args:
        tables: The tables. Table names must be unique, and so must the features of a table.
        is_weighted: Multiply each row by the weight of its id before pooling.
        device: Device of the tables; None: torch's default device; "meta": nothing is allocated.
        bounds_check_mode: Handling of ids outside their table.

    Attributes:
        embedding_bags: Modules that hold the `weight` of each table, by table name.

    Raises:
        ValueError: Table names repeat, a table has no features, pooling NONE or a dtype that cannot
            be trained.
        TypeError: A table is not an EmbeddingBagConfig.

    Example:
        >>> ebc = EmbeddingBagCollection(
        ...     tables=[
        ...         EmbeddingBagConfig(100, 4, "users", feature_names=["user"]),
        ...         EmbeddingBagConfig(500, 8, "films", feature_names=["liked", "shown"]),
        ...     ]
        ... )
        >>> batch = KeyedJaggedTensor(
        ...     keys=["user", "liked", "shown"],
        ...     values=torch.tensor([7, 8, 1, 2, 3, 4, 5]),
        ...     lengths=torch.tensor([1, 1, 3, 0, 1, 1]),
        ... )
        >>> pooled = ebc(batch)
        >>> pooled.keys(), pooled.values().shape
        (['user', 'liked', 'shown'], torch.Size([2, 20]))
    """

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        tables = check_tables(type(self).__name__, tables, EmbeddingBagConfig)
        super().__init__(tables, [c.pooling for c in tables], device, bounds_check_mode)
        self._is_weighted = is_weighted
        self._dims = [c.embedding_dim for c in tables for _ in c.feature_names]
        self._widths = [c.embedding_dim * c.num_features() for c in tables]
        self.embedding_bags = self._new_tables()
        self._fill()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool a batch.

        Args:
            features: int32 or int64 ids of all features of the tables; other features are ignored.
                With one batch size per key it needs inverse indices. If batch and tables are on
                `meta`, the output has a shape and no values.

        Returns:
            fp32 [B, sum of D] with one key per feature ("feature@table" if several tables read it),
            in the order of the tables and their features.

        Raises:
            KeyError: A feature is missing.
            TypeError: Ids are not integers.
            ValueError: The batch is on another device, or lacks weights or inverse indices.
            IndexError: An id is outside its table (`BoundsCheckMode.FATAL`).
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            tables: list[Tensor] = []
            for table in self.embedding_bags.values():
                tables.append(table.weight)  # type: ignore[arg-type]
            return look_up_bags(
                features,
                self._is_weighted,
                tables,
                self._read,
                self._table_of,
                self._pooling_names,
                self._names,
                self._dims,
            )
        else:
            return self._look_up(features)

    @torch.jit.unused
    def _look_up(self, features: KeyedJaggedTensor) -> KeyedTensor:
        if is_traced(features):
            parts = self._is_weighted, self._names, self._dims
            return self._traced(look_up_bags, features, *parts)  # type: ignore[no-any-return]
        if self.device.type == "meta" and is_on_meta(features):
            size = features.stride(), sum(self._dims)
            return KeyedTensor.from_parts(self._names, self._dims, torch.empty(size, device="meta"))
        if not self._configs:
            nothing = torch.empty(features.stride(), 0, device=self.device)
            return KeyedTensor.from_parts([], [], nothing)
        lookups = self._current_lookups()
        groups = lookups.groups
        checked = lookups.check_batch(features, is_weighted=self._is_weighted)
        bags = checked.bags
        weights = bags.weights if self._is_weighted else None
        pooled = [
            group.lookup(group.selector.select(bags, weights), self.training) for group in groups
        ]
        values_BD = pooled[0] if len(groups) == 1 else self._in_table_order(groups, pooled)
        if checked.is_variable:
            values_BD = expand_bags(values_BD, tuple(self._dims), tuple(self._read), checked.safe)
        return KeyedTensor.from_parts(self._names, self._dims, values_BD)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the tables, in order."""
        return list(self._configs)  # type: ignore[arg-type]

    @property
    @torch.jit.unused
    def _embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.embedding_bag_configs()  # used by code for TorchRec

    def is_weighted(self) -> bool:
        """Return whether ids have weights."""
        return self._is_weighted

    @property
    def embedding_names(self) -> list[str]:
        """Names of the outputs, in order."""
        return list(self._names)

    def _tables(self) -> list[EmbeddingTable]:
        return list(self.embedding_bags.values())  # type: ignore[arg-type]

    def _gradient_of(self, group: TableGroup, gradients: Sequence[Tensor]) -> Tensor:
        parts = torch.split(gradients[0], self._widths, dim=1)
        return torch.cat([parts[t] for t in group.tables], dim=1)

    def _in_table_order(self, groups: Sequence[TableGroup], pooled: Sequence[Tensor]) -> Tensor:
        """Reorder the columns of several groups by table."""
        widths = self._widths
        pieces: dict[int, Tensor] = {}
        for group, values in zip(groups, pooled, strict=True):
            parts = torch.split(values, [widths[t] for t in group.tables], dim=1)
            pieces.update(zip(group.tables, parts, strict=True))
        return torch.cat([pieces[t] for t in range(len(widths))], dim=1)
