"""A small serving package with raw columns, and random tables for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import nn

from recsys.features import (
    Categorical,
    FeatureSpec,
    Hashed,
    Ids,
    Label,
    Numeric,
    Timestamp,
)
from recsys.inference import package, quantize_embeddings
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_configs import PoolingType
from recsys.modules.embedding_modules import EmbeddingBagCollection

_WORDS = ["Oslo", "Rome", "Zürich", "", "北京", *(f"word {i}" for i in range(50))]


def raw_table(num_rows: int, seed: int) -> Any:
    """A table with missing values in all columns but the label."""
    random = np.random.default_rng(seed)

    def column(values: Any, kind: Any) -> Any:
        return pa.array([None if random.random() < 0.1 else value for value in values], kind)

    words = random.choice(_WORDS, num_rows)
    lists = [
        None if random.random() < 0.1 else column(random.choice(_WORDS, n), pa.string()).to_pylist()
        for n in random.integers(0, 5, num_rows)
    ]
    weights = [None if one is None else random.random(len(one)).tolist() for one in lists]
    low, high = -(2**63), 2**63
    return pa.table(
        {
            "city": column(words.tolist(), pa.string()),
            "small": column(random.integers(0, 30, num_rows).tolist(), pa.int32()),
            "tags": pa.array(lists, pa.list_(pa.string())),
            "weight": pa.array(weights, pa.list_(pa.float32())),
            "code": column(random.integers(low, high, num_rows).tolist(), pa.int64()),
            "user": column([f"u{i}" for i in random.integers(0, 1000, num_rows)], pa.string()),
            "big": column(random.integers(0, 2**64, num_rows, np.uint64).tolist(), pa.uint64()),
            "row": column(random.integers(0, 20, num_rows).tolist(), pa.int64()),
            "age": column(random.normal(40, 20, num_rows).tolist(), pa.float64()),
            "price": column(random.exponential(100, num_rows).tolist(), pa.float32()),
            "level": column(random.integers(-5, 5, num_rows).tolist(), pa.int64()),
            "size": column(random.normal(0, 1, num_rows).tolist(), pa.float64()),
            "time": column(random.integers(-(10**9), 10**10, num_rows).tolist(), pa.int64()),
            "ok": pa.array(random.integers(0, 2, num_rows)),
        }
    )


def raw_spec(is_weighted: bool) -> FeatureSpec:
    """A spec of all kinds of columns, fitted."""
    spec = FeatureSpec(
        [
            Categorical("city", min_count=2),
            Categorical("small", max_size=20),
            Categorical("tags", is_list=True, weights="weight" if is_weighted else None),
            Hashed("code", rows=37),
            Hashed("user", rows=101),
            Hashed("big", rows=53),
            Ids("row", rows=20),
            Numeric("age", clip=(0, 100), standardize=True),
            Numeric("price", log1p=True, standardize=True),
            Numeric("level", missing=3.5),
            Numeric("size", buckets=7),
            Timestamp("time", parts=("hour", "weekday", "day", "month")),
            Label("ok"),
        ]
    )
    return spec.fit(raw_table(3000, seed=0))


def write_raw_version(folder: Path, spec: FeatureSpec, seed: int = 0) -> tuple[Path, nn.Module]:
    """Write version 1 of a package; return its folder and its model."""
    torch.manual_seed(seed)
    tables = spec.tables(8, PoolingType.SUM)
    collection = EmbeddingBagCollection(tables=tables, is_weighted=spec.is_weighted)
    model = quantize_embeddings(DLRM(collection, len(spec.dense_names), [8, 8], [8, 1]).eval())
    example = raw_table(5, seed=1).drop_columns(["ok"])
    return package(model, folder, example, spec=spec), model
