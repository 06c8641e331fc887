"""Two ranks share one GPU over gloo: all that many GPUs run but NCCL itself."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.stages import input_dist
from recsys.distributed.types import ShardingType
from recsys.optim import Adagrad, Adam, RowWiseAdagrad
from tests.distributed.cases import Case, EachType, assert_same, shard, train
from tests.ranks import RankPool

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def _train_both(case: Case, device: str, folder: Path) -> None:
    rank = dist.get_rank()
    reference, sharded = case.model(), shard(case, device=torch.device(device))
    expected = train(case, reference, range(3), rank=None)
    received = train(case, sharded, range(3), rank=rank)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True)):
        torch.testing.assert_close(own.cpu(), case.parts(joined, step)[rank], **CLOSE)
    save_checkpoint(folder, sharded, sharded.fused_optimizer)
    unsharded = case.model()
    load_checkpoint(folder, unsharded)
    assert_same(unsharded.state_dict(), dict(reference.state_dict()), **CLOSE)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad, Adam])
@pytest.mark.parametrize("seed", range(4))
def test_they_train_as_the_unsharded_model(
    ranks: RankPool, seed: int, optimizer: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    ranks(2, _train_both, Case(seed, 2, optimizer=optimizer), "cuda:0", tmp_path / "c")


def _train_by_id(case: Case, device: str, folder: Path) -> None:
    with mock.patch.multiple(input_dist, _MAX_IDS=1e9, _MIN_VALUES=0):
        _train_both(case, device, folder)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad, Adam, Adagrad])
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_short_bags_return_one_by_one(
    ranks: RankPool, seed: int, optimizer: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    """FBGEMM looks up batches of variable size, also of fewer bags than features."""
    kinds = (ShardingType.ROW_WISE, ShardingType.TABLE_WISE)[: 1 + seed % 2]
    case = Case(seed, 2, kinds, optimizer, variable_batch=seed == 3)
    ranks(2, _train_by_id, case, "cuda:0", tmp_path / "c")


def test_every_strategy(ranks: RankPool, tmp_path: Path) -> None:
    case = EachType(0, 2, optimizer=RowWiseAdagrad)
    ranks(2, _train_both, case, "cuda:0", tmp_path / "c")
