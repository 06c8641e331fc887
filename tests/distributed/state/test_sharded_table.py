"""A table of a state dict whose parts are on several ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.shard import shard
from recsys.distributed.sharding_plan import row_wise
from recsys.distributed.state.sharded_table import Shard, ShardedTable
from recsys.distributed.types import ShardingEnv, ShardMetadata
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
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
    if rank == 0:
        with pytest.raises(NotImplementedError, match="for a rank with one part"):
            sharded.local_tensor()
    else:
        assert sharded.local_tensor().data_ptr() == sharded.local_shards()[0].tensor.data_ptr()
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
        with pytest.raises(ValueError, match=r"out, .*of shape \[4, 3\].*rank 0"):
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
        sharded.t()
    with pytest.raises(RuntimeError, match="size"):
        torch.zeros(3, 3).copy_(sharded)


def _parts_of_all_ranks() -> list[tuple[list[int], list[int], int]]:
    tables = [EmbeddingBagConfig(6, 4, "t", feature_names=["f"])]
    model = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    env = ShardingEnv.default()
    place = row_wise(([2, 4], "cpu"))
    sharded = shard(model, place, env)
    weight = sharded.state_dict()["embedding_bags.t.weight"]
    (part,) = weight.local_shards()
    first = [0, 2][env.rank]
    assert part.metadata == ShardMetadata([first, 0], [[2, 4][env.rank], 4], f"rank:{env.rank}/cpu")
    (state,) = sharded.fused_optimizer.state_dict()["state"].values()
    rows = state["sum"].metadata()
    assert rows.size == (6,)
    assert [m.shard_sizes for m in rows.shards_metadata] == [[2], [4]]
    assert copy.deepcopy(weight).metadata() == weight.detach().metadata() == weight.metadata()
    assert pickle.loads(pickle.dumps(weight)).metadata().size == weight.metadata().size == (6, 4)
    assert weight.metadata().tensor_properties.dtype is torch.float32
    shards = weight.metadata().shards_metadata
    return [(m.shard_offsets, m.shard_sizes, m.placement.rank()) for m in shards]


def test_metadata_names_the_parts_of_all_ranks(ranks: RankPool) -> None:
    expected = [([0, 0], [2, 4], 0), ([2, 0], [4, 4], 1)]
    assert ranks(2, _parts_of_all_ranks) == [expected] * 2


def test_metadata_of_a_table_made_by_hand_is_this_ranks() -> None:
    parts = [((0, 0), torch.zeros(2, 3))]
    sharded = ShardedTable((4, 3), parts, dtype=torch.float32, device=torch.device("cpu"))
    assert [m.shard_sizes for m in sharded.metadata().shards_metadata] == [[2, 3]]


def test_a_shard_that_is_not_what_it_says() -> None:
    with pytest.raises(ValueError, match=r"its metadata, \[2, 4\]; .*\[3, 4\]"):
        Shard(torch.zeros(3, 4), ShardMetadata([0, 0], [2, 4], "rank:0/cpu"))
