"""The tracker returns the rows whose weights changed, of static tables and of hashed ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys.compat.eviction_policies import LFU_EvictionPolicy
from recsys.compat.managed_collisions import ManagedCollisionCollection, MCHManagedCollisionModule
from recsys.compat.managed_embeddings import ManagedCollisionEmbeddingBagCollection
from recsys.compat.model_tracker import DeltaStore, ModelDeltaTracker, TrackingMode, UpdateMode
from recsys.distributed.model_parallel import DistributedModelParallel
from recsys.distributed.placement.strategies import parameter_sharding
from recsys.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import HashedIds
from recsys.optim import RowWiseAdagrad, apply_optimizer_in_backward
from recsys.sparse import KeyedJaggedTensor
from tests.distributed.cases import CPU, whole_state
from tests.distributed.checkpoint.test_row_logs import filled
from tests.ranks import RankPool

TYPES = (ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.COLUMN_WISE)
ROWS = 256


class Model(nn.Module):
    """Three static tables, and three of a managed collection, one for each sharding type."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        tables = {
            prefix: [
                EmbeddingBagConfig(ROWS, 8, f"{prefix}{kind.value}", feature_names=[f"{prefix}{i}"])
                for i, kind in enumerate(TYPES)
            ]
            for prefix in ("s", "m")
        }
        self.static = EmbeddingBagCollection(tables=tables["s"])
        modules = {
            config.name: MCHManagedCollisionModule(ROWS, CPU, LFU_EvictionPolicy(), 1)
            for config in tables["m"]
        }
        self.managed = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables["m"]),
            ManagedCollisionCollection(modules, tables["m"]),
        )
        apply_optimizer_in_backward(RowWiseAdagrad, self.parameters(), {"lr": 0.5})

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        pooled = [self.static(features).values(), self.managed(features)[0].values()]
        return torch.cat(pooled, dim=1)


KEYS = [f"{prefix}{i}" for prefix in ("s", "m") for i in range(len(TYPES))]


def batch_of(rng: torch.Generator) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 3, (5 * len(KEYS),), generator=rng)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=rng)
    return KeyedJaggedTensor(list(KEYS), ids, lengths=lengths)


def plan() -> ShardingPlan:
    entries = {
        prefix: EmbeddingModuleShardingPlan(
            {
                f"{prefix}{kind.value}": parameter_sharding(
                    kind, ROWS, 8, [1] if kind is ShardingType.TABLE_WISE else [0, 1]
                )
                for kind in TYPES
            }
        )
        for prefix in ("s", "m")
    }
    return ShardingPlan({"static": entries["s"], "managed": entries["m"]})


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    state = whole_state(model)
    return {n.removesuffix(".weight"): v for n, v in state.items() if n.endswith(".weight")}


def gathered(rows: dict[str, Tensor]) -> dict[str, list[int]]:
    """The rows of all ranks."""
    found: list[Any] = [{n: r.tolist() for n, r in rows.items()}]
    if dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, {n: r.tolist() for n, r in rows.items()})
    names = {name for of_rank in found for name in of_rank}
    return {
        name: sorted({row for of_rank in found for row in of_rank.get(name, [])}) for name in names
    }


