"""The tensor part of quantized collections: plain tensors in and out, compiled by TorchScript.

Legend: `K` keys of a batch, `B` batch size, `N` ids, `D` columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast, final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import Rect
from recsys.kernels import ops
from recsys.kernels.arguments import whole
from recsys.kernels.quantized_lookup import QuantizedLookup
from recsys.kernels.quantized_split_lookup import QuantizedSplitLookup
from recsys.kernels.types import PoolingType
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig

__all__ = [
    "QuantizedBags",
    "QuantizedRows",
    "QuantizedTables",
    "by_key",
    "fails",
    "read_sizes",
    "rows_left",
    "to_device",
]


def rows_left(config: BaseEmbeddingConfig) -> int:
    """Return the rows of a table that are served: all, or those left after pruning."""
    left = config.num_embeddings_post_pruning
    if left is None:
        return config.num_embeddings
    where = f"Table {config.name!r}: num_embeddings_post_pruning"
    return whole(where, left, most=config.num_embeddings)


class _Columns(NamedTuple):
    """Some columns of a table, all rows: what one lookup reads."""

    table: int
    start: int
    """The first column."""
    width: int
    shards: tuple[int, ...]
    """Of the table's shards those with these columns, by their rows."""
    rank: int
    """The owner of the first rows."""


def _columns_of(table: int, shards: Sequence[Rect]) -> list[_Columns]:
    """Return a table's blocks of columns, in order."""
    by_start: dict[int, list[int]] = {}
    for i in sorted(range(len(shards)), key=lambda i: (shards[i].col_start, shards[i].row_start)):
        by_start.setdefault(shards[i].col_start, []).append(i)
    return [
        _Columns(table, start, shards[own[0]].num_cols, tuple(own), shards[own[0]].rank)
        for start, own in by_start.items()
    ]


