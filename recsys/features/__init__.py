"""Raw columns to batches: fitted on training data, saved, the same in training and serving.

`columns` describes the columns of a table, `arrow` reads tables, `vocabulary` and `scaling` are the
fitted parts, `fit` collects them from data in pieces, and `spec` is the `FeatureSpec` that joins
them. The package needs pyarrow (extra `data`).
"""

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:
    from recsys.features.columns import (
        Categorical,
        Group,
        Hashed,
        Ids,
        Label,
        Numeric,
        SampleWeight,
        Timestamp,
    )
    from recsys.features.spec import FeatureSpec

__all__ = [
    "Categorical",
    "FeatureSpec",
    "Group",
    "Hashed",
    "Ids",
    "Label",
    "Numeric",
    "SampleWeight",
    "Timestamp",
]

_COLUMNS = [name for name in __all__ if name != "FeatureSpec"]
__getattr__ = lazy_names(
    __name__,
    {"FeatureSpec": "features.spec", **dict.fromkeys(_COLUMNS, "features.columns")},
)
