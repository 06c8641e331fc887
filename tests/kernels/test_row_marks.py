"""Marks of rows: bits of consumers, and which rows a lookup marks."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recsys.kernels.row_marks import RowMarks
from recsys.kernels.tbe import TableBatchedEmbedding
from recsys.kernels.types import (
    EmbOptimType,
    OptimizerSpec,
    PoolingType,
    TableSpec,
    UpdateMode,
)
from tests.kernels.lookup_cases import CPU, CPU_BACKENDS

ROWS, DIMS, READS = (7, 1, 12), (4, 2, 4), (2, 0, 1, 0)


class Consumer:
    """Something that can be referenced weakly."""


def make_lookup(
    mode: UpdateMode = UpdateMode.FUSED, pooling: PoolingType = PoolingType.SUM, **options: Any
) -> TableBatchedEmbedding:
    dims = DIMS if pooling is not PoolingType.NONE else (4, 4, 4)
    made = TableBatchedEmbedding(
        [
            TableSpec(name=f"t{t}", num_rows=r, dim=d)
            for t, (r, d) in enumerate(zip(ROWS, dims, strict=True))
        ],
        feature_table_map=sorted(READS),
        pooling=pooling,
        update_mode=mode,
        optimizer=None
        if mode is UpdateMode.GRADIENT
        else OptimizerSpec(algorithm=EmbOptimType.EXACT_ROWWISE_ADAGRAD, learning_rate=0.1),
        device=CPU,
        **options,
    )
    made.storage.normal_()
    return made


def draw(seed: int, bags: tuple[int, ...] = (3,) * 4) -> tuple[Tensor, Tensor, list[set[int]]]:
    """Ids, offsets, and the rows of each table that they read."""
    rng = np.random.default_rng(seed)
    ids: list[int] = []
    lengths: list[int] = []
    read: list[set[int]] = [set(), set(), set()]
    for table, count in zip(sorted(READS), bags, strict=True):
        for _ in range(count):
            own = rng.integers(0, ROWS[table], rng.integers(0, 3)).tolist()
            ids += own
            lengths.append(len(own))
            read[table] |= set(own)
    offsets = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int64)
    return torch.tensor(ids, dtype=torch.int64), offsets, read


def rows_of(marked: list[Tensor]) -> list[set[int]]:
    return [set(of_table.nonzero().flatten().tolist()) for of_table in marked]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE])
@pytest.mark.parametrize("bags", [(3, 3, 3, 3), (5, 2, 0, 3)])
def test_an_update_marks_the_rows_of_its_batch(
    backend: str, pooling: PoolingType, bags: tuple[int, ...]
) -> None:
    tbe, consumer = make_lookup(pooling=pooling, backend=backend), Consumer()
    tbe.marks.add(consumer)
    is_ragged = len(set(bags)) > 1 and pooling is not PoolingType.NONE
    bags = bags if is_ragged else (3, 3, 3, 3)
    for seed in range(5):
        ids, offsets, read = draw(seed, bags)
        tbe.forward(ids, offsets, bags=np.array(bags) if is_ragged else None).sum().backward()
        assert rows_of(tbe.marks.take(consumer)) == read
    with torch.no_grad():
        tbe.forward(ids, offsets, bags=np.array(bags) if is_ragged else None)
    assert rows_of(tbe.marks.take(consumer)) == [set()] * 3


def test_frozen_tables_are_not_marked() -> None:
    tbe, consumer = make_lookup(), Consumer()
    tbe.marks.add(consumer)
    parameters = [torch.nn.Parameter(w, requires_grad=t != 2) for t, w in enumerate(tbe.weights)]
    ids, offsets, read = draw(3)
    tbe.forward(ids, offsets, parameters=parameters).sum().backward()
    assert rows_of(tbe.marks.take(consumer)) == [*read[:2], set()]


@pytest.mark.parametrize("keeps_batch", [True, False])
def test_deferred_rows_are_marked_by_the_step(keeps_batch: bool) -> None:
    tbe, consumer = make_lookup(UpdateMode.DEFERRED, keeps_batch=keeps_batch), Consumer()
    tbe.marks.add(consumer)
    expected: list[set[int]] = [set(), set(), set()]
    for seed in range(2):
        ids, offsets, read = draw(seed)
        tbe.forward(ids, offsets).sum().backward()
        expected = [a | b for a, b in zip(expected, read, strict=True)]
    assert rows_of(tbe.marks.take(consumer)) == [set()] * 3
    tbe.deferred.step()
    assert rows_of(tbe.marks.take(consumer)) == expected
    ids, offsets, read = draw(7)
    tbe.forward(ids, offsets).sum().backward()
    tbe.deferred.step_dense(*tbe.deferred.take_dense())
    assert rows_of(tbe.marks.take(consumer)) == read
    tbe.forward(ids, offsets).sum().backward()
    tbe.deferred.row_statistics()
    tbe.deferred.step([s / w.shape[1] for s, w in zip(
        tbe.deferred.row_statistics(), tbe.weights, strict=True
    )])  # fmt: skip
    assert rows_of(tbe.marks.take(consumer)) == read


def test_reset_rows_are_marked() -> None:
    tbe, consumer = make_lookup(), Consumer()
    tbe.marks.add(consumer)
    tbe.reset_rows(
        [0, 0, 2],
        torch.tensor([5, 11]),
        lambda group, weights, at: weights.index_copy_(0, at, torch.ones(2, 4)),
    )
    assert rows_of(tbe.marks.take(consumer)) == [set(), set(), {5, 11}]


ALL = [set(range(rows)) for rows in ROWS]


def test_other_writes_mark_all_rows() -> None:
    tbe, consumer = make_lookup(), Consumer()
    tbe.marks.add(consumer)
    ids, offsets, _ = draw(0)
    tbe.weights[0].add_(1)
    assert rows_of(tbe.marks.take(consumer)) == ALL
    tbe.states[1]["sum"].zero_()
    tbe.forward(ids, offsets).sum().backward()  # an update after the write
    assert rows_of(tbe.marks.take(consumer)) == ALL
    tbe.drop_cache()
    assert rows_of(tbe.marks.take(consumer)) == ALL


def test_a_torch_optimizer_marks_all_rows() -> None:
    tbe, consumer = make_lookup(UpdateMode.GRADIENT), Consumer()
    parameters = [torch.nn.Parameter(weight) for weight in tbe.weights]
    optimizer = torch.optim.Adam(parameters)
    tbe.marks.add(consumer)
    ids, offsets, _ = draw(0)
    tbe.forward(ids, offsets, parameters=parameters).sum().backward()
    assert rows_of(tbe.marks.take(consumer)) == [set()] * 3
    optimizer.step()
    assert rows_of(tbe.marks.take(consumer)) == ALL


def test_consumers_have_their_own_marks() -> None:
    tbe = make_lookup()
    consumers = [Consumer() for _ in range(8)]
    for consumer in consumers[:7]:
        tbe.marks.add(consumer)
    first, second = draw(1), draw(2)
    tbe.forward(*first[:2]).sum().backward()
    tbe.marks.add(consumers[7])
    with pytest.raises(ValueError, match="can have 8 consumers"):
        tbe.marks.add(Consumer())
    assert rows_of(tbe.marks.take(consumers[3])) == first[2]
    tbe.forward(*second[:2]).sum().backward()
    both = [a | b for a, b in zip(first[2], second[2], strict=True)]
    for i, consumer in enumerate(consumers):
        expected = second[2] if i in (3, 7) else both
        assert rows_of(tbe.marks.take(consumer)) == expected
        assert rows_of(tbe.marks.take(consumer)) == [set()] * 3


def test_no_consumer_no_memory() -> None:
    tbe, consumer = make_lookup(), Consumer()
    marks: RowMarks = tbe.marks
    ids, offsets, _ = draw(0)
    assert not marks.exist
    assert marks._bytes is None
    marks.add(consumer)
    assert marks.exist
    marks.remove(consumer)
    assert marks._bytes is None
    marks.add(consumer)
    del consumer
    gc.collect()
    tbe.forward(ids, offsets).sum().backward()
    assert marks._bytes is None
