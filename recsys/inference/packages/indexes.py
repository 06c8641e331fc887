"""Hashed ids of a package's tables: the files of their indexes, and the rows of ids.

A row's id is in `tables/<table>.ids`, int64, and the id's digest in `tables/<table>.digests`,
uint8; 0 for a row without an id.

Shapes: `N` ids, `R` rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recsys.inference.packages.mapping import MappedFile, map_files
from recsys.kernels.hashed.index import LINE, IdIndex, IndexSettings

__all__ = ["empty_index", "open_index", "write_ids"]

_READ_ONLY = IndexSettings(
    eviction="none", half_life=0, exponent=1, ttl=0,
    admission="always", admission_value=0, is_shared=True,
)  # fmt: skip


def empty_index(rows: int, entry: Mapping[str, Any]) -> IdIndex:
    """Return the index of a table without rows, which gives the places of ids.

    Args:
        rows: Rows of the table.
        entry: The key `index` of the table's entry in the manifest.
    """
    regions = entry["regions"]
    none = torch.zeros(0, dtype=torch.uint8)
    return IdIndex(
        settings=_READ_ONLY, num_regions=regions, first_region=0, last_region=regions,
        lines=rows // (LINE * regions), seed=entry["seed"], ids=none.long(), last_used=none.int(),
        seen=none.int(), digests=none, sketch=none,
    )  # fmt: skip


def open_index(version: Path, table: Mapping[str, Any]) -> IdIndex:
    """Return the index of a table of a package; writes do not change the files."""
    entry, rows = table["index"], table["rows"]
    ids, digests = (
        map_files(size, [MappedFile(version / entry[name], 0, size)])
        for name, size in (("ids", 8 * rows), ("digests", rows))
    )
    place = empty_index(rows, entry)
    return IdIndex(
        settings=_READ_ONLY, num_regions=place.num_regions, first_region=0,
        last_region=place.num_regions, lines=place.lines, seed=place.seed,
        ids=ids.view(torch.int64), last_used=(digests > 0).int(), seen=place.seen, digests=digests,
        sketch=place.sketch,
    )  # fmt: skip


def write_ids(index: IdIndex, rows: Tensor, hashed_ids: Tensor, digests: Tensor) -> None:
    """Write the ids of rows, in memory only; see `Delta.tables`."""
    index.ids[rows] = hashed_ids
    index.last_used[rows] = (digests > 0).int()
    index.digests[rows] = digests
