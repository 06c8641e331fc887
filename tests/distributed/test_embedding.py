"""Sequences beyond the property suite: deduplicated ids, indices, lookups of many ids."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist

from recsys.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.ranks import comm
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv, ShardingType
from recsys.modules.embedding_configs import EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingCollection
from recsys.optim import apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor
from tests.distributed.cases import whole_state
from tests.ranks import RankPool

CPU = torch.device("cpu")
TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
)


def _unsharded(need_indices: bool = False) -> EmbeddingCollection:
    """Tables "a" and "b" both read feature "x"; "b" reads "y" too."""
    torch.manual_seed(0)
    tables = [
        EmbeddingConfig(20, 12, "a", feature_names=["x"]),
        EmbeddingConfig(30, 12, "b", feature_names=["y", "x"]),
    ]
    collection = EmbeddingCollection(tables=tables, device=CPU, need_indices=need_indices)
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
    return collection


def _shard(
    kind: ShardingType, use_index_dedup: bool, need_indices: bool = False
) -> ShardedEmbeddingCollection:
    env = ShardingEnv.default()
    ranks = list(range(env.world_size))
    plan = EmbeddingModuleShardingPlan(
        a=parameter_sharding(kind, 20, 12, ranks), b=parameter_sharding(kind, 30, 12, ranks[::-1])
    )
    sharder = EmbeddingCollectionSharder(use_index_dedup=use_index_dedup)
    return sharder.shard(_unsharded(need_indices), plan, env, CPU)


def _batch(rank: int, num_ids: int = 7) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    values = torch.randint(0, 4, (2 * num_ids,), generator=generator)  # of few ids, often
    lengths = torch.tensor([num_ids - 1, 1, 0, num_ids])
    return KeyedJaggedTensor(["y", "x"], values, lengths=lengths)


def _look_up(
    kind: ShardingType, use_index_dedup: bool
) -> tuple[dict[str, JaggedTensor], dict[str, JaggedTensor]]:
    batch = _batch(dist.get_rank())
    expected = _unsharded(need_indices=True)(batch)
    return dict(_shard(kind, use_index_dedup, need_indices=True)(batch).items()), expected


@pytest.mark.parametrize("use_index_dedup", [False, True])
@pytest.mark.parametrize("kind", TYPES)
def test_values_lengths_and_indices_are_those_of_the_unsharded(
    ranks: RankPool, kind: ShardingType, use_index_dedup: bool
) -> None:
    for own, expected in ranks(2, _look_up, kind, use_index_dedup):
        assert list(own) == list(expected) == ["x@a", "y", "x@b"]
        for name, jagged in expected.items():
            assert torch.equal(own[name].values(), jagged.values())
            assert torch.equal(own[name].lengths(), jagged.lengths())
            assert torch.equal(own[name].weights(), jagged.weights())


def _gradients_by(rank: int, of: dict[str, JaggedTensor]) -> torch.Tensor:
    """A loss whose gradients cannot be added up exactly."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.cat([of[name].values() for name in ("x@a", "y", "x@b")])
    return (values * torch.randn(values.shape, generator=generator)).sum()


def _train_shared(kind: ShardingType) -> list[torch.Tensor]:
    rank, num_ids = dist.get_rank(), 40
    sharded = _shard(kind, use_index_dedup=False)
    _gradients_by(rank, dict(sharded(_batch(rank, num_ids)).items())).backward()
    return list(whole_state(sharded).values())


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.COLUMN_WISE])
def test_a_table_of_several_features_trains_to_the_same_bits(
    ranks: RankPool, kind: ShardingType
) -> None:
    world_size, num_ids = 3, 40
    unsharded = _unsharded()
    batches = [_batch(rank, num_ids) for rank in range(world_size)]
    joint = KeyedJaggedTensor(
        ["y", "x"],
        torch.cat([batch[key].values() for key in ("y", "x") for batch in batches]),
        lengths=torch.cat([batch[key].lengths() for key in ("y", "x") for batch in batches]),
    )
    found = unsharded(joint)
    parts = {name: jagged.values().split(num_ids) for name, jagged in found.items()}
    of_ranks = [
        {
            name: JaggedTensor(part[rank], lengths=torch.tensor([num_ids]))
            for name, part in parts.items()
        }
        for rank in range(world_size)
    ]
    losses = [_gradients_by(rank, of) for rank, of in enumerate(of_ranks)]
    (torch.stack(losses).sum() / world_size).backward()
    for trained in ranks(world_size, _train_shared, kind):
        for own, expected in zip(trained, unsharded.state_dict().values(), strict=True):
            assert torch.equal(own, expected)


def _ids_sent(use_index_dedup: bool) -> int:
    sizes = []
    plain = comm.all_to_all

    def spy(env: object, what: str, sent: torch.Tensor, *args: object, **kwargs: object) -> object:
        sizes.append(sent.numel())
        return plain(env, what, sent, *args, **kwargs)  # type: ignore[arg-type]

    comm.all_to_all = spy  # type: ignore[assignment]
    try:
        _shard(ShardingType.TABLE_WISE, use_index_dedup)(_batch(0, 1000)).wait()
    finally:
        comm.all_to_all = plain
    _, payload, _ = sizes
    return payload


