"""Batches from tables."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from recsys import datasets
from recsys.datasets.balance import BalancedBatches, BalancedSampler
from recsys.datasets.criteo import CriteoDataset
from recsys.datasets.rows import criteo_terabyte, movielens_20m
from recsys.datasets.utils import Batch, rank_in_job
from recsys.distributed.train_pipeline.batches import to_device
from recsys.features import FeatureSpec, Ids, Label
from recsys.sparse import finish_value_checks
from recsys.sparse.value_checks import check_dense_values, check_labels
from tests.pretended_cuda import CUDA, PretendedCuda
from tests.ranks import RankPool
from tests.saved import through_torch_save

TABLE: dict[str, Any] = {
    "age": [31, 44, 5],
    "price": [0.5, 2.0, 1.0],
    "user": [7, 8, 9],
    "films": [[1, 2], [], [3]],
    "seconds": [[10.0, 20.0], [], [5.0]],
    "liked": [True, False, True],
}


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table])
def test_from_a_table(kind: Any) -> None:
    batch = Batch.from_columns(
        kind(TABLE),
        sparse=["user", "films"],
        dense=["age", "price"],
        label="liked",
        weights={"films": "seconds"},
    )
    assert batch.dense_features.tolist() == [[31.0, 0.5], [44.0, 2.0], [5.0, 1.0]]
    assert batch.labels.tolist() == [1.0, 0.0, 1.0]
    assert {t.dtype for t in (batch.dense_features, batch.labels)} == {torch.float32}
    assert batch.sparse_features.keys() == ["user", "films"]
    assert batch.sparse_features["films"].weights().tolist() == [10.0, 20.0, 5.0]
    assert batch.sparse_features["user"].weights().tolist() == [1.0, 1.0, 1.0]


def test_a_copy_without_blocking_waits_for_nothing_pinned_or_not() -> None:
    batch = Batch.from_columns(TABLE, sparse=["user", "films"], dense=["age"], label="liked")
    with PretendedCuda() as cuda:
        batch.to(CUDA)
        assert {kind for kind, _, _ in cuda.notes} == {"upload"}
        cuda.forget()
        for given in (batch, batch.pin_memory()):
            moved = given.to(CUDA, non_blocking=True)
            features = moved.sparse_features
            parts = moved.dense_features, moved.labels, features.values(), features.lengths()
            assert all(map(cuda.is_on_device, parts))
        assert cuda.notes == []
        assert moved.labels.tolist() == [1.0, 0.0, 1.0]


def test_dense_columns_and_labels_may_be_left_out() -> None:
    batch = Batch.from_columns({"user": np.array([[1, 0], [2, 3]])}, sparse=["user"], padding=0)
    assert batch.dense_features.shape == (2, 0)
    assert batch.labels.tolist() == [0.0, 0.0]
    assert batch.sparse_features.lengths().tolist() == [1, 2]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"liked": [1.0]}, ValueError, "received 3 in 'user' .* 'liked'"),
        ({"age": [[1.0]] * 3}, ValueError, "Column 'age' must .*number per row"),
        (
            {"age": [1.0, None, 2.0]},
            ValueError,
            "Column 'age' .*received nan in",
        ),
        ({"liked": [1.0, 0.0, math.inf]}, ValueError, "Column 'liked' must .*in row 2"),
        ({"age": ["a", "b", "c"]}, TypeError, "Column 'age' must hold numbers"),
    ],
)
def test_columns_that_do_not_fit(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    table = TABLE | change
    with pytest.raises(error, match=message):
        Batch.from_columns(table, sparse=["user"], dense=["age"], label="liked")
    with pytest.raises(KeyError, match="no such"):
        Batch.from_columns(table, sparse=["no such"])


@pytest.mark.parametrize("kind", [dict, pd.DataFrame, pa.table])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_weights_are_named_by_their_column(kind: Any, bad: float) -> None:
    table = kind(TABLE | {"films": [1, 2, 3], "seconds": [1.0, bad, 2.0]})
    with pytest.raises(ValueError, match=r"^Column 'seconds' must .* row 1"):
        Batch.from_columns(table, sparse=["films"], weights={"films": "seconds"})
    with pytest.raises(KeyError, match=r"weights must .*received"):
        Batch.from_columns(table, sparse=["user"], weights={"films": "seconds"})


TRAVELS: dict[str, Callable[[Batch], Batch]] = {
    "to": lambda batch: batch.to(torch.device("cpu")),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)),
    "save": through_torch_save,
    "tree_map": lambda batch: torch.utils._pytree.tree_map(lambda leaf: leaf, batch),
    "replace": lambda batch: dataclasses.replace(batch, labels=batch.labels + 0),
    "to_device": lambda batch: to_device(batch, torch.device("cpu")),
}


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
def test_names_travel_with_a_batch(travel: Callable[[Batch], Batch]) -> None:
    batch = Batch.from_columns(TABLE, sparse=["user"], dense=["age", "price"], label="liked")
    travelled = travel(batch)
    assert travelled.dense_names == ("age", "price")
    assert travelled.label_name == "liked"
    travelled.dense_features[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"nan in row 2.*'price'"):
        check_dense_values(travelled.dense_features)
    travelled.labels[0] = 3
    with pytest.raises(ValueError, match=r"3\.0 in row 0.*'liked'"):
        check_labels(travelled.labels)


def test_names_travel_to_a_gpu() -> None:
    batch = Batch.from_columns(TABLE, sparse=["user"], dense=["age", "price"], label="liked")
    with PretendedCuda():
        moved = batch.pin_memory().to(CUDA, non_blocking=True)
        assert (moved.dense_names, moved.label_name) == (("age", "price"), "liked")
        moved.dense_features[2, 1] = math.nan
        check_dense_values(moved.dense_features)
        with pytest.raises(ValueError, match=r"nan in row 2.*'price'"):
            finish_value_checks()


def test_a_batch_needs_no_names() -> None:
    made = Batch.from_columns(TABLE, sparse=["user"])
    batch = Batch(torch.full((3, 1), math.nan), made.sparse_features, made.labels)
    assert (batch.dense_names, batch.label_name) == ((), "")
    with pytest.raises(ValueError, match=r"received nan in row 0 \(3"):
        check_dense_values(batch.dense_features)
    old = pickle.loads(pickle.dumps(batch))
    del old.__dict__["dense_names"], old.__dict__["label_name"]  # as of an earlier version
    assert pickle.loads(pickle.dumps(old)).dense_names == ()


def with_all_parts() -> Batch:
    made = Batch.from_columns(TABLE, sparse=["user", "films"], dense=["age"])
    labels = torch.tensor([[1.0, 0.5], [0.0, 0.25], [1.0, 0.0]])
    weights, groups = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([7, -(2**63), 7])
    return dataclasses.replace(
        made, labels=labels, label_name="liked,stars", sample_weights=weights, groups=groups
    )


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
@pytest.mark.parametrize("absent", ["", "sample_weights", "groups"])
def test_weights_and_groups_travel_with_a_batch(
    travel: Callable[[Batch], Batch], absent: str
) -> None:
    batch = with_all_parts()
    if absent:
        setattr(batch, absent, None)
    travelled = travel(batch)
    for name in ("sample_weights", "groups", "labels"):
        found, expected = getattr(travelled, name), getattr(batch, name)
        if name == absent:
            assert found is None
        else:
            assert found.dtype == expected.dtype
            assert torch.equal(found, expected)
    travelled.labels[1, 1] = 7
    with pytest.raises(ValueError, match=r"7\.0 in row 1.*'stars'"):
        check_labels(travelled.labels)


def test_weights_and_groups_travel_to_a_gpu() -> None:
    with PretendedCuda() as cuda:
        moved = with_all_parts().pin_memory().to(CUDA, non_blocking=True)
        assert cuda.is_on_device(moved.sample_weights)
        assert cuda.is_on_device(moved.groups)
        assert cuda.notes == []
        again = torch.utils._pytree.tree_map(lambda leaf: leaf, moved)
        assert cuda.is_on_device(again.groups)


def test_a_stream_is_recorded_on_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda part, _: seen.append(part))
    batch = with_all_parts()
    batch.record_stream(None)  # type: ignore[arg-type]
    for part in (batch.dense_features, batch.labels, batch.sample_weights, batch.groups):
        assert any(part is one for one in seen)


def test_all_parts_are_leaves_of_a_tree() -> None:
    batch = with_all_parts()
    doubled = torch.utils._pytree.tree_map(
        lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf, batch
    )
    assert torch.equal(doubled.sample_weights, torch.tensor([1.0, 2.0, 4.0]))
    assert torch.equal(doubled.labels, batch.labels * 2)


def test_parts_have_their_types() -> None:
    for name in ("sample_weights", "groups"):
        with pytest.raises(TypeError, match=f"Batch.{name} must be a tensor; received"):
            dataclasses.replace(with_all_parts(), **{name: [1.0, 2.0, 3.0]})
    old = pickle.loads(pickle.dumps(with_all_parts()))
    del old.__dict__["sample_weights"], old.__dict__["groups"]  # as of an earlier version
    again = pickle.loads(pickle.dumps(old))
    assert (again.sample_weights, again.groups) == (None, None)
    assert again.to(torch.device("cpu")).groups is None


def _read(folder: str, **share: int) -> dict[str, list[Any]]:
    """Return the rows that this rank reads by each reader; all have 7 rows."""
    path, spec = Path(folder, "rows.tsv"), FeatureSpec([Ids("film", rows=9), Label("ok")])
    data = {"film": [*range(7)], "ok": [1] * 7}
    sampler = BalancedSampler([1] * 7, 1, **share)
    found: dict[str, Any] = {
        "table": datasets.table(data, spec, 1, divide="batches", **share),
        "criteo": CriteoDataset([path], 1, 9, **share),
        "rows": criteo_terabyte([path], **share),
        "films": movielens_20m(folder, **share),
        "sampler": [position for step in sampler for position in step],
        "balanced": BalancedBatches(
            datasets.table(data, spec, 7, rank=0, world_size=1), "film", **share
        ),
    }
    return {
        name: [
            row
            for part in parts
            for row in (part.labels.tolist() if isinstance(part, Batch) else [part])
        ]
        for name, parts in found.items()
    }


def _read_all(folder: str) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
    return _read(folder), _read(folder, rank=0, world_size=1)


def test_readers_take_their_rank_from_the_process_group(ranks: RankPool, tmp_path: Path) -> None:
    line = "\t".join(["1", *["7"] * 13, *["0a"] * 26])
    (tmp_path / "rows.tsv").write_text(f"{line}\n" * 7)
    (tmp_path / "ratings.csv").write_text("".join(f"1,{i},3.5,4\n" for i in range(7)))
    alone = _read(str(tmp_path))
    assert {name: len(rows) for name, rows in alone.items()} == dict.fromkeys(alone, 7)
    for world_size in (2, 3):
        found = ranks(world_size, _read_all, str(tmp_path))
        for name in alone:
            counts = [len(own[name]) for own, _ in found]
            assert sum(counts) == 7, name
            assert max(counts) < 5, name
        assert [everything for _, everything in found] == [alone] * world_size  # as passed


def test_a_rank_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rank_in_job(None, None) == (0, 1)
    assert rank_in_job(None, 4) == (0, 4)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert rank_in_job(1, 2) == (1, 2)
    with pytest.raises(ValueError, match=r"one of 2 processes \(WORLD_SIZE=2\)"):
        datasets.table({"film": [1]}, FeatureSpec([Ids("film", rows=9)]), 1, labels=False)


def test_balanced_batches_need_the_samples_of_all_ranks() -> None:
    spec = FeatureSpec([Ids("film", rows=9), Label("ok")])
    data = {"film": [1, 2], "ok": [1, 0]}
    reader = datasets.table(data, spec, 2, rank=1, world_size=2, divide="batches")
    with pytest.raises(ValueError, match=r"received a reader .*rank of 2\."):
        BalancedBatches(reader, "film", 1, 2)
