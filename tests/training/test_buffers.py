"""`OwnBuffers` has the buffers of a rank that differ from rank 0, and no others."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from recsys.distributed.types import ShardingEnv
from recsys.training.buffers import OwnBuffers
from tests.ranks import RankPool


class _Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("same", torch.ones(3))
        self.register_buffer("short", torch.ones(2, dtype=torch.bfloat16))
        self.register_buffer("flag", torch.tensor(False))
        self.register_buffer("passing", torch.zeros(1), persistent=False)
        self.register_buffer("none", None)
        self.norm = nn.BatchNorm1d(2)


def _differing(same: bool) -> dict[str, list[float]]:
    model, rank = _Sums(), 0 if same else dist.get_rank()
    model.short[0] += rank  # type: ignore[index,operator]
    model.flag.fill_(rank == 1)  # type: ignore[operator]
    model.passing.fill_(rank)  # type: ignore[operator]
    model.norm.num_batches_tracked.fill_(rank)
    own = OwnBuffers(model, ShardingEnv.default())
    own.compare()
    state = own.state_dict()
    other = _Sums()
    OwnBuffers(other, ShardingEnv.default()).load_state_dict(state)
    for name, value in state.items():
        assert torch.equal(other.state_dict()[name], model.state_dict()[name])
        assert value.dtype == other.state_dict()[name].dtype
    return {name: value.float().view(-1).tolist() for name, value in state.items()}


def test_buffers_that_differ_from_rank_0(ranks: RankPool) -> None:
    assert ranks(3, _differing, False) == [
        {},
        {"short": [2, 1], "flag": [1], "norm.num_batches_tracked": [1]},
        {"short": [3, 1], "norm.num_batches_tracked": [2]},
    ]
    assert ranks(2, _differing, True) == [{}, {}]
