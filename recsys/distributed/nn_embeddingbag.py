"""Old path of `recsys.compat.nn_embeddingbag`."""

from recsys.base.lazy import moved_names

__getattr__ = moved_names(__name__)
