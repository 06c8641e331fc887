"""Columns of the Criteo click logs, for the example and for `prepare`.

python -m recsys prepare --spec examples/dlrm/criteo_spec.py --format tsv \
    --input DIR/day_{0..23} --output PREPARED

Counts become log(1 + x); missing and negative counts are 0. Categories have a vocabulary each.
"""

import pyarrow as pa
from pyarrow import csv

from recsys.datasets.criteo import (
    DEFAULT_CAT_NAMES,
    DEFAULT_COLUMN_NAMES,
    DEFAULT_INT_NAMES,
    DEFAULT_LABEL_NAME,
)
from recsys.features import Categorical, FeatureSpec, Label, Numeric

spec = FeatureSpec(
    [
        *(Numeric(name, missing=0, clip=(0, 2**63), log1p=True) for name in DEFAULT_INT_NAMES),
        *(Categorical(name, min_count=5, max_size=1_000_000) for name in DEFAULT_CAT_NAMES),
        Label(DEFAULT_LABEL_NAME),
    ]
)
csv_options = {
    "read_options": csv.ReadOptions(column_names=DEFAULT_COLUMN_NAMES),
    "parse_options": csv.ParseOptions(delimiter="\t"),
    # types are not inferred: the categories 12345678 and 1e234567 are texts
    "convert_options": csv.ConvertOptions(
        column_types=dict.fromkeys(DEFAULT_COLUMN_NAMES, pa.int64())
        | dict.fromkeys(DEFAULT_CAT_NAMES, pa.string()),
        null_values=[""],
        strings_can_be_null=True,
    ),
}
