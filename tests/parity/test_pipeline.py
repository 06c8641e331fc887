"""A client's own pipeline, over the stages, is the same code in TorchRec and in ours."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.distributed.types import ShardedModule, ShardingType
from recsys.optim import Adagrad
from tests.distributed.cases import shard, whole_state
from tests.distributed.pipeline_client import train_pipelined
from tests.parity.peer import ParityCase, PeerPool, parts_of, peer_batch, peer_mood, shard_peer

STEPS = range(20)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _step(model: nn.Module, batch: Any, outputs: list[Tensor]) -> float:
    values, _ = model(batch)
    outputs.append(values.detach())
    loss = (values * values.detach().sin()).sum()
    loss.backward()
    return loss.item()  # type: ignore[no-any-return]


def _train(
    model: nn.Module, sharded_module: type, batches: list[Any], in_one_call: bool
) -> tuple[list[float], list[Tensor]]:
    outputs: list[Tensor] = []
    step = partial(_step, outputs=outputs)
    return train_pipelined(model, sharded_module, batches, step, in_one_call), outputs


def _compare(case: ParityCase, in_one_call: bool) -> None:
    batches = [case.batches(step)[dist.get_rank()] for step in STEPS]
    with peer_mood():
        from torchrec.distributed.types import ShardedModule as PeerModule

        peer, _, _ = shard_peer(case)
        given = [peer_batch(batch) for batch in batches]
        their_losses, theirs = _train(peer, PeerModule, given, in_one_call)
        their_state = peer.state_dict()
    model = shard(case)
    our_losses, ours = _train(model, ShardedModule, batches, in_one_call)
    torch.testing.assert_close(our_losses, their_losses, rtol=1e-4, atol=1e-4)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
    our_state = whole_state(model)
    for name, value in their_state.items():
        for place, part in parts_of(value):
            torch.testing.assert_close(our_state[name][place], part, **CLOSE)


@pytest.mark.parametrize("in_one_call", [True, False], ids=["in one call", "in two calls"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_the_same_code_trains_the_same(
    peer_ranks: PeerPool, pooled: bool, in_one_call: bool
) -> None:
    types = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
    case = ParityCase(11, 2, types=types, pooled=pooled, optimizer=Adagrad, weighted=False)
    peer_ranks(2, _compare, case, in_one_call)
