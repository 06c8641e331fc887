"""Rows of windows, compared with lists of samples."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recsys.datasets.utils import Batch
from recsys.datasets.windows import join_rows, split_rows, take_rows
from recsys.sparse import KeyedJaggedTensor


def _batch(num_rows: int, num_features: int, seed: int, *, plain: bool, weighted: bool) -> Batch:
    draw = np.random.default_rng(seed)
    shape = (num_features, num_rows)
    lengths = torch.from_numpy(np.ones(shape, np.int64) if plain else draw.integers(0, 4, shape))
    count = int(lengths.sum())
    ids = KeyedJaggedTensor(
        [f"f{i}" for i in range(num_features)],
        torch.from_numpy(draw.integers(0, 10**12, count)),
        torch.from_numpy(draw.random(count).astype(np.float32)) if weighted else None,
        lengths.flatten(),
    )
    dense = torch.from_numpy(draw.random((num_rows, 3)).astype(np.float32))
    labels = torch.arange(float(num_rows))
    if weighted:
        labels = torch.stack([labels, -labels], 1)
    groups = torch.arange(num_rows) if plain else None
    weights = torch.rand(num_rows) if weighted else None
    mask = torch.rand(labels.shape) < 0.7 if weighted else None
    return Batch(dense, ids, labels, ("a", "b", "c"), "y", weights, groups, mask)


def _samples(batch: Batch) -> list[Any]:
    lists = [
        [one.tolist() for one in jagged.to_dense()]
        for jagged in batch.sparse_features.to_dict().values()
    ]
    weights = [
        [one.tolist() for one in jagged.to_dense_weights() or []]
        for jagged in batch.sparse_features.to_dict().values()
    ]
    parts = [batch.dense_features, batch.labels, batch.sample_weights, batch.groups]
    parts.append(batch.label_mask)
    rows = [part.tolist() for part in parts if part is not None]
    columns = [column for column in (*lists, *weights, *rows) if column]
    return list(zip(*columns, strict=True))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_features", [0, 1, 5])
def test_rows_are_split_and_joined(plain: bool, weighted: bool, num_features: int) -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        num_rows = int(draw.integers(1, 40))
        batch = _batch(num_rows, num_features, seed, plain=plain, weighted=weighted)
        whole = _samples(batch)
        cuts = draw.integers(0, num_rows + 1, 5).tolist()
        edges = sorted([0, *cuts, num_rows])
        order = draw.permutation(num_rows) if seed % 2 else None
        if order is not None:
            whole = [whole[row] for row in order]
        parts = split_rows(batch, edges, order)
        assert [len(part.labels) for part in parts] == np.diff(edges).tolist()
        assert [row for part in parts for row in _samples(part)] == whole
        again = join_rows(parts)
        assert _samples(again) == whole
        rows = draw.integers(0, num_rows, draw.integers(0, num_rows + 1))
        taken = take_rows(again, rows)
        assert _samples(taken) == [whole[row] for row in rows]
        assert taken.dense_names == ("a", "b", "c")
        assert (again.dense_names, again.label_name) == (("a", "b", "c"), "y")


def test_batches_have_memory_of_their_own() -> None:
    batch = _batch(8, 2, 0, plain=False, weighted=True)
    order = np.arange(8)[::-1].copy()
    first = split_rows(batch, [0, 4, 8], order)
    before = [_samples(part) for part in first]
    other = split_rows(_batch(8, 2, 1, plain=False, weighted=True), [0, 8], order)
    other[0].sparse_features.values().zero_()
    batch.dense_features.zero_()
    first[1].dense_features.zero_()
    assert _samples(first[0]) == before[0]
    assert first[0].labels.untyped_storage().nbytes() == first[0].labels.nbytes


def test_batches_with_and_without_missing_labels_are_joined() -> None:
    batch = _batch(5, 2, 0, plain=False, weighted=True)
    whole = replace(batch, label_mask=None)
    found = join_rows([whole, batch, whole])
    ones = torch.ones(5, 2, dtype=torch.bool)
    assert batch.label_mask is not None
    assert found.label_mask is not None
    assert torch.equal(found.label_mask, torch.cat([ones, batch.label_mask, ones]))
    assert join_rows([whole, whole]).label_mask is None
