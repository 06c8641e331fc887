"""Raw columns to batches: fitted on training data, saved, the same in training and serving.

`columns` defines the base class of columns; the kinds are in `id_columns`, `numeric`, `times`,
`vectors` and `samples`. `arrow` reads tables, `vocabulary` and `scaling` are the fitted parts,
`fit` collects them from data in pieces, and `spec` is the `FeatureSpec` that joins them. The
package needs pyarrow (extra `data`).
"""

from typing import TYPE_CHECKING

from recsys.base.lazy import lazy_names

if TYPE_CHECKING:
    from recsys.features.id_columns import Categorical, Hashed, Ids
    from recsys.features.numeric import Numeric
    from recsys.features.samples import Group, Label, SampleWeight
    from recsys.features.spec import FeatureSpec
    from recsys.features.times import Timestamp
    from recsys.features.vectors import Vector

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
    "Vector",
]

__getattr__ = lazy_names(
    __name__,
    {
        **dict.fromkeys(["Categorical", "Hashed", "Ids"], "features.id_columns"),
        "FeatureSpec": "features.spec",
        **dict.fromkeys(["Group", "Label", "SampleWeight"], "features.samples"),
        "Numeric": "features.numeric",
        "Timestamp": "features.times",
        "Vector": "features.vectors",
    },
)
