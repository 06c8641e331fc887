"""Whole models under a loss that is not linear train as the unsharded ones do.

Collections alone, each strategy by itself, and bit for bit: tests/conformance/.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from recsys.distributed.ranks import comm
from recsys.distributed.stages import input_dist
from recsys.distributed.stages.batch import BatchContext
from recsys.distributed.stages.input_dist import start_together
from recsys.distributed.types import ShardingEnv, ShardingType
from recsys.kernels import ops
from recsys.optim import SGD, Adam, RowWiseAdagrad
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    CLOSE,
    FEATURES,
    NEED_WHOLE_ROWS,
    OPTIMIZERS,
    Case,
    EachType,
    Narrow,
    assert_same,
    concat_batches,
    shard,
    train,
    whole,
    whole_state,
)
from tests.ranks import RankPool

STEPS = range(3)


def _train_both(case: Case) -> None:
    rank = torch.distributed.get_rank()
    reference, sharded = case.model(), shard(case)
    keys = list(sharded.module.ebc(case.batches(0)[rank]).keys())
    assert keys == list(reference.ebc(concat_batches(case.batches(0))).keys())
    expected = train(case, reference, STEPS, rank=None)
    received = train(case, sharded, STEPS, rank=rank)
    for step, (joined, own) in enumerate(zip(expected, received, strict=True)):
        torch.testing.assert_close(own, case.parts(joined, step)[rank], **CLOSE)
    assert list(sharded.state_dict()) == list(reference.state_dict())
    assert_same(whole_state(sharded), reference.state_dict())
    optimizer = sharded.fused_optimizer.state_dict()["state"]
    for table, states in reference.ebc.optimizer_states().items():
        for name, value in states.items():
            own = optimizer[f"ebc.{sharded.module.ebc.tables_name}.{table}.weight"][name]
            torch.testing.assert_close(whole(own), value, **CLOSE)


@pytest.mark.parametrize("seed", range(8))
def test_trains_as_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    optimizer = RowWiseAdagrad if seed % 2 else torch.optim.SGD
    case = Case(seed, world_size=1 + seed % 4, optimizer=optimizer)
    ranks(case.world_size, _train_both, case)


def _types_of(optimizer: type[torch.optim.Optimizer]) -> tuple[ShardingType, ...]:
    """The strategies that a table with this optimizer may have."""
    split = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)
    return tuple(
        kind for kind in ShardingType if optimizer not in NEED_WHOLE_ROWS or kind not in split
    )


def _sample(seed: int) -> Case:
    """A case of any strategy, pooled or not, of one or several nodes."""
    rng = random.Random(seed)
    world_size = rng.randint(1, 4)
    optimizer = rng.choice(OPTIMIZERS)
    return Case(
        seed,
        world_size=world_size,
        node_size=rng.choice([size for size in (1, 2, 4) if world_size % size == 0]),
        types=_types_of(optimizer),
        pooled=rng.random() < 0.5,
        variable_batch=rng.random() < 0.3,
        use_index_dedup=rng.random() < 0.5,
        optimizer=optimizer,
    )


@pytest.mark.parametrize("seed", range(400, 416))
def test_every_strategy_trains_as_the_unsharded_model(ranks: RankPool, seed: int) -> None:
    case = _sample(seed)
    ranks(case.world_size, _train_both, case)


def _train_narrow(optimizer: type[torch.optim.Optimizer], kind: ShardingType) -> None:
    for width in (None, 1):
        _train_both(Narrow(3, 2, types=(kind,), optimizer=optimizer, width=width))
    for width in (1, 2, 3):
        _train_both(Narrow(4, 2, types=(kind,), optimizer=optimizer, width=width, pooled=False))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.__name__)
def test_tables_of_1_to_3_columns(ranks: RankPool, optimizer: type[torch.optim.Optimizer]) -> None:
    for kind in _types_of(optimizer):
        ranks(2, _train_narrow, optimizer, kind)


class OnAllRanks(Case):
    """Tables with enough rows for every rank, split over all; most batches have one size."""

    sizes: ClassVar[tuple[int, ...]] = (3, 3, 3, 3, 0)

    def configs(self) -> list[Any]:
        for config in (configs := super().configs()):
            config.num_embeddings += self.world_size
        return configs

    def ranks_of(self, kind: ShardingType, rng: random.Random) -> list[int]:
        whole = kind is ShardingType.ROW_WISE
        return list(range(self.world_size)) if whole else super().ranks_of(kind, rng)


def _train_by_sums(case: Case) -> tuple[int, int]:
    """Train as over NCCL, which reduces sums during the exchange."""
    with (
        mock.patch.object(ShardingEnv, "prefers_reduce_scatter", return_value=True),
        mock.patch.object(comm, "reduce_scatter", wraps=comm.reduce_scatter) as sums,
        mock.patch.object(comm, "all_gather", wraps=comm.all_gather) as gathers,
    ):
        _train_both(case)
    return sums.call_count, gathers.call_count


@pytest.mark.parametrize("kinds", [("row_wise",), ("row_wise", "data_parallel")], ids="+".join)
@pytest.mark.parametrize("seed", [2, 3, 4])
def test_sums_over_ranks_may_be_made_on_the_way(
    ranks: RankPool, seed: int, kinds: tuple[str, ...]
) -> None:
    case = OnAllRanks(seed, 2 + seed % 2, tuple(map(ShardingType, kinds)), RowWiseAdagrad)
    found = ranks(case.world_size, _train_by_sums, case)
    equal = [all(batch.stride() == 3 for batch in case.batches(step)) for step in STEPS]
    assert any(equal)
    assert found == [(sum(equal) + equal[0], sum(equal))] * case.world_size


@pytest.mark.parametrize("seed", [0, 1])
def test_sums_inside_a_node_may_be_made_on_the_way(ranks: RankPool, seed: int) -> None:
    kinds = (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_WISE)
    case = OnAllRanks(seed, 4, kinds, RowWiseAdagrad, node_size=2)
    found = ranks(4, _train_by_sums, case)
    assert any(forward and backward for forward, backward in found)


def _train_without_padding(case: Case, is_mixed: bool) -> tuple[int, int]:
    """With and without bags that do not exist, to the same bits; returns how much each sends."""
    rank, sent, found = torch.distributed.get_rank(), list[int](), []
    exchange = comm.all_to_all
    plain = dataclasses.replace(case, variable_batch=False)
    for leaves_out in (False, True):
        sharded, values = shard(case), 0

        def noted(env: ShardingEnv, what: str, send: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal values
            values += send.numel() * (what == "send embeddings back")
            return exchange(env, what, send, *args, **kwargs)

        sharded.module.ebc.input_stage.leaves_out = leaves_out
        outputs = []
        # rows that return one by one are added up in another order
        by_bag = mock.patch.object(input_dist, "_MAX_IDS", -1)
        with by_bag, mock.patch.object(comm, "all_to_all", noted):
            for step in STEPS:
                of = plain if is_mixed and rank == step % 2 else case
                pooled, logits = sharded(of.batches(step)[rank])
                outputs.append(pooled.detach().clone())
                ((pooled * pooled.detach().sin()).sum() + logits.sum()).backward()
        sent.append(values)
        found.append((outputs, whole_state(sharded)))
    (padded, padded_state), (ragged, ragged_state) = found
    torch.testing.assert_close(ragged, padded, rtol=0, atol=0)
    assert_same(ragged_state, padded_state, rtol=0, atol=0)
    return sent[0], sent[1]


@pytest.mark.parametrize("is_mixed", [False, True], ids=["all", "mixed"])
@pytest.mark.parametrize("seed", range(4))
def test_bags_that_features_do_not_have_are_not_sent(
    ranks: RankPool, seed: int, is_mixed: bool
) -> None:
    kinds = (ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE)
    case = Case(seed + 20, 2, kinds, torch.optim.SGD, variable_batch=True)
    found = ranks(2, _train_without_padding, case, is_mixed)
    padded, ragged = (sum(values) for values in zip(*found, strict=True))
    assert ragged <= padded
    if not is_mixed:  # each column comes from one rank
        dims = [(c.embedding_dim, f) for c in case.configs() for f in c.feature_names]
        expected = 0
        for step in STEPS:
            for batch in case.batches(step):
                bags = dict(zip(batch.keys(), batch.stride_per_key(), strict=True))
                expected += sum(dim * bags[feature] for dim, feature in dims)
        assert ragged == expected < padded


def test_replicas_and_sums_stand_beside_ragged_bags(ranks: RankPool) -> None:
    for seed in (3, 5):
        case = Case(seed, 3, optimizer=RowWiseAdagrad, variable_batch=True)
        for padded, ragged in ranks(3, _train_without_padding, case, seed == 5):
            assert ragged <= padded


def _train_by_id(case: Case) -> int:
    """With a row for each id of row-split tables; returns how many batches had none for bags."""
    sends = input_dist.InputDist.send
    by_id = 0

    def noted(stage: input_dist.InputDist, ctx: BatchContext) -> BatchContext:
        nonlocal by_id
        sends(stage, ctx)
        by_id += ctx.shape.is_by_id
        return ctx

    with (
        mock.patch.multiple(input_dist, _MAX_IDS=1e9, _MIN_VALUES=0),
        mock.patch.object(input_dist.InputDist, "send", noted),
    ):
        _train_both(case)
    return by_id


@pytest.mark.parametrize("seed", range(500, 512))
def test_rows_of_short_bags_return_one_by_one(ranks: RankPool, seed: int) -> None:
    kinds = (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL, ShardingType.COLUMN_WISE)
    rng = random.Random(seed)
    optimizer = rng.choice([SGD, RowWiseAdagrad, Adam, None])
    types = kinds[: 1 + seed % 3]
    case = Case(seed, 2 + seed % 3, types, optimizer, variable_batch=seed % 4 == 3)
    splits = any(s.sharding_type == "row_wise" for s in case.plan().plan["ebc"].values())
    found = ranks(case.world_size, _train_by_id, case)
    assert found == [(len(STEPS) + 1) * splits] * case.world_size


def _values_sent(case_name: str) -> int:
    """Return how many values of embeddings a step sends with one id a bag, or more of them."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    case = EachType(0, world, (ShardingType.ROW_WISE,))
    sharded, sent = shard(case), 0
    exchange = comm.all_to_all

    def noted(env: ShardingEnv, what: str, send: Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += send.numel() * ("embeddings back" in what)
        return exchange(env, what, send, *args, **kwargs)

    # the other features have no ids
    number, samples = 1, 4
    if rank == 0:
        number += case_name == "one rank has longer bags"
        samples *= case_name != "one rank has no samples"
    lengths = torch.tensor([number] * samples + [0] * 3 * samples)
    batch = KeyedJaggedTensor(list(FEATURES), torch.arange(number * samples) % 12, lengths=lengths)
    if case_name == "sums are fewer":
        sharded.module.ebc.input_stage.most_ids = 0.4
    least = 0 if case_name != "few values" else 4 * 8 * world + 1
    few = mock.patch.object(input_dist, "_MIN_VALUES", least)
    with few, mock.patch.object(comm, "all_to_all", noted):
        sharded(batch)[0].sum().backward()
    return sent


@pytest.mark.parametrize(
    ("case_name", "samples"),
    [
        ("bags of all ranks are short", 2 * 4),
        ("one rank has no samples", 4),
        ("one rank has longer bags", 2 * 2 * 4),
        ("few values", 2 * 2 * 4),
        ("sums are fewer", 2 * 2 * 4),
    ],
)
def test_bags_are_short_where_those_of_all_ranks_are(
    ranks: RankPool, case_name: str, samples: int
) -> None:
    # 8 columns: for each id, or for each bag of each of two row parts
    assert sum(ranks(2, _values_sent, case_name)) == samples * 8


def _kept(case_name: str) -> tuple[list[bool], list[torch.Size]]:
    """Return the requests for positions from bucketizing, and the shapes of the kept positions."""
    rank = torch.distributed.get_rank()
    sharded = shard(EachType(0, 2, (ShardingType.ROW_WISE,))).module.ebc
    number = 1 + 9 * (case_name == "both" or (case_name == "rank 0" and rank == 0))
    lengths = torch.full((len(FEATURES) * 4,), number)
    batch = KeyedJaggedTensor(
        list(FEATURES), torch.arange(int(lengths.sum())) % 12, lengths=lengths
    )
    asked, bucketize = list[bool](), ops.block_bucketize

    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs["return_positions"])
        return bucketize(*args, **kwargs)

    with (
        mock.patch.multiple(input_dist, _MAX_IDS=4, _MIN_VALUES=0),
        mock.patch.object(ops, "block_bucketize", noted),
    ):
        ctx = sharded.input_stage.prepare(batch)
        start_together([ctx])
        ctx.stage.send(ctx)
    segments = ctx.prepared.segments
    assert segments.lengths == segments.values == []
    return asked, [places.shape for places in segments.moved_to]


@pytest.mark.parametrize("longer", ["both", "rank 0", "neither"])
def test_places_of_ids_are_kept_where_rows_return_for_them(ranks: RankPool, longer: str) -> None:
    found = ranks(2, _kept, longer)
    assert [asked for asked, _ in found] == [[longer == "neither"], [longer != "both"]]
    for _, kept in found:  # of the one feature that is read
        assert kept == ([(4,)] if longer == "neither" else [])


def _most_ids(adds_up: bool, node_size: int) -> float:
    case = EachType(0, 4, (ShardingType.ROW_WISE,), node_size=node_size)
    with mock.patch.object(ShardingEnv, "prefers_reduce_scatter", return_value=adds_up):
        most: float = shard(case).module.ebc.input_stage.most_ids
    return most


def test_rows_of_ids_are_no_more_than_sums_that_cross_between_nodes(ranks: RankPool) -> None:
    assert ranks(4, _most_ids, True, 2) == [2 / 4] * 4  # as many as nodes, of bags of four parts
    assert ranks(4, _most_ids, True, 4) == [math.inf] * 4
    assert ranks(4, _most_ids, False, 2) == [math.inf] * 4
