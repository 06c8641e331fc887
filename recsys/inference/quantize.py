"""Embedding collections with rows of 8 or 4 bits or of fp16, made from trained ones."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import cast, final

import torch
from torch import Tensor, nn

from recsys.kernels import ops
from recsys.kernels.quantized import QuantizedLookup, quantize_rows
from recsys.kernels.types import PoolingMode
from recsys.modules.embedding_configs import (
    EmbeddingBagConfig,
    pooling_type_to_pooling_mode,
)
from recsys.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
)
from recsys.sparse import KeyedJaggedTensor, KeyedTensor

_BITS = {
    torch.int8: 8,
    torch.uint8: 8,
    torch.qint8: 8,
    torch.quint8: 8,
    torch.quint4x2: 4,
    torch.float16: 16,
}


@final
class QuantizedBags(nn.Module):
    """The tensor part of a quantized collection: plain tensors in and out, compiled by TorchScript.

    Args:
        configs: the tables.
        rows: per table its quantized rows, on the device that looks them up.
        bits: per table 16, 8 or 4.
        features: the collection's distinct features.
        shards: per table the number of the shard that owns it; each shard is looked up by itself.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        rows: Sequence[Tensor],
        bits: Sequence[int],
        features: Sequence[str],
        shards: Sequence[int],
    ) -> None:
        super().__init__()
        groups = _group_tables(configs, shards)
        slots = [[(t, f) for t in tables for f in configs[t].feature_names] for _, tables in groups]
        self.lookups = nn.ModuleList(
            QuantizedLookup(
                [rows[t] for t in tables],
                [bits[t] for t in tables],
                [tables.index(t) for t, _ in of_group],
                pooling,
            )
            for (pooling, tables), of_group in zip(groups, slots, strict=True)
        )
        self._tables_of_lookups = [tables for _, tables in groups]
        self.group_features = [[features.index(f) for _, f in of_group] for of_group in slots]
        # the lookups' columns, as (table, feature)
        found = [(t, features.index(f)) for of_group in slots for t, f in of_group]
        wanted = [(t, features.index(f)) for t, c in enumerate(configs) for f in c.feature_names]
        self.widths = [configs[t].embedding_dim for t, _ in found]
        self.order = [found.index(slot) for slot in wanted]
        self.in_order = self.order == list(range(len(wanted)))
        least_rows = [
            min(c.num_embeddings for c in configs if feature in c.feature_names)
            for feature in features
        ]
        self.feature_names = list(features)
        self.num_rows = least_rows

    @torch.jit.unused
    def table_rows(self) -> list[Tensor]:
        """Returns each table's quantized rows, as live views."""
        found = {
            table: cast(QuantizedLookup, lookup).table_rows(i)
            for lookup, tables in zip(self.lookups, self._tables_of_lookups, strict=True)
            for i, table in enumerate(tables)
        }
        return [found[table] for table in sorted(found)]

    def forward(
        self,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None,
        positions: list[int],
        num_keys: int,
    ) -> Tensor:
        """Looks up a batch.

        Args:
            values: ``[N]`` ids, feature-major.
            lengths: ``[K * B]`` ids per bag.
            weights: ``[N]`` fp32, or None.
            positions: for each feature of the collection its place among the keys of the batch.
            num_keys: ``K``, the keys of the batch.

        Returns:
            ``[B, sum of dims]`` fp32, on the ids' device.

        Raises:
            IndexError: if an id lies outside its table.
            TypeError: if the ids are not integers.
            ValueError: if the lengths do not fit the ids or the features.
        """
        if values.is_floating_point():
            raise TypeError("ids must be integers; received floats. Convert with values.long().")
        if lengths.numel() % num_keys != 0:
            raise ValueError(
                f"lengths must have one value per feature and sample, {num_keys} features; "
                f"received {lengths.numel()} values."
            )
        lengths_KB = lengths.view(num_keys, lengths.numel() // num_keys)
        ids_per_key = _read_sizes(values, lengths_KB)
        self._check_ids(values, lengths_KB.sum(1), positions)
        if weights is not None:
            weights = weights.float()
        outputs: list[Tensor] = []
        for i, lookup in enumerate(self.lookups):
            keys = [positions[f] for f in self.group_features[i]]
            lengths_FB, ids, id_weights = lengths_KB, values, weights
            if keys != list(range(num_keys)):
                total = sum([ids_per_key[key] for key in keys])
                order = _to_device(keys, values.device)
                lengths_FB, ids, id_weights = _permute(order, lengths_KB, values, weights, total)
            offsets = _cumsum(lengths_FB.flatten())
            device = lookup.weights.device
            if id_weights is not None:
                id_weights = id_weights.to(device)  # type: ignore[arg-type]
            pooled = lookup(ids.to(device), offsets.to(device), id_weights)  # type: ignore[arg-type]
            outputs.append(pooled.to(values.device))
        pooled = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        if self.in_order:
            return pooled
        columns = pooled.split(self.widths, dim=1)
        return torch.cat([columns[i] for i in self.order], dim=1)

    def _check_ids(self, values: Tensor, ids_per_key: Tensor, positions: list[int]) -> None:
        """Waits for the device: an answer is only given when its own ids are known to be good."""
        rows = [-1] * ids_per_key.numel()  # of the tables that a key is looked up in; -1: in none
        for feature, key in enumerate(positions):
            rows[key] = self.num_rows[feature]
        rows_N = torch.repeat_interleave(
            _to_device(rows, values.device), ids_per_key, output_size=values.numel()
        )
        bad_N = (rows_N >= 0) & ((values < 0) | (values >= rows_N))
        if bool(bad_N.any()):
            where = int(bad_N.nonzero()[0].item())
            key = int(torch.searchsorted(ids_per_key.cumsum(0), where, right=True))
            raise IndexError(
                f"Feature {self.feature_names[positions.index(key)]} has the id "
                f"{int(values[where])}, outside its table with {rows[key]} rows."
            )


def _read_sizes(values: Tensor, lengths_KB: Tensor) -> list[int]:
    """Returns the number of ids of each key, as sizes for all that follows: one wait."""
    num_negative = (lengths_KB < 0).sum().view(1)
    found: list[int] = torch.cat([lengths_KB.sum(1), num_negative]).tolist()
    sizes = found[:-1]
    if found[-1] > 0 or sum(sizes) != values.numel():
        raise ValueError(
            f"lengths must not be negative and must add up to the number of ids, {values.numel()}; "
            f"received {found[-1]} negative ones and a sum of {sum(sizes)}."
        )
    return sizes


def _group_tables(
    configs: Sequence[EmbeddingBagConfig], shards: Sequence[int]
) -> list[tuple[PoolingMode, list[int]]]:
    """Returns the tables of each lookup: those of one shard that pool alike."""
    groups: dict[tuple[int, PoolingMode], list[int]] = {}
    for table, config in enumerate(configs):
        pooling = pooling_type_to_pooling_mode(config.pooling)
        groups.setdefault((shards[table], pooling), []).append(table)
    return [(pooling, tables) for (_, pooling), tables in groups.items()]


def _to_device(values: list[int], device: torch.device) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.int64)
    if device.type == "cuda":  # from pinned memory the copy does not wait for the device
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _permute(
    order: Tensor, lengths_KB: Tensor, values: Tensor, weights: Tensor | None, total: int
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
class QuantEmbeddingBagCollection(nn.Module):
    """An :class:`~recsys.modules.embedding_modules.EmbeddingBagCollection` of quantized rows.

    Made by :func:`quantize_embeddings` or :meth:`from_float`, for inference: it has no gradients.

    Args:
        tables: the tables' configurations.
        is_weighted: whether features carry weights.
        rows: per table its quantized rows, as
            :func:`~recsys.kernels.quantized.quantize_rows` returns them.
        bits: per table 16, 8 or 4.
        devices: per table the shard that owns it and its device; all in one shard where the rows
            are, if None.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool,
        rows: Sequence[Tensor],
        bits: Sequence[int],
        devices: Sequence[tuple[int, torch.device]] | None = None,
    ) -> None:
        super().__init__()
        self._configs = list(tables)
        self._is_weighted = is_weighted
        self._bits = list(bits)
        if devices is not None:
            rows = [r.to(device) for r, (_, device) in zip(rows, devices, strict=True)]
        shards = [0] * len(rows) if devices is None else [shard for shard, _ in devices]
        self._features = list(dict.fromkeys(f for c in tables for f in c.feature_names))
        self.bags = QuantizedBags(tables, rows, bits, self._features, shards)
        self._names = [n for names in get_embedding_names_by_table(self._configs) for n in names]
        self._dims = [c.embedding_dim for c in tables for _ in c.feature_names]

    @classmethod
    def from_float(
        cls,
        module: EmbeddingBagCollection,
        dtype: torch.dtype | None = None,
        per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    ) -> QuantEmbeddingBagCollection:
        """Quantizes the tables of a trained collection.

        ``torch.quantization.quantize_dynamic`` calls it too, on collections with a ``qconfig``.

        Args:
            module: the collection, unsharded.
            dtype: ``torch.int8``, ``torch.quint4x2`` or ``torch.float16``; None: that of the
                weights in the collection's ``qconfig``, ``torch.int8`` if it has none.
            per_table_weight_dtype: other dtypes by table name.

        Raises:
            ValueError: if a dtype is none of these, a name is not a table's, or a table cannot be
                quantized.
        """
        qconfig = getattr(module, "qconfig", None)
        if dtype is None:
            dtype = torch.int8 if qconfig is None else qconfig.weight().dtype
        configs = module.embedding_bag_configs()
        chosen = dict(per_table_weight_dtype or {})
        unknown = sorted(chosen.keys() - {config.name for config in configs})
        if unknown:
            raise ValueError(
                f"per_table_weight_dtype names {unknown}, which are not tables of the collection; "
                f"its tables are {[config.name for config in configs]}."
            )
        bits = [_bits_of(chosen.get(config.name, dtype)) for config in configs]
        rows = []
        for config, b in zip(configs, bits, strict=True):
            try:
                weight = cast(Tensor, module.embedding_bags[config.name].weight)
                rows.append(quantize_rows(weight, b))
            except ValueError as error:
                raise ValueError(f"Table {config.name!r} cannot be quantized. {error}") from error
        return cls(configs, module.is_weighted(), rows, bits).eval()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up a batch.

        Args:
            features: the ids, with every feature the tables read.

        Returns:
            ``[B, sum of dims]`` fp32, keys in the order of the float collection.

        Raises:
            IndexError: if an id lies outside its table.
            KeyError: if the batch lacks a feature.
            ValueError: if the features carry weights and the batch has none.
        """
        keys = features.keys()
        missing = [name for name in self._features if name not in keys]
        if missing:
            raise KeyError(
                f"The batch lacks the features {missing}, which the tables read; received {keys}."
            )
        weights = features.weights_or_none() if self._is_weighted else None
        if self._is_weighted and weights is None:
            raise ValueError(
                "The collection was built with is_weighted=True and needs one weight per id; "
                "received a batch without weights. Pass weights= to the KeyedJaggedTensor, and "
                "is_weighted=True to an export."
            )
        values = self.bags(
            features.values(),
            features.lengths(),
            weights,
            [keys.index(name) for name in self._features],
            len(keys),
        )
        return KeyedTensor.from_parts(self._names, self._dims, values)

    def on_devices(
        self, devices: Sequence[tuple[int, torch.device]]
    ) -> QuantEmbeddingBagCollection:
        """Returns the same collection with each table in the given shard, on its device."""
        return QuantEmbeddingBagCollection(
            self._configs, self._is_weighted, self.bags.table_rows(), self._bits, devices
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Returns the configuration of each table."""
        return self._configs

    def is_weighted(self) -> bool:
        """Returns whether features carry weights."""
        return self._is_weighted

    def table_bytes(self) -> list[int]:
        """Returns the size of each table in bytes."""
        return [rows.numel() for rows in self.bags.table_rows()]


def _bits_of(dtype: torch.dtype) -> int:
    if not isinstance(dtype, torch.dtype) or dtype not in _BITS:
        raise ValueError(
            "Tables are quantized to torch.int8, torch.quint4x2 or torch.float16; received "
            f"{dtype!r}."
        )
    return _BITS[dtype]


def quantize_embeddings(
    module: nn.Module,
    dtype: torch.dtype = torch.int8,
    inplace: bool = False,
    *,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
) -> nn.Module:
    """Replaces every EmbeddingBagCollection of a model by its quantized counterpart.

    An EmbeddingCollection, which does not pool, stays as it is.

    Args:
        module: a trained model, unsharded.
        dtype: ``torch.int8`` (one byte per value), ``torch.quint4x2`` (half a byte) or
            ``torch.float16`` (two).
        inplace: change the given model instead of a copy.
        per_table_weight_dtype: other dtypes by table name.

    Returns:
        The model with quantized tables, in evaluation mode.

    Raises:
        ValueError: if the model has no embedding collection.

    Example:
        >>> config = EmbeddingBagConfig(10, 4, "t", feature_names=["f"])
        >>> model = nn.Sequential(EmbeddingBagCollection(tables=[config]))
        >>> type(quantize_embeddings(model, torch.int8)[0]).__name__
        'QuantEmbeddingBagCollection'
    """
    if isinstance(module, EmbeddingBagCollection):
        return QuantEmbeddingBagCollection.from_float(module, dtype, per_table_weight_dtype)
    found = [
        (path, child)
        for path, child in module.named_modules()
        if isinstance(child, EmbeddingBagCollection)
    ]
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no EmbeddingBagCollection to quantize (once quantized it "
            "has none). A sharded model is quantized after loading its checkpoint into the "
            "unsharded one."
        )
    quantized = {
        id(child): QuantEmbeddingBagCollection.from_float(child, dtype, per_table_weight_dtype)
        for _, child in found
    }
    model = module if inplace else copy.deepcopy(module, dict(quantized))
    if inplace:
        for parent in list(model.modules()):
            for name, child in parent._modules.items():
                if id(child) in quantized:  # also one that is used at several places
                    parent._modules[name] = quantized[id(child)]
    return model.eval()
