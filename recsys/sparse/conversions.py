"""Old path of `recsys.compat.sparse`."""

from recsys.base.lazy import moved_names

__getattr__ = moved_names(__name__)
