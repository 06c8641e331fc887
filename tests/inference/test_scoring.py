"""Batch scoring, by packages with raw columns and by models."""

from __future__ import annotations

import copy
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import csv
from torch import nn

import recsys.__main__
from recsys.distributed.checkpoint import save_checkpoint
from recsys.features import Categorical, FeatureSpec, Label, Numeric, Timestamp
from recsys.inference import (
    Predictor,
    inspect,
    package,
    quantize_embeddings,
    score,
    write_delta,
)
from recsys.inference.packages.columns import raw_request
from recsys.modules.dlrm import DLRM
from recsys.modules.embedding_modules import EmbeddingBagCollection
from tests.inference.raw_package import raw_spec, raw_table, write_raw_version


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module, FeatureSpec]:
    spec = raw_spec(is_weighted=True)
    version, model = write_raw_version(tmp_path_factory.mktemp("raw") / "m", spec)
    return version, model, spec


@torch.no_grad()
def wanted(model: nn.Module, spec: FeatureSpec, table: pa.Table) -> np.ndarray:
    batch = spec.transform(table)
    return model(batch.dense_features, batch.sparse_features).numpy()[:, 0]


def test_a_package_scores_raw_columns(packaged: tuple[Path, nn.Module, FeatureSpec]) -> None:
    version, model, spec = packaged
    with Predictor(version) as predictor:
        for seed in range(5):
            table = raw_table(40 + seed, seed + 10)
            found = predictor(table.drop_columns(["ok"]))["output"][:, 0]
            np.testing.assert_allclose(found, wanted(model, spec, table), rtol=1e-5, atol=1e-6)
        whole = raw_table(3, 1)  # the label is a further column
        np.testing.assert_allclose(
            predictor(whole)["output"][:, 0], wanted(model, spec, whole), 1e-5
        )
        stated = whole.drop_columns(["level"])  # Numeric("level", missing=3.5)
        filled = whole.set_column(10, "level", pa.array([3.5] * 3))
        assert np.array_equal(predictor(stated)["output"], predictor(filled)["output"])
        for name in spec.column_names(labels=False):
            if name != "level":
                with pytest.raises(KeyError, match=f"must have a column '{name}'"):
                    predictor(whole.drop_columns([name]))
                with pytest.raises(KeyError, match=f"must have a column '{name}'"):
                    raw_request(predictor.manifest["columns"], whole.drop_columns([name]))
        assert "level" not in raw_request(predictor.manifest["columns"], stated)
        bad = raw_table(3, 1).drop_columns(["ok"]).set_column(7, "row", pa.array([1, 25, 3]))
        with pytest.raises(ValueError, match=r"'row' must .*0 to 19.*row 1"):
            predictor(bad)


def test_parents_of_versions_and_jobs_are_named(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path
) -> None:
    version, *_ = packaged
    for number in (9, 10):
        shutil.copytree(version, tmp_path / "m" / str(number))
    (tmp_path / "m" / "11").mkdir()
    with pytest.raises(FileNotFoundError, match=rf"Pass its newest version, {tmp_path}/m/10\."):
        Predictor(tmp_path / "m")
    save_checkpoint(tmp_path / "job" / "best", nn.Linear(1, 1))
    with pytest.raises(FileNotFoundError, match=rf"load its checkpoint {tmp_path}/job/best into"):
        inspect(tmp_path / "job")
    with pytest.raises(FileNotFoundError, match=r"it has no manifest\.json\.$"):
        Predictor(tmp_path / "nothing")


def test_a_package_describes_its_columns(packaged: tuple[Path, nn.Module, FeatureSpec]) -> None:
    lines = inspect(packaged[0]).splitlines()
    assert "column tags: lists of text, categorical, weights in weight" in lines
    assert "column price: float32, numeric" in lines
    assert not [line for line in lines if line.startswith("input ")]


