"""Indexes of quantized tables with hashed ids: the row of each id, read only.

Legend: `N` ids, `R` rows of a table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import final

import torch
from torch import Tensor, nn

from recsys.distributed.sharded.collection import ShardedCollection
from recsys.distributed.state.sharded_table import ShardedTable
from recsys.kernels.quantize import quantize_rows
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from recsys.modules.hashed_ids import LRU, HashedIds
from recsys.modules.ids.rows import stored_rows
from recsys.modules.ids.table_index import TableIndex
from recsys.modules.tables.embedding_tables import TableCollection
from recsys.sparse import KeyedJaggedTensor

__all__ = ["INDEX_STATES", "ServedIndexes", "index_states", "used_rows"]

INDEX_STATES = ("ids", "last_used", "steps")
"""Buffers of a trained `TableIndex` that are served."""


@final
class ServedIndexes(nn.Module):
    """Indexes of the tables of a quantized collection that have hashed ids, by table name.

    Ids without a row read the first row of their region. No id loses its row here: a `ttl` ends
    when the index is assigned.

    Args:
        configs: The tables of the collection.
        device: Device of the indexes.

    Raises:
        ValueError: Another table reads the feature of a table with hashed ids, or such a table is
            pruned or has an overflow.
    """

    def __init__(self, configs: Iterable[BaseEmbeddingConfig], device: torch.device) -> None:
        super().__init__()
        readers: dict[str, list[BaseEmbeddingConfig]] = {}
        for config in configs:
            for feature in config.feature_names:
                readers.setdefault(feature, []).append(config)
            if config.ids is None:
                continue
            if config.num_embeddings_post_pruning not in (None, config.num_embeddings):
                raise ValueError(
                    f"Table {config.name!r} with HashedIds must keep all rows; received "
                    f"num_embeddings_post_pruning={config.num_embeddings_post_pruning}."
                )
            if config.ids.overflow is not None:
                raise ValueError(
                    f"Table {config.name!r} to quantize must have no HashedIds.overflow, whose "
                    f"rows are partly on the disk; received {config.ids.overflow!r}. Leave out "
                    "overflow."
                )
            served = replace(config, ids=replace(config.ids, eviction=LRU(), admission=None))
            self._modules[config.name] = TableIndex(served, device)
        self._tables: dict[str, str] = {}
        """The table with hashed ids that reads a feature."""
        for feature, tables in readers.items():
            names = [config.name for config in tables]
            if any(config.ids is not None for config in tables):
                if len(names) > 1:
                    raise ValueError(
                        f"Feature {feature!r} of a table with HashedIds must be read by one "
                        f"quantized table; received {names}. Give each table a feature of its own."
                    )
                self._tables[feature] = names[0]

    def table(self, name: str) -> TableIndex:
        """Return the index of a table."""
        index = self._modules[name]
        assert isinstance(index, TableIndex)
        return index

    def rows_of(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return a batch with rows in place of hashed ids, int64 if there are some."""
        keys, sizes = features.keys(), features.length_per_key()
        hashed = [i for i, key in enumerate(keys) if key in self._tables]
        parts = list(features.values().long().split(sizes))
        if not hashed:
            return features
        indexes = [self.table(self._tables[keys[i]]).index for i in hashed]
        ids = torch.cat([parts[i] for i in hashed])
        own_sizes = [sizes[i] for i in hashed]
        found = stored_rows(indexes, ids, own_sizes).split(own_sizes)
        for i, rows in zip(hashed, found, strict=True):
            parts[i] = rows
        return features.with_values(torch.cat(parts))

    @torch.no_grad()
    def assign(
        self,
        config: BaseEmbeddingConfig,
        states: Mapping[str, Tensor],
        rules: HashedIds,
        stored: Tensor,
    ) -> None:
        """Write the index of a table.

        Args:
            config: The quantized table.
            states: `INDEX_STATES` of the trained index.
            rules: Rules of the trained index.
            stored: The table's quantized rows, uint8 `[R, row bytes]`; rows of unknown ids are
                set to zero if the rules require it.

        Raises:
            ValueError: Ids have other rows than the hash gives them.
        """
        index = self.table(config.name)
        index.ids.copy_(states["ids"])
        index.last_used.copy_(used_rows(states["last_used"], int(states["steps"]), rules))
        index.restore()
        if rules.unknown == "zero":
            shared = index.shared_rows()
            zeros = torch.zeros(len(shared), config.embedding_dim)
            rows = quantize_rows(zeros, DATA_TYPE_NUM_BITS[config.data_type])
            stored[shared, : rows.shape[1]] = rows.to(stored.device)


def used_rows(last_used: Tensor, step: int, rules: HashedIds) -> Tensor:
    """Return whether rows have an id that has not expired, bool `[R]`.

    Args:
        last_used: The last batch that had the id, `[R]`; 0: the row is free.
        step: Number of training batches.
        rules: Rules of the table.
    """
    oldest = max(step - rules.ttl, 1) if rules.ttl else 1
    return last_used >= oldest


def index_states(tables: TableCollection | ShardedCollection, name: str) -> dict[str, Tensor]:
    """Return the `INDEX_STATES` of a trained table with hashed ids.

    Every rank of a sharded collection must call it.
    """
    states = tables.state_dict()
    found = {}
    for key in INDEX_STATES:
        [state] = [v for path, v in states.items() if path.endswith(f".{name}.index.{key}")]
        found[key] = state.full_tensor() if isinstance(state, ShardedTable) else state
    return found
