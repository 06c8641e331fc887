"""Operations on a table with parts on each rank, compared with operations on the whole table."""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from recsys.distributed.state.sharded_table import ShardedTable
from recsys.distributed.state.table_operations import (
    is_by_element,
    is_reduction,
    like_of,
    reduce_parts,
    written_argument,
)
from tests.ranks import RankPool
from tests.saved import through_torch_save

aten = torch.ops.aten
CPU = torch.device("cpu")
WHOLE = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0], [7.0, 8.5, 9.0], [0.0, 11.0, 12.0]])
PLACES = [((0, 0), (1, 3)), ((1, 2), (3, 1)), ((1, 0), (3, 2))]


def table_of(
    whole: Tensor, rank: int = 0, num_ranks: int = 1, repeats: bool = False
) -> ShardedTable:
    """The parts that a rank holds of a tensor of 4 x 3; the last rank holds none of several."""
    holders = max(num_ranks - 1, 1)
    parts = []
    for i, ((row, column), (rows, columns)) in enumerate(PLACES):
        if i % holders == rank or (repeats and rank < holders):
            part = whole[row : row + rows, column : column + columns].clone()
            parts.append(((row, column), part))
    group = dist.group.WORLD if num_ranks > 1 else None
    return ShardedTable(whole.shape, parts, dtype=whole.dtype, device=whole.device, group=group)


BY_ELEMENT: dict[str, Callable[[Any], Any]] = {
    "clone": lambda t: t.clone(),
    "half": lambda t: t.half(),
    "to": lambda t: t.to(torch.float64).float().cpu(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "abs": lambda t: t.abs(),
    "isfinite": torch.isfinite,
    "isnan": lambda t: (t / 0).isnan(),
    "isclose": lambda t: torch.isclose(t, WHOLE + 1e-9),
    "compare": lambda t: (t == WHOLE) & (t >= 1) | ~(t < 0),
    "scalars": lambda t: 2 * t - t / 3 + 1,
    "broadcast": lambda t: torch.tensor([1.0, 2.0, 3.0]) * t - torch.ones(4, 1),
    "tables": lambda t: torch.where(t > 1, t.sqrt(), t.clone() * t).nan_to_num(),
    "zeros_like": lambda t: torch.zeros_like(t, dtype=torch.int32),
    "full_like": lambda t: torch.full_like(t, 3) + torch.ones_like(t),
    "new_zeros": lambda t: t.new_zeros(t.shape) + t.new_ones(t.shape) + t.new_full(t.shape, 2),
    "in place": lambda t: t.clone().mul_(2).add_(t).clamp_(max=9),
    "fill_": lambda t: torch.empty_like(t).fill_(4).copy_(t).add_(t.new_empty(t.shape).zero_()),
    "out": lambda t: torch.add(t, 1, out=torch.empty_like(t)),
    "pytree": lambda t: pytree.tree_map(torch.clone, [t])[0],
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}
REDUCTIONS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda t: t.sum(),
    "sum of another dtype": lambda t: t.sum(dtype=torch.float64),
    "mean": lambda t: t.mean(),
    "max": lambda t: torch.stack([t.max(), t.min(), t.amax(), t.amin()]),
    "norm": lambda t: t.norm(),
    "norms": lambda t: torch.stack([t.norm(p=p) for p in (1, 3, math.inf, -math.inf)]),
    "linalg": torch.linalg.vector_norm,
    "all": lambda t: torch.stack([torch.isfinite(t).all(), (t > 0).all(), (t > 11).any()]),
    "equal": lambda t: (torch.equal(t, t + 0), torch.equal(t, t + 1), torch.equal(t, WHOLE)),
    "equal to a larger one": lambda t: torch.equal(t, torch.zeros(5, 3)),
    "allclose": lambda t: (torch.allclose(t, WHOLE + 1e-9), torch.allclose(WHOLE, t + 1)),
    "total norm": lambda t: torch.nn.utils.get_total_norm([t, t + 1], foreach=False),
}


def _all_operations(repeats: bool) -> None:
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    for name, operation in BY_ELEMENT.items():
        table = table_of(WHOLE, rank, num_ranks, repeats)
        result, expected = operation(table), operation(WHOLE.clone())
        assert isinstance(result, ShardedTable), name
        assert result.dtype is expected.dtype, name
        assert [offsets for offsets, _ in result.local_shards()] == [
            offsets for offsets, _ in table.local_shards()
        ]
        torch.testing.assert_close(result.full_tensor(), expected, msg=lambda m, n=name: f"{n} {m}")
        assert torch.equal(table.full_tensor(), WHOLE), f"{name} changed its argument"
    for name, operation in REDUCTIONS.items():
        result = operation(table_of(WHOLE, rank, num_ranks, repeats))
        assert not isinstance(result, ShardedTable)
        torch.testing.assert_close(result, operation(WHOLE), msg=lambda m, n=name: f"{n} {m}")


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_operations_are_those_of_the_whole(ranks: RankPool, num_ranks: int, repeats: bool) -> None:
    ranks(num_ranks, _all_operations, repeats)


def test_random_partitions_and_values() -> None:
    rng = random.Random(0)
    for seed in range(30):
        torch.manual_seed(seed)
        whole = torch.randn(rng.randint(1, 6), rng.randint(1, 4))
        cut = rng.randint(0, whole.shape[0])
        parts = [((0, 0), whole[:cut].clone()), ((cut, 0), whole[cut:].clone())]
        table = ShardedTable(whole.shape, parts, dtype=whole.dtype, device=CPU)
        for operation in (lambda t: t.norm(p=3), lambda t: t.sum(), lambda t: (t * t).max()):
            torch.testing.assert_close(operation(table), operation(whole))
        assert torch.equal((table * 2).full_tensor(), whole * 2)


