"""Old path of `recsys.compat.tracing`."""

from recsys.base.lazy import moved_names

__getattr__ = moved_names(__name__)
