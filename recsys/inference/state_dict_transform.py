"""Old path of `recsys.compat.state_dict_transform`."""

from recsys.base.lazy import moved_names

__getattr__ = moved_names(__name__)