def test_files_are_scored_by_processes(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path
) -> None:
    """The results of two processes together equal the results of one, and of the model."""
    version, model, spec = packaged
    tables = [raw_table(100 * (i + 1), i) for i in range(3)]
    for i, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"day_{i}.parquet")
    data = str(tmp_path / "day_*.parquet")
    alone = score(version, data, tmp_path / "one", keys=["user", "tags"], batch_size=64)
    assert [path.name.rpartition("-")[0] for path in alone] == [f"day_{i}" for i in range(3)]
    for rank in range(2):
        score(version, data, tmp_path / "two", keys=["user"], rank=rank, world_size=2)
    score(model, data, tmp_path / "model", spec=spec)
    for path, table in zip(alone, tables, strict=True):
        found = pq.read_table(path)
        assert found.column_names == ["user", "tags", "output"]
        assert found["user"].to_pylist() == table["user"].to_pylist()
        assert found["tags"].to_pylist() == table["tags"].to_pylist()
        scores = found["output"].to_numpy()
        np.testing.assert_allclose(scores, wanted(model, spec, table), rtol=1e-5, atol=1e-6)
        for other in ("two", "model"):
            same = pq.read_table(tmp_path / other / path.name)["output"].to_numpy()
            np.testing.assert_allclose(same, scores, rtol=1e-5, atol=1e-6)


