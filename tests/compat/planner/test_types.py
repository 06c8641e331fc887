from __future__ import annotations

import copy

import pytest
import torch

from recsys.compat.planner.topology import Perf, Storage
from recsys.compat.planner.types import (
    Enumerator,
    Partitioner,
    PerfModel,
    Proposer,
    Shard,
    ShardEstimator,
    ShardingOption,
    Stats,
    StorageReservation,
    groups_of,
    reset_shard_rank,
    storage_repr_in_gb,
)
from recsys.distributed.types import CacheParams
from recsys.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.modules.feature_processor import PositionWeightedModule
from recsys.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

META = torch.device("meta")
BAGS = EmbeddingBagCollection(
    tables=[EmbeddingBagConfig(10, 4, "t", feature_names=["f"])], is_weighted=True, device=META
)
SEQUENCES = EmbeddingCollection(
    tables=[EmbeddingConfig(10, 4, "t", feature_names=["f"])], device=META
)
PROCESSED = FeatureProcessedEmbeddingBagCollection(BAGS, {"f": PositionWeightedModule(3)})


def option(module: torch.nn.Module = BAGS, path: str = "x.y", **more: object) -> ShardingOption:
    shards = [
        Shard([5, 4], [0, 0], Storage(1, 2), Perf(1.0, 2.0, 3.0, 4.0), rank=1),
        Shard([5, 4], [5, 0], Storage(3, 4), Perf(1.0, 1.0, 1.0, 1.0)),
    ]
    weight = torch.empty(10, 4, device=META)
    return ShardingOption(
        "t", weight, (path, module), [1.0, 2.0], 8, "row_wise", "uniform", "fused", shards, **more
    )  # type: ignore[arg-type]


def test_an_option_adds_up_its_shards() -> None:
    found = option(cache_params=CacheParams(load_factor=0.5))
    assert (found.fqn, option(path="").fqn) == ("x.y.t", ".t")
    assert (found.num_shards, found.num_inputs) == (2, 2)
    assert (found.total_storage, found.total_perf) == (Storage(4, 6), 14.0)
    assert found.get_shards_assignment() == [1, None]
    assert (found.cache_load_factor, option().cache_load_factor) == (0.5, None)
    found.shards[1].perf = None
    with pytest.raises(ValueError, match=r"table 't' must have a perf.*populate_estimates"):
        _ = found.total_perf


def test_an_option_knows_its_module() -> None:
    assert [option(m).is_pooled for m in (BAGS, PROCESSED, SEQUENCES)] == [True, True, False]
    assert [option(m).has_feature_processor for m in (BAGS, PROCESSED)] == [False, True]
    assert option(SEQUENCES).module_type_key.endswith(".EmbeddingCollection")
    assert option(SEQUENCES, is_pooled=True).is_pooled


def test_a_copy_has_shards_of_its_own() -> None:
    one = option()
    other = copy.deepcopy(one)
    assert (other.tensor, other.module[1]) == (one.tensor, one.module[1])
    assert hash(other) == hash(one)
    for change in (
        lambda shard: setattr(shard.storage, "hbm", 7),
        lambda shard: setattr(shard.perf, "fwd_comms", 7.0),
        lambda shard: setattr(shard, "rank", 3),
    ):
        before = hash(other), other.storage_hash()
        change(other.shards[0])
        assert hash(other) != before[0]
    assert str(one.shards[0]) in str(one)
    assert one.shards[0] == option().shards[0]
    other = copy.deepcopy(one)
    other.shards[0].perf = None
    assert other.storage_hash() == one.storage_hash()
    other.shards[0].size[0] = 1
    assert other.storage_hash() != one.storage_hash()


def test_options_of_a_table_are_a_group() -> None:
    options = [option(), option(path="z"), option()]
    assert groups_of(options) == {"x.y.t": [options[0], options[2]], "z.t": [options[1]]}


@pytest.mark.parametrize(
    "kind",
    [Enumerator, Partitioner, PerfModel, Proposer, ShardEstimator, Stats, StorageReservation],
)
def test_what_is_to_be_extended_cannot_be_used_as_it_is(kind: type) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()


def test_ranks_are_taken_back() -> None:
    options = [option(), option()]
    assert {shard.rank for each in options for shard in each.shards} == {1, None}
    reset_shard_rank(options)
    assert {shard.rank for each in options for shard in each.shards} == {None}


def test_memory_is_written_in_gib() -> None:
    size = Storage(hbm=2**30 // 3, ddr=2**40, ssd=5)
    assert storage_repr_in_gb(size) == "Storage(hbm = 0.333 GB, ddr = 1024.0 GB)"
    assert storage_repr_in_gb(None) == ""
