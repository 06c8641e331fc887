"""Models of clicks and of several tasks: each reads dense features and ids, and returns logits.

They have the arguments of `DLRM`, `forward(dense_features, sparse_features)`, so `DLRMTrain` and
`recsys.training.Trainer` train them, and `DistributedModelParallel` shards their tables.
"""

from recsys.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
