"""Public path of `recsys.base.lazy`."""

from recsys.base.lazy import lazy_names as lazy_names
