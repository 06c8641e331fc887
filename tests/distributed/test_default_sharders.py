"""The default sharders; `recsys.inference` adds sharders of quantized modules."""

from __future__ import annotations

from recsys.distributed.default_sharders import get_module_to_default_sharders
from recsys.inference import (
    QuantEmbeddingBagCollection,
    QuantEmbeddingCollection,
    QuantFeatureProcessedEmbeddingBagCollection,
)
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recsys.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
)


def test_default_sharders_by_type() -> None:
    known = get_module_to_default_sharders()
    assert [kind for kind in known if not kind.__module__.startswith("recsys.compat")] == [
        EmbeddingBagCollection,
        FeatureProcessedEmbeddingBagCollection,
        EmbeddingCollection,
        FusedEmbeddingBagCollection,
        FusedEmbeddingCollection,
        QuantEmbeddingBagCollection,
        QuantFeatureProcessedEmbeddingBagCollection,
        QuantEmbeddingCollection,
    ]
