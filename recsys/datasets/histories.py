"""Histories of users: `leave_one_out`, which `recsys.features.histories` implements."""

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:
    from recsys.features.histories import leave_one_out

__all__ = ["leave_one_out"]

__getattr__ = lazy_names(__name__, {"leave_one_out": "features.histories"})
