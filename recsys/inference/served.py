"""Quantized collections as programs run them: what TorchScript compiles and `torch.export` traces.

They take a batch and return what the collections return, and hold nothing but tensors, names and
numbers. `QuantizedCollection.served` makes them; they read the collection's own tables.

Legend: `K` keys of a batch, `B` batch size, `N` ids, `D` columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor, nn

from recsys.inference.quantized_tables import (
    QuantizedBags,
    QuantizedRows,
    by_key,
    fails,
    read_sizes,
    to_device,
)
from recsys.kernels.bounds import NO_LIMIT
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
    "Served",
    "ServedBags",
    "ServedRows",
    "position_processor",
]


class Served(nn.Module):
    """What a collection is in a program: a batch in, a keyed container out."""

    @torch.jit.unused
    def opened(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return the container of an output that `torch.fx` knows by its proxy only.

        Args:
            found: The proxy.
            features: The batch, of proxies.
        """
        raise NotImplementedError


@final
class ServedBags(Served):
    """Looks up bags and pools them.

    Args:
        lookups: Of the tables.
        names: The keys of the result.
        dims: The width of each.
        is_weighted: Whether the weights of a batch count.
    """

    def __init__(
        self, lookups: QuantizedBags, names: list[str], dims: list[int], is_weighted: bool
    ) -> None:
        super().__init__()
        self.lookups = lookups
        self.names = names
        self.dims = dims
        self.is_weighted = is_weighted

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up a batch.

        Args:
            features: One batch size for all keys.

        Raises:
            IndexError: An id is outside its table.
            KeyError: The batch lacks a feature.
            ValueError: The batch has no weights where they are needed, or a batch size per key, or
                its lengths do not fit.
        """
        positions = _positions(features, self.lookups.feature_names)
        weights: Tensor | None = None
        if self.is_weighted:
            weights = features.weights()
        values = self.lookups(
            features.values(), features.lengths(), weights, positions, len(features.keys())
        )
        return KeyedTensor(self.names, self.dims, values)

    @torch.jit.unused
    def opened(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return the keyed tensor of a proxy."""
        values = cast(KeyedTensor, found).values()
        return KeyedTensor.from_parts(self.names, self.dims, values)


@final
class ServedRows(Served):
    """Looks up one row per id.

    Args:
        lookups: Of the tables.
        names: The keys of the result.
        read: The feature of each.
        need_indices: Whether the ids are returned too, as weights.
    """

    def __init__(
        self, lookups: QuantizedRows, names: list[str], read: list[str], need_indices: bool
    ) -> None:
        super().__init__()
        self.lookups = lookups
        self.names = names
        self.read = read
        self.need_indices = need_indices

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up a batch, as `ServedBags` does."""
        keys = features.keys()
        positions = _positions(features, self.lookups.feature_names)
        lengths = features.lengths()
        rows, ids = self.lookups(features.values(), lengths, None, positions, len(keys))
        lengths_KB = lengths.view(len(keys), lengths.numel() // len(keys))
        found: dict[str, JaggedTensor] = {}
        for i, name in enumerate(self.names):
            key = keys.index(self.read[i])
            weights: Tensor | None = None
            if self.need_indices:
                weights = ids[key]
            found[name] = JaggedTensor(rows[i], weights, lengths_KB[key])
        return found

    @torch.jit.unused
    def opened(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return the jagged tensors of a proxy."""
        jagged = cast(dict[str, JaggedTensor], found)
        return {
            name: JaggedTensor.from_parts(
                jagged[name].values(),
                jagged[name].weights() if self.need_indices else None,
                jagged[name].lengths(),
            )
            for name in self.names
        }


@final
class ProcessedBags(Served):
    """Looks up and pools bags whose ids are weighed first.

    Args:
        processor: Returns a batch with weights.
        bags: Looks that up.
    """

    def __init__(self, processor: nn.Module, bags: ServedBags) -> None:
        super().__init__()
        self.processor = processor
        self.bags = bags

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up a batch, as `ServedBags` does, which needs no weights."""
        found: KeyedTensor = self.bags(self.processor(features))
        return found

    @torch.jit.unused
    def opened(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return the keyed tensor of a proxy."""
        return self.bags.opened(found, features)


@final
class PositionProcessor(Served):
    """Weighs each id by its position in its bag.

    Args:
        weights: Per feature its position weights, `[P]`; copied. Other features weigh 1.
    """

    if TYPE_CHECKING:  # TorchScript does not read annotations that are texts
        weights: Tensor
        rows: Tensor

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = list(weights)
        parts = [weight.detach() for weight in weights.values()]
        ends = list(accumulate(part.numel() for part in parts))
        # the first and the last weight of each feature, and how many; at the end those of others
        rows = [(end - len(p), end - 1, len(p)) for end, p in zip(ends, parts, strict=True)]
        total = sum(map(len, parts))
        rows.append((total, total, NO_LIMIT))
        device = parts[0].device if parts else None
        self.register_buffer("weights", torch.cat([*parts, torch.ones(1, device=device)]))
        self.register_buffer("rows", torch.tensor(rows, dtype=torch.int64, device=device))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Weigh a batch.

        Args:
            features: One batch size for all keys; its own weights do not count.

        Raises:
            ValueError: A bag has more ids than its feature has weights, or the lengths do not fit.
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
    def opened(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return the weighed batch of a proxy."""
        return with_weights(features, cast(KeyedJaggedTensor, found).weights())


def position_processor(module: nn.Module) -> PositionProcessor | None:
    """Return what programs run in place of a feature processor that weighs by position only."""
    if type(module) is PositionWeightedModuleCollection:
        return PositionProcessor(module.position_weights_dict)
    if isinstance(module, FeatureProcessorDictWrapper):
        parts = dict(module.named_children())
        if all(type(part) is PositionWeightedModule for part in parts.values()):
            return PositionProcessor(
                {name: cast(Tensor, part.position_weight) for name, part in parts.items()}
            )
    return None


def _positions(features: KeyedJaggedTensor, names: list[str]) -> list[int]:
    """Return where the features that are looked up are among the keys of a batch.

    Args:
        features: The batch.
        names: The features.

    Raises:
        KeyError: The batch lacks one.
        ValueError: The batch has a batch size per key.
    """
    if features.variable_stride_per_key():
        raise ValueError("A traced model takes batches with one batch size for all features.")
    keys = features.keys()
    positions: list[int] = []
    for name in names:
        if name not in keys:
            raise KeyError(f"The batch lacks the feature {name}; received {keys}.")
        positions.append(keys.index(name))
    return positions