def test_distinct_ids_travel_once(ranks: RankPool) -> None:
    assert min(ranks(2, _ids_sent, False)) >= 2000
    assert max(ranks(2, _ids_sent, True)) <= 20


def _bad_id(use_index_dedup: bool) -> str:
    collection = _shard(ShardingType.ROW_WISE, use_index_dedup)
    batch = _batch(dist.get_rank())
    if dist.get_rank() == 1:
        batch.values()[9] = 25  # in "b", not in "a"
    try:
        collection(batch)
    except IndexError as error:
        return str(error)
    return "none"


@pytest.mark.parametrize("use_index_dedup", [False, True])
def test_a_bad_id_is_named_on_every_rank(ranks: RankPool, use_index_dedup: bool) -> None:
    first, second = ranks(2, _bad_id, use_index_dedup)
    assert first == second
    assert first.startswith("On rank 1: ")
    assert "25" in first
    assert "'x'" in first
    assert "'a'" in first


def _copied() -> bool:
    collection = _shard(ShardingType.COLUMN_WISE, True)
    copied = collection.copy(CPU)
    batch = _batch(dist.get_rank())
    both = [dict(c(batch).items()) for c in (collection, copied)]
    return all(torch.equal(a.values(), both[1][name].values()) for name, a in both[0].items())


def test_a_copy_looks_up_the_same(ranks: RankPool) -> None:
    assert ranks(2, _copied) == [True, True]


def _beside_large_ids_that_nobody_reads() -> list[tuple[torch.Tensor, torch.Tensor]]:
    batch = _batch(dist.get_rank())
    keys, hashes = ["unread", *batch.keys()], torch.tensor([2**40 + 3, 2**62, -1, 5])
    beside = KeyedJaggedTensor(
        keys,
        torch.cat([hashes, batch.values()]),
        lengths=torch.cat([torch.tensor([2, 2]), batch.lengths()]),
    )
    found = _shard(ShardingType.ROW_WISE, use_index_dedup=True)(beside).wait()
    right = _unsharded()(batch)
    return [(found[key].values().detach(), right[key].values().detach()) for key in right]


def test_distinct_ids_beside_large_ids_that_nobody_reads(ranks: RankPool) -> None:
    for pairs in ranks(2, _beside_large_ids_that_nobody_reads):
        for found, right in pairs:
            torch.testing.assert_close(found, right)


def _of_output(dtype: torch.dtype, kind: ShardingType) -> tuple[list[torch.Tensor], torch.Tensor]:
    env = ShardingEnv.default()
    plan = EmbeddingModuleShardingPlan(
        a=parameter_sharding(kind, 20, 12, [0, 1]), b=parameter_sharding(kind, 30, 12, [1, 0])
    )
    for entry in plan.values():
        entry.output_dtype = dtype
    sharded = EmbeddingCollectionSharder().shard(_unsharded(), plan, env, CPU)
    sharded = copy.deepcopy(sharded)  # a copy gives the same
    found = [jagged.values() for jagged in sharded(_batch(env.rank)).wait().values()]
    assert {values.dtype for values in found} == {dtype}
    torch.cat(found).sum().backward()
    return [values.detach().float() for values in found], whole_state(sharded)[
        "embeddings.a.weight"
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL])
def test_the_plan_chooses_the_dtype_of_the_output(
    ranks: RankPool, dtype: torch.dtype, kind: ShardingType
) -> None:
    """Rounded once, at the end; a sum's gradient is 1 in every dtype, so the weights are equal."""
    exact = ranks(2, _of_output, torch.float32, kind)
    rounded = ranks(2, _of_output, dtype, kind)
    for (values, weight), (expected, trained) in zip(rounded, exact, strict=True):
        for one, other in zip(values, expected, strict=True):
            assert torch.equal(one, other.to(dtype).float())
        assert torch.equal(weight, trained)


def test_tables_of_a_collection_share_the_dtype_of_their_output() -> None:
    plan = EmbeddingModuleShardingPlan(
        {name: parameter_sharding(ShardingType.TABLE_WISE, 9, 12, [0]) for name in "ab"}
    )
    plan["a"].output_dtype = torch.float16
    with pytest.raises(ValueError, match=r"share one output_dtype .*\['torch\.float16', 'torch\."):
        EmbeddingCollectionSharder().shard(_unsharded(), plan, ShardingEnv.from_local(), CPU)
    plan["a"].output_dtype = plan["b"].output_dtype = torch.int8
    with pytest.raises(ValueError, match=r"received \['torch\.int8'\]"):
        EmbeddingCollectionSharder().shard(_unsharded(), plan, ShardingEnv.from_local(), CPU)
