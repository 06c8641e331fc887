"""Public path of sharders of quantized collections, which are in `recsys.inference.quant`."""

from recsys.inference.quant.sharders import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
    QuantizedSharder,
)

__all__ = [
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollectionSharder",
    "QuantFeatureProcessedEmbeddingBagCollectionSharder",
    "QuantizedSharder",
]