def test_storage() -> None:
    table = table_of(WHOLE)
    pointers = [part.tensor.data_ptr() for part in table.local_shards()]
    for same in (table.detach(), table.data, copy.copy(table), table.contiguous(), table.float()):
        assert [part.tensor.data_ptr() for part in same.local_shards()] == pointers
    for other in (table.clone(), copy.deepcopy(table), pickle.loads(pickle.dumps(table))):
        assert not {part.tensor.data_ptr() for part in other.local_shards()} & set(pointers)
    assert torch.equal(through_torch_save(table).full_tensor(), WHOLE)
    assert table.share_memory_() is table
    assert all(part.tensor.is_shared() for part in table.local_shards())
    assert not table.is_pinned()
    seen: list[Tensor] = []
    with mock.patch.object(Tensor, "is_pinned", lambda tensor: seen.append(tensor) or True):
        assert table_of(WHOLE).is_pinned() is True


def test_sizes_that_are_not_the_tables() -> None:
    table = table_of(WHOLE)
    assert torch.equal(table.new_full((2, 5), 3.0), torch.full((2, 5), 3.0))
    assert type(table.new_empty(7, dtype=torch.int8)) is Tensor
    assert isinstance(table.new_empty((4, 3), dtype=torch.int8), ShardedTable)


def test_the_meta_device() -> None:
    table = table_of(WHOLE).to("meta")
    for value in (table, table.half().clone(), table.full_tensor(), table.norm(), table.mean()):
        assert value.is_meta
    assert [part.tensor.is_meta for part in table.local_shards()] == [True] * 3


def test_one_value_for_the_whole_table() -> None:
    step = ShardedTable((), [((), torch.tensor(3.0))], dtype=torch.float32, device=CPU)
    assert (step + 1).sum() == 4
    assert step.add_(1).clone().full_tensor() == 4
    none = ShardedTable((0, 3), [], dtype=torch.float32, device=CPU)
    assert none.half().sum() == 0
    assert none.isfinite().all()


def test_what_is_undefined_says_what_to_do() -> None:
    table, plain = table_of(WHOLE), WHOLE.clone()
    for undefined in (
        lambda: table.t(),
        lambda: table[0],
        lambda: table.sum(0),
        lambda: table.norm(dim=1),
        lambda: table.norm(0),
        lambda: table.all(dim=0),
        lambda: table @ plain.t(),
        lambda: torch.cat([table, table]),
        lambda: torch.rand_like(table),
        lambda: plain.mul_(table),
        lambda: torch.add(table, 1, out=plain),
    ):
        with pytest.raises(NotImplementedError, match=r"Use full_tensor\(\) or tensor\.copy_\("):
            undefined()
    assert torch.equal(plain, WHOLE)
    rows = ShardedTable((4, 3), [((0, 0), WHOLE.clone())], dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match=r"mul.* takes tables with the same"):
        table * rows
    with pytest.raises(ValueError, match=r"broadcast to .*of shape \(5, 4,"):
        table * torch.ones(5, 4, 3)
    with pytest.raises(ValueError, match=r"broadcast to .*of shape \(2, 3\)"):
        table * torch.ones(2, 3)
    part = ShardedTable((4, 3), [((0, 0), WHOLE[:2])], dtype=torch.float32, device=CPU)
    with pytest.raises(ValueError, match=r"shape \(4, 3\) cannot be reduced"):
        part.sum()


def test_kinds_of_operations() -> None:
    assert is_by_element(aten.mul.Tensor)
    assert is_by_element(aten._to_copy.default)
    assert not is_by_element(aten.t.default)
    assert not is_by_element(aten.bernoulli.p)
    assert like_of(aten.new_empty.default) is aten.empty_like.default
    assert like_of(aten.empty_like.default) is None
    assert is_reduction(aten.sum.default, [WHOLE], {})
    assert is_reduction(aten.linalg_vector_norm.default, [WHOLE, 2], {"dim": None})
    assert not is_reduction(aten.linalg_vector_norm.default, [WHOLE, 0], {})
    assert not is_reduction(aten.linalg_vector_norm.default, [WHOLE, 2, [1]], {})
    assert written_argument(aten.mul_.Tensor, [WHOLE, 2], {}) is WHOLE
    assert written_argument(aten.add.out, [1, 2], {"out": WHOLE}) is WHOLE
    assert written_argument(aten.mul.Tensor, [WHOLE, 2], {}) is None
    parts = [((0, 0), WHOLE[:2]), ((2, 0), WHOLE[2:]), ((0, 0), WHOLE[:2])]
    assert reduce_parts(aten.mean.default, parts, WHOLE, None, [], {}) == WHOLE.mean()


def _an_error_of_an_operation() -> None:
    table = table_of(torch.ones(4, 3, dtype=torch.int64), dist.get_rank(), 2)
    with pytest.raises(RuntimeError, match="floating point or complex"):
        table.norm()  # an error on every rank, so that none waits for another
    assert table.sum() == 12


def test_an_error_of_an_operation_is_raised_on_every_rank(ranks: RankPool) -> None:
    ranks(2, _an_error_of_an_operation)
