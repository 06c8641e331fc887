"""Public path of sharders of quantized collections, which are in `recsys.inference.quant`."""

from recsys.inference.quant.modules import (
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
