"""The record has requests and answers, and never delays or fails a request."""

from __future__ import annotations

import copy
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor, nn

from recsys import EmbeddingBagCollection
from recsys.features import Categorical, FeatureSpec, Ids, Label, Numeric
from recsys.inference import Predictor, package, quantize_embeddings
from recsys.inference.packages.requests import Request
from recsys.inference.records import Recording
from recsys.inference.records.recorder import METADATA, Recorder
from recsys.sparse import KeyedJaggedTensor
from tests.inference.packages.test_indexes import batch_of, new_model
from tests.inference.packages.test_writer import request_of

CITIES = ["Oslo", "Rome", "Bonn"]


class _Model(nn.Module):
    def __init__(self, spec: FeatureSpec) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(tables=spec.tables(4))

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return dense[:, 0] + self.tables(ids).values().sum(1)


def write_versions(folder: Path) -> tuple[Path, Path]:
    """Two versions of a package with the raw columns city, tags and age."""
    columns = [
        Categorical("city"), Categorical("tags", is_list=True), Numeric("age", missing=1.0),
        Label("click"),
    ]  # fmt: skip
    data = {"city": CITIES, "tags": [["a"], [], ["b"]], "age": [1.0, 2.0, 3.0], "click": [0, 1, 1]}
    spec = FeatureSpec(columns).fit(data)
    versions = []
    for number in range(2):
        torch.manual_seed(number)
        model = quantize_embeddings(_Model(spec).eval(), torch.float32)
        target = folder / f"m{number}"
        written = package(model, target, pa.table(data), spec=spec, programs=["torchscript"])
        versions.append(written)
    return versions[0], versions[1]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_versions(tmp_path_factory.mktemp("versions"))


def _requests(count: int) -> Iterator[dict[str, list[Any]]]:
    random = np.random.default_rng(0)
    for number in range(count):
        rows = int(random.integers(1, 5))
        yield {
            "city": random.choice(np.array([*CITIES, "new", None], object), rows).tolist(),
            "tags": [["a", "b"][: random.integers(3)] for _ in range(rows)],
            "age": random.choice(np.array([1.5, None, 7], object), rows).tolist(),
            "id": [f"{number}-{row}" for row in range(rows)],
            "more": random.integers(0, 3, rows).tolist(),
        }


def _read(folder: Path) -> list[dict[str, Any]]:
    rows = []
    for file in folder.glob("*.parquet"):
        rows += pq.read_table(file).to_pylist()
    assert not list(folder.glob(".part-*"))
    return rows


