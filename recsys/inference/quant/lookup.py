"""Lookups of quantized collections. TorchScript compiles them and `torch.export` traces them.

They hold tensors, names and numbers only. An exported program runs them in place of the collection
(`QuantizedCollection.served`), on the same storage.

Shapes: `K` keys of a batch, `B` batch size, `N` ids, `D` columns, `P` positions of a bag.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple, cast, final

import torch
from torch import Tensor, nn

from recsys.distributed.placement.layout import Rect
from recsys.inference.batch_checks import (
    are_outside,
    by_key,
    fails,
    first_bad_id,
    positions_in,
    read_sizes,
    to_device,
)
from recsys.inference.quant.options import QuantizedOptions, rows_left
from recsys.kernels import ops
from recsys.kernels.bounds import NO_LIMIT, bad_id_text
from recsys.kernels.quantized_lookup import QuantizedLookup
from recsys.kernels.quantized_split_lookup import QuantizedSplitLookup
from recsys.kernels.types import PoolingType
from recsys.modules.embedding_configs import DATA_TYPE_NUM_BITS, BaseEmbeddingConfig
from recsys.modules.embedding_interfaces import get_embedding_names_by_table
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessorDictWrapper
from recsys.modules.position_weights import with_weights
from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = [
    "PositionProcessor",
    "ProcessedBags",
    "QuantizedBags",
    "QuantizedRows",
    "QuantizedTables",
    "Served",
    "position_processor",
]


class _Columns(NamedTuple):
    """A range of columns of a table, which one lookup reads."""

    table: int
    start: int
    """The first column."""
    width: int
    shards: tuple[int, ...]
    """The table's shards that hold these columns, ordered by rows."""
    rank: int
    """The owner of the first rows."""


def _columns_of(table: int, shards: Sequence[Rect]) -> list[_Columns]:
    """Return a table's column ranges, in order."""
    by_start: dict[int, list[int]] = {}
    for i in sorted(range(len(shards)), key=lambda i: (shards[i].col_start, shards[i].row_start)):
        by_start.setdefault(shards[i].col_start, []).append(i)
    return [
        _Columns(table, start, shards[indices[0]].num_cols, tuple(indices), shards[indices[0]].rank)
        for start, indices in by_start.items()
    ]


class Served(nn.Module):
    """A module of an exported program: takes a batch and returns a keyed container."""

    @torch.jit.unused
    def wrap_proxy(self, output: object, features: KeyedJaggedTensor) -> object:
        """Return the output as a container of proxies.

        Args:
            output: The proxy of the output in `torch.fx`.
            features: The batch, of proxies.
        """
        raise NotImplementedError


