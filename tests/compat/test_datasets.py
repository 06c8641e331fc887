"""Functions that read Criteo's rows for TorchRec scripts."""

from __future__ import annotations

from pathlib import Path

from recsys.compat.datasets import criteo_terabyte
from tests.ranks import RankPool

LINE = "\t".join(["1", *["7"] * 13, *["0a"] * 26])


def _count(path: str, **share: int) -> int:
    return len(list(criteo_terabyte([path], **share)))


def test_readers_of_rows_know_no_ranks(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text(f"{LINE}\n" * 7)
    assert _count(str(path)) == _count(str(path), rank=0, world_size=1) == 7
    for world_size in (2, 3):
        assert ranks(world_size, _count, str(path)) == [7] * world_size
