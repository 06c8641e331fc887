"""Readers of recommendation data that yield batches of dense features, jagged ids and labels.

`parquet`, `csv` and `table` read tables by a `recsys.features.FeatureSpec`, shuffled, divided among
ranks, split into training and test data by `Split` or `TimeSplit`, and resumable at any batch.
`TableVersion` is a table of Delta Lake or Iceberg at a version, and `follow` reads files that
appear while a job runs.

`utils` defines the batch and its division among ranks. `random` generates batches, `criteo` reads
the Criteo click logs, and `rows` reads single lines. Readers take `rank` and `world_size` from the
process group, if there is one, or as arguments.
"""

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:
    from recsys.datasets.following import Follower, follow
    from recsys.datasets.lake import TableVersion
    from recsys.datasets.readers import csv, parquet, table
    from recsys.datasets.table_reader import TableReader
    from recsys.features.splits import Split, TimeSplit

__all__ = [
    "Follower",
    "Split",
    "TableReader",
    "TableVersion",
    "TimeSplit",
    "csv",
    "follow",
    "parquet",
    "table",
]

_READERS = ["csv", "parquet", "table"]
_SPLITS = ["Split", "TimeSplit"]
__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(["Follower", "follow"], "datasets.following"),
        "TableReader": "datasets.table_reader",
        "TableVersion": "datasets.lake",
        **dict.fromkeys(_READERS, "datasets.readers"),
        **dict.fromkeys(_SPLITS, "features.splits"),
    },
)
