"""Defaults of the planner, and conversions of memory units."""

from __future__ import annotations

from recsys.base.arguments import finite
from recsys.base.checked import checked

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


@checked
def sharder_name(sharder: type) -> str:
    """Return the module and name of a class, such as `my.module.MySharder`."""
    return f"{sharder.__module__}.{sharder.__name__}"


@checked
def bytes_to_gb(num_bytes: float) -> float:
    """Return bytes as GiB."""
    finite("bytes_to_gb.num_bytes", num_bytes)
    return num_bytes / 2**30


@checked
def bytes_to_mb(num_bytes: float) -> float:
    """Return bytes as MiB."""
    finite("bytes_to_mb.num_bytes", num_bytes)
    return num_bytes / 2**20


@checked
def gb_to_bytes(gb: float) -> int:
    """Return GiB as bytes."""
    finite("gb_to_bytes.gb", gb)
    return int(gb * 2**30)


@checked
def mb_to_bytes(mb: float) -> int:
    """Return MiB as bytes."""
    finite("mb_to_bytes.mb", mb)
    return int(mb * 2**20)
