"""A spec that Ray Data and Spark fit and apply, compared with the same in one process."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recsys.features import FeatureSpec
from recsys.features.prepared import prepared_table
from tests.features.test_prepared import raw_spec, raw_table


def _files(folder: Path) -> list[pa.Table]:
    tables = [raw_table(200, seed) for seed in range(4)]
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"{number}.parquet")
    return tables


def _check(spec: FeatureSpec, tables: list[pa.Table], found: list[pa.Table]) -> None:
    alone = raw_spec().fit(iter(tables))
    for name, vocabulary in alone.fitted.vocabularies.items():
        assert spec.fitted.vocabularies[name].values.equals(vocabulary.values)
    assert spec.fitted.means == pytest.approx(alone.fitted.means, rel=1e-12)
    wanted = [row for table in tables for row in prepared_table(spec, table).to_pylist()]
    rows = [row for table in found for row in table.to_pylist()]
    assert Counter(map(repr, rows)) == Counter(map(repr, wanted))


@pytest.mark.filterwarnings("ignore")
def test_ray(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray.data", reason="Ray Data is not installed.")
    import ray as cluster

    tables = _files(tmp_path)
    cluster.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        data = ray.read_parquet(str(tmp_path))

        def part(table: pa.Table) -> pa.Table:
            return pa.table({"part": [pickle.dumps(raw_spec().partial(table))]})

        parts = data.map_batches(part, batch_format="pyarrow", batch_size=128)
        spec = raw_spec().fit_parts(pickle.loads(row["part"]) for row in parts.iter_rows())
        ready = data.map_batches(lambda table: prepared_table(spec, table), batch_format="pyarrow")
        found = list(ready.iter_batches(batch_format="pyarrow"))
    finally:
        cluster.shutdown()
    _check(spec, tables, found)


@pytest.mark.filterwarnings("ignore:PySpark does not yet:FutureWarning")
def test_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    sql = pytest.importorskip("pyspark.sql", reason="Spark is not installed.")
    tables = _files(tmp_path)
    session = sql.SparkSession.builder.master("local[2]").getOrCreate()
    try:
        data = session.read.parquet(str(tmp_path))

        def parts_of(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            part = raw_spec().partial(batches)
            yield pa.record_batch({"part": [pickle.dumps(part)]})

        parts = data.mapInArrow(parts_of, "part binary").toLocalIterator()
        spec = raw_spec().fit_parts(pickle.loads(row["part"]) for row in parts)

        def convert(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                yield from prepared_table(spec, batch).to_batches()

        schema: Any = sql.pandas.types.from_arrow_schema(prepared_table(spec, tables[0]).schema)
        data.mapInArrow(convert, schema).write.parquet(str(tmp_path / "ready"))
    finally:
        session.stop()
    _check(spec, tables, [pq.read_table(tmp_path / "ready")])
