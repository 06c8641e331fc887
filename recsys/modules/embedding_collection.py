"""EmbeddingCollection: one embedding per id, of many tables on one device.

Shapes: `N` ids of one feature, `D` columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from recsys.base.checked import checked
from recsys.kernels.types import BoundsCheckMode, PoolingType
from recsys.modules.embedding_configs import EmbeddingConfig, check_tables
from recsys.modules.embedding_interfaces import EmbeddingCollectionInterface
from recsys.modules.tables.embedding_inputs import is_on_meta
from recsys.modules.tables.embedding_table import EmbeddingTable
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.modules.tables.table_lookups import TableGroup
from recsys.modules.tables.traced import is_traced, look_up_sequences
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from recsys.sparse.features import FeatureViews

__all__ = ["EmbeddingCollection"]


class EmbeddingCollection(TableCollection, EmbeddingCollectionInterface):
    """Lookup of ids in many tables at once, without pooling, for sequences.

    Training and storage work as in `EmbeddingBagCollection`.

    Args:
        tables: The tables, all of the same embedding_dim.
        device: Device of the tables; None: torch's default device; "meta": nothing is allocated.
        need_indices: Return the ids too, as the weights of each JaggedTensor.
        bounds_check_mode: Handling of ids outside their table.

    Attributes:
        embeddings: Modules that hold the `weight` of each table, by table name.

    Raises:
        ValueError: Table names repeat, dims differ, or a table has no features or a dtype that
            cannot be trained.
        TypeError: A table is not an EmbeddingConfig.

    Example:
        >>> ec = EmbeddingCollection(
        ...     tables=[EmbeddingConfig(500, 8, "films", feature_names=["watched"])]
        ... )
        >>> batch = KeyedJaggedTensor(
        ...     keys=["watched"], values=torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> watched = ec(batch)["watched"]
        >>> watched.values().shape, watched.lengths()
        (torch.Size([3, 8]), tensor([2, 0, 1]))
    """

    @checked
    def __init__(
        self,
        tables: Iterable[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        *,
        bounds_check_mode: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        tables = check_tables(type(self).__name__, tables, EmbeddingConfig)
        super().__init__(tables, [PoolingType.NONE] * len(tables), device, bounds_check_mode)
        self._need_indices = need_indices
        self.embeddings = self._new_tables()
        self._fill()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a batch.

        Args:
            features: int32 or int64 ids of all features of the tables; other features are ignored.
                If batch and tables are on `meta`, the output has shapes and no values. A batch
                without `length_per_key` is then assumed to have the same number of ids per feature.

        Returns:
            One JaggedTensor per feature ("feature@table" if several tables read it): fp32 [N, D]
            values, the feature's lengths, and the ids as weights if `need_indices`.

        Raises:
            KeyError: A feature is missing.
            TypeError: Ids are not integers.
            ValueError: The batch is on another device.
            IndexError: An id is outside its table (`BoundsCheckMode.FATAL`).
        """
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            tables: list[Tensor] = []
            for table in self.embeddings.values():
                tables.append(table.weight)  # type: ignore[arg-type]
            return look_up_sequences(
                features,
                self._need_indices,
                tables,
                self._read,
                self._table_of,
                self._pooling_names,
                self._names,
            )
        else:
            return self._look_up(features)

    @torch.jit.unused
    def _look_up(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        if is_traced(features):
            parts = self._need_indices, self._names
            return self._traced(look_up_sequences, features, *parts)  # type: ignore[no-any-return]
        if self.device.type == "meta" and is_on_meta(features):
            return self._on_meta(features)
        lookups = self._current_lookups()
        groups = lookups.groups
        checked = lookups.check_batch(features, is_weighted=False)
        safe = checked.safe
        sizes_per_key = checked.bags.length_per_key or safe.length_per_key()
        batch = checked.bags._replace(length_per_key=sizes_per_key)
        safe_batch = batch._replace(values=checked.found.values)
        # the output has the ids as given
        are_replaced = self._need_indices and checked.found is not checked.bags
        strides_per_key = safe.stride_per_key()
        lengths = safe.lengths().split_with_sizes(strides_per_key)
        embeddings: dict[str, JaggedTensor] = {}
        for group in groups:
            bags = group.selector.select(batch, None)
            ids_N = (
                group.selector.select(safe_batch, None).indices if are_replaced else bags.indices
            )
            rows_ND = group.lookup(bags, self.training)
            positions = group.selector.positions
            views = FeatureViews(
                rows_ND,
                ids_N if self._need_indices else None,
                torch.cat([lengths[p] for p in positions]),
                [sizes_per_key[p] for p in positions],
                [strides_per_key[p] for p in positions],
            )
            names = [name for t in group.tables for name in self._names_by_table[t]]
            embeddings |= JaggedTensor.from_views(names, views)
        if len(groups) == 1:
            return embeddings
        return {name: embeddings[name] for name in self._names}

    def _on_meta(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        keys, ids = features.keys(), features.values()
        sizes = features.length_per_key_or_none()
        if sizes is None:
            each, more = divmod(ids.numel(), len(keys))
            sizes = [each + (i < more) for i in range(len(keys))]
        ids_of = dict(zip(keys, ids.split_with_sizes(sizes), strict=True))
        strides = features.stride_per_key()
        lengths_of = dict(zip(keys, features.lengths().split_with_sizes(strides), strict=True))
        return {
            name: JaggedTensor.from_parts(
                torch.empty(ids_of[feature].numel(), config.embedding_dim, device="meta"),
                ids_of[feature] if self._need_indices else None,
                lengths_of[feature],
            )
            for config, names in zip(self._configs, self._names_by_table, strict=True)
            for name, feature in zip(names, config.feature_names, strict=True)
        }

    @property
    @torch.jit.unused
    def _embedding_configs(self) -> list[EmbeddingConfig]:
        return self.embedding_configs()  # used by code for TorchRec

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the tables, in order."""
        return list(self._configs)  # type: ignore[arg-type]

    def need_indices(self) -> bool:
        """Return whether the output includes the ids."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """Return the number of columns of every table."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs of each table."""
        return [list(names) for names in self._names_by_table]

    def _gradient_of(self, group: TableGroup, gradients: Sequence[Tensor]) -> Tensor:
        parts = dict(zip(self._names, gradients, strict=False))  # then gradients of the ids
        return torch.cat([parts[n] for t in group.tables for n in self._names_by_table[t]])

    def _tables(self) -> list[EmbeddingTable]:
        return list(self.embeddings.values())  # type: ignore[arg-type]
