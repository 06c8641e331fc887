"""The mean over ranks, against float64."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from recsys.distributed.state.replica_average import average_over_ranks
from recsys.distributed.types import ShardingEnv
from tests.distributed.cases import CPU, counted_collectives
from tests.ranks import RankPool

SIZES = (3, 0, 40, 1, 17, 5, 64)


def tensors_of(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [
        torch.randn(size, generator=generator).to((torch.float32, torch.bfloat16)[i == 4])
        for i, size in enumerate(SIZES)
    ]


def _average(limits: list[int]) -> list[tuple[list[Tensor], list[int]]]:
    results = []
    env = ShardingEnv.default()
    for limit in limits:
        own = tensors_of(env.rank)
        places = [tensor.data_ptr() for tensor in own]
        with counted_collectives() as counts:
            average_over_ranks(env, "average", own, CPU, bucket_bytes=4 * limit)
        assert places == [tensor.data_ptr() for tensor in own]
        results.append((own, [args[0].numel() for args in counts.arguments["all_reduce"]]))
    return results


def test_is_the_mean_of_all_ranks_in_buckets_of_any_size(ranks: RankPool) -> None:
    limits = [1, 7, 16, 40, 1000]
    for results in ranks(3, _average, limits):
        for limit, (means, sent) in zip(limits, results, strict=True):
            assert max(sent) <= limit
            assert sum(sent) == sum(SIZES)
            assert len(sent) <= sum(SIZES) / limit * 2 + 1
            for received, *given in zip(means, *map(tensors_of, range(3)), strict=True):
                expected = torch.stack(given).double().mean(0).to(received.dtype)
                torch.testing.assert_close(received, expected, rtol=0, atol=2e-7)


def _average_large() -> int:
    """Return the bytes allocated by a mean of 20 MB of one tensor and 4 MB of many."""
    made: list[int] = []
    original = torch.cat

    def cat(tensors: list[Tensor]) -> Tensor:
        joined = original(tensors)
        made.append(joined.nbytes)
        return joined

    own = [torch.full((5 << 20,), float(dist.get_rank())), *torch.ones(1024, 1024).unbind()]
    torch.cat = cat  # type: ignore[assignment]
    try:
        average_over_ranks(ShardingEnv.default(), "average", own, CPU, bucket_bytes=1 << 20)
    finally:
        torch.cat = original
    assert bool((own[0] == 0.5).all())
    return sum(made)


def test_large_tensors_travel_from_where_they_lie(ranks: RankPool) -> None:
    assert ranks(2, _average_large) == [4 << 20] * 2


def test_one_rank_has_the_mean() -> None:
    own = torch.ones(2)
    average_over_ranks(ShardingEnv.from_local(), "average", [own], CPU)
    assert own.tolist() == [1.0, 1.0]