class QuantizedTables(nn.Module):
    """The lookups of a quantized collection.

    Args:
        configs: the tables.
        poolings: how each table's bags are reduced.
        rows: per table and shard its quantized rows, on the device that holds them.
        shards: per table the rectangles of its shards, which are a grid. Those of one owner are
            looked up together; columns whose rows have several owners, by themselves.
        output_dtype: of what is looked up.
        row_alignment: rows are stored in multiples of that many bytes.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingType],
        rows: Sequence[Sequence[Tensor]],
        shards: Sequence[Sequence[Rect]],
        output_dtype: torch.dtype,
        row_alignment: int,
    ) -> None:
        super().__init__()
        self.feature_names = list(dict.fromkeys(f for c in configs for f in c.feature_names))
        columns = [part for t, of_table in enumerate(shards) for part in _columns_of(t, of_table)]
        by_lookup: dict[object, list[_Columns]] = {}
        for part in columns:
            pooling = poolings[part.table]
            # rows that are not pooled are one tensor, of one width
            alike = part.rank, pooling, part.width if pooling is PoolingType.NONE else 0
            key = part if len(part.shards) > 1 else alike
            by_lookup.setdefault(key, []).append(part)
        self.lookups = nn.ModuleList(
            _lookup_of(parts, configs, poolings, rows, output_dtype, row_alignment)
            for parts in by_lookup.values()
        )
        self._stored = [
            (part.table, shard)
            for parts in by_lookup.values()
            for part in parts
            for shard in part.shards
        ]
        slots = [
            [(part, f) for part in parts for f in configs[part.table].feature_names]
            for parts in by_lookup.values()
        ]
        place = {feature: i for i, feature in enumerate(self.feature_names)}
        self.lookup_features = [[place[f] for _, f in of_lookup] for of_lookup in slots]
        # the lookups' outputs, as (table, feature, first column)
        found = [(part.table, f, part.start) for of_lookup in slots for part, f in of_lookup]
        per_table = [[part.start for part in columns if part.table == t] for t in range(len(rows))]
        wanted = [
            (t, f, start)
            for t, c in enumerate(configs)
            for f in c.feature_names
            for start in per_table[t]
        ]
        self.widths = [part.width for of_lookup in slots for part, _ in of_lookup]
        place_of_slot = {slot: i for i, slot in enumerate(found)}
        self.order = [place_of_slot[slot] for slot in wanted]
        self.in_order = found == wanted
        self.num_parts = [len(per_table[t]) for t, c in enumerate(configs) for _ in c.feature_names]
        rows_of: dict[str, int] = {}
        for config in configs:
            for feature in config.feature_names:
                left = rows_left(config)
                rows_of[feature] = min(rows_of.get(feature, left), left)
        self.num_rows = [rows_of[feature] for feature in self.feature_names]

    @torch.jit.unused
    def row_alignment(self) -> int:
        """Return the bytes that rows are stored in multiples of."""
        return cast(QuantizedLookup, self.lookups[0]).row_alignment

    @torch.jit.unused
    def stored_rows(self) -> list[list[Tensor]]:
        """Return each table's shards as they are stored, zeros at the end of rows: live views."""
        stored = [
            rows
            for lookup in self.lookups
            for rows in cast(QuantizedLookup, lookup).stored_tables()
        ]
        found = dict(zip(self._stored, stored, strict=True))
        tables: list[list[Tensor]] = []
        for table, shard in sorted(found):
            if shard == 0:
                tables.append([])
            tables[-1].append(found[table, shard])
        return tables

    def _look_up(
        self,
        values: Tensor,
        lengths_KB: Tensor,
        ids_per_key: list[int],
        weights: Tensor | None,
        positions: list[int],
    ) -> list[Tensor]:
        """Return what each lookup finds, on the ids' device.

        `ids_per_key` is empty where the host does not know it.
        """
        self._check_ids(values, lengths_KB.sum(1), positions)
        if weights is not None:
            if weights.dim() != 1 or weights.numel() != values.numel():
                raise ValueError(
                    f"weights must be one number per id, {values.numel()} of them; received "
                    f"{weights.numel()} in {weights.dim()} dims."
                )
            weights = weights.float()
        outputs: list[Tensor] = []
        for i, lookup in enumerate(self.lookups):
            keys = [positions[f] for f in self.lookup_features[i]]
            lengths_FB, ids, id_weights = lengths_KB, values, weights
            if keys != list(range(lengths_KB.size(0))):
                total: int | None = None
                if len(ids_per_key) > 0:
                    total = sum([ids_per_key[key] for key in keys])
                order = to_device(keys, values.device)
                lengths_FB, ids, id_weights = _permute(order, lengths_KB, values, weights, total)
            offsets = _cumsum(lengths_FB.flatten())
            device = lookup.weights.device
            if id_weights is not None:
                id_weights = id_weights.to(device)  # type: ignore[arg-type]
            found = lookup(ids.to(device), offsets.to(device), id_weights)  # type: ignore[arg-type]
            outputs.append(found.to(values.device))
        return outputs

    def _check_ids(self, values: Tensor, ids_per_key: Tensor, positions: list[int]) -> None:
        """Wait for the device: an answer is only given when its own ids are known to be good."""
        rows = [-1] * ids_per_key.numel()  # of the tables that a key is looked up in; -1: in none
        for feature, key in enumerate(positions):
            rows[key] = self.num_rows[feature]
        rows_N = torch.repeat_interleave(
            to_device(rows, values.device), ids_per_key, output_size=values.numel()
        )
        bad_N = (rows_N >= 0) & ((values < 0) | (values >= rows_N))
        if fails(~bad_N.any(), "An id is outside its table."):
            where = int(bad_N.nonzero()[0].item())
            key = int(torch.searchsorted(ids_per_key.cumsum(0), where, right=True))
            raise IndexError(
                f"Feature {self.feature_names[positions.index(key)]} has the id "
                f"{int(values[where])}, outside its table with {rows[key]} rows."
            )


@final
class QuantizedBags(QuantizedTables):
    """Looks up bags and pools them."""

    def forward(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        positions: list[int],
        num_keys: int,
    ) -> Tensor:
        """Look up a batch.

        Args:
            values: `[N]` ids, feature-major.
            lengths: `[K * B]` ids per bag.
            weights: `[N]` fp32, or None.
            positions: for each feature of the collection its place among the keys of the batch.
            num_keys: `K`, the keys of the batch.

        Returns:
            `[B, sum of dims]`, on the ids' device.

        Raises:
            IndexError: if an id is outside its table.
            TypeError: if the ids are not integers.
            ValueError: if ids or weights have two dims, or the lengths do not fit the ids or the
                features.
        """
        lengths_KB = by_key(values, lengths, num_keys)
        sizes = read_sizes(values, lengths_KB, False)
        outputs = self._look_up(values, lengths_KB, sizes, weights, positions)
        pooled = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if self.in_order:
            return pooled
        columns = pooled.split(self.widths, dim=1)
        return torch.cat([columns[i] for i in self.order], dim=1)


