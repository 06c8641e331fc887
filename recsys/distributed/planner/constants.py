"""Defaults of the planner."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recsys.base.lazy import moved_names

BATCH_SIZE = 512
"""Samples per rank and step."""
POOLING_FACTOR = 1.0
"""Ids per bag."""
NUM_POOLINGS = 1.0
"""Bags per sample."""
UVM_CACHING_RATIO = 0.2
"""Share of a table's rows that the cache of `fused_uvm_caching` holds: FBGEMM's default."""
BIGINT_DTYPE = 8
"""Bytes of an int64."""

if not TYPE_CHECKING:  # a type checker reports unknown names
    __getattr__ = moved_names(__name__)
