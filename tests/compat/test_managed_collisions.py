"""Managed collision modules, by themselves and in a collection, give the rows of a table."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from recsys.compat.eviction_policies import (
    DistanceLFU_EvictionPolicy,
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    average_threshold_filter,
)
from recsys.compat.managed_collisions import (
    HashZchManagedCollisionModule,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from recsys.compat.managed_embeddings import ManagedCollisionEmbeddingBagCollection
from recsys.modules.embedding_configs import EmbeddingBagConfig
from recsys.modules.embedding_modules import EmbeddingBagCollection
from recsys.modules.hashed_ids import LFU, LRU, AtLeast, DistanceLFU, HashedIds, Probability
from recsys.optim import apply_optimizer_in_backward
from recsys.sparse import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")


def mch(rows: int = 100, policy: Any = None, **options: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(rows, CPU, policy or LFU_EvictionPolicy(), 1, **options)


def zch(**options: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(100, CPU, total_num_buckets=4, **options)


def batch_of(rng: torch.Generator) -> KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (24,), generator=rng)
    ids = torch.randint(0, 300, (int(lengths.sum()),), generator=rng)
    return KeyedJaggedTensor(["c", "a", "b"], ids * 0x5851F42D4C957F2D - 2**63, lengths=lengths)


TTL, LRU_NAME = (
    HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
    HashZchEvictionPolicyName.LRU_EVICTION,
)
RULES = (
    (mch(), HashedIds(eviction=LFU())),
    (mch(policy=LRU_EvictionPolicy(), buckets=4, input_hash_size=5), HashedIds(eviction=LRU())),
    (
        mch(policy=DistanceLFU_EvictionPolicy(2, average_threshold_filter), mch_size=9),
        HashedIds(eviction=DistanceLFU(2), admission=AtLeast(2)),
    ),
    (zch(), HashedIds(eviction=None)),
    (
        zch(eviction_policy_name=TTL, eviction_config=HashZchEvictionConfig(["a"], single_ttl=3)),
        HashedIds(eviction=LRU()),
    ),
    (
        zch(eviction_policy_name=LRU_NAME, opt_in_prob=25, percent_reserved_slots=1, max_probe=9),
        HashedIds(eviction=LRU(), admission=Probability(0.25)),
    ),
    (
        zch(disable_fallback=True, opt_in_prob=100, percent_reserved_slots=1, end_bucket=4),
        HashedIds(eviction=None, unknown="zero"),
    ),
)


@pytest.mark.parametrize(("module", "rules"), RULES)
def test_arguments_become_rules(module: Any, rules: HashedIds) -> None:
    assert module.ids == rules
    assert module.output_size() == 128


@pytest.mark.parametrize("number", range(len(RULES)))
def test_rows_are_those_of_a_trained_table(number: int) -> None:
    """Two tables: ids lose their rows to others; evaluation writes nothing."""
    rules = RULES[number][1]
    configs = [
        EmbeddingBagConfig(128, 4, "t", feature_names=["a", "b"]),
        EmbeddingBagConfig(128, 4, "u", feature_names=["c"]),
    ]
    modules = {name: copy.deepcopy(RULES[number][0]) for name in ("t", "u")}
    collisions: Any = ManagedCollisionCollection(modules, configs)
    hashed = [
        EmbeddingBagConfig(128, 4, c.name, feature_names=c.feature_names, ids=rules)
        for c in configs
    ]
    bags = EmbeddingBagCollection(tables=hashed)
    apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
    rng = torch.Generator().manual_seed(number)
    for step in range(30):
        batch = batch_of(rng)
        collisions.train(step % 4 != 3)
        bags.train(step % 4 != 3)
        pooled, remapped = bags(batch), collisions(batch)
        if bags.training:
            pooled.values().sum().backward()
        del pooled  # its rows would keep their ids
        assert remapped.keys() == ["a", "b", "c"]
        for name in ("t", "u"):
            own, table = modules[name].index, bags.embedding_bags[name].index
            assert all(map(torch.equal, own.pairs(), table.pairs()))
            assert own.stats() == table.stats()
        for key, name in (("a", "t"), ("b", "t"), ("c", "u")):
            index = modules[name].index
            rows, ids = remapped[key].values(), batch[key].values()
            is_known = (index.ids[rows] == ids) & (index.last_used[rows] > 0)
            assert torch.equal(is_known, torch.isin(ids, index.pairs()[0]))
            assert (rows[~is_known] % 64 == 0).all()
            assert torch.equal(remapped[key].lengths(), batch[key].lengths())
    used = int((modules["t"].index.last_used > 0).sum())
    assert collisions.open_slots()["t"].tolist() == [126 - used]
    other: Any = ManagedCollisionCollection(
        {name: copy.deepcopy(RULES[number][0]) for name in ("t", "u")}, configs
    )
    other.load_state_dict(collisions.state_dict())
    batch = batch_of(rng)
    assert torch.equal(other(batch).values(), collisions(batch).values())


def test_a_compiled_model_trains_alike() -> None:
    configs = [EmbeddingBagConfig(128, 4, "t", feature_names=["a", "b", "c"])]
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        collisions = ManagedCollisionCollection({"t": mch()}, configs)
        bags = EmbeddingBagCollection(tables=configs)
        module: Any = ManagedCollisionEmbeddingBagCollection(bags, collisions, True)
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        call = torch.compile(module, backend="eager") if is_compiled else module
        rng = torch.Generator().manual_seed(1)
        for _ in range(3):
            pooled, rows = call(batch_of(rng))
            pooled.values().sum().backward()
            found.append((pooled.values().detach(), rows.values()))
    for eager, compiled in zip(found[:3], found[3:], strict=True):
        assert all(map(torch.equal, eager, compiled))


def test_a_module_by_itself() -> None:
    module = mch(input_hash_func=lambda ids, size: ids % size, input_hash_size=7)
    features = {
        "t": JaggedTensor(torch.tensor([-1, 6, 13]), lengths=torch.tensor([2, 1])),
        "u": JaggedTensor(torch.tensor([2]), lengths=torch.tensor([1]), weights=torch.ones(1)),
    }
    found = module(features)
    rows = found["t"].values()
    assert len(set(rows.tolist())) == 1
    assert module.index.ids[rows].tolist() == [6, 6, 6]
    assert module.index.ids[found["u"].values()].tolist() == [2]
    assert torch.equal(found["u"].weights(), torch.ones(1))
    assert module.profile(features) is features
    with pytest.raises(ValueError, match=r"remap.write_weights must be None; received tensor"):
        module.remap(features, write_weights=torch.ones(4))  # type: ignore[arg-type]


def test_inference_mode_gives_no_rows() -> None:
    module = zch()
    ids = {"t": JaggedTensor(torch.tensor([5, 7]), lengths=torch.tensor([2]))}
    rows = module(ids)["t"].values()
    module.reset_inference_mode()
    used = module.open_slots()
    new = {"t": JaggedTensor(torch.tensor([5, 7, 8]), lengths=torch.tensor([3]))}
    assert module(new)["t"].values()[:2].tolist() == rows.tolist()
    assert torch.equal(module.open_slots(), used)
    module.reset_training_mode()
    module(new)
    assert torch.equal(module.open_slots(), used - 1)


def test_inference_mode_of_a_module_in_a_collection() -> None:
    module = zch()
    tables = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(128, 4, "t", feature_names=["f"], ids=HashedIds(eviction=None))]
    )
    module.bind(tables.table("t"))
    with pytest.raises(ValueError, match=r"received one in training mode. Call eval\(\)"):
        module.reset_inference_mode()
    tables.eval()
    module.reset_inference_mode()
    assert not module.training


REFUSED: tuple[tuple[Any, str], ...] = (
    (lambda: mch(0), "zch_size must be positive; received 0"),
    (lambda: mch(output_global_offset=5), "output_global_offset must be 0; received 5. A table is"),
    (lambda: mch(output_segments=[0, 100]), r"output_segments must be None; received \[0, 100\]"),
    (lambda: zch(output_segments=[0, 100]), r"output_segments must be None; received \[0, 100\]"),
    (lambda: zch(start_bucket=1), "start_bucket must be 0; received 1. A table is sharded by its"),
    (lambda: zch(end_bucket=2), "end_bucket must be None; received 2"),
    (lambda: zch(is_inference=True), r"is_inference must be False; received True. Call eval\(\)"),
    (lambda: zch(track_id_freq=True), "track_id_freq must be False; received True. A row has no"),
    (lambda: zch(write_runtime_meta_dim=2), "write_runtime_meta_dim must be 0; received 2"),
    (lambda: zch(enable_per_feature_lookups=True), "enable_per_feature_lookups must be False"),
    (
        lambda: zch(eviction_policy_name=HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION),
        "eviction_policy_name must be one rule for all features of a table; received PER_FEATURE",
    ),
    (lambda: zch(percent_reserved_slots=100), "must be at least 0 and below 100; received 100"),
    (lambda: zch(opt_in_prob=5), "percent_reserved_slots must be above 0 if opt_in_prob is"),
    (lambda: zch(opt_in_prob=0), "must be from 1 to 100, or -1 for 100; received 0"),
    (lambda: zch(opt_in_prob=101), "opt_in_prob must be"),
)


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_arguments_without_a_meaning_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_tables_have_any_name() -> None:
    table = EmbeddingBagConfig(100, 4, "items", feature_names=["keys"])
    collisions = ManagedCollisionCollection({"items": mch()}, [table])
    batch = KeyedJaggedTensor(["keys"], torch.tensor([1]), lengths=torch.tensor([1]))
    assert collisions(batch).keys() == ["keys"]
    assert collisions.table_to_number_buckets() == {"items": 1}


def test_collections_name_the_table() -> None:
    table = EmbeddingBagConfig(100, 4, "t", feature_names=["a"])
    with pytest.raises(ValueError, match="received none for table 't'"):
        ManagedCollisionCollection({}, [table])
    with pytest.raises(ValueError, match=r"'t' must have num_embeddings=zch_size .* 100 rows, 256"):
        ManagedCollisionCollection({"t": mch(200)}, [table])
    with pytest.raises(TypeError, match=r"modules\['t'\] must be an MCHManagedCollisionModule"):
        ManagedCollisionCollection({"t": nn.Linear(1, 1)}, [table])  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="eviction_policy must be one of three policies"):
        mch(policy="lfu")
    collisions = ManagedCollisionCollection({"t": mch()}, [table])
    batch = KeyedJaggedTensor(["b"], torch.tensor([1]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"must have all features of the tables; \['a'\] are"):
        collisions(batch)
    twice = [table, EmbeddingBagConfig(100, 4, "u", feature_names=["a"])]
    collisions = ManagedCollisionCollection({"t": mch(), "u": mch()}, twice)
    with pytest.raises(ValueError, match="Each feature must be of one table"):
        collisions(batch)