@final
class QuantizedRows(QuantizedTables):
    """Looks up one row per id."""

    def forward(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        positions: list[int],
        num_keys: int,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Look up a batch, as `QuantizedBags` does.

        Returns:
            Per feature of each table the rows, `[N, D]`; and per key of the batch its ids,
            `[N]`.
        """
        lengths_KB = by_key(values, lengths, num_keys)
        sizes = read_sizes(values, lengths_KB, True)
        pieces: list[Tensor] = []
        outputs = self._look_up(values, lengths_KB, sizes, weights, positions)
        for i, rows in enumerate(outputs):
            pieces.extend(rows.split([sizes[positions[f]] for f in self.lookup_features[i]]))
        ids: list[Tensor] = []
        ids.extend(values.split(sizes))
        pieces = [pieces[i] for i in self.order]
        outputs, first = [], 0
        for count in self.num_parts:
            parts = pieces[first : first + count]
            outputs.append(parts[0] if count == 1 else torch.cat(parts, dim=1))
            first += count
        return outputs, ids


def _lookup_of(
    parts: Sequence[_Columns],
    configs: Sequence[BaseEmbeddingConfig],
    poolings: Sequence[PoolingType],
    rows: Sequence[Sequence[Tensor]],
    output_dtype: torch.dtype,
    row_alignment: int,
) -> QuantizedLookup:
    """Return the lookup of columns of one owner, or of columns whose rows have several."""
    bits = [DATA_TYPE_NUM_BITS[configs[part.table].data_type] for part in parts]
    tables = [rows[part.table][shard] for part in parts for shard in part.shards]
    features = [i for i, part in enumerate(parts) for _ in configs[part.table].feature_names]
    pooling = poolings[parts[0].table]
    if len(tables) > len(parts):
        return QuantizedSplitLookup(
            tables, bits[0], len(features), pooling, output_dtype=output_dtype,
            row_alignment=row_alignment,
        )  # fmt: skip
    return QuantizedLookup(
        tables, bits, features, pooling, output_dtype=output_dtype, row_alignment=row_alignment
    )


def by_key(values: Tensor, lengths: Tensor, num_keys: int) -> Tensor:
    """Return the lengths of a batch, `[K, B]`.

    Raises:
        TypeError: The ids are not integers.
        ValueError: The ids have two dims, or the lengths do not fit the keys.
    """
    if values.is_floating_point():
        raise TypeError("ids must be integers; received floats. Convert with values.long().")
    if values.dim() != 1:
        raise ValueError(f"ids must have one dim; received {values.dim()}.")
    if lengths.numel() % num_keys != 0:
        raise ValueError(
            f"lengths must have one value per feature and sample, {num_keys} features; "
            f"received {lengths.numel()} values."
        )
    return lengths.view(num_keys, lengths.numel() // num_keys)


def fails(holds: Tensor, message: str) -> bool:
    """Return whether what must hold does not: a wait for the device.

    A program of `torch.export` cannot branch on it: there it is asserted.

    Args:
        holds: One bool.
        message: Of the assertion.
    """
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():  # type: ignore[attr-defined]
        torch._assert_async(holds, message)
        return False
    return not bool(holds)


def read_sizes(values: Tensor, lengths_KB: Tensor, is_needed: bool) -> list[int]:
    """Return the number of ids of each key, as sizes for all that follows: one wait.

    Args:
        values: `[N]` ids.
        lengths_KB: `[K, B]` ids per bag.
        is_needed: False: a program of `torch.export`, which must not know them, gets none.

    Raises:
        ValueError: The lengths do not fit the ids.
    """
    if not torch.jit.is_scripting() and torch.compiler.is_compiling():  # type: ignore[attr-defined]
        return _traced_sizes(values, lengths_KB, is_needed)
    num_negative = (lengths_KB < 0).sum().view(1)
    found: list[int] = torch.cat([lengths_KB.sum(1), num_negative]).tolist()
    sizes = found[:-1]
    if found[-1] > 0 or sum(sizes) != values.numel():
        raise ValueError(
            f"lengths must not be negative and must add up to the number of ids, {values.numel()}; "
            f"received {found[-1]} negative ones and a sum of {sum(sizes)}."
        )
    return sizes


def _traced_sizes(values: Tensor, lengths_KB: Tensor, is_needed: bool) -> list[int]:
    ids_per_key = lengths_KB.sum(1)
    fit = (lengths_KB >= 0).all() & (ids_per_key.sum() == values.numel())
    fails(fit, "lengths must add up to the number of ids.")
    sizes: list[int] = ids_per_key.tolist() if is_needed else []
    for size in sizes:
        torch._check(size >= 0)
    if is_needed:
        torch._check(sum(sizes) == values.numel())
    return sizes


def to_device(values: list[int], device: torch.device) -> Tensor:
    """Return numbers that the host knows as an int64 tensor on a device, without a wait."""
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":  # from pinned memory the copy does not wait for the device
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _permute(
    order: Tensor, lengths_KB: Tensor, values: Tensor, weights: Tensor | None, total: int | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return torch.ops.fbgemm.permute_2D_sparse_data(  # type: ignore[no-any-return]
            order.int(), lengths_KB, values, weights, total
        )
    return ops.permute_2d(order, lengths_KB, values, weights, total)


def _cumsum(lengths: Tensor) -> Tensor:
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return torch.ops.fbgemm.asynchronous_complete_cumsum(lengths)  # type: ignore[no-any-return]
    return ops.complete_cumsum(lengths)