def test_a_model_stays_in_its_mode_and_a_terminal_needs_no_tqdm(
    packaged: tuple[Path, nn.Module, FeatureSpec],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, model, spec = packaged
    pq.write_table(raw_table(4, 0), tmp_path / "a.parquet")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for is_training in (True, False):
        model.train(is_training)
        model.over_arch.train(not is_training)
        score(model, tmp_path / "a.parquet", tmp_path / f"{is_training}", spec=spec)
        assert model.training == model.dense_arch.training == is_training
        assert model.over_arch.training == (not is_training)


@pytest.mark.parametrize("is_package", [True, False])
def test_an_empty_file_has_the_columns_of_others(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path, is_package: bool
) -> None:
    version, model, spec = packaged
    table = raw_table(10, 0)
    pq.write_table(table, tmp_path / "a.parquet")
    pq.write_table(table.slice(0, 0), tmp_path / "b.parquet")
    with pq.ParquetWriter(tmp_path / "c.parquet", table.schema):
        pass  # without row groups
    options = {} if is_package else {"spec": spec}
    found = score(
        version if is_package else model, str(tmp_path / "*.parquet"), tmp_path / "out",
        keys=["user", "tags"], **options,
    )  # fmt: skip
    full, *empty = map(pq.read_table, found)
    assert [part.num_rows for part in empty] == [0, 0]
    for part in empty:
        assert part.schema.equals(full.schema)
        assert pa.concat_tables([full, part]).num_rows == 10


def test_a_stopped_job_continues(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A bad file is named; the results before it stay, and nothing else does."""
    version, *_ = packaged
    data = tmp_path / "data"
    data.mkdir()
    pq.write_table(raw_table(10, 0), data / "a.parquet")
    bad = raw_table(10, 1).set_column(7, "row", pa.array([*range(9), 20]))
    pq.write_table(bad, data / "b.parquet")
    arguments = ["score", str(version), "--input", str(data), "--output", str(tmp_path / "out")]
    assert recsys.__main__.main([*arguments, "--keys", "user", "--batch-size", "4"]) == 1
    error = capsys.readouterr().err
    assert "Column 'row' must have row numbers from 0 to 19; received 20 in row 9 of" in error
    assert f" of {data / 'b.parquet'}. Send row numbers of the table." in error
    [written] = (tmp_path / "out").iterdir()
    assert written.name.startswith("a-")
    first = written.stat().st_mtime_ns
    pq.write_table(raw_table(10, 1), data / "b.parquet")
    arguments += ["--keys", "user"]
    assert recsys.__main__.main(arguments) == 0
    assert written.stat().st_mtime_ns == first
    [second] = (tmp_path / "out").glob("b-*.parquet")
    assert pq.read_metadata(second).num_rows == 10
    before = data / "0.parquet"  # sorted before the others
    pq.write_table(raw_table(3, 2), before)
    assert recsys.__main__.main(arguments) == 0
    assert len(list((tmp_path / "out").iterdir())) == 3
    assert written.stat().st_mtime_ns == first


def test_processes_of_the_command(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    arguments = ["score", str(packaged[0]), "--input", str(data), "--output", str(out)]
    arguments += ["--processes", "2"]
    for number in range(3):
        pq.write_table(raw_table(10, number), data / f"{number}.parquet")
    bad = raw_table(10, 1).set_column(7, "row", pa.array([*range(9), 20]))
    pq.write_table(bad, data / "1.parquet")
    assert recsys.__main__.main(arguments) == 1
    error = capsys.readouterr().err
    assert f"received 20 in row 9 of {data / '1.parquet'}. Send row numbers" in error
    pq.write_table(raw_table(10, 1), data / "1.parquet")
    assert recsys.__main__.main(arguments) == 0
    found = sorted(path.name[0] for path in out.iterdir())
    assert found == ["0", "1", "2"]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("is_scoring", [True, False])
def test_a_killed_process_ends_the_command(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path, is_scoring: bool
) -> None:
    """Its file is named, and no unfinished result stays."""
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    pq.write_table(raw_table(20, 0), data / "0.parquet")
    for name in ("1", "2"):
        pq.write_table(pa.concat_tables([raw_table(100, 1)] * 2000), data / f"{name}.parquet")
    command = [sys.executable, "-m", "recsys", "score", str(packaged[0]), "--input", str(data)]
    command += ["--output", str(out), "--processes", "2", "--batch-size"]
    job = subprocess.Popen([*command, "1"], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + 60
        while True:
            assert job.poll() is None
            assert time.monotonic() < end
            unfinished = [*out.glob(".*")] if out.exists() else []
            children = [
                child
                for child in _children(job.pid)
                if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
            ]
            if is_scoring and len(unfinished) == 2 and [*out.glob("0-*")]:
                break
            if not is_scoring and len(children) == 2:
                break
            time.sleep(0.01)
        os.kill(children[0], signal.SIGKILL)
        _, error = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 1
    assert f"recsys score: --processes: a process ended by signal {signal.SIGKILL:d} " in error
    if is_scoring:
        assert f"while it scored {data}" in error
        assert [path.name[:2] for path in out.iterdir()] == ["0-"]
    else:
        assert "before its first file" in error
    assert not [*out.glob(".*")]


def test_results_of_another_origin_are_computed_again(
    packaged: tuple[Path, nn.Module, FeatureSpec],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another file, package, delta, module or setting is logged in one line; other results stay."""
    version, _, spec = packaged
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    for name in ("a", "b"):
        pq.write_table(raw_table(20, 0), data / f"{name}.parquet")

    def scores(model: Any, word: str, **options: Any) -> np.ndarray:
        before = {path: path.stat().st_mtime_ns for path in out.glob("*")}
        caplog.clear()
        found = score(model, data, out, **options)
        lines = [record.getMessage() for record in caplog.records if record.name == "recsys"]
        assert [word in line for line in lines] == [True] * bool(word), (word, lines)
        if not word:
            assert {path: path.stat().st_mtime_ns for path in out.glob("*")} == (before or ANY)
        return pq.read_table(found[0])["output"].to_numpy()

    own = version.parent / "9"
    shutil.copytree(version, own)
    first = scores(own, "")
    assert np.array_equal(scores(own, ""), first)
    pq.write_table(raw_table(20, 5), data / "a.parquet")
    changed = scores(own, "1 of 2 results in ")
    assert not np.array_equal(changed, first)
    np.testing.assert_allclose(changed, wanted(packaged[1], spec, raw_table(20, 5)), 1e-5, 1e-6)
    write_delta(own, {"city": (torch.arange(3), torch.ones(3, 8))})
    after = scores(own, "2 of 2 results")
    assert not np.array_equal(after, changed)
    with Predictor(own) as predictor:
        table = raw_table(20, 5).drop_columns(["ok"])
        np.testing.assert_allclose(after, predictor(table)["output"][:, 0], 1e-5)
    scores(own, "another version of the settings", keys=["user"])
    scores(own, "", keys=["user"])
    torch.manual_seed(1)
    model = DLRM(
        EmbeddingBagCollection(tables=spec.tables(8), is_weighted=True), 3, [8, 8], [8, 1]
    ).eval()
    scores(model, "another version of the model", spec=spec, keys=["user"])
    scores(model, "", spec=spec, keys=["user"])
    before = scores(copy.deepcopy(model), "", spec=spec, keys=["user"])
    with torch.no_grad():
        next(model.over_arch.parameters()).mul_(2)
    assert not np.array_equal(scores(model, "the model", spec=spec, keys=["user"]), before)
    for path in out.glob("*"):
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    scores(model, "2 of 2 results", spec=spec, keys=["user"])
    next(out.glob("a-*")).write_bytes(b"")
    scores(model, "1 of 2 results", spec=spec, keys=["user"])


def test_raw_requests_are_checked_as_training_data(
    packaged: tuple[Path, nn.Module, FeatureSpec],
) -> None:
    """The conversion for the C++ core checks them; the plain predictor uses the spec itself."""
    with Predictor(packaged[0]) as predictor:
        columns = predictor.manifest["columns"]
    strings, floats = pa.list_(pa.string()), pa.list_(pa.float32())
    tags = pa.array([["a", "b"], ["a"]], strings)
    for bad, error, message in (
        (
            {"tags": tags, "weight": pa.array([[0.5], [1, 2]], floats)},
            ValueError,
            "1 weights and 2",
        ),
        ({"tags": tags, "weight": pa.array([[0.5, None], [1]], floats)}, ValueError, "for each id"),
        ({"tags": tags}, KeyError, "must have a column 'weight'"),
        ({"city": pa.array([True, False])}, TypeError, "'city' must have texts; received bool"),
        ({"time": pa.array([10**18, 0])}, ValueError, "times of the years 1 to 9999"),
    ):
        whole = raw_table(2, 0).drop_columns(["weight"] if "tags" in bad else [])
        table = {**{name: whole[name] for name in whole.column_names}, **bad}
        with pytest.raises(error, match=message):
            raw_request(columns, pa.table(table))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"city": [["Oslo"]]}, "received list<item: string>. Send one"),
        ({"age": ["old"]}, "'age' must .*received string. Send"),
        ({"row": ["a"]}, "'row' must .*received .* Send "),
        ({"time": [10**18]}, "years 1 .*received 1000000000000000000 in"),
        ({"city": ["a", 3]}, "'city' must have .*of one type"),
        (
            {"tags": ["a"], "weight": [[1.0]]},
            "'tags' must .*received string. Send",
        ),
    ],
)
def test_errors_of_requests_have_remedies_of_senders(
    packaged: tuple[Path, nn.Module, FeatureSpec], request_: Any, message: str
) -> None:
    size = max(len(values) for values in request_.values())
    whole = raw_table(size, 0).to_pydict()
    with Predictor(packaged[0]) as predictor:
        columns = predictor.manifest["columns"]
        for call in (predictor, lambda data: raw_request(columns, data)):
            with pytest.raises((TypeError, ValueError), match=message):
                call({**whole, **request_})


