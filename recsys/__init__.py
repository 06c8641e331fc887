"""Recommendation models with huge embedding tables, in PyTorch.

The packages, in the order in which a batch passes through them. Each imports only earlier ones:

`base` (argument checks, logs) -> `kernels` (fused lookups on plain tensors) -> `sparse` (jagged
data) -> `optim` -> `modules` (authored on one device) -> `distributed` (placed on many) ->
`inference` (quantized, exported).

Common names are also available here, such as `recsys.KeyedJaggedTensor`. Names, packages and
modules are imported at their first use, so `import recsys` is fast, and
`recsys.distributed.planner.Topology` works after it.
"""

from __future__ import annotations

import pkgutil
from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:  # _HOMES for editors and type checkers
    from recsys.base.streamable import Multistreamable, Pipelineable
    from recsys.distributed.model_parallel import DistributedModelParallel
    from recsys.modules.embedding_configs import (
        DataType,
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
    )
    from recsys.modules.embedding_modules import (
        EmbeddingBagCollection,
        EmbeddingBagCollectionInterface,
        EmbeddingCollection,
        EmbeddingCollectionInterface,
    )
    from recsys.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__version__ = "0.1.0"

__all__ = [
    "DataType",
    "DistributedModelParallel",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Multistreamable",
    "Pipelineable",
    "PoolingType",
]

_HOMES = {
    "DataType": "modules.embedding_configs",
    "DistributedModelParallel": "distributed.model_parallel",
    "EmbeddingBagCollection": "modules.embedding_modules",
    "EmbeddingBagCollectionInterface": "modules.embedding_modules",
    "EmbeddingBagConfig": "modules.embedding_configs",
    "EmbeddingCollection": "modules.embedding_modules",
    "EmbeddingCollectionInterface": "modules.embedding_modules",
    "EmbeddingConfig": "modules.embedding_configs",
    "JaggedTensor": "sparse",
    "KeyedJaggedTensor": "sparse",
    "KeyedTensor": "sparse",
    "Multistreamable": "streamable",
    "Pipelineable": "streamable",
    "PoolingType": "modules.embedding_configs",
}


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    rooms = [info.name for info in pkgutil.iter_modules(__path__) if info.ispkg]
    return sorted({*globals(), *__all__, *rooms})
