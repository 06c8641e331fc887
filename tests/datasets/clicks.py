"""Tables of clicks in files, and the samples of batches, for tests of readers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recsys.datasets.utils import Batch
from recsys.features import FeatureSpec, Group, Hashed, Ids, Label, Numeric, SampleWeight

SIZES = ((13, 1, 7), (20,), (5, 5, 5, 4))
"""Rows of the row groups of each file."""
SPEC = FeatureSpec(
    [
        Ids("row", rows=10_000),
        Ids("tags", rows=50, is_list=True, weights="strengths"),
        Hashed("user", rows=30),
        Numeric("age"),
        Label("liked"),
        SampleWeight("weight"),
        Group("session"),
    ]
).fit({name: [0.0] for name in ("age",)})


def clicks(first: int, count: int, seed: int = 0) -> pa.Table:
    draw = np.random.default_rng([seed, first])
    tags: list[list[int] | None] = []
    for size in draw.integers(-1, 4, count):
        tags.append(None if size < 0 else draw.integers(0, 50, size).tolist())
    strengths = [None if bag is None else draw.random(len(bag)).round(3).tolist() for bag in tags]
    return pa.table(
        {
            "unread": pa.array(range(count)),
            "row": pa.array(range(first, first + count)),
            "tags": pa.array(tags, pa.list_(pa.int64())),
            "strengths": pa.array(strengths, pa.list_(pa.float64())),
            "user": pa.array([f"user {i}" for i in draw.integers(0, 12, count)]),
            "age": pa.array(draw.integers(18, 80, count).astype(float)),
            "liked": pa.array(draw.integers(0, 2, count)),
            "weight": pa.array(draw.integers(0, 9, count)),
            "session": pa.array(draw.integers(-9, 9, count)),
        }
    )


def write_clicks(folder: Path, sizes: Any = SIZES) -> pa.Table:
    """Write files, and return all rows."""
    first, tables = 0, []
    for number, groups in enumerate(sizes):
        table = clicks(first, sum(groups))
        first += sum(groups)
        tables.append(table)
        with pq.ParquetWriter(folder / f"{number}.parquet", table.schema) as writer:
            start = 0
            for size in groups:
                writer.write_table(table.slice(start, size))
                start += size
    return pa.concat_tables(tables)


def samples_of(batch: Batch) -> list[Any]:
    """Return the samples of a batch, one by one."""
    ids = batch.sparse_features.to_dict()
    bags = {key: jagged.to_dense() for key, jagged in ids.items()}
    weights = {key: jagged.to_dense_weights() or [] for key, jagged in ids.items()}
    assert batch.sample_weights is not None
    assert batch.groups is not None
    return [
        (
            *(tuple(bags[key][i].tolist()) for key in bags),
            *(tuple(weights[key][i].tolist()) for key in weights),
            tuple(batch.dense_features[i].tolist()),
            batch.labels[i].item(),
            batch.sample_weights[i].item(),
            batch.groups[i].item(),
        )
        for i in range(len(batch.labels))
    ]


def plain_samples(table: pa.Table) -> list[Any]:
    """Return the samples of a table, each transformed alone."""
    return [samples_of(SPEC.transform(table.slice(i, 1)))[0] for i in range(table.num_rows)]


def is_equal(first: Batch, second: Batch) -> bool:
    return pickle.dumps(samples_of(first)) == pickle.dumps(samples_of(second))