def test_missing_values_of_pandas_in_requests(
    packaged: tuple[Path, nn.Module, FeatureSpec],
) -> None:
    pd = pytest.importorskip("pandas")
    request = {"tags": [["a", pd.NA], pd.NA], "weight": [[1.0, 2.0], None], "city": ["x", pd.NA]}
    plain = {"tags": [["a", None], None], "weight": [[1.0, 2.0], None], "city": ["x", None]}
    whole = raw_table(2, 0).to_pydict()
    with Predictor(packaged[0]) as predictor:
        found = predictor({**whole, **request})["output"].tolist()
        assert found == predictor({**whole, **plain})["output"].tolist()


def test_a_raw_column_has_one_use(tmp_path: Path) -> None:
    spec = FeatureSpec([Timestamp("when"), Numeric("when"), Label("ok")])
    table = pa.table({"when": [1, 2], "ok": [0, 1]})
    spec.fit(table)
    tables = EmbeddingBagCollection(tables=spec.tables(4))
    model = quantize_embeddings(DLRM(tables, 1, [4, 4], [4, 1]).eval())
    with pytest.raises(ValueError, match=r"one use; received several of \['when'\]"):
        package(model, tmp_path / "m", table.select(["when"]), spec=spec)


def test_keys_are_not_outputs(
    packaged: tuple[Path, nn.Module, FeatureSpec], tmp_path: Path
) -> None:
    table = raw_table(3, 0).append_column("output", pa.array([1, 2, 3]))
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"keys must not be outputs .*\['output'\]"):
        score(packaged[0], tmp_path / "a.parquet", tmp_path / "out", keys=["output"])


