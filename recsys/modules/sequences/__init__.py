"""Models of sequences: encoders of jagged histories, losses of retrieval, and heads.

An encoder, such as `SASRec`, maps the embeddings of a history, `[N, D]` jagged, to a vector after
each value. `NextItem` and `Ranking` read ids, look them up in an `EmbeddingCollection`, which
`DistributedModelParallel` may shard, and train an encoder.
"""

from recsys.base.lazy import lazy_names

__getattr__ = lazy_names(__name__, {})