def test_rows_and_both_predictions_are_recorded(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    new, old = versions
    recording = Recording(folder=str(tmp_path / "r"), key="id", shadow=str(old), file_rows=40)
    expected: dict[str, dict[str, Any]] = {}
    start = time.time()
    with Predictor(new) as plain, Predictor(old) as shadow:
        predictor = Predictor(new, record=recording)
        for number, request in enumerate(_requests(50)):
            given: Any = request
            if number % 3 == 0:
                given = pa.table(request).to_pandas().astype({"city": "category"})
            response, wanted = predictor(given), plain(request)
            np.testing.assert_array_equal(response["output"], wanted["output"])
            other = shadow(request)["output"]
            for row, key in enumerate(request["id"]):
                expected[key] = {n: copy.copy(request[n][row]) for n in ("city", "tags", "age")}
                expected[key] |= {
                    "prediction_output": response["output"][row].item(),
                    "shadow_output": other[row].item(),
                }
            if isinstance(given, dict):
                given["city"][:] = ["changed"] * len(given["city"])
                given["tags"][0].append("changed")
            response["output"][:] = -1  # an answer belongs to its receiver
            if number == 20:
                time.sleep(0.7)
        predictor.close()
    assert predictor.record_counts == (len(expected), 0, 0, 0, 0)
    rows = _read(tmp_path / "r")
    assert len(rows) == len(expected)
    assert len(list((tmp_path / "r").iterdir())) > 1
    for row in rows:
        of_key = expected[row["record_key"]]
        for name, value in of_key.items():
            if name.endswith("output"):
                assert row[name] == pytest.approx(value, rel=1e-5)
            else:
                assert row[name] == value
        assert (row["record_version"], row["record_shadow"]) == (str(new), str(old))
        assert start - 1 <= row["record_time"].timestamp() <= time.time()
        assert "more" not in row


def test_requests_of_ids_are_recorded(tmp_path: Path) -> None:
    model = new_model()
    model.eval()
    version = package(
        quantize_embeddings(model), tmp_path / "m", [batch_of(0)], programs=["torchscript"]
    )
    recording = Recording(folder=str(tmp_path / "r"), key="key", shadow=str(version))
    with Predictor(version, record=recording) as predictor, Predictor(version) as plain:
        batches = [batch_of(seed) for seed in (1, 2)]
        for number, batch in enumerate(batches):
            request: Request = {**request_of(batch), "key": np.arange(16) + 16 * number}
            wanted = plain(request_of(batch))["output"]
            np.testing.assert_array_equal(predictor(request)["output"], wanted)
        bad = predictor.run([{"nothing": torch.tensor([1])}])
        assert isinstance(bad[0], ValueError)
    rows = sorted(_read(tmp_path / "r"), key=lambda row: row["record_key"])
    assert [row["record_key"] for row in rows] == list(range(32))
    for name in ("user", "friend", "film"):
        found = [row[name] for row in rows]
        wanted_ids = [bag.tolist() for b in batches for bag in b[name].to_dense()]
        assert found == wanted_ids
    for row in rows:
        assert row["prediction_output"] == row["shadow_output"]
        assert len(row["prediction_output"]) == 2


def test_a_sample_is_taken_and_swapped_versions_are_named(
    versions: tuple[Path, Path], tmp_path: Path
) -> None:
    recording = Recording(folder=str(tmp_path / "r"), sample=0.25)
    with Predictor(versions[0], record=recording) as predictor:
        for request in _requests(400):
            predictor(request)
        predictor.swap(versions[1])
        for request in _requests(400):
            predictor(request)
    names = [row["record_version"] for row in _read(tmp_path / "r")]
    for version in versions:
        assert 100 < names.count(str(version)) < 450  # of about 1,000 rows


def test_a_slow_thread_drops_rows_and_counts_them(tmp_path: Path) -> None:
    entered, go = threading.Event(), threading.Event()

    class _Slow:
        def __call__(self, request: Any) -> dict[str, Any]:
            entered.set()
            go.wait(20)
            return {"output": np.zeros(len(request["x"]), np.float32)}

        def close(self) -> None:
            pass

    recorder = Recorder(
        Recording(folder=str(tmp_path / "r"), shadow="old", max_waiting_rows=10), _Slow()
    )
    served = "1", {"columns": [], "inputs": [{"kind": "dense", "name": "x"}]}, 0
    request = {"x": np.arange(4.0, dtype=np.float32)}
    response = {"output": np.ones(4, np.float32)}
    recorder.add(request, response, served)
    assert entered.wait(20)
    start = time.perf_counter()
    for _ in range(5):
        recorder.add(request, response, served)
    assert time.perf_counter() - start < 1
    assert recorder.counts() == (0, 8, 16, 0, 0)
    go.set()
    recorder.close()
    assert recorder.counts() == (8, 0, 16, 0, 0)
    recorder.add(request, response, served)
    assert recorder.counts().dropped == 20
    [file] = (tmp_path / "r").iterdir()
    metadata = pq.read_schema(file).metadata
    assert json.loads(metadata[METADATA])["dropped"] == 16


def test_errors_of_the_record_do_not_reach_requests(
    versions: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A shadow that rejects some rows, and a folder that is gone."""
    other = FeatureSpec([Ids("more", rows=2), Numeric("age"), Label("click")])
    other.fit({"more": [0, 1], "age": [1, 2], "click": [0, 1]})
    model = quantize_embeddings(_Model(other).eval(), torch.float32)
    example = pa.table({"more": [0, 1], "age": [1.0, 2.0]})
    old = package(model, tmp_path / "old", example, spec=other, programs=["torchscript"])
    recording = Recording(folder=str(tmp_path / "r"), shadow=str(old), key="id")
    with Predictor(versions[0], record=recording) as predictor:
        has_other: dict[str, bool] = {}
        for request in _requests(20):
            predictor(request)
            has_other |= dict.fromkeys(request["id"], 2 in request["more"])
    counts = predictor.record_counts
    rows = _read(tmp_path / "r")
    assert 0 < counts.shadow_failed < counts.written == len(rows)
    assert all((r["shadow_output"] is None) == has_other[r["record_key"]] for r in rows)
    assert sum(has_other.values()) == counts.shadow_failed
    assert all(row["prediction_output"] is not None for row in rows)
    assert caplog.text.count("cannot score a request") == 1
    with Predictor(versions[0], record=recording) as predictor:
        for file in (tmp_path / "r").iterdir():
            file.unlink()
        (tmp_path / "r").rmdir()
        (tmp_path / "r").write_text("")
        assert len(predictor({"city": ["Oslo"], "tags": [[]], "age": [1.0]})["output"]) == 1
    assert predictor.record_counts == (0, 0, 0, 1, 1)
    assert caplog.text.count("cannot write a file") == 1


def test_wrong_settings_are_errors(versions: tuple[Path, Path], tmp_path: Path) -> None:
    for settings, match in (
        ({"sample": 0.0}, "above 0 and at most 1"),
        ({"sample": 1.5}, "above 0 and at most 1"),
        ({"file_rows": 0}, "file_rows"),
        ({"file_seconds": -1.0}, "file_seconds must be positive"),
        ({"max_waiting_rows": 0}, "max_waiting_rows"),
        ({"folder": ""}, "must not be empty"),
    ):
        with pytest.raises(ValueError, match=match):
            Recording(**{"folder": "r", **settings})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="that the model does not read; received 'city'"):
        Predictor(versions[0], record=Recording(folder=str(tmp_path / "r"), key="city"))
    with pytest.raises(FileNotFoundError):
        Predictor(versions[0], record=Recording(folder=str(tmp_path / "r"), shadow="no/version"))
    assert not (tmp_path / "r").exists()