def test_what_cannot_be_scored_is_refused(tmp_path: Path) -> None:
    pq.write_table(raw_table(1, 0), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="needs a fitted FeatureSpec with a"):
        score(nn.Linear(1, 1), tmp_path / "a.parquet", tmp_path / "out")
    with pytest.raises(FileNotFoundError, match=r"none\.parquet must be a file"):
        score(nn.Linear(1, 1), tmp_path / "none.parquet", tmp_path / "out")


@pytest.mark.parametrize("suffix", ["parquet", "csv"])
@pytest.mark.parametrize("is_package", [True, False])
def test_a_column_that_states_its_value_may_be_absent(
    tmp_path: Path, is_package: bool, suffix: str
) -> None:
    """The same holds in `transform`; files that have the column may be among the others."""
    rows = {"city": ["a", "b", "a"], "price": [1.0, 2.0, 4.0], "ok": [0, 1, 0]}
    spec = FeatureSpec([Categorical("city"), Numeric("price", missing=0.5), Label("ok")]).fit(rows)
    tables = EmbeddingBagCollection(tables=spec.tables(4))
    model = quantize_embeddings(DLRM(tables, 1, [4, 4], [4, 1]).eval())
    tables = {"with": rows, "without": {"city": ["b", "c"]}, "no": {"price": [1.0]}}
    for name, columns in tables.items():
        if suffix == "csv":
            csv.write_csv(pa.table(columns), tmp_path / f"{name}.csv")
        else:
            pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
    scored: Any = model
    if is_package:
        scored = package(model, tmp_path / "m", rows, spec=spec, programs=["torchscript"])
    given = {} if is_package else {"spec": spec}
    paths = [tmp_path / f"{name}.{suffix}" for name in ("with", "without")]
    results = score(scored, paths, tmp_path / "out", **given)
    for result, name in zip(results, ("with", "without"), strict=True):
        columns = {"price": [None] * len(tables[name]["city"]), **tables[name]}
        with torch.no_grad():
            batch = spec.transform(columns, labels=False)
            found = model(batch.dense_features, batch.sparse_features)[:, 0]
        np.testing.assert_allclose(pq.read_table(result)["output"], found, 1e-5, 1e-6)
    with pytest.raises(KeyError, match=rf"no\.{suffix} must have the columns \['city'\]"):
        score(scored, tmp_path / f"no.{suffix}", tmp_path / "out", **given)
    with pytest.raises(KeyError, match=rf"without\.{suffix} must have the columns \['price'\]"):
        score(scored, tmp_path / f"without.{suffix}", tmp_path / "out", keys=["price"], **given)


def test_files_without_a_column_of_the_spec_have_their_rows(tmp_path: Path) -> None:
    spec = FeatureSpec([Numeric("x", missing=2.0)]).fit({"x": [1.0]})
    pq.write_table(pa.table({"y": [1, 2, 3]}), tmp_path / "a.parquet")
    model = _WithIds(lambda dense: dense)
    [path] = score(model, tmp_path / "a.parquet", tmp_path / "out", spec=spec)
    assert pq.read_table(path)["output"].to_pylist() == [2.0] * 3


class _WithIds(nn.Module):
    def __init__(self, result: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.result = result

    def forward(self, dense: torch.Tensor, ids: Any) -> Any:
        return self.result(dense)


@pytest.mark.parametrize(
    ("result", "received"),
    [
        (lambda dense: dense.sum(), r"received shape \[\] for 'output'"),
        (lambda dense: {"a": dense, "b": dense[:0]}, r"received shape \[0, 1\] for 'b'"),
        (lambda dense: (dense, dense), r"received \(.* for 'output'"),
        (lambda dense: None, r"received None for 'output'"),
    ],
)
def test_outputs_have_a_row_per_sample(
    tmp_path: Path, result: Callable[[torch.Tensor], Any], received: str
) -> None:
    """Also in a batch of one row, where a mean could be taken for it."""
    pq.write_table(pa.table({"x": [1.0, 2.0, 3.0]}), tmp_path / "a.parquet")
    spec = FeatureSpec([Numeric("x")]).fit(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet: model must.* {received}"):
        score(_WithIds(result), tmp_path / "a.parquet", tmp_path / "out", spec=spec, batch_size=1)
    assert list((tmp_path / "out").iterdir()) == []