class QuantizedTables(Served):
    """The lookups of a quantized collection.

    Args:
        configs: The tables.
        poolings: The pooling of each table.
        rows: The quantized rows per table and shard, each on the device of its owner.
        shards: The rectangles of each table's shards, which form a grid. Shards of one owner are
            looked up together. Columns whose rows have several owners get their own lookup.
        options: The options of the collection.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        poolings: Sequence[PoolingType],
        rows: Sequence[Sequence[Tensor]],
        shards: Sequence[Sequence[Rect]],
        options: QuantizedOptions,
    ) -> None:
        super().__init__()
        self.names = [n for names in get_embedding_names_by_table(configs) for n in names]
        self.read = [f for config in configs for f in config.feature_names]
        self.dims = [config.embedding_dim for config in configs for _ in config.feature_names]
        self.is_weighted = options.is_weighted
        self.need_indices = options.need_indices
        self.feature_names = list(dict.fromkeys(self.read))
        columns = [part for t, rects in enumerate(shards) for part in _columns_of(t, rects)]
        by_lookup: dict[object, list[_Columns]] = {}
        for part in columns:
            pooling = poolings[part.table]
            # rows without pooling are one tensor of one width
            alike = part.rank, pooling, part.width if pooling is PoolingType.NONE else 0
            key = part if len(part.shards) > 1 else alike
            by_lookup.setdefault(key, []).append(part)
        self.lookups = nn.ModuleList(
            _lookup_of(parts, configs, poolings, rows, options) for parts in by_lookup.values()
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
        self.lookup_features = [[place[f] for _, f in lookup] for lookup in slots]
        # outputs of the lookups as (table, feature, first column)
        outputs = [(part.table, f, part.start) for lookup in slots for part, f in lookup]
        per_table = [[part.start for part in columns if part.table == t] for t in range(len(rows))]
        wanted = [
            (t, f, start)
            for t, c in enumerate(configs)
            for f in c.feature_names
            for start in per_table[t]
        ]
        self.widths = [part.width for lookup in slots for part, _ in lookup]
        place_of_slot = {slot: i for i, slot in enumerate(outputs)}
        self.order = [place_of_slot[slot] for slot in wanted]
        self.in_order = outputs == wanted
        self.num_parts = [len(per_table[t]) for t, c in enumerate(configs) for _ in c.feature_names]
        self.num_rows = [
            min(rows_left(config) for config in configs if feature in config.feature_names)
            for feature in self.feature_names
        ]

    @torch.jit.unused
    def row_alignment(self) -> int:
        """Return the alignment of stored rows in bytes."""
        return cast(QuantizedLookup, self.lookups[0]).row_alignment

    @torch.jit.unused
    def stored_rows(self) -> list[list[Tensor]]:
        """Return live views of the stored rows, with padding, per table and shard."""
        lookups = [cast(QuantizedLookup, lookup) for lookup in self.lookups]
        stored = [rows for lookup in lookups for rows in lookup.stored_tables()]
        tables: dict[int, list[Tensor]] = {}
        for (table, _), rows in sorted(zip(self._stored, stored, strict=True), key=itemgetter(0)):
            tables.setdefault(table, []).append(rows)
        return list(tables.values())

    @torch.jit.unused
    def tables_by_lookup(self) -> list[list[int]]:
        """Return the tables of each lookup, in the order of its rows."""
        tables = iter([table for table, _ in self._stored])
        counts = [len(cast(QuantizedLookup, lookup).stored_tables()) for lookup in self.lookups]
        return [[next(tables) for _ in range(count)] for count in counts]

    @torch.jit.unused
    def over(self, lookups: Sequence[QuantizedLookup]) -> QuantizedTables:
        """Return these tables with other lookups of the same rows."""
        new = copy.copy(self)
        new._modules = {**self._modules, "lookups": nn.ModuleList(lookups)}
        return new

    def _look_up(
        self,
        values: Tensor,
        lengths_KB: Tensor,
        ids_per_key: list[int],
        weights: Tensor | None,
        positions: list[int],
    ) -> list[Tensor]:
        """Return the output of each lookup, on the ids' device.

        `ids_per_key` is empty if the host does not know the sizes.
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
            output = lookup(ids.to(device), offsets.to(device), id_weights)  # type: ignore[arg-type]
            outputs.append(output.to(values.device))
        return outputs

    def _check_ids(self, values: Tensor, ids_per_key: Tensor, positions: list[int]) -> None:
        """Check all ids before the lookup; this waits for the device."""
        rows = [-1] * ids_per_key.numel()  # of the table that a key is looked up in; -1: no table
        for feature, key in enumerate(positions):
            rows[key] = self.num_rows[feature]
        bad_N = are_outside(values, ids_per_key, rows)
        if fails(~bad_N.any(), "An id is outside its table."):
            where, key, position = first_bad_id(bad_N, ids_per_key)
            feature_name = self.feature_names[positions.index(key)]
            raise IndexError(bad_id_text(feature_name, int(values[where]), position, rows[key]))


