"""A table of a state dict, of which each rank holds parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.sharded_table import ShardedTable
from tests.ranks import RankPool

WHOLE = torch.arange(12.0).reshape(4, 3)


def table(rank: int) -> ShardedTable:
    """Rank 0 holds the first row and the last column below it, rank 1 the rest."""
    parts = {0: [((0, 0), WHOLE[:1]), ((1, 2), WHOLE[1:, 2:])], 1: [((1, 0), WHOLE[1:, :2])]}
    held: list[tuple[tuple[int, ...], Tensor]] = list(parts[rank])
    return ShardedTable(
        (4, 3), held, dtype=torch.float32, device=torch.device("cpu"), group=dist.group.WORLD
    )


def _gathers() -> None:
    rank = dist.get_rank()
    sharded = table(rank)
    assert torch.equal(sharded.full_tensor(), WHOLE)
    dense = torch.zeros(4, 3)
    assert dense.copy_(sharded) is dense
    assert type(dense) is Tensor
    assert torch.equal(dense, WHOLE)
    wide = torch.zeros(4, 3, dtype=torch.float64)
    wide.copy_(sharded)
    assert torch.equal(wide, WHOLE.double())
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    with torch.no_grad():
        parameter.copy_(sharded)
    assert torch.equal(parameter.detach(), WHOLE)
    out = torch.zeros(4, 3)
    sharded.gather(1, out)
    assert torch.equal(out, WHOLE if rank == 1 else torch.zeros(4, 3))
    sharded.gather(0, out if rank == 0 else None)
    assert torch.equal(out, WHOLE)
    if rank == 0:
        with pytest.raises(ValueError, match=r"needs out, a tensor of shape \[4, 3\], on rank 0"):
            sharded.gather()
    else:
        sharded.gather()


def test_gathers(ranks: RankPool) -> None:
    ranks(2, _gathers)


def test_parts_have_names_and_are_live() -> None:
    values = torch.zeros(2, 3)
    sharded = ShardedTable((2, 3), [((0, 0), values)], dtype=torch.float32, device=values.device)
    (part,) = sharded.local_shards()
    assert part.offsets == (0, 0)
    part.tensor.fill_(2)
    offsets, tensor = part
    assert (offsets, tensor.sum()) == ((0, 0), 12)
    assert values.sum() == 12
    assert isinstance(sharded.detach(), ShardedTable)
    with pytest.raises(NotImplementedError, match=r"Use full_tensor\(\) or tensor\.copy_\(table\)"):
        sharded + 1
    with pytest.raises(RuntimeError, match="size"):
        torch.zeros(3, 3).copy_(sharded)
