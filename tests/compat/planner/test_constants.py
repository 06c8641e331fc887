"""Numbers for planner components, units, and names of sharders."""

from __future__ import annotations

import pytest

from recsys.compat.planner import constants
from recsys.compat.planner.constants import (
    bytes_to_gb,
    bytes_to_mb,
    gb_to_bytes,
    mb_to_bytes,
    sharder_name,
)
from recsys.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tests.compat.planner.scripts import needs_peer, printed


@needs_peer
def test_constants_are_those_of_torchrec() -> None:
    ours, theirs = printed("constants.py"), printed("constants.py", by_peer=True)
    functions = {name for name in ours if name.startswith(("placement", "prod"))}
    assert len(ours.keys() - functions) == 28
    assert {name: ours.pop(name) for name in functions} == {
        name: theirs.pop(name) for name in functions
    }
    assert ours == pytest.approx(theirs)


def test_speeds_are_bytes_per_millisecond() -> None:
    gib_per_s = {
        "HBM_MEM_BW": 897,
        "DDR_MEM_BW": 51,
        "SSD_MEM_BW": 100 / 1024,
        "HBM_TO_DDR_MEM_BW": 32,
        "INTRA_NODE_BANDWIDTH": 600,
        "CROSS_NODE_BANDWIDTH": 12.5,
    }
    for name, speed in gib_per_s.items():
        assert getattr(constants, name) * 1000 / 2**30 == pytest.approx(speed)


def test_units() -> None:
    assert (bytes_to_gb(3 * 2**29), bytes_to_mb(2**19)) == (1.5, 0.5)
    assert (gb_to_bytes(1.5), mb_to_bytes(0.5)) == (3 * 2**29, 2**19)


def test_a_sharder_is_named_by_where_it_lives() -> None:
    name = sharder_name(EmbeddingBagCollectionSharder)
    assert name == "recsys.distributed.embeddingbag.EmbeddingBagCollectionSharder"
