"""`load_table` gives rows to ids, compared with a dict."""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from recsys import EmbeddingBagCollection, EmbeddingBagConfig
from recsys.distributed.changed_rows import ChangedRows
from recsys.distributed.checkpoint import load_table, read_checkpoint, save_checkpoint
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import RowWiseAdagrad
from tests.distributed.cases import shard, train
from tests.distributed.checkpoint.test_hashed import Sized, rows_of
from tests.ranks import RankPool

CASE = Sized(3, 2, optimizer=RowWiseAdagrad)


def _load(case: Sized, path: Path, ids: np.ndarray[Any, Any], file: Path) -> list[set[int]]:
    model = shard(case)
    train(case, model, range(12), rank=dist.get_rank(), with_dense=False)
    save_checkpoint(path / "before", model, model.fused_optimizer)
    changed = ChangedRows(model)
    for table in ("h0", "h1", "h2"):
        load_table(model, table, file, ids=ids)
    rows = changed.take()
    save_checkpoint(path / "after", model, model.fused_optimizer)
    train(case, model, range(12, 15), rank=dist.get_rank(), with_dense=False)
    return [set(rows.get(f"ebc.embedding_bags.{t}.weight", torch.empty(0)).tolist()) for t in
            ("h0", "h1", "h2", "h3")]  # fmt: skip


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ids_get_rows(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    case = replace(CASE, world_size=world_size)
    draws = np.random.default_rng(1)
    known = (torch.arange(60) * 0x5851F42D4C957F2D - 2**63).numpy()  # some have rows already
    ids = np.concatenate([known, draws.integers(-(2**63), 2**63 - 1, 100)])
    dim = case.configs()[0].embedding_dim
    values = draws.standard_normal((len(ids), dim)).astype(np.float32)
    np.save(tmp_path / "values.npy", values)
    of_ranks = ranks(world_size, _load, case, tmp_path, ids, tmp_path / "values.npy")
    before = read_checkpoint(tmp_path / "before", optimizer=True)
    after = read_checkpoint(tmp_path / "after", optimizer=True)
    given = dict(zip(ids.tolist(), values.tolist(), strict=True))
    for number, table in enumerate(("h0", "h1", "h2")):
        old, new = rows_of(before, table), rows_of(after, table)
        assert given.keys() <= new.keys() <= old.keys() | given.keys()
        assert given.keys() & old.keys()
        step = int(before[f"ebc.embedding_bags.{table}.index.steps"])
        for id_, (weights, states, last_used, _) in new.items():
            if id_ in given:
                assert weights == given[id_]
                assert last_used == step
                assert states == (old[id_][1] if id_ in old else {"sum": 0.0})
            else:
                assert new[id_] == old[id_]
        index = after[f"ebc.embedding_bags.{table}.index.ids"]
        used = after[f"ebc.embedding_bags.{table}.index.last_used"] > 0
        expected = {r for r, id_ in enumerate(index.tolist()) if used[r] and id_ in given}
        assert set().union(*(rows[number] for rows in of_ranks)) == expected
        assert not set().union(*(rows[3] for rows in of_ranks))


def _unsharded(rows: int = 64, ids: HashedIds | None = None) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(rows, 2, "t", feature_names=["f"], ids=ids)
    return EmbeddingBagCollection(tables=[config])


def test_a_table_without_room_says_so() -> None:
    model = _unsharded(64, HashedIds())
    values = np.arange(200, dtype=np.float32).reshape(100, 2)
    with pytest.warns(UserWarning, match="'t' has no room for 37"):
        load_table(model, "t", values, ids=np.arange(100))
    index = model.embedding_bags["t"].index
    ids, rows = index.pairs()
    assert ids.tolist() == list(range(63))
    assert torch.equal(model.embedding_bags["t"].weight[rows], torch.from_numpy(values[:63]))
    assert index.step == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_table(model, "t", values[:5], ids=np.arange(1000, 1005))  # others make room
    ids, _ = index.pairs()
    assert len(ids) == 63
    assert set(range(1000, 1005)) <= set(ids.tolist())


BAD: dict[str, tuple[Any, int, str]] = {
    "missing": (None, 3, "ids must be an array of int64 [rows] for"),
    "int32": (np.arange(3, dtype=np.int32), 3, "received int32 [3]"),
    "repeat": (np.array([4, 7, 4]), 3, "ids must be distinct; received id 4 2 times"),
    "fewer": (np.arange(2), 3, "must have its shape, (2, 2); received (3, 2)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_ids_are_named(name: str) -> None:
    ids, rows, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)):
        load_table(_unsharded(64, HashedIds()), "t", np.zeros((rows, 2), np.float32), ids=ids)


def test_a_table_of_row_numbers_takes_no_ids() -> None:
    with pytest.raises(ValueError, match="ids must be None"):
        load_table(_unsharded(3), "t", np.zeros((3, 2), np.float32), ids=np.arange(3))
