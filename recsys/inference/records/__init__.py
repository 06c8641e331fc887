"""Records of the requests and answers of a server, as Parquet files.

`settings` has the settings of a `Predictor`, `rows` converts requests to columns, and `recorder`
writes them in a thread. `compare` compares a record with the training data, and `join` joins it
with late labels into rows of a next day.
"""

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names
from recsys.inference.records.settings import RecordCounts, Recording

if TYPE_CHECKING:  # need pyarrow
    from recsys.inference.records.compare import RecordReport, compare_record
    from recsys.inference.records.join import JoinReport, join_labels

__all__ = [
    "JoinReport",
    "RecordCounts",
    "RecordReport",
    "Recording",
    "compare_record",
    "join_labels",
]

__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(["RecordReport", "compare_record"], "inference.records.compare"),
        **dict.fromkeys(["JoinReport", "join_labels"], "inference.records.join"),
    },
)