@final
class QuantizedBags(QuantizedTables):
    """Lookups of bags with pooling."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Forward pass in an exported program: look up and pool one batch.

        Args:
            features: One batch size for all keys.

        Raises:
            IndexError: An id is outside its table.
            KeyError: The batch lacks a feature.
            ValueError: The batch lacks weights, has a batch size per key, or has lengths that do
                not match the ids.
        """
        positions = positions_in(features, self.feature_names)
        weights: Tensor | None = None
        if self.is_weighted:
            weights = features.weights()
        values = self.look_up(
            features.values(), features.lengths(), weights, positions, len(features.keys())
        )
        return KeyedTensor(self.names, self.dims, values)

    def look_up(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        positions: list[int],
        num_keys: int,
    ) -> Tensor:
        """Look up and pool bags.

        Args:
            values: `[N]` ids, feature-major.
            lengths: `[K * B]` ids per bag.
            weights: `[N]` fp32, or None.
            positions: The position of each of `feature_names` among the keys of the batch.
            num_keys: `K`.

        Returns:
            `[B, sum of dims]`, on the ids' device.

        Raises:
            IndexError: An id is outside its table.
            TypeError: The ids are not integers.
            ValueError: Ids or weights have two dims, or the lengths do not match the ids or the
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

    @torch.jit.unused
    def wrap_proxy(self, output: object, features: KeyedJaggedTensor) -> object:
        """Return a keyed tensor of proxies."""
        values = cast(KeyedTensor, output).values()
        return KeyedTensor.from_parts(self.names, self.dims, values)


@final
class QuantizedRows(QuantizedTables):
    """Lookups of one row per id."""

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Forward pass in an exported program; arguments and errors as `QuantizedBags.forward`."""
        keys = features.keys()
        positions = positions_in(features, self.feature_names)
        lengths = features.lengths()
        rows, ids = self.look_up(features.values(), lengths, positions, len(keys))
        lengths_KB = lengths.view(len(keys), lengths.numel() // len(keys))
        outputs: dict[str, JaggedTensor] = {}
        for i, name in enumerate(self.names):
            key = keys.index(self.read[i])
            weights: Tensor | None = None
            if self.need_indices:
                weights = ids[key]
            outputs[name] = JaggedTensor(rows[i], weights, lengths_KB[key])
        return outputs

    def look_up(
        self, values: Tensor, lengths: Tensor, positions: list[int], num_keys: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Look up ids; arguments and errors as `QuantizedBags.look_up`.

        Returns:
            The rows per output, `[N, D]` each; and the ids per key of the batch, `[N]` each.
        """
        lengths_KB = by_key(values, lengths, num_keys)
        sizes = read_sizes(values, lengths_KB, True)
        pieces: list[Tensor] = []
        outputs = self._look_up(values, lengths_KB, sizes, None, positions)
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

    @torch.jit.unused
    def wrap_proxy(self, output: object, features: KeyedJaggedTensor) -> object:
        """Return jagged tensors of proxies."""
        jagged = cast(dict[str, JaggedTensor], output)
        return {
            name: JaggedTensor.from_parts(
                jagged[name].values(),
                jagged[name].weights() if self.need_indices else None,
                jagged[name].lengths(),
            )
            for name in self.names
        }


def _lookup_of(
    parts: Sequence[_Columns],
    configs: Sequence[BaseEmbeddingConfig],
    poolings: Sequence[PoolingType],
    rows: Sequence[Sequence[Tensor]],
    options: QuantizedOptions,
) -> QuantizedLookup:
    """Build the lookup of columns with one owner, or of columns whose rows have several owners."""
    bits = [DATA_TYPE_NUM_BITS[configs[part.table].data_type] for part in parts]
    tables = [rows[part.table][shard] for part in parts for shard in part.shards]
    features = [i for i, part in enumerate(parts) for _ in configs[part.table].feature_names]
    pooling = poolings[parts[0].table]
    layout = {"output_dtype": options.output_dtype, "row_alignment": options.row_alignment}
    if len(tables) > len(parts):
        return QuantizedSplitLookup(tables, bits[0], len(features), pooling, **layout)  # type: ignore[arg-type]
    return QuantizedLookup(tables, bits, features, pooling, **layout)  # type: ignore[arg-type]


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


@final
class ProcessedBags(Served):
    """Lookup of bags with pooling, after a feature processor.

    Args:
        processor: Maps a batch to a batch with weights.
        bags: Looks up the result.
    """

    def __init__(self, processor: nn.Module, bags: QuantizedBags) -> None:
        super().__init__()
        self.processor = processor
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up a batch, as `QuantizedBags.forward`; it needs no weights."""
        output: KeyedTensor = self.bags(self.processor(features))
        return output

    @torch.jit.unused
    def wrap_proxy(self, output: object, features: KeyedJaggedTensor) -> object:
        """Return a keyed tensor of proxies."""
        return self.bags.wrap_proxy(output, features)


@final
class PositionProcessor(Served):
    """Weights of ids by their position in a bag.

    Args:
        weights: `[P]` position weights by feature; copied. Ids of other features get 1.
    """

    if TYPE_CHECKING:  # TorchScript does not support annotations that are strings
        weights: Tensor
        rows: Tensor

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = list(weights)
        parts = [weight.detach() for weight in weights.values()]
        ends = list(accumulate(part.numel() for part in parts))
        # first weight, last weight and number of weights per feature; the last row is for others
        rows = [(end - len(p), end - 1, len(p)) for end, p in zip(ends, parts, strict=True)]
        total = sum(map(len, parts))
        rows.append((total, total, NO_LIMIT))
        device = parts[0].device if parts else None
        self.register_buffer("weights", torch.cat([*parts, torch.ones(1, device=device)]))
        self.register_buffer("rows", torch.tensor(rows, dtype=torch.int64, device=device))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Set the weights of a batch.

        Args:
            features: One batch size for all keys; its own weights are replaced.

        Raises:
            ValueError: A bag has more ids than its feature has weights, or the lengths do not match
                the ids.
        """
        keys, values, lengths = features.keys(), features.values(), features.lengths()
        lengths_KB = by_key(values, lengths, len(keys))
        read_sizes(values, lengths_KB, False)
        known = [self.names.index(key) if key in self.names else len(self.names) for key in keys]
        first, last, longest = self.rows.index_select(0, to_device(known, values.device)).unbind(1)
        too_long = lengths_KB > longest.unsqueeze(1)
        if fails(~too_long.any(), "A bag has more ids than its feature has position weights."):
            key = int(too_long.any(1).nonzero()[0].item())
            raise ValueError(
                f"A bag of feature {keys[key]} must not have more ids than the feature has "
                f"position weights, {int(longest[key])}; received {int(lengths_KB[key].max())}."
            )
        bags, size = lengths_KB.flatten(), lengths_KB.size(1)
        start = first.repeat_interleave(size) - (bags.cumsum(0) - bags)
        num_ids = values.numel()
        place = torch.repeat_interleave(start, bags, output_size=num_ids)
        place = place + torch.arange(num_ids, device=values.device)
        last = torch.repeat_interleave(last.repeat_interleave(size), bags, output_size=num_ids)
        weights = self.weights.index_select(0, torch.minimum(place, last))
        return KeyedJaggedTensor(keys, values, weights, lengths)

    @torch.jit.unused
    def wrap_proxy(self, output: object, features: KeyedJaggedTensor) -> object:
        """Return a batch with weights, of proxies."""
        return with_weights(features, cast(KeyedJaggedTensor, output).weights())


def position_processor(module: nn.Module) -> PositionProcessor | None:
    """Convert a processor that only has position weights for a program. Return None for others."""
    if type(module) is PositionWeightedModuleCollection:
        return PositionProcessor(module.position_weights_dict)
    if isinstance(module, FeatureProcessorDictWrapper):
        parts = dict(module.named_children())
        if all(type(part) is PositionWeightedModule for part in parts.values()):
            return PositionProcessor(
                {name: cast(Tensor, part.position_weight) for name, part in parts.items()}
            )
    return None
