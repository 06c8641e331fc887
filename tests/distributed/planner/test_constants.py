"""Units, and names of sharders."""

from __future__ import annotations

from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recsys.distributed.planner.constants import (
    bytes_to_gb,
    bytes_to_mb,
    gb_to_bytes,
    mb_to_bytes,
    sharder_name,
)


def test_units() -> None:
    assert (bytes_to_gb(3 * 2**29), bytes_to_mb(2**19)) == (1.5, 0.5)
    assert (gb_to_bytes(1.5), mb_to_bytes(0.5)) == (3 * 2**29, 2**19)


def test_a_sharder_is_named_by_where_it_lives() -> None:
    name = sharder_name(EmbeddingBagCollectionSharder)
    assert name == "recsys.distributed.embeddingbag.EmbeddingBagCollectionSharder"
