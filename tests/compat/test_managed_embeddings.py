"""Managed collision collections train as plain collections with the same `HashedIds`."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.compat.eviction_policies import (
    DistanceLFU_EvictionPolicy,
    HashZchEvictionPolicyName,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    average_threshold_filter,
    dynamic_threshold_filter,
)
from recsys.compat.managed_collisions import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from recsys.compat.managed_embeddings import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingCollectionSharder,
)
from recsys.distributed.checkpoint import load_checkpoint, save_checkpoint
from recsys.distributed.default_sharders import get_module_to_default_sharders
from recsys.distributed.embedding import EmbeddingCollectionSharder
from recsys.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import (
    CPU,
    FEATURES,
    assert_same,
    concat_batches,
    shard,
    train,
    whole_state,
)
from tests.distributed.test_hashed_ids import TYPES, HashedCase
from tests.ranks import RankPool

MODULES = (
    lambda rows: MCHManagedCollisionModule(rows, CPU, LFU_EvictionPolicy(), 1),
    lambda rows: MCHManagedCollisionModule(
        rows, CPU, LRU_EvictionPolicy(2.0, average_threshold_filter), 3, name="t"
    ),
    lambda rows: MCHManagedCollisionModule(
        rows,
        CPU,
        DistanceLFU_EvictionPolicy(2, lambda counts: dynamic_threshold_filter(counts, 0.5)),
        eviction_interval=2,
        input_hash_func=lambda ids, size: ids % size,
        input_hash_size=2**40,
    ),
    lambda rows: HashZchManagedCollisionModule(rows, CPU, 4, disable_fallback=True),
    lambda rows: HashZchManagedCollisionModule(
        rows,
        CPU,
        total_num_buckets=4,
        eviction_policy_name=HashZchEvictionPolicyName.LRU_EVICTION,
        opt_in_prob=50,
        percent_reserved_slots=1,
    ),
)


class ManagedModel(nn.Module):
    """As `cases.Model`, with a managed collection; ``rows`` are those of the last batch."""

    def __init__(self, case: ManagedCase) -> None:
        super().__init__()
        configs = [replace(config, ids=None) for config in case.configs()]
        modules = {
            config.name: module(config.num_embeddings)
            for config, module in zip(configs, case.modules(), strict=True)
        }
        collisions = ManagedCollisionCollection(modules, configs)
        if case.pooled:
            bags = EmbeddingBagCollection(tables=configs, is_weighted=case.is_weighted)
            self.ebc: Any = ManagedCollisionEmbeddingBagCollection(bags, collisions, True)
            width = sum(c.embedding_dim * len(c.feature_names) for c in configs)
        else:
            sequences = EmbeddingCollection(tables=configs)
            self.ebc = ManagedCollisionEmbeddingCollection(sequences, collisions, True)
            width = configs[0].embedding_dim
        self.over = nn.Linear(width, 3)
        self.is_pooled = case.pooled

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found, self.rows = self.ebc(features)
        if self.is_pooled:
            values = found.values()
        else:
            values = torch.cat([jagged.values() for jagged in dict(found.items()).values()])
        return values, self.over(values)


@dataclass(frozen=True)
class ManagedCase(HashedCase):
    """Tables with managed collision modules, which share no feature."""

    is_managed: bool = True
    hashes: bool = False
    """Whether ids pass a function first."""

    def modules(self) -> list[Any]:
        rng = random.Random(self.seed + 9)
        kinds = [kind for i, kind in enumerate(MODULES) if i != 2 or self.hashes]
        return [rng.choice(kinds) for _ in super().configs()[:-1]]

    def configs(self) -> list[Any]:
        rng = random.Random(self.seed + 5)
        features = rng.sample(FEATURES, len(FEATURES))
        configs = super().configs()[:-1]
        for i, (config, module) in enumerate(zip(configs, self.modules(), strict=True)):
            config.ids = module(config.num_embeddings).ids
            config.feature_names = features[i :: len(configs)]
        return configs

    def model(self) -> Any:
        if not self.is_managed:
            return super().model()
        torch.manual_seed(self.seed)
        model = ManagedModel(self)
        optimizer: Any = self.optimizer
        apply_optimizer_in_backward(optimizer, model.ebc.parameters(), dict(self.hyperparameters))
        return model

    def plain(self) -> ManagedCase:
        return replace(self, is_managed=False)


def state_of(model: Any) -> dict[str, Tensor]:
    """The state of the tables, by the names of the plain model; ids of free rows mean nothing."""
    state = {
        name.replace("_embedding_module.", ""): value
        for name, value in whole_state(model).items()
        if name.startswith("ebc.")
    }
    for name in [n for n in state if n.endswith("index.ids")]:
        used = state[name.replace("index.ids", "index.last_used")] > 0
        state[name] = state[name].masked_fill(~used, 0)
    return state


def check_rows(case: ManagedCase, model: Any, given: KeyedJaggedTensor) -> int:
    """Known ids have the rows where the tables have them, others the first row of a region of 64."""
    received, state, num_known = model.rows, state_of(model), 0
    if hasattr(received, "wait"):
        received = received.wait()
    assert received.keys() == [f for config in case.configs() for f in config.feature_names]
    tables = "ebc.embedding_bags" if case.pooled else "ebc.embeddings"
    for config in case.configs():
        prefix = f"{tables}.{config.name}.index."
        ids, last_used = state[f"{prefix}ids"], state[f"{prefix}last_used"]
        for name in config.feature_names:
            rows, wanted = received[name].values(), given[name].values().long()
            assert torch.equal(received[name].lengths(), given[name].lengths())
            assert rows.dtype is torch.int64
            is_known = (ids[rows] == wanted) & (last_used[rows] > 0)
            assert not torch.isin(wanted[~is_known], ids[last_used > 0]).any()
            assert (rows[~is_known] % 64 == 0).all()
            num_known += int(is_known.sum())
    return num_known


def _train_all(case: ManagedCase, folder: Path, moves: bool) -> None:
    rank, num_known = dist.get_rank(), 0
    plain, joined = case.plain().model(), case.model()
    registered: list[Any] = []
    if case.use_index_dedup:
        sharder = EmbeddingCollectionSharder(use_index_dedup=True)
        registered = [ManagedCollisionEmbeddingCollectionSharder(sharder)]
    sharders = registered or list(get_module_to_default_sharders().values())
    sharded = shard(case, sharders=sharders)
    for step in range(8):
        steps = range(step, step + 1)
        [expected] = train(case.plain(), plain, steps, rank=None, with_dense=False)
        [unsharded] = train(case, joined, steps, rank=None, with_dense=False)
        assert torch.equal(unsharded, expected)
        [received] = train(case, sharded, steps, rank=rank, with_dense=False)
        wanted = case.parts(expected, step)[rank]
        torch.testing.assert_close(received, wanted, rtol=1e-4, atol=1e-5)
        num_known += check_rows(case, sharded.module, case.batches(step)[rank])
        check_rows(case, joined, concat_batches(case.batches(step)))
        if moves and step == 4:
            sharded.reshard(case.plan(seed=1))
    assert num_known > 0
    for model in (joined, sharded):
        assert_same(state_of(model), state_of(plain), rtol=1e-4, atol=1e-5)
    save_checkpoint(folder, sharded, sharded.fused_optimizer)
    other = shard(case, case.plan(seed=1), sharders)
    load_checkpoint(folder, other, other.fused_optimizer)
    assert_same(state_of(other), state_of(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_they_train_as_plain_collections(
    ranks: RankPool, seed: int, pooled: bool, tmp_path: Path
) -> None:
    case = ManagedCase(seed, 2, pooled=pooled, optimizer=RowWiseAdagrad)
    ranks(2, _train_all, case, tmp_path / "c", seed == 1)


CASES = {
    "one rank": ManagedCase(0, 1, optimizer=RowWiseAdagrad),
    "one rank, sequences": ManagedCase(0, 1, optimizer=RowWiseAdagrad, pooled=False),
    "three ranks": ManagedCase(1, 3),
    "two nodes": ManagedCase(4, 4, types=TYPES[3:], optimizer=RowWiseAdagrad, node_size=2),
    "deduplicated": ManagedCase(5, 2, pooled=False, use_index_dedup=True),
    "own batch sizes": ManagedCase(6, 2, variable_batch=True, optimizer=RowWiseAdagrad),
    "weighted": ManagedCase(7, 2, weighted=True),
}


@pytest.mark.parametrize("name", CASES)
def test_they_train_as_plain_collections_in_other_ways(
    ranks: RankPool, name: str, tmp_path: Path
) -> None:
    ranks(CASES[name].world_size, _train_all, CASES[name], tmp_path / "c", False)