def _track(is_sharded: bool) -> None:
    rank = 0
    model: Any = Model()
    if is_sharded:
        rank = dist.get_rank()
        model = DistributedModelParallel(model, device=CPU, plan=plan())
    consumers = ["often", "seldom", "none"]
    tracker = ModelDeltaTracker(model, consumers, delete_on_read=False, auto_compact=True)
    rng = torch.Generator().manual_seed(rank)
    before = {"often": weights_of(model), "seldom": weights_of(model)}

    def check(consumer: str) -> None:
        after, rows = weights_of(model), gathered(tracker.get_unique_ids(consumer))
        assert rows.keys() == after.keys()
        for name, value in after.items():
            moved = (value != before[consumer][name]).any(1).nonzero().flatten().tolist()
            assert rows[name] == moved, name
        before[consumer] = after

    for step in range(7):
        model.train(step != 3)  # evaluation changes nothing
        with torch.set_grad_enabled(step != 3):
            loss = model(batch_of(rng)).sum()
        tracker.step()
        if step == 3:
            assert not any(len(r) for r in tracker.get_unique_ids("often").values())
            continue
        loss.backward()
        check("often")
        if step == 5:
            check("seldom")
    tracker.clear("none")
    found = tracker.get_unique("none")
    assert all(rows.states is None and rows.ids.numel() == 0 for rows in found.values())
    assert any(len(rows) for rows in gathered(tracker.get_unique_ids("seldom")).values())
    tracker.clear()
    features = tracker.fqn_to_feature_names()
    assert features["static.embedding_bags.stable_wise"] == ["s0"]
    assert features["managed._embedding_module.embedding_bags.mcolumn_wise"] == ["m2"]
    assert list(tracker.get_tracked_modules()) == ["static", "managed._embedding_module"]


def test_rows_of_an_unsharded_model() -> None:
    _track(is_sharded=False)


def test_rows_of_shards(ranks: RankPool) -> None:
    ranks(2, _track, True)


def test_paths_may_be_left_out() -> None:
    model = Model()
    tracker = ModelDeltaTracker(model, fqns_to_skip=["managed"])
    model(batch_of(torch.Generator().manual_seed(0))).sum().backward()
    assert len(tracker.get_unique_ids()) == len(TYPES)
    assert list(tracker.get_tracked_modules()) == ["static"]


def test_features_of_tables_of_any_name() -> None:
    configs = [
        EmbeddingBagConfig(64, 4, name, feature_names=[f"of_{name}"], ids=HashedIds())
        for name in ("index", "weight")
    ]
    tracker = ModelDeltaTracker(EmbeddingBagCollection(tables=configs))
    assert tracker.fqn_to_feature_names() == {
        "embedding_bags.index": ["of_index"],
        "embedding_bags.weight": ["of_weight"],
    }


def test_errors_name_the_argument() -> None:
    model = Model()
    with pytest.raises(ValueError, match=r"mode must be TrackingMode\.ID_ONLY; received Tracking"):
        ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING)
    tracker = ModelDeltaTracker(model, ["a", "b"])
    with pytest.raises(ValueError, match=r"must be one of \['a', 'b'\]; received 'default'"):
        tracker.get_unique()
    store = DeltaStore(UpdateMode.FIRST)
    store.append(0, "t", torch.tensor([1]))
    with pytest.raises(ValueError, match="received 0 states of 1 batches in mode FIRST"):
        store.get_unique()
    with pytest.raises(ValueError, match="start_idx must be below end_idx; received 2 and 2"):
        store.compact(2, 2)


@pytest.mark.parametrize("mode", list(UpdateMode))
def test_a_store_is_a_dict_by_id(mode: UpdateMode) -> None:
    rng = torch.Generator().manual_seed(4)
    for size in (0, 1, 40):
        store, wanted = DeltaStore(mode), dict[int, float]()
        for number in range(4):
            ids = torch.randint(0, 12, (size,), generator=rng)
            states = torch.rand(size, generator=rng)
            store.append(number, "t", ids, None if mode is UpdateMode.NONE else states)
            for id_, state in zip(ids.tolist(), states.tolist(), strict=True):
                if mode is UpdateMode.LAST or id_ not in wanted:
                    wanted[id_] = state
            if number == 2:
                store.compact(0, 2)
        rows = store.get_unique()["t"]
        assert rows.ids.tolist() == sorted(wanted)
        if rows.states is not None:
            assert rows.states.tolist() == [wanted[id_] for id_ in sorted(wanted)]
    assert DeltaStore().get_unique() == {}


def test_rows_on_the_disk_are_refused(tmp_path: Path) -> None:
    message = r"published or counted needs all rows .* table 'ta'"
    with pytest.raises(ValueError, match=message):
        ModelDeltaTracker(filled(tmp_path))
