"""Feature processors in exported programs: modules for TorchScript and `torch.export`.

Legend: `K` keys of a batch, `B` batch size, `N` ids, `P` positions of a bag.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, cast, final

import torch
from torch import Tensor, nn

from recsys.inference.batch_checks import by_key, fails, read_sizes, to_device
from recsys.inference.quant.lookup import QuantizedBags, Served
from recsys.kernels.bounds import NO_LIMIT
from recsys.modules.feature_processor import (
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from recsys.modules.fp_embedding_modules import FeatureProcessorDictWrapper
from recsys.modules.position_weights import with_weights
from recsys.sparse import KeyedJaggedTensor, KeyedTensor

__all__ = ["PositionProcessor", "ProcessedBags", "position_processor"]


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
        found: KeyedTensor = self.bags(self.processor(features))
        return found

    @torch.jit.unused
    def wrap_proxy(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return a keyed tensor of proxies."""
        return self.bags.wrap_proxy(found, features)


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
    def wrap_proxy(self, found: object, features: KeyedJaggedTensor) -> object:
        """Return a batch with weights, of proxies."""
        return with_weights(features, cast(KeyedJaggedTensor, found).weights())


def position_processor(module: nn.Module) -> PositionProcessor | None:
    """Convert a feature processor with position weights only for a program; None for others."""
    if type(module) is PositionWeightedModuleCollection:
        return PositionProcessor(module.position_weights_dict)
    if isinstance(module, FeatureProcessorDictWrapper):
        parts = dict(module.named_children())
        if all(type(part) is PositionWeightedModule for part in parts.values()):
            return PositionProcessor(
                {name: cast(Tensor, part.position_weight) for name, part in parts.items()}
            )
    return None
