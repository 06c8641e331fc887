from __future__ import annotations

import numpy as np
import pytest
import torch

from recsys.kernels.types import BoundsCheckMode
from recsys.modules.tables.batch_checker import BatchChecker, CheckedBatch
from recsys.sparse import KeyedJaggedTensor

CPU = torch.device("cpu")
READERS = [("user", "users", 5), ("item", "items", 3), ("item", "more items", 9)]


def _checker(mode: BoundsCheckMode) -> BatchChecker:
    return BatchChecker(READERS, mode, CPU, is_pooled=True)


def _batch(values: list[int], lengths: list[int], keys: str = "user item") -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys.split(), torch.tensor(values, dtype=torch.int64), lengths=torch.tensor(lengths)
    )


def _check(checker: BatchChecker, batch: KeyedJaggedTensor) -> CheckedBatch:
    return checker.check(batch, batch.parts(), checker.limits_of(batch.keys()))


@pytest.mark.parametrize("mode", list(BoundsCheckMode))
@pytest.mark.parametrize(("values", "lengths"), [([0, 4, 2], [1, 1, 1, 0]), ([], [0, 0])])
def test_good_ids_pass(mode: BoundsCheckMode, values: list[int], lengths: list[int]) -> None:
    batch = _batch(values, lengths)
    checked = _check(_checker(mode), batch)
    assert checked.bags.values is batch.values()
    assert not checked.faults.numel()


def test_the_message_names_feature_table_id_position_and_size() -> None:
    checker = _checker(BoundsCheckMode.FATAL)
    checked = _check(checker, _batch([4, 0, 1, 3, -1], [1, 1, 1, 2]))
    assert checked.bags.values.tolist() == [4, 0, 1, 0, 0]
    assert checked.faults.tolist() == [False, True]
    with pytest.raises(IndexError) as caught:
        checker.report(checked)
    assert str(caught.value) == (
        "Id 3 at position 1 of feature 'item' must be from 0 to 2. Table 'items' has 3 rows; the "
        "batch has 2 bad ids, the first in sample 1. Hash or remap ids, enlarge num_embeddings, "
        "or choose another BoundsCheckMode."
    )


def test_a_negative_id_is_bad() -> None:
    checker = _checker(BoundsCheckMode.FATAL)
    with pytest.raises(IndexError, match=r"Id -1 at .*of feature 'user'"):
        checker.report(_check(checker, _batch([-1, 0], [1, 1])))


def test_empty_bags_before_a_bad_id_do_not_shift_its_sample() -> None:
    checker = _checker(BoundsCheckMode.FATAL)
    with pytest.raises(IndexError, match=r"feature 'user'.*sample 2"):
        checker.report(_check(checker, _batch([5], [0, 0, 1, 0, 0, 0])))


def test_the_mode_decides() -> None:
    batch = _batch([4, 3], [1, 1])
    warns, ignores, reads = map(
        _checker, (BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE, BoundsCheckMode.NONE)
    )
    for checker in (warns, ignores):
        assert _check(checker, batch).bags.values.tolist() == [4, 0]
    with pytest.warns(UserWarning, match="Id 3 at .*of feature 'item'"):
        warns.report(_check(warns, batch))
    ignores.report(_check(ignores, batch))
    assert _check(reads, batch).bags.values is batch.values()


def test_features_that_no_table_reads_may_have_any_ids() -> None:
    batch = _batch([4, 99, -7, 2], [1, 2, 1], "user other item")
    checked = _check(_checker(BoundsCheckMode.FATAL), batch)
    assert not checked.faults.any()
    assert checked.bags.values[[0, 3]].tolist() == [4, 2]


@pytest.mark.parametrize("seed", range(20))
def test_bad_ids_are_those_of_a_loop(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = {"a": int(rng.integers(1, 6)), "b": int(rng.integers(1, 6))}
    strides = [int(rng.integers(0, 4)), int(rng.integers(1, 4))]
    lengths = rng.integers(0, 3, sum(strides))
    values = rng.integers(-1, 7, int(lengths.sum()))
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.from_numpy(values),
        lengths=torch.from_numpy(lengths),
        stride_per_key_per_rank=[[stride] for stride in strides],
    )
    checker = BatchChecker(
        [(key, key, limit) for key, limit in rows.items()],
        BoundsCheckMode.IGNORE,
        CPU,
        is_pooled=True,
    )
    checked = _check(checker, batch)
    first = int(lengths[: strides[0]].sum())
    limits = [rows["a"]] * first + [rows["b"]] * (len(values) - first)
    is_good = [0 <= value < limit for value, limit in zip(values, limits, strict=True)]
    assert checked.bags.values.tolist() == np.where(is_good, values, 0).tolist()
    assert bool(checked.faults.any()) is not all(is_good)
    assert checked.bags.lengths.numel() == 2 * max(strides)
